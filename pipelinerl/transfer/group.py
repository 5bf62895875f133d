"""A collective group for one epoch of weight transfer. Rank 0 is the trainer, and the other ranks receive.

Ranks build a group through a key-value store that the trainer hosts. They do not use torch's global process group, so several
groups can coexist in one process. Every wait has a deadline. A group that failed is unusable: close it, agree on a new epoch
and build another. Neither the store nor Gloo authenticates peers (docs/security.md).

Ranks meet in two stages. First each rank checks in at the store, and rank 0 waits for all. Only then do they connect to each
other, so a missing rank blocks no other rank inside a collective library. If rank 0 gives up, all waiting ranks stop at once.
When a receiver checks in, it reports the chunks that it kept of a version whose transfer broke. If all keep chunks of the same
version, sending starts with the first chunk that one of them lacks.

Gloo cannot interrupt a running operation (`ProcessGroupGloo.abort` does nothing), so each operation has its own timeout. NCCL
can be interrupted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore

from pipelinerl.errors import FieldError, TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.service.settings import host_port, split_host_port
from pipelinerl.transfer.chunks import checksum, chunk_header, chunk_of
from pipelinerl.transfer.manifest import DeadlineExceeded, GroupFailed, GroupSpec, Kept, Manifest, TransferAborted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """Memory of chunks: a CUDA device, with a torch.cuda.Stream for their transfer, or host memory, without a stream."""

    device: torch.device
    stream: Any = None

    def scope(self) -> AbstractContextManager[Any]:
        """Inside the block, queue this thread's device work on the stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Like `scope`, but the block's work runs between the caller's earlier and later device work. The host never waits."""
        if self.stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # work queued before an error still runs
            callers.wait_stream(self.stream)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if it is in host memory, otherwise a copy made after the work queued on the stream."""
        with self.scope():
            return tensor.cpu()

    def synchronize(self) -> None:
        """Wait until the device has done the work that this thread queued."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()


HOST = Placement(torch.device("cpu"))


def on_device(device: torch.device) -> Placement:
    """Return a placement on a CUDA device with a new stream. For any other device, return `HOST`."""
    return Placement(device, torch.cuda.Stream(device)) if device.type == "cuda" else HOST


def transfer_backend(wanted: str, on_gpu: bool) -> Backend:
    """Return the backend that `weights.backend` selects. Raises `FieldError` for nccl if the trainer has no GPU."""
    if wanted == "nccl" and not on_gpu:
        raise FieldError("weights.backend", wanted, "this trainer has no GPU: use gloo, or auto")
    return "nccl" if wanted == "nccl" or (wanted in ("auto", "log") and on_gpu) else "gloo"


