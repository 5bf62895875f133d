"""The trainer's end of the collective, as the updater drives it: a store for the run, a group per epoch or joiner, broadcasts.

A group that is abandoned while stuck is left to its own thread, which ends within the stall timeout; other groups do not
wait for it. Decides nothing about membership.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from pipelinerl.errors import TransferError
from pipelinerl.service.address import host_port
from pipelinerl.weights.manifest import Manifest
from pipelinerl_torch.group import Backend, GroupSpec, GroupStore, WeightGroup
from services.trainer.updates.lane import SentBytes
from services.trainer.weights.sender import Broadcast, Snapshot, WeightSender


class CollectivePort:
    """Implements `lane.TransferPort`. `host`: the address on which actors reach this pod, and so its store."""

    def __init__(self, sender: WeightSender, store: GroupStore, *, host: str, backend: Backend = "gloo") -> None:
        self.manifest: Manifest = sender.manifest
        self.backend: Backend = backend
        self._sender, self._store, self._host = sender, store, host

    async def open_group(
        self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None = None
    ) -> CollectiveGroup:
        """Starts meeting the other ranks of `epoch`, as rank 0. Numbers of epochs never come twice."""
        spec = GroupSpec(self._store.host, self._store.port, f"epoch-{epoch}", 0, world_size, self.backend, self._host)
        given_up, placement = threading.Event(), self._sender.group_placement.another()
        meeting = asyncio.create_task(
            asyncio.to_thread(WeightGroup.connect, spec, deadline_s, given_up, placement, patience_s)
        )
        return CollectiveGroup(self._sender, host_port(self._host, self._store.port), meeting, given_up)


class CollectiveGroup:
    """Implements `lane.TransferGroup`."""

    def __init__(
        self, sender: WeightSender, store_address: str, meeting: asyncio.Task[WeightGroup], given_up: threading.Event
    ) -> None:
        self.store_address = store_address
        self._sender, self._given_up = sender, given_up
        self._meeting: asyncio.Task[WeightGroup] | None = meeting
        self._group: WeightGroup | None = None
        self._broadcast: Broadcast | None = None

    async def built(self) -> None:
        """Returns when every rank has connected. Raises TransferError at the deadline."""
        if self._meeting is None:
            raise TransferError("the group was abandoned")
        self._group = await asyncio.shield(self._meeting)

    async def broadcast(self, snapshot: object, deadline_s: float) -> SentBytes:
        """Send a Snapshot. Raises TransferError; the group is then closed."""
        assert isinstance(snapshot, Snapshot)
        if self._group is None:
            raise TransferError("the group is not built")
        self._broadcast = self._sender.broadcast(snapshot, self._group, deadline_s)
        done = asyncio.wrap_future(self._broadcast.done)
        done.add_done_callback(_heed)  # nobody else does when this wait is cancelled
        result = await asyncio.shield(done)
        return SentBytes(result.checksum, result.num_bytes, result.seconds)

    async def abandon(self) -> None:
        """Give up whatever is under way. Returns at once; what is stuck ends by its own timeouts and closes its group."""
        meeting, group, broadcast = self._meeting, self._group, self._broadcast
        self._meeting = self._group = self._broadcast = None
        self._given_up.set()  # tells those who wait in a meeting, too, and ends a broadcast that can be interrupted
        if broadcast is not None and not broadcast.done.done():
            broadcast.abort()  # its thread closes the group
        elif group is not None:
            await asyncio.to_thread(group.close)
        elif meeting is not None:
            meeting.add_done_callback(_close_late_group)


def _heed(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _close_late_group(meeting: asyncio.Task[WeightGroup]) -> None:
    if not meeting.cancelled() and meeting.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, meeting.result().close)
