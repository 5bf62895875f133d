"""A collective group for one epoch of weight transfer: rank 0 is the trainer, the others receive.

Built from a key-value store that the trainer hosts, without torch's global process group, so that groups of several epochs
(and side groups of joiners) may exist one after another, or side by side, in one process. Backend `gloo` or `nccl`: the
same calls. Every wait has a deadline. A group that failed once is unusable: close it, agree on a new epoch, build another.

Neither the store nor Gloo asks who connects: whoever reaches their ports can read and disturb a transfer (docs/security.md).

Ranks meet in two steps. First each checks in at the store, and rank 0 waits for all; only then do they connect to each
other. So a rank that never comes keeps nobody inside a collective library, and when rank 0 gives the meeting up, those
who wait are told at once.

Gloo cannot interrupt an operation under way (`ProcessGroupGloo.abort` does nothing), so each operation carries its own
timeout: that timeout is the most that giving up a transfer can take. A peer that died is noticed at once. NCCL can be
interrupted.

It does not decide who is a member, and sends tensors, not weights.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore

from pipelinerl.errors import FieldError, TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.service.settings import host_port, split_host_port
from pipelinerl.transfer.manifest import DeadlineExceeded, GroupFailed, GroupSpec, RanksMissing, TransferAborted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Where chunks live and in which order a device works on them: host memory, or a device and a stream of its own.

    `stream`: a torch.cuda.Stream; None in host memory, for which nothing of `torch.cuda` is touched.
    """

    device: torch.device
    stream: Any = None

    def scope(self) -> AbstractContextManager[Any]:
        """What this thread does within is queued on the stream. Memory allocated within is reused in the stream's order."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """As `scope`, and in order with the caller's stream: after what is queued there, before what will be.

        By events on the device. The host does not wait, and neither do other streams.
        """
        if self.stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # what was queued before an error runs all the same
            callers.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Returns when the device has done what this thread has queued so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()


HOST = Placement(torch.device("cpu"))


def on_device(device: torch.device) -> Placement:
    """On a CUDA device, with a new stream, which nothing queued on another one holds up; any other is host memory."""
    return Placement(device, torch.cuda.Stream(device)) if device.type == "cuda" else HOST


def transfer_backend(wanted: str, on_gpu: bool) -> Backend:
    """Which backend a recipe's `weights.backend` means here. Raises `FieldError`. Pure."""
    if wanted == "nccl" and not on_gpu:
        raise FieldError("weights.backend", wanted, "this trainer has no GPU: use gloo, or auto")
    return "nccl" if wanted == "nccl" or (wanted == "auto" and on_gpu) else "gloo"


_Result = TypeVar("_Result")


def on_thread(name: str, work: Callable[[], _Result]) -> Future[_Result]:
    """Begins `work` on a thread of its own. What it waits for keeps neither other work nor the process's end waiting."""
    done = Future[_Result]()
    done.set_running_or_notify_cancel()  # whoever waits for it may be cancelled; it may not

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if not isinstance(error, TransferError):
                log.exception("%s failed", name)
            done.set_exception(error.with_traceback(None))  # whose frames would keep what it worked on
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


