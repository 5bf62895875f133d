"""A collective group for one epoch of weight transfer: rank 0 is the trainer, the others receive.

Built from a key-value store that the trainer hosts, without torch's global process group, so that groups of several epochs
(and side groups of joiners) may exist one after another, or side by side, in one process. Backend `gloo` or `nccl`: the
same calls. Every wait has a deadline. A group that failed once is unusable: close it, agree on a new epoch, build another.

Ranks meet in two steps. First each checks in at the store, and rank 0 waits for all; only then do they connect to each
other. So a rank that never comes keeps nobody inside a collective library, and when rank 0 gives the meeting up, those
who wait are told at once.

Gloo cannot interrupt an operation under way (`ProcessGroupGloo.abort` does nothing), so each operation carries its own
timeout: that timeout is the most that giving up a transfer can take. A peer that died is noticed at once. NCCL can be
interrupted (`nccl.py`).

It does not decide who is a member, and sends tensors, not weights.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from pipelinerl.weights.errors import DeadlineExceeded, GroupFailed, RanksMissing, TransferAborted
from pipelinerl_torch.placement import HOST, Placement

Backend = Literal["gloo", "nccl"]

_GO, _VOID = "go", "void"
"""Keys of a meeting: all have checked in; it was given up."""
_TORCH_ERRORS = (RuntimeError, ValueError, TimeoutError)
"""Its DistError family and Gloo's own are RuntimeErrors."""
_LOOK_S = 0.01
_LET_GO_S = 0.5
"""How long whoever connects waits, after the deadline or after giving up, for the meeting to end by itself."""


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


class Transport(Protocol):
    """A connected collective. `close` may be called from any thread, also during a broadcast; idempotent."""

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """From rank 0. Raises RuntimeError, TimeoutError, TransferAborted."""
        ...

    def close(self) -> None: ...


