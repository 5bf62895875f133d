"""Receive and prepare versions in a vLLM worker process, on threads beside its decode steps.

A reading thread takes orders from the actor's Unix socket. The transfer thread performs them one after another. A third thread
runs the loader (`loaders.py`), which keeps arriving tensors beside the live weights. For a `Discard` order, the reading thread
also sets a flag, which ends a running transfer within the stall timeout. A closed socket ends all threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.transfer import chunks
from pipelinerl.transfer.chunks import HEADER_SIZE, ReusedMemory, Unpacker, checksum, prefetch
from pipelinerl.transfer.group import HOST, StreamFile, WeightGroup, on_device
from pipelinerl.transfer.manifest import Chunk, GroupFailed, Kept, Manifest, TransferAborted
from services.actor.weight_sync.client import Discard, Join, Order, Receive, Reply, StagedWeights, WeightLoading, as_line
from services.actor.weight_sync.loaders import Loader

log = logging.getLogger(__name__)

MAX_WAITING_ORDERS = 16
ENDING_S = 60.0
"""Maximum seconds to wait for a loader's end. The loader may have to free a whole model."""
RELEASE = "release"


@dataclass(eq=False)
class Receiver:
    """Receives one version's chunks, checks their checksums, and yields the tensors as they become complete.

    If the group breaks, `loaded` raises the error, while the thread of `begin` keeps its chunks and waits: `resume` gives it
    another group, and `drop` ends it. Call `begin` and `resume` from one thread.
    """

    group: WeightGroup | StreamFile
    """Source of the chunks. It must stay open until the iterator of `tensors` is closed."""
    manifest: Manifest
    version: PolicyVersion
    _: KW_ONLY
    timeout_s: float
    """Maximum seconds for receiving from one group."""
    stall_timeout_s: float
    """Maximum seconds for one chunk (the stall timeout). A longer `slowest_chunk_s` of the manifest replaces it."""
    aborted: threading.Event
    """While it is set, receiving raises `TransferAborted`."""
    buffers: int = 1
    """Number of chunks in memory at a time, besides the chunks of an incomplete tensor. If it is more than 1, a separate thread
    receives chunks while the loader works."""
    memory: tuple[ReusedMemory, ReusedMemory] | None = None
    """Memory for chunks, and memory for tensors larger than a chunk. If None, each chunk and each such tensor gets new memory
    on the group's device. Host memory is then pinned if the machine has a GPU."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._largest_chunk = max(chunk.num_bytes for chunk in self.manifest.chunks)
        self._checksums: list[int] = []
        self._receive_s = self._checked_s = self._waited_s = 0.0
        self._loading: Future[StagedWeights] | None = None
        self._waits = False
        """If True, a loader whose group breaks waits for another group."""
        self._resumed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._problems: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    @property
    def kept(self) -> Kept:
        """The chunks that are complete and checked, and need not be received again."""
        failed = self._loading is not None and self._loading.done() and self._loading.exception() is not None
        return Kept() if failed else Kept(self.manifest.content(self.version), len(self._checksums))

    def begin(self, load: Callable[[Receiver], StagedWeights]) -> None:
        """Call `load(self)` on a new thread. `load` must read `tensors()` to the end and return `staged()`."""
        self._waits = True
        self._loading = on_thread(f"load-{self.version}", partial(load, self))
        self._loading.add_done_callback(lambda done: self._problems.put(done.exception()))

    def resume(self, group: WeightGroup | StreamFile, timeout_s: float) -> None:
        """Let the loader's thread continue with `group`. If the load is already complete, receive the chunks that other ranks
        lack and drop them, because every rank takes part in each broadcast. Raises `TransferError`."""
        assert self._loading is not None
        self.group, self.timeout_s = group, timeout_s
        if not self._loading.done():
            self._resumed.put(True)
        else:
            self._waits = False
            list(self.tensors())
            self._problems.put(None)

    def loaded(self) -> StagedWeights:
        """Wait for the load; return its figures. Raises TransferError if the group breaks, or the error that ended the load."""
        assert self._loading is not None
        if (problem := self._problems.get()) is not None:
            raise problem
        return self._loading.result()

    def drop(self) -> None:
        """Give up the load and wait up to `ENDING_S` for its end. A load that waits for a group in `tensors` ends, too."""
        assert self._loading is not None
        self._resumed.put(False)
        wait([self._loading], ENDING_S)

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Yield all parameters in the manifest's order. Always close this iterator; closing takes at most the stall timeout. If
        the group breaks after a chunk was checked, a load that `begin` started waits here for `resume` or `drop`. Raises
        `TransferError`; the group is then unusable."""
        unpacker = Unpacker(self.manifest, self._new_memory)
        while True:
            try:
                yield from self._from_group(unpacker)
                return
            except (GroupFailed, TransferAborted) as error:
                started = time.monotonic()
                if self._checksums:  # the error is kept, and its frames would hold a chunk's memory
                    error.__cause__ = error.__context__ = error.__traceback__ = None
                if not self._checksums or not self._waits:
                    raise
                self._problems.put(error)
                if not self._resumed.get():
                    raise
                self._waited_s += time.monotonic() - started

    def _from_group(self, unpacker: Unpacker) -> Generator[tuple[str, Tensor], None, None]:
        """Yield parameters as they become complete. Chunks that only other ranks lack are received and dropped."""
        first, num_kept = self.group.first_chunk(self.manifest.content(self.version)), len(self._checksums)
        if first > num_kept:
            raise GroupFailed("", f"version {self.version} continues with chunk {first}, but only {num_kept} chunks came")
        coming, self._deadline = self.manifest.chunks[first:], time.monotonic() + self.timeout_s
        if num_kept < len(self.manifest.chunks):
            unpacker.rewind(self.manifest.chunks[num_kept])
        taken: Generator[tuple[Tensor, int], None, None] = (self._take(chunk, unpacker) for chunk in coming)
        if self.buffers > 1 and len(coming) > 1:
            taken = prefetch(taken, self.buffers, f"receive-{self.version}")
        with contextlib.closing(taken):
            for chunk in coming:
                started = time.monotonic()
                self._time_left()
                raw, expected = next(taken)
                self._check(chunk, raw, expected)
                self._waited_s += time.monotonic() - started
                del raw
                complete = unpacker.add(chunk) if chunk.index >= num_kept else []
                while complete:  # release a chunk's memory with its last tensor
                    yield complete.pop(0)

    def staged(self) -> StagedWeights:
        """Return the version's figures, once all `tensors()` were read. `prepare_s` excludes the wait for bytes."""
        assert len(self._checksums) == len(self.manifest.chunks)
        return StagedWeights(
            checksum=chunks.version_checksum(self.manifest.manifest_id, self._checksums),
            num_bytes=self.manifest.total_bytes,
            receive_s=self._receive_s + self._checked_s,
            prepare_s=time.monotonic() - self._began - self._waited_s,
        )

    def _take(self, chunk: Chunk, unpacker: Unpacker) -> tuple[Tensor, int]:
        started, placement = time.monotonic(), self.group.placement
        with placement.scope():
            header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=placement.device)
            self.group.broadcast(header, self._time_left())
            expected = chunks.announced_checksum(header, self.version, chunk)
            raw = unpacker.memory_for(chunk) if chunk.index >= len(self._checksums) else self._new_memory(chunk.num_bytes)
            self.group.broadcast(raw, self._time_left())
        self._receive_s += time.monotonic() - started
        return raw, expected

    def _new_memory(self, num_bytes: int) -> Tensor:
        if self.memory is None:
            device = self.group.placement.device
            pinned = device.type == "cpu" and torch.cuda.is_available()
            return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        small, large = self.memory
        if num_bytes > self._largest_chunk:
            return large.take(num_bytes)
        return small.take(self._largest_chunk)[:num_bytes]  # equal sizes, so that any can be reused

    def _check(self, chunk: Chunk, raw: Tensor, expected: int) -> None:
        started, is_new = time.monotonic(), chunk.index >= len(self._checksums)
        with self.group.placement.scope():
            actual = checksum(raw) if is_new else self._checksums[chunk.index]
        if actual != expected:
            problem = f"version {self.version}, chunk {chunk.index}: checksum {actual:08x}, expected {expected:08x}"
            raise TransferError(problem)
        if is_new:
            self._checksums.append(actual)
        self._checked_s += time.monotonic() - started

    def _time_left(self) -> float:
        if self.aborted.is_set():
            raise TransferAborted(f"receiving of version {self.version} was given up")
        return min(self._deadline - time.monotonic(), max(self.stall_timeout_s, self.manifest.slowest_chunk_s))


