"""Write the offered versions to the weight log, and announce each one when it is complete in the store."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import TransferError
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.transfer.weight_log import WeightLog
from pipelinerl.v1.control_pb2 import Published
from services.trainer.weight_sync.sender import Snapshot

log = logging.getLogger(__name__)

BACKOFF = Backoff(first_s=0.5, most_s=15.0, jitter=0.2)


class LogWriter:
    """Never delays training: if writing takes longer than a step, versions are skipped, and the next delta spans them. A store
    that fails is tried again, each time with the newest version. The log refers to the last written snapshot and the one that
    is being written, whose memory the transfers cannot reuse meanwhile."""

    def __init__(self, weight_log: WeightLog) -> None:
        self._log = weight_log
        self._newest: Snapshot | None = None
        self._arrived, self._released, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._held_above: int | None = None
        self._idle.set()
        self.published: Published | None = None
        self.problem = ""
        """Why the last attempt to write failed; empty if it succeeded."""

    @property
    def version(self) -> int | None:
        """Return the newest announced version; None before the first. Any thread may call this."""
        return None if self.published is None else self.published.version

    def offer(self, snapshot: Snapshot) -> None:
        """Write this version next, instead of an earlier one that still waits."""
        self._newest = snapshot
        self._idle.clear()
        self._arrived.set()

    def hold(self, above: int | None) -> None:
        """Announce no version after `above` from now on; None = announce all."""
        self._held_above = above
        self._released.set()

    async def all_announced(self) -> None:
        """Wait until the newest offered version is announced."""
        await self._idle.wait()

    async def run(self, bus: Bus) -> None:
        """Write and announce versions until cancelled."""
        while True:
            await self._arrived.wait()
            published = await retry_forever(self._write, "write the weight log", retried=_is_stores, backoff=BACKOFF)
            while self._held_above is not None and published.version > self._held_above:
                self._released.clear()
                await self._released.wait()
            await retry_forever(partial(bus.publish_control, "published", published.SerializeToString()), "say 'published'")
            self.published = published
            if not self._arrived.is_set():
                self._idle.set()
            try:
                await self._log.discard_old()
            except TransferError as error:
                log.warning("old versions stay in the weight log, and are removed after the next one: %s", error)

    async def _write(self) -> Published:
        snapshot = self._newest
        assert snapshot is not None, "one has arrived"
        self._arrived.clear()
        try:
            published = await self._log.add(snapshot.version, snapshot.stream, await asyncio.to_thread(snapshot.sha256))
            self.problem = ""
            return published
        except BaseException as error:
            self.problem = str(error)
            self._arrived.set()
            raise


def _is_stores(error: Exception) -> bool:
    return isinstance(error, TransferError)
