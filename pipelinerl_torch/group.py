"""A collective group for one epoch of weight transfer: rank 0 is the trainer, the others receive.

Built from a key-value store that the trainer hosts, without torch's global process group, so that groups of several epochs
(and side groups of joiners) may exist one after another, or side by side, in one process. Backend `gloo` or `nccl`: the
same calls. Every wait has a deadline. A group that failed once is unusable: close it, agree on a new epoch, build another.

Ranks meet in two steps. First each checks in at the store, and rank 0 waits for all; only then do they connect to each
other. So a rank that never comes keeps nobody inside a collective library, and when rank 0 gives the meeting up, those
who wait are told at once.

Gloo cannot interrupt an operation under way (`ProcessGroupGloo.abort` does nothing), so each operation carries its own
timeout: that timeout is the most that giving up a transfer can take. A peer that died is noticed at once.

It does not decide who is a member, and sends tensors, not weights.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from pipelinerl.weights.errors import DeadlineExceeded, GroupFailed, TransferAborted

Backend = Literal["gloo", "nccl"]

_GO, _VOID = "go", "void"
"""Keys of a meeting: all have checked in; it was given up."""
_LOOK_S = 0.01


@dataclass(frozen=True)
class GroupSpec:
    """Where and as whom to meet. `name` must be new for every group ever built on one store (`epoch-3`).

    `host`, `port`: the trainer's store. `bind_host`: this side's address on which the others reach it (gloo; None: by the
    machine's name).
    """

    host: str
    port: int
    name: str
    rank: int
    world: int
    backend: Backend = "gloo"
    bind_host: str | None = None


class GroupStore:
    """The trainer's rendezvous store. Lives as long as the object.

    It has no authentication: `host` is the one interface it listens on (torch alone would listen on all of them), `port` 0
    picks a free one. Attribute `host` is where the trainer itself reaches it. Raises OSError when it cannot listen there.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        self.host, self.port = _reachable(host), int(listener.getsockname()[1])
        self._store = TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _reachable(host: str) -> str:
    """The address under which this process reaches a server of its own that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


class WeightGroup:
    """An open group. Use from one thread at a time; `close` when done, also after an error."""

    def __init__(self, spec: GroupSpec, process_group: Any, store: TCPStore) -> None:
        self.spec = spec
        self._pg: Any = process_group
        self._store: TCPStore | None = store

    @classmethod
    def connect(cls, spec: GroupSpec, timeout_s: float, given_up: threading.Event | None = None) -> WeightGroup:
        """Meet the other `spec.world - 1` ranks. `given_up` ends the wait early; set on rank 0, for everybody.

        Raises DeadlineExceeded when they are not all there within `timeout_s`, TransferAborted when the meeting was given
        up, GroupFailed when the store is unreachable.
        """
        deadline = time.monotonic() + timeout_s
        given_up = given_up or threading.Event()
        try:
            # Unreachable, TCPStore tries twice with a pause: up to 2.5 times what it is given.
            store = TCPStore(spec.host, spec.port, is_master=False, timeout=timedelta(seconds=timeout_s / 3))
            meeting = PrefixStore(spec.name, store)
            _check_in(spec, meeting, deadline, timeout_s, given_up)
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            store.set_timeout(left)
            group = _process_group(spec, meeting, left)
        except (RuntimeError, ValueError) as error:  # torch's DistError family and Gloo's own are RuntimeErrors
            if time.monotonic() >= deadline - 0.05 * timeout_s:
                raise DeadlineExceeded(spec.name, f"the meeting of {spec.world} ranks", timeout_s) from error
            raise GroupFailed(spec.name, f"cannot be built: {error}") from error
        return cls(spec, group, store)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Send `tensor` (rank 0) or fill it (others). Returns when it may be reused.

        Raises DeadlineExceeded or GroupFailed; the group is then unusable.
        """
        if self._pg is None:
            raise GroupFailed(self.spec.name, "is closed")
        timeout = timedelta(seconds=max(timeout_s, 0.001))
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        started, work = time.monotonic(), None
        try:
            work = self._pg.broadcast([tensor], options)
            work.wait(timeout)
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        except RuntimeError as error:
            # It keeps the connections open, and whoever keeps the error keeps this frame: others would not see `close`.
            work = None
            if time.monotonic() - started >= 0.95 * timeout_s:
                raise DeadlineExceeded(self.spec.name, f"a broadcast of {tensor.nbytes} bytes", timeout_s) from error
            raise GroupFailed(self.spec.name, str(error).splitlines()[0]) from error

    def close(self) -> None:
        """Leave. Others waiting for this rank fail at once. Idempotent; waits for nobody."""
        group, self._pg, self._store = self._pg, None, None
        if group is not None and self.spec.backend == "nccl":
            group.abort()


def _check_in(
    spec: GroupSpec, meeting: PrefixStore, deadline: float, timeout_s: float, given_up: threading.Event
) -> None:
    """Returns when all ranks have checked in. Raises DeadlineExceeded, TransferAborted."""
    if spec.rank == 0:
        awaited = [f"here/{rank}" for rank in range(1, spec.world)]
    else:
        meeting.set(f"here/{spec.rank}", b"1")
        awaited = [_GO]
    while not meeting.check(awaited):
        late = time.monotonic() >= deadline
        if spec.rank == 0 and (late or given_up.is_set()):
            meeting.set(_VOID, b"1")
        if given_up.is_set() or (spec.rank and meeting.check([_VOID])):
            raise TransferAborted(f"the meeting of {spec.name} was given up")
        if late:
            raise DeadlineExceeded(spec.name, f"the meeting of {spec.world} ranks", timeout_s)
        given_up.wait(_LOOK_S)
    if spec.rank == 0:
        meeting.set(_GO, b"1")


def _process_group(spec: GroupSpec, store: PrefixStore, timeout: timedelta) -> Any:
    if spec.backend == "nccl":
        from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, spec.rank, spec.world, nccl)
    gloo_class: Any = ProcessGroupGloo  # its options are missing from torch's stubs
    gloo = gloo_class._Options()
    gloo._timeout = timeout
    device = ProcessGroupGloo.create_device(hostname=spec.bind_host) if spec.bind_host else None
    gloo._devices = [device or ProcessGroupGloo.create_default_device()]
    return gloo_class(store, spec.rank, spec.world, gloo)