ABORT_WITHIN_S = 5.0
"""Maximum seconds that closing waits for NCCL. A communicator that takes longer is abandoned."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.0001, 0.005
"""Bounds of the interval at which a broadcast is polled."""
_LOOK_SHARE = 1 / 8
"""Maximum delay until a finished broadcast is noticed, as a share of its duration."""
_making = threading.Lock()


class NcclTransport:
    """One NCCL communicator, whose broadcasts always end and whose failures do not end the process.

    NCCL reports the death of a peer over a network, but not over shared memory or NVLink, where the deadline ends the wait. Use
    `broadcast` from one thread at a time, and `close` from any thread.
    """

    def __init__(
        self, store: PrefixStore, rank: int, world: int, timeout_s: float, placement: Placement, given_up: threading.Event
    ) -> None:
        """Connect by a first broadcast, which makes the communicator. Raises the errors of `broadcast`."""
        from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

        self._placement, self._given_up = placement, given_up
        self._closed, self._closing = threading.Event(), threading.Lock()
        self._aborting: Future[None] | None = None
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0  # a blocking communicator would wait as long as a peer is missing
        with _without_watchdog(timeout_s):
            self._group: Any = ProcessGroupNCCL(store, rank, world, options)
        with placement.scope():
            greeting = torch.zeros(1, dtype=torch.int64, device=placement.device)
        self.broadcast(greeting, timeout_s)

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Broadcast `tensor` and wait until the device has sent or filled it. Raises TimeoutError, TransferAborted or NCCL's
        RuntimeError. An error closes the communicator, so that its kernel writes no more to the tensor's memory."""
        began_at, options = time.monotonic(), BroadcastOptions()
        options.rootRank = 0
        try:
            with self._placement.scope():
                work = self._group.broadcast([tensor], options)
                while not work.is_completed():
                    self._check_wanted()
                    taken_s = time.monotonic() - began_at
                    if taken_s >= timeout_s:
                        raise TimeoutError
                    time.sleep(min(max(_SHORTEST_LOOK_S, _LOOK_SHARE * taken_s), _LONGEST_LOOK_S))
                self._check_wanted()
                work.wait(timedelta(seconds=max(timeout_s, 0.001)))  # raises NCCL's error, if any, without waiting
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the communicator, even during a broadcast on another thread, and wait for its end, at most `ABORT_WITHIN_S`."""
        with self._closing:
            if self._aborting is None:
                self._closed.set()  # first, because an aborted broadcast looks complete
                # On a thread, since torch waits for NCCL without a time limit.
                self._aborting = on_thread("nccl-abort", partial(_abort, self._group))
        if wait([self._aborting], ABORT_WITHIN_S).not_done:
            log.error("NCCL did not end a communicator within %g s; it is abandoned", ABORT_WITHIN_S)

    def _check_wanted(self) -> None:
        if self._closed.is_set() or self._given_up.is_set():
            raise TransferAborted("the broadcast was given up")


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("an NCCL communicator ended with an error: %s", str(error).splitlines()[0])


@contextmanager
def _without_watchdog(timeout_s: float) -> Iterator[None]:
    """Set torch's environment variables so that groups made inside the block have no watchdog thread, which would end the
    process on an error or a timeout."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _making:
        # torch reads this timeout only once per process.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


PIECE_BYTES = 2**19
"""Bytes that a rank of a Gloo group receives before it passes them on. Smaller pieces take more CPU time."""
_OUTCOME = "outcome"
"""Store key under which rank 0 writes the end of a meeting: `_VOID`, or as JSON the chunks that all receivers already have."""
_VOID = "void"
"""Value of `_OUTCOME` if rank 0 gave up the meeting."""
_MEETING_LOOK_S = 0.1
"""Interval, in seconds, at which a rank that waits for other ranks checks whether the meeting was given up."""
_LET_GO_S = 0.5
"""Interval, in seconds, at which `connect` checks whether the meeting was given up or is late."""


