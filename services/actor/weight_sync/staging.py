"""Receives one version's chunks and hands out its tensors as they complete.

The tensors go straight into the engine's layout beside the live weights (`shadow_model.py`), so that no second copy of all
bytes is held. With one buffer, receiving and loading take turns; with more, a thread receives the next chunks while the
caller checks and loads earlier ones. Memory here is that many chunks and at most one tensor that spans chunks; on the host it
is kept for the next update. A chunk is used only after its checksum held.

It does not know vLLM, does not decide what happens to a failed transfer, and does not close the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.buffers import Prefetcher, ReusedMemory
from pipelinerl.transfer.chunks import HEADER_SIZE, ChunkHeader, Unpacker, checksum, version_checksum
from pipelinerl.transfer.group import WeightGroup
from pipelinerl.transfer.manifest import Chunk, ChunkCorrupt, Manifest, TransferAborted


@dataclass(frozen=True)
class Receipt:
    """`checksum` of the whole version, from the bytes that arrived.

    `receive_s`: receiving and checking, seconds; `waited_s`: what of it the caller of `tensors` has spent.
    """

    version: PolicyVersion
    checksum: int
    num_bytes: int
    receive_s: float
    waited_s: float


class StagingMemory:
    """Host memory of one engine's updates, one after another."""

    def __init__(self, buffers: int) -> None:
        self.chunks, self.spanning = ReusedMemory(buffers + 1), ReusedMemory(2)


@dataclass(frozen=True)
class _Taken:
    """One chunk as it came, and what its checksum should be."""

    chunk: Chunk
    raw: Tensor
    checksum: int


class Receiver:
    """One version's receive. Iterate `tensors()` to the end, `close` in any case, then take the `receipt`.

    `buffers`: chunks held at a time, the one being loaded included. `memory`: to receive into; None: new memory. The group
    may be closed only after `close`.
    """

    def __init__(
        self,
        group: WeightGroup,
        manifest: Manifest,
        version: PolicyVersion,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        aborted: threading.Event,
        buffers: int = 1,
        memory: StagingMemory | None = None,
    ) -> None:
        self._group, self._manifest, self._version = group, manifest, version
        self._deadline, self._stall_timeout_s = time.monotonic() + timeout_s, stall_timeout_s
        self._aborted, self._buffers = aborted, buffers
        self._memory = memory if group.placement.stream is None else None
        self._ahead: Prefetcher[_Taken] | None = None
        self._checksums: list[int] = []
        self._receive_s = self._checked_s = self._waited_s = 0.0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters in the manifest's order. Raises TransferError; the group is then unusable."""
        unpacker = Unpacker(self._manifest, self._memory.spanning if self._memory else None)
        chunks = self._chunks()
        for _ in self._manifest.chunks:
            started = time.monotonic()
            self._time_left()
            taken = next(chunks)
            self._check(taken)
            self._waited_s += time.monotonic() - started
            complete = unpacker.add(taken.raw)
            del taken
            while complete:  # nothing here keeps a chunk longer than its last tensor is wanted
                yield complete.pop(0)

    def close(self) -> None:
        """Returns when nothing uses the group any more: at most the stall timeout. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()

    def _chunks(self) -> Iterator[_Taken]:
        in_turn = (self._take(chunk) for chunk in self._manifest.chunks)
        if self._buffers == 1:
            return in_turn
        self._ahead = Prefetcher(in_turn, self._buffers, f"receive-{self._version}")
        return self._ahead

    @property
    def receipt(self) -> Receipt:
        """Valid once `tensors()` is exhausted."""
        assert len(self._checksums) == len(self._manifest.chunks)
        total = version_checksum(self._manifest.manifest_id, self._checksums)
        return Receipt(
            self._version, total, self._manifest.total_bytes, self._receive_s + self._checked_s, self._waited_s
        )

    def _take(self, chunk: Chunk) -> _Taken:
        started, placement = time.monotonic(), self._group.placement
        with placement.scope():
            packed_header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=placement.device)
            self._group.broadcast(packed_header, self._time_left())
            header = ChunkHeader.parse(packed_header)
            header.check(self._version, chunk)
            raw = self._new(chunk.num_bytes)
            self._group.broadcast(raw, self._time_left())
        self._receive_s += time.monotonic() - started
        return _Taken(chunk, raw, header.checksum)

    def _new(self, num_bytes: int) -> Tensor:
        if self._memory is not None:
            return self._memory.chunks.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._group.placement.device)

    def _check(self, taken: _Taken) -> None:
        started = time.monotonic()
        with self._group.placement.scope():
            actual = checksum(taken.raw)
        if actual != taken.checksum:
            raise ChunkCorrupt(self._version, taken.chunk.index, taken.checksum, actual)
        self._checksums.append(actual)
        self._checked_s += time.monotonic() - started

    def _time_left(self) -> float:
        if self._aborted.is_set():
            raise TransferAborted(f"receiving of version {self._version} was given up")
        return min(self._deadline - time.monotonic(), self._stall_timeout_s)