ABORT_WITHIN_S = 5.0
"""How long closing waits for NCCL to let go. What it holds after that is left to it."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.0001, 0.005
"""Between two looks at a broadcast."""
_LOOK_SHARE = 1 / 8
"""Of the time that it has taken so far: so much too late its end is noticed at most."""
_making = threading.Lock()


class NcclTransport:
    """One NCCL communicator: broadcasts that end, whatever a peer does, and a process that outlives them.

    What torch's ProcessGroupNCCL does by itself does not suit a group whose members may die:

    - its watchdog thread answers an error or a timeout by ending the process. With blocking wait there is no watchdog, and
      waiting is ours; that setting is read from the environment when a group is made, so it stands there only meanwhile;
    - making a communicator blocks for as long as a peer is missing. A non-blocking communicator is polled instead, up to
      TORCH_NCCL_NONBLOCKING_TIMEOUT, which torch reads once in a process;
    - a broadcast whose communicator is aborted looks complete. Therefore an abort is remembered here, and is what the waiting
      thread raises.

    A peer that dies is noticed through NCCL's own error where the bytes go over the network; over shared memory or NVLink it
    is not, and the deadline ends the wait. Use `broadcast` from one thread at a time; `close` from any.
    """

    def __init__(
        self, store: PrefixStore, rank: int, world: int, timeout_s: float, placement: Placement, given_up: threading.Event
    ) -> None:
        """Connects: a first broadcast makes the communicator. Raises RuntimeError, TimeoutError or TransferAborted."""
        from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

        self._placement, self._given_up = placement, given_up
        self._closed, self._closing = threading.Event(), threading.Lock()
        self._aborting: Future[None] | None = None
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        with _without_watchdog(timeout_s):
            self._group: Any = ProcessGroupNCCL(store, rank, world, options)
        with placement.scope():
            greeting = torch.zeros(1, dtype=torch.int64, device=placement.device)
        self.broadcast(greeting, timeout_s)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Returns when the device has sent or filled `tensor`.

        Raises TimeoutError, TransferAborted when it was given up or closed meanwhile, RuntimeError for NCCL's own errors. The
        communicator is then closed: its kernel must not fill memory that has gone to somebody else.
        """
        try:
            self._broadcast(tensor, timeout_s)
        except BaseException:
            self.close()
            raise

    def _broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        began_at = time.monotonic()
        options = BroadcastOptions()
        options.rootRank = 0
        with self._placement.scope():
            work = self._group.broadcast([tensor], options)
            while not work.is_completed():
                self._check_wanted()
                taken_s = time.monotonic() - began_at
                if taken_s >= timeout_s:
                    raise TimeoutError
                time.sleep(min(max(_SHORTEST_LOOK_S, _LOOK_SHARE * taken_s), _LONGEST_LOOK_S))
            self._check_wanted()
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))  # raises what went wrong; does not wait any more

    def close(self) -> None:
        """Abort: an operation under way on another thread ends there. Whoever calls it waits until all of it has ended, at
        most `ABORT_WITHIN_S`; once is enough."""
        with self._closing:
            if self._aborting is None:
                self._closed.set()  # before a broadcast can look complete
                # On a thread, since torch waits for NCCL without a limit of its own.
                self._aborting = on_thread("nccl-abort", partial(_abort, self._group))
        if wait([self._aborting], ABORT_WITHIN_S).not_done:
            log.error("NCCL does not end a communicator within %g s; it is left behind", ABORT_WITHIN_S)

    def _check_wanted(self) -> None:
        if self._closed.is_set() or self._given_up.is_set():
            raise TransferAborted("the broadcast was given up")


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("a communicator ended with an error: %s", str(error).splitlines()[0])