class WeightGroup:
    """An open group. Use from one thread at a time; `close` when done, also after an error.

    `placement`: where the tensors that are broadcast must live.
    """

    def __init__(self, spec: GroupSpec, transport: Transport, store: TCPStore, placement: Placement) -> None:
        self.spec, self.placement = spec, placement
        self._transport: Transport | None = transport
        self._store: TCPStore | None = store

    @classmethod
    def connect(
        cls,
        spec: GroupSpec,
        timeout_s: float,
        given_up: threading.Event | None = None,
        placement: Placement = HOST,
        patience_s: float | None = None,
    ) -> WeightGroup:
        """Meet the other `spec.world - 1` ranks.

        `patience_s`, on rank 0: how long to wait for the next one once somebody has come, where all are known to be quick.

        `given_up` ends the wait early; set on rank 0, for everybody. With NCCL it ends later broadcasts at once, too.
        Raises DeadlineExceeded when they are not all there within `timeout_s` (on rank 0 RanksMissing, which says who is
        not), TransferAborted when the meeting was given up, GroupFailed when the store is unreachable.
        """
        given_up = given_up or threading.Event()
        meeting: Future[WeightGroup] = Future()
        arguments = (meeting, spec, timeout_s, given_up, placement, patience_s)
        threading.Thread(target=cls._meet, args=arguments, name=f"meet-{spec.name}", daemon=True).start()
        latest = time.monotonic() + timeout_s + _LET_GO_S
        while not wait([meeting], _LET_GO_S).done:
            if given_up.is_set() or time.monotonic() >= latest:
                meeting.add_done_callback(_close_late)
                if given_up.is_set():
                    raise TransferAborted(f"the meeting of {spec.name} was given up")
                raise DeadlineExceeded(spec.name, "an answer of the store", timeout_s)
        return meeting.result()

    @classmethod
    def _meet(
        cls,
        meeting: Future[WeightGroup],
        spec: GroupSpec,
        timeout_s: float,
        given_up: threading.Event,
        placement: Placement,
        patience_s: float | None,
    ) -> None:
        """On a thread of its own: torch waits for the answer of a store whose host has gone for as long as TCP does."""
        try:
            meeting.set_result(cls._join(spec, timeout_s, given_up, placement, patience_s))
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the error goes to whoever connects
            meeting.set_exception(error)

    @classmethod
    def _join(
        cls,
        spec: GroupSpec,
        timeout_s: float,
        given_up: threading.Event,
        placement: Placement,
        patience_s: float | None,
    ) -> WeightGroup:
        deadline = time.monotonic() + timeout_s
        try:
            # Unreachable, TCPStore tries twice with a pause: up to 2.5 times what it is given.
            store = TCPStore(spec.host, spec.port, is_master=False, timeout=timedelta(seconds=timeout_s / 3))
            meeting = PrefixStore(spec.name, store)
            if spec.rank == 0:
                _wait_for_all(spec, meeting, timeout_s, given_up, patience_s)
            else:
                _check_in(spec, meeting, deadline, timeout_s, given_up)
            left_s = max(deadline - time.monotonic(), 0.001)
            store.set_timeout(timedelta(seconds=left_s))
            transport = _transport(spec, meeting, left_s, placement, given_up)
        except _TORCH_ERRORS as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline - 0.05 * timeout_s:
                raise DeadlineExceeded(spec.name, f"the meeting of {spec.world} ranks", timeout_s) from error
            raise GroupFailed(spec.name, f"cannot be built: {error}") from error
        return cls(spec, transport, store, placement)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Send `tensor` (rank 0) or fill it (others). Returns when it may be reused.

        Raises DeadlineExceeded, GroupFailed, or (NCCL) TransferAborted; the group is then unusable.
        """
        transport = self._transport
        if transport is None:
            raise GroupFailed(self.spec.name, "is closed")
        started = time.monotonic()
        try:
            transport.broadcast(tensor, timeout_s)
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() - started >= 0.95 * timeout_s:
                raise DeadlineExceeded(self.spec.name, f"a broadcast of {tensor.nbytes} bytes", timeout_s) from error
            raise GroupFailed(self.spec.name, str(error).splitlines()[0]) from error

    def close(self) -> None:
        """Leave. Others waiting for this rank fail at once. Idempotent; waits for nobody, but for NCCL to let go."""
        transport, self._transport, self._store = self._transport, None, None
        if transport is not None:
            transport.close()


class GlooTransport:
    """Gloo leaves a group when its object is gone."""

    def __init__(self, spec: GroupSpec, store: PrefixStore, timeout_s: float) -> None:
        gloo_class: Any = ProcessGroupGloo  # its options are missing from torch's stubs
        options = gloo_class._Options()
        options._timeout = timedelta(seconds=timeout_s)
        device = ProcessGroupGloo.create_device(hostname=spec.bind_host) if spec.bind_host else None
        options._devices = [device or ProcessGroupGloo.create_default_device()]
        self._group: Any = gloo_class(store, spec.rank, spec.world, options)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        timeout = timedelta(seconds=max(timeout_s, 0.001))
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timeout
        self._group.broadcast([tensor], options).wait(timeout)

    def close(self) -> None:
        self._group = None


def _close_late(meeting: Future[WeightGroup]) -> None:
    if meeting.exception() is None:
        meeting.result().close()


def _wait_for_all(
    spec: GroupSpec, meeting: PrefixStore, timeout_s: float, given_up: threading.Event, patience_s: float | None
) -> None:
    """Rank 0's side: says go when all ranks have checked in. Raises RanksMissing, TransferAborted, and says void then."""
    started = last_came = time.monotonic()
    missing = list(range(1, spec.world))
    while missing:
        still = [rank for rank in missing if not meeting.check([f"here/{rank}"])]
        now = time.monotonic()
        if len(still) < len(missing):
            missing, last_came = still, now
            continue
        impatient = patience_s is not None and len(missing) < spec.world - 1 and now - last_came >= patience_s
        if given_up.is_set() or impatient or now - started >= timeout_s:
            meeting.set(_VOID, "1")
            if given_up.is_set():
                raise TransferAborted(f"the meeting of {spec.name} was given up")
            raise RanksMissing(spec.name, tuple(missing), spec.world, now - started)
        given_up.wait(_LOOK_S)
    meeting.set(_GO, "1")


def _check_in(
    spec: GroupSpec, meeting: PrefixStore, deadline: float, timeout_s: float, given_up: threading.Event
) -> None:
    """The others' side: returns when rank 0 says go. Raises DeadlineExceeded, TransferAborted."""
    meeting.set(f"here/{spec.rank}", "1")
    while not meeting.check([_GO]):
        if given_up.is_set() or meeting.check([_VOID]):
            raise TransferAborted(f"the meeting of {spec.name} was given up")
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(spec.name, f"the meeting of {spec.world} ranks", timeout_s)
        given_up.wait(_LOOK_S)


def _transport(
    spec: GroupSpec, store: PrefixStore, timeout_s: float, placement: Placement, given_up: threading.Event
) -> Transport:
    if spec.backend == "gloo":
        return GlooTransport(spec, store, timeout_s)
    from pipelinerl_torch.nccl import NcclTransport

    return NcclTransport(store, spec.rank, spec.world, timeout_s, placement, given_up)