@dataclass(eq=False)
class TransferWorker:
    """Performs the actor's orders in one vLLM worker. `loading` is the first message to the actor. One chunk may take
    at most the stall timeout: `stall_timeout_s` or the manifest's `slowest_chunk_s`, whichever is longer."""

    rank: int
    loading: WeightLoading
    loader: Loader
    manifest: Manifest
    socket_path: str
    _: KW_ONLY
    stall_timeout_s: float = 10.0
    staging_buffers: int = 2
    device: torch.device = HOST.device

    def __post_init__(self) -> None:
        buffers = self.staging_buffers
        self._memory = (ReusedMemory(buffers + 1), ReusedMemory(buffers)) if self.device.type == "cpu" else None
        self._placement = on_device(self.device)
        self._group: WeightGroup | StreamFile | None = None
        self._staging: Receiver | None = None
        self._staged: PolicyVersion | None = None
        self._to_swap: PolicyVersion | None = None
        self._loading = threading.Lock()  # held while the loader is in use, or has loaded part of a version
        self._aborted = threading.Event()
        self._discards = 0  # discards received and not yet performed, plus one once the connection has ended
        self._discarding = threading.Lock()
        self._orders: queue.Queue[Order | str | None] = queue.Queue(MAX_WAITING_ORDERS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self.socket_path)
        self._socket.sendall(as_line(self.loading))
        for target in (self._read, self._work):
            threading.Thread(target=target, name=f"weights-{target.__name__}", daemon=True).start()

    # vLLM calls the next three methods on the worker's main thread.

    def check_staged(self, version: PolicyVersion) -> None:
        """Remember the version that `swap` will make live. Raises TransferError if the version is not staged."""
        self._to_swap = version
        if self._staged != version:
            raise TransferError(f"version {version} is to be served, but {self._staged or 'nothing'} is staged")

    def swap(self) -> None:
        """Make the version of `check_staged` live. Raises TransferError if it has been discarded since."""
        assert self._to_swap is not None, "check_staged comes first"
        self.check_staged(self._to_swap)  # fail before taking the lock, which a waiting loader may hold
        with self._loading:
            self._placement.synchronize()  # no queued work may still read the old weights
            self.check_staged(self._to_swap)
            self.loader.swap()
            self._placement.synchronize()
            self._staged = self._staging = None
        # The old weights are freed on the transfer thread, so that the pause does not become longer.
        with contextlib.suppress(queue.Full):
            self._orders.put_nowait(RELEASE)

    def close(self) -> None:
        """End all threads, and wait up to `ENDING_S` for the loader's end."""
        self._abort()
        if (staging := self._staging) is not None:
            staging.drop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    order = msgspec.json.decode(line, type=Order)
                    if isinstance(order, Discard):
                        self._abort()
                    self._orders.put(order)
        except (OSError, ValueError) as error:
            log.info("the actor's connection ended: %s", error)
        self._abort()
        self._orders.put(None)

    def _work(self) -> None:
        _use_one_core()
        while (order := self._orders.get()) is not None:
            if isinstance(order, str):
                if self._staged is None:
                    self._drop()
                continue
            with contextlib.suppress(OSError):
                self._socket.sendall(as_line(self._perform(order)))
        self._leave()
        self.close()  # so that the actor's process does not wait for replies that never come

    def _perform(self, order: Order) -> Reply:
        staged = None
        try:
            match order:
                case Join():
                    self._join(order)
                case Receive():
                    staged = self._receive(order)
                case Discard():
                    self._discard()
        except Exception as error:
            if not isinstance(error, TransferError):
                log.exception("weight transfer failed")
            group_broke = isinstance(error, GroupFailed | TransferAborted)
            return Reply(problem=f"{type(error).__name__}: {error}", group_broke=group_broke)
        return Reply(staged)

    def _join(self, order: Join) -> None:
        self._leave()
        kept = Kept() if self._staging is None else self._staging.kept
        spec = replace(order.group, rank=order.group.rank + self.rank, kept=kept)
        if spec.backend == "nccl" and self._placement is HOST:
            fix = "set weights.backend: gloo (auto selects nccl if the trainer has a GPU)"
            raise TransferError(f"the trainer sends weights by nccl, but this engine is on CPU: {fix}")
        placement = self._placement if spec.backend == "nccl" else HOST
        self._group = WeightGroup.connect(spec, order.timeout_s, self._aborted, placement)

    def _receive(self, order: Receive) -> StagedWeights:
        if order.path:
            self._leave()
            self._group = StreamFile(order.path, self.manifest, order.version)
        if self._group is None:
            raise TransferError("this worker has joined no transfer group")
        receiver = Receiver(
            self._group,
            self.manifest,
            order.version,
            timeout_s=order.timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            aborted=self._aborted,
            buffers=self.staging_buffers,
            memory=self._memory,
        )
        try:
            if self._staging is None or self._staging.kept.content != receiver.kept.content:
                self._drop()
                self._staging = receiver
                receiver.begin(self._load)
            else:
                self._staging.resume(self._group, order.timeout_s)
            staged = self._staging.loaded()
        except BaseException:
            self._leave()
            raise
        self._staged = order.version
        return staged

    def _load(self, receiver: Receiver) -> StagedWeights:
        _use_one_core()
        with self._loading, self._placement.scope(), contextlib.closing(receiver.tensors()) as tensors:
            try:
                self.loader.load(tensors)
            except BaseException:
                self.loader.drop()
                raise
            self._placement.synchronize()
        return receiver.staged()

    def _drop(self) -> None:
        """Drop a version that is loaded or partly loaded, but not live."""
        if self._staging is not None:
            self._staging.drop()
        self._staging = self._staged = None
        with self._loading:
            self.loader.drop()

    def _discard(self) -> None:
        """Withdraw a staged version, but keep its chunks until another version comes."""
        self._staged = None
        with self._discarding:
            self._discards -= 1
            if not self._discards:
                self._aborted.clear()

    def _abort(self) -> None:
        """Make orders fail until all received `Discard`s have been performed or, after the connection's end, forever."""
        with self._discarding:
            self._discards += 1
            self._aborted.set()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _use_one_core() -> None:
    """Use one thread on any free core, because a second team of OpenMP threads would compete with vLLM's decoding threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch._C.set_num_threads(1)  # vLLM replaces torch.set_num_threads on a CPU