class GroupStore:
    """The trainer's rendezvous store, which exists as long as this object. Raises OSError if it cannot listen.

    It has no authentication, so it listens only on the interface `host`. `port` 0 picks a free port. Actors use `address`,
    which has `advertise_host` if given; the trainer uses `own_address`.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise_host: str = "") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)  # torch's own would listen on all interfaces
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        self.port = int(listener.getsockname()[1])
        self.own_address, self.address = host_port(self.host, self.port), host_port(advertise_host or self.host, self.port)
        self._store = TCPStore(self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class WeightGroup:
    """An open group. Use it from one thread at a time, and always close it. Tensors must be in the memory of `placement`."""

    def __init__(self, spec: GroupSpec, transport: Transport, placement: Placement) -> None:
        self.spec, self.placement = spec, placement
        self._transport: Transport | None = transport

    @classmethod
    def connect(
        cls,
        spec: GroupSpec,
        timeout_s: float,
        given_up: threading.Event | None = None,
        placement: Placement = HOST,
        patience_s: float | None = None,
    ) -> WeightGroup:
        """Connect to the other `spec.world - 1` ranks.

        `given_up`: ends the wait of this rank, or of all ranks if this is rank 0; with NCCL, also later broadcasts.
        `patience_s`: on rank 0, maximum wait for the next rank after one has checked in. Raises DeadlineExceeded after
        `timeout_s` or `patience_s`, TransferAborted if the meeting was given up, else GroupFailed.
        """
        stop, deadline = given_up or threading.Event(), time.monotonic() + timeout_s

        def join() -> WeightGroup:
            try:
                store = open_store(spec, timeout_s)
                meeting = PrefixStore(spec.name, store)
                if spec.rank == 0:
                    kept = _wait_for_all(spec, meeting, timeout_s, stop, patience_s)
                else:
                    kept = _check_in(spec, meeting, deadline, stop)
                left = _time_until(deadline)
                store.set_timeout(left)
                transport: Transport
                if spec.backend == "nccl":
                    transport = NcclTransport(meeting, spec.rank, spec.world, left.total_seconds(), placement, stop)
                else:
                    transport = GlooTransport(spec, meeting, left)
                return cls(replace(spec, kept=kept), transport, placement)
            # torch's DistError and its subclasses, and Gloo's errors, are RuntimeErrors
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                if isinstance(error, TimeoutError) or time.monotonic() >= deadline - 0.05 * timeout_s:
                    raise DeadlineExceeded(spec.name, f"connecting {spec.world} ranks", timeout_s) from error
                raise GroupFailed(spec.name, f"cannot be built: {error}") from error

        # On a thread, because torch waits for a store whose host is gone as long as TCP does.
        meeting, is_late = on_thread(f"meet-{spec.name}", join), False
        while not wait([meeting], _LET_GO_S).done:
            if stop.is_set() or is_late:
                meeting.add_done_callback(close_when_met)
                if stop.is_set():
                    raise TransferAborted(f"forming {spec.name} was abandoned")
                raise DeadlineExceeded(spec.name, "an answer from the store", timeout_s)
            is_late = time.monotonic() >= deadline  # then wait once more, so that `join` can name missing ranks
        return meeting.result()

    def first_chunk(self, content: str) -> int:
        """Return the index of the first chunk to send of the version named `content`. All receivers keep the earlier chunks."""
        return self.spec.kept.num_chunks if self.spec.kept.content == content else 0

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Send `tensor` (rank 0) or fill it (other ranks), and wait until it may be reused. Raises DeadlineExceeded,
        GroupFailed or, with NCCL, TransferAborted."""
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
        """Leave the group and wait for NCCL to end. Over Gloo, ranks that wait for this one fail at once. May be repeated."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


class GlooTransport:
    """A chain of ranks over Gloo. Each rank passes on bytes from the rank before it while it receives more. A link
    therefore carries one copy, whereas some links of Gloo's own broadcast, a binomial tree, carry ⌈log₂ ranks⌉ copies."""

    def __init__(self, spec: GroupSpec, store: PrefixStore, timeout: timedelta) -> None:
        gloo_class: Any = ProcessGroupGloo  # its options are missing from torch's stubs
        options = gloo_class._Options()
        options._timeout = timeout
        device = ProcessGroupGloo.create_device(hostname=spec.bind_host) if spec.bind_host else None
        options._devices = [device or ProcessGroupGloo.create_default_device()]
        self._group: Any = gloo_class(store, spec.rank, spec.world, options)
        self._rank, self._world = spec.rank, spec.world

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Fill `tensor` from the rank before, and send it to the rank after. Raises RuntimeError if either fails or is late."""
        deadline, whole = time.monotonic() + timeout_s, tensor.view(-1).view(torch.uint8)
        pieces = whole.split(PIECE_BYTES) if self._world > 2 else (whole,)
        group, works = self._group, deque[Any]()
        try:
            if self._rank > 0:
                for piece in pieces:
                    works.append(group.recv([piece], self._rank - 1, 0))
            for piece in pieces:
                if self._rank > 0:
                    works.popleft().wait(_time_until(deadline))
                if self._rank + 1 < self._world:
                    works.append(group.send([piece], self._rank + 1, 0))
            while works:
                works.popleft().wait(_time_until(deadline))
        finally:  # a traceback would otherwise keep connections open. Gloo does not use the memory of dropped operations
            group = None
            works.clear()

    def close(self) -> None:
        self._group = None


def _time_until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


Transport = GlooTransport | NcclTransport


def open_store(spec: GroupSpec, timeout_s: float) -> TCPStore:
    """Connect to the trainer's store. Raises ValueError for an invalid address, RuntimeError or OSError if connecting fails."""
    host, port = split_host_port(spec.store)
    # TCPStore tries an unreachable store twice with a pause, which takes up to 2.5 times the timeout.
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s / 3))


