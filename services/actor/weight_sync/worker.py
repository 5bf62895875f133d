"""Receive and prepare versions in a vLLM worker process, on a thread beside its decode steps.

A reading thread consumes orders from the actor's Unix socket; the transfer thread performs them one after another. When the
reading thread gets a Discard, it also sets a flag that the transfer thread sees within the stall timeout. A closed socket ends
both threads. Tensors are loaded into the engine's layout beside the live weights (`loaders.py`) as they arrive, so that no
further copy of all bytes is held. This module does not depend on vLLM or decide what happens after a failed transfer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import KW_ONLY, dataclass, replace

import msgspec
import torch
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer import chunks
from pipelinerl.transfer.chunks import HEADER_SIZE, ReusedMemory, Unpacker, checksum, prefetch
from pipelinerl.transfer.group import HOST, WeightGroup, on_device
from pipelinerl.transfer.manifest import Chunk, GroupFailed, Manifest, TransferAborted
from services.actor.weight_sync.client import Discard, Join, Order, Receive, Reply, StagedWeights, WeightLoading, as_line
from services.actor.weight_sync.loaders import Loader

log = logging.getLogger(__name__)

MAX_WAITING_ORDERS = 16
RELEASE = "release"


class StagingMemory:
    """Host memory that successive updates of one engine reuse."""

    def __init__(self, buffers: int) -> None:
        self.chunks, self.large = ReusedMemory(buffers + 1), ReusedMemory(buffers)


@dataclass(eq=False)
class Receiver:
    """Receives one version's chunks, checks their checksums, and yields the tensors as they become complete. Iterate
    `tensors()` to the end, close the iterator in any case, then call `staged`. The group is in use until the iterator is
    closed; closing takes at most the stall timeout.

    `buffers`: number of chunks held at a time, including the one being loaded. With more than one, a thread receives the next
    chunks while the caller checks and loads earlier ones. A tensor of several chunks is held as a whole. `memory`: reusable
    memory to receive into; None = new memory.
    """

    group: WeightGroup
    manifest: Manifest
    version: PolicyVersion
    _: KW_ONLY
    timeout_s: float
    stall_timeout_s: float
    aborted: threading.Event
    buffers: int = 1
    memory: StagingMemory | None = None

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._deadline = self._began + self.timeout_s
        self._memory = self.memory if self.group.placement.stream is None else None
        self._largest_chunk = max(chunk.num_bytes for chunk in self.manifest.chunks)
        self._checksums: list[int] = []
        self._receive_s = self._checked_s = self._waited_s = 0.0

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Yield all parameters in the manifest's order. Raises TransferError; the group is then unusable."""
        unpacker = Unpacker(self.manifest, self._new_memory)
        taken: Generator[tuple[Tensor, int], None, None] = (self._take(chunk, unpacker) for chunk in self.manifest.chunks)
        if self.buffers > 1 and len(self.manifest.chunks) > 1:
            taken = prefetch(taken, self.buffers, f"receive-{self.version}")
        with contextlib.closing(taken):
            for chunk in self.manifest.chunks:
                started = time.monotonic()
                self._time_left()
                raw, expected = next(taken)
                self._check(chunk, raw, expected)
                self._waited_s += time.monotonic() - started
                del raw
                complete = unpacker.add(chunk)
                while complete:  # release a chunk's memory with its last tensor
                    yield complete.pop(0)

    def staged(self) -> StagedWeights:
        """Return the version's figures, once all `tensors()` were read. `prepare_s` excludes the time of waiting for bytes."""
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
            raw = unpacker.room(chunk)
            self.group.broadcast(raw, self._time_left())
        self._receive_s += time.monotonic() - started
        return raw, expected

    def _new_memory(self, num_bytes: int) -> Tensor:
        if self._memory is None:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.group.placement.device)
        if num_bytes > self._largest_chunk:
            return self._memory.large.take(num_bytes)
        return self._memory.chunks.take(self._largest_chunk)[:num_bytes]  # equal sizes, so that any can be reused

    def _check(self, chunk: Chunk, raw: Tensor, expected: int) -> None:
        started = time.monotonic()
        with self.group.placement.scope():
            actual = checksum(raw)
        if actual != expected:
            problem = f"version {self.version}, chunk {chunk.index}: checksum {actual:08x}, expected {expected:08x}"
            raise TransferError(problem)
        self._checksums.append(actual)
        self._checked_s += time.monotonic() - started

    def _time_left(self) -> float:
        if self.aborted.is_set():
            raise TransferAborted(f"receiving of version {self.version} was given up")
        return min(self._deadline - time.monotonic(), max(self.stall_timeout_s, self.manifest.slowest_chunk_s))