@contextmanager
def _without_watchdog(timeout_s: float) -> Iterator[None]:
    """The environment for making a group whose errors and timeouts are for its user, not for torch, to act on."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _making:
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


_OUTCOME, _GO, _VOID = "outcome", "go", "void"
"""Key of a meeting, and its values: all have checked in; it was given up."""
_MEETING_LOOK_S = 0.1
"""Seconds between two looks whether a meeting is given up. A key that is set ends the wait at once."""
_LET_GO_S = 0.5
"""How long whoever connects waits, after the deadline or after giving up, for the meeting to end by itself."""


class GroupStore:
    """The trainer's rendezvous store. Lives as long as the object.

    It has no authentication: `host` is the one interface it listens on (torch alone would listen on all of them), `port` 0
    picks a free one. `address` is for actors, which reach this pod as `advertise_host` (empty: `host`); attribute `host` is
    where the trainer itself reaches it. Raises OSError when it cannot listen there.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise_host: str = "") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        self.port = int(listener.getsockname()[1])
        self.own_address, self.address = host_port(self.host, self.port), host_port(advertise_host or self.host, self.port)
        self._store = TCPStore(self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


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
        stop = given_up or threading.Event()
        # On a thread of its own: torch waits for the answer of a store whose host has gone for as long as TCP does.
        meet = partial(cls._join, spec, timeout_s, stop, placement, patience_s)
        meeting = on_thread(f"meet-{spec.name}", meet)
        latest = time.monotonic() + timeout_s + _LET_GO_S
        while not wait([meeting], _LET_GO_S).done:
            if stop.is_set() or time.monotonic() >= latest:
                meeting.add_done_callback(close_when_met)
                if stop.is_set():
                    raise TransferAborted(f"the meeting of {spec.name} was given up")
                raise DeadlineExceeded(spec.name, "an answer of the store", timeout_s)
        return meeting.result()

    @classmethod
    def _join(
        cls, spec: GroupSpec, timeout_s: float, given_up: threading.Event, placement: Placement, patience_s: float | None
    ) -> WeightGroup:
        deadline = time.monotonic() + timeout_s
        try:
            store = open_store(spec, timeout_s)
            meeting = PrefixStore(spec.name, store)
            if spec.rank == 0:
                _wait_for_all(spec, meeting, timeout_s, given_up, patience_s)
            else:
                _check_in(spec, meeting, deadline, given_up)
            left_s = max(deadline - time.monotonic(), 0.001)
            store.set_timeout(timedelta(seconds=left_s))
            transport: Transport
            if spec.backend == "nccl":
                transport = NcclTransport(meeting, spec.rank, spec.world, left_s, placement, given_up)
            else:
                transport = GlooTransport(spec, meeting, left_s)
            return cls(spec, transport, store, placement)
        # torch's DistError family and Gloo's own are RuntimeErrors
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= deadline - 0.05 * timeout_s:
                raise DeadlineExceeded(spec.name, f"the meeting of {spec.world} ranks", timeout_s) from error
            raise GroupFailed(spec.name, f"cannot be built: {error}") from error

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Send `tensor` (rank 0) or fill it (others). Returns when it may be reused.

        Raises DeadlineExceeded, GroupFailed, or, with NCCL, TransferAborted; the group is then unusable.
        """
        transport = self._transport
        if transport is None:
            raise GroupFailed(self.spec.name, "is closed")
        started = time.monotonic()
        try:
            transport.broadcast(tensor, timeout_s)
        except (RuntimeError, OSError) as error:
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


Transport = GlooTransport | NcclTransport


def open_store(spec: GroupSpec, timeout_s: float) -> TCPStore:
    """Raises RuntimeError, OSError, or ValueError for an address that is none."""
    host, port = split_host_port(spec.store)
    # Unreachable, TCPStore tries twice with a pause: up to 2.5 times what it is given.
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s / 3))


def close_when_met(meeting: Future[WeightGroup]) -> None:
    """Closes the group of a meeting that is done, where there is one."""
    if meeting.exception() is None:
        meeting.result().close()


def _wait_for_all(
    spec: GroupSpec, meeting: PrefixStore, timeout_s: float, given_up: threading.Event, patience_s: float | None
) -> None:
    """Rank 0's side: says go when all ranks have checked in. Raises RanksMissing, TransferAborted, and says void then."""
    started = last_came = time.monotonic()
    missing = list(range(1, spec.world))
    while missing and not _are_set(meeting, [f"here/{rank}" for rank in missing]):
        still = [rank for rank in missing if not meeting.check([f"here/{rank}"])]
        now = time.monotonic()
        if len(still) < len(missing):
            missing, last_came = still, now
            continue
        impatient = patience_s is not None and len(missing) < spec.world - 1 and now - last_came >= patience_s
        if given_up.is_set() or impatient or now - started >= timeout_s:
            meeting.set(_OUTCOME, _VOID)
            if given_up.is_set():
                raise TransferAborted(f"the meeting of {spec.name} was given up")
            raise RanksMissing(spec.name, tuple(missing), spec.world, now - started)
    meeting.set(_OUTCOME, _GO)


def _check_in(spec: GroupSpec, meeting: PrefixStore, deadline: float, given_up: threading.Event) -> None:
    """The others' side: returns when rank 0 says go. Raises TimeoutError, TransferAborted."""
    meeting.set(f"here/{spec.rank}", "1")
    while not _are_set(meeting, [_OUTCOME]):
        if given_up.is_set():
            raise TransferAborted(f"the meeting of {spec.name} was given up")
        if time.monotonic() >= deadline:
            raise TimeoutError
    if meeting.get(_OUTCOME).decode() == _VOID:
        raise TransferAborted(f"the meeting of {spec.name} was given up")


def _are_set(meeting: PrefixStore, keys: list[str]) -> bool:
    """Whether all are set within `_MEETING_LOOK_S`; returns as soon as they are. One call of the store."""
    try:
        meeting.wait(keys, timedelta(seconds=_MEETING_LOOK_S))
    except DistStoreError:
        return False
    return True