def close_when_met(meeting: Future[WeightGroup]) -> None:
    """Close the group that a finished meeting made, if any."""
    if meeting.exception() is None:
        meeting.result().close()


def _wait_for_all(
    spec: GroupSpec, meeting: PrefixStore, timeout_s: float, given_up: threading.Event, patience_s: float | None
) -> Kept:
    """As rank 0, wait until all other ranks have checked in. Then publish and return the chunks that they all keep. Raises
    DeadlineExceeded if ranks do not come in time, and TransferAborted if `given_up` is set."""
    started = last_came = time.monotonic()
    missing = list(range(1, spec.world))
    try:
        while missing and not _are_set(spec, meeting, [f"here/{rank}" for rank in missing], given_up):
            still, now = [rank for rank in missing if not meeting.check([f"here/{rank}"])], time.monotonic()
            impatient = patience_s is not None and len(still) < spec.world - 1 and now - last_came >= patience_s
            if len(still) < len(missing):
                missing, last_came = still, now
            elif impatient or now - started >= timeout_s:
                connecting = f"connecting {spec.world} ranks ({missing} are missing)"
                raise DeadlineExceeded(spec.name, connecting, now - started, tuple(missing))
    except (TransferAborted, DeadlineExceeded):
        meeting.set(_OUTCOME, _VOID)
        raise
    values = meeting.multi_get([f"here/{rank}" for rank in range(1, spec.world)])
    ranks = [Kept(*json.loads(value)) for value in values]
    agree = len({kept.content for kept in ranks}) == 1
    kept_by_all = min(ranks, key=lambda kept: kept.num_chunks) if agree else Kept()
    meeting.set(_OUTCOME, json.dumps(kept_by_all))
    return kept_by_all


def _check_in(spec: GroupSpec, meeting: PrefixStore, deadline: float, given_up: threading.Event) -> Kept:
    """As a receiver, check in, wait for rank 0, and return the chunks that all receivers keep. Raises TimeoutError after
    `deadline`, and TransferAborted if this rank or rank 0 gives up."""
    meeting.set(f"here/{spec.rank}", json.dumps(spec.kept))
    while not _are_set(spec, meeting, [_OUTCOME], given_up):
        if time.monotonic() >= deadline:
            raise TimeoutError
    if (outcome := meeting.get(_OUTCOME).decode()) == _VOID:
        raise TransferAborted(f"forming {spec.name} was abandoned")
    return Kept(*json.loads(outcome))


def _are_set(spec: GroupSpec, meeting: PrefixStore, keys: list[str], given_up: threading.Event) -> bool:
    """Wait up to `_MEETING_LOOK_S` for all keys. Return whether they are set. Raises TransferAborted if `given_up` is set."""
    if given_up.is_set():
        raise TransferAborted(f"forming {spec.name} was abandoned")
    try:
        meeting.wait(keys, timedelta(seconds=_MEETING_LOOK_S))
    except DistStoreError:
        return False
    return True


class StreamFile:
    """Reads a version from a file instead of a group: `broadcast` fills tensors with each chunk's header and then the chunk, in
    order. The file at `path` has been checked against the trainer's digest and must not change. Raises TransferError if it is
    smaller than the manifest's stream."""

    placement = HOST

    def __init__(self, path: str, manifest: Manifest, version: PolicyVersion) -> None:
        try:
            stream = torch.from_file(path, shared=False, size=manifest.total_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise TransferError(f"{path} does not hold the {manifest.total_bytes} bytes of {version}: {error}") from error

        def pieces() -> Iterator[Tensor]:
            for chunk in manifest.chunks:
                raw = chunk_of(stream, chunk)
                yield chunk_header(version, chunk, checksum(raw))
                yield raw

        self._pieces = pieces()

    def first_chunk(self, content: str) -> int:
        """Return the index of the first chunk that `broadcast` delivers: 0, because the file has every chunk."""
        return 0

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Fill `tensor` with the next header or chunk."""
        tensor.copy_(next(self._pieces))

    def close(self) -> None:
        """Do nothing: the memory map ends with this object."""