@dataclass(eq=False)
class TransferWorker:
    """Performs the orders of the actor's `WeightUpdateClient` in one vLLM worker. `loading` is the first message to the actor.
    `device` is the device of the model."""

    rank: int
    loading: WeightLoading
    loader: Loader
    manifest: Manifest
    socket_path: str
    _: KW_ONLY
    stall_timeout_s: float
    staging_buffers: int = 2
    device: torch.device = HOST.device

    def __post_init__(self) -> None:
        self._memory = StagingMemory(self.staging_buffers)
        self._placement = on_device(self.device)
        self._group: WeightGroup | None = None
        self._staged: PolicyVersion | None = None
        self._to_swap: PolicyVersion | None = None
        self._loading = threading.Lock()  # held while the loader is in use
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
        """Note the version that `swap` will make live. Raises TransferError if it is not staged."""
        self._to_swap = version
        self._check_staged()

    def _check_staged(self) -> None:
        if self._staged != self._to_swap:
            raise TransferError(f"version {self._to_swap} is to be served, but {self._staged or 'nothing'} is staged")

    def swap(self) -> None:
        """Make the version of `check_staged` live. Raises TransferError if it has been discarded since."""
        with self._loading:
            self._placement.synchronize()  # no queued work may still read the old weights
            assert self._to_swap is not None, "check_staged comes first"
            self._check_staged()
            self.loader.swap()
            self._placement.synchronize()
            self._staged = None
        # The old weights are freed on the transfer thread, so that the pause does not wait for it.
        with contextlib.suppress(queue.Full):
            self._orders.put_nowait(RELEASE)

    def close(self) -> None:
        """End both threads. Returns at once; a running transfer ends within the stall timeout."""
        self._abort()
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
                with self._loading:
                    if self._staged is None:
                        self.loader.drop()
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
        spec = replace(order.group, rank=order.group.rank + self.rank)
        if spec.backend == "nccl" and self._placement is HOST:
            raise TransferError("weights.backend is nccl, but this engine is on CPU: set weights.backend: gloo")
        placement = self._placement if spec.backend == "nccl" else HOST
        self._group = WeightGroup.connect(spec, order.timeout_s, self._aborted, placement)

    def _receive(self, order: Receive) -> StagedWeights:
        if self._group is None:
            raise TransferError("no transfer group is joined")
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
            with self._loading, self._placement.scope(), contextlib.closing(receiver.tensors()) as tensors:
                self._staged = None
                self.loader.load(tensors)
                self._placement.synchronize()
                self._staged = order.version
        except BaseException:
            self._leave()
            raise
        return receiver.staged()

    def _discard(self) -> None:
        with self._loading:
            self._staged = None
            self.loader.drop()
        with self._discarding:
            self._discards -= 1
            if not self._discards:
                self._aborted.clear()

    def _abort(self) -> None:
        """Make orders fail until all Discards received so far have been performed, or for good if the connection has ended."""
        with self._discarding:
            self._discards += 1
            self._aborted.set()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _use_one_core() -> None:
    """Prepare weights with one thread, on any free core, instead of the cores of vLLM's decoding threads. A second team of
    OpenMP threads would make both teams wait for each other at every barrier: 135M parameters took 7.5 s instead of 1.6 to 3.7
    s on two busy cores. The call is private because vLLM replaces `torch.set_num_threads` on a CPU. OpenMP keeps the number of
    threads per calling thread, so that the decoding threads keep theirs."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch._C.set_num_threads(1)
