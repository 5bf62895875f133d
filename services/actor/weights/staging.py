"""Receives one version's chunks and hands out its tensors as they complete.

The tensors go straight into the engine's layout beside the live weights (`shadow.py`), so that no second copy of all bytes
is held: memory here is one chunk and at most one tensor that spans chunks. A chunk is used only after its checksum held.

It does not know vLLM, and does not decide what happens to a failed transfer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.types import PolicyVersion
from pipelinerl.weights.errors import ChunkCorrupt, TransferAborted
from pipelinerl.weights.manifest import Chunk, Manifest
from pipelinerl_torch.chunks import Unpacker, checksum, version_checksum
from pipelinerl_torch.group import WeightGroup
from pipelinerl_torch.header import HEADER_SIZE, ChunkHeader


@dataclass(frozen=True)
class Receipt:
    """`checksum` of the whole version, from the bytes that arrived; `receive_s` waiting for them and checking them."""

    version: PolicyVersion
    checksum: int
    num_bytes: int
    receive_s: float


class Receiver:
    """One version's receive. Iterate `tensors()` to the end, then take the `receipt`."""

    def __init__(
        self,
        group: WeightGroup,
        manifest: Manifest,
        version: PolicyVersion,
        *,
        timeout_s: float,
        stall_timeout_s: float,
        aborted: threading.Event,
    ) -> None:
        self._group, self._manifest, self._version = group, manifest, version
        self._deadline, self._stall_timeout_s = time.monotonic() + timeout_s, stall_timeout_s
        self._aborted = aborted
        self._checksums: list[int] = []
        self._receive_s = 0.0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters in the manifest's order. Raises TransferError; the group is then unusable."""
        unpacker = Unpacker(self._manifest)
        for chunk in self._manifest.chunks:
            started = time.monotonic()
            raw = self._take(chunk)
            self._receive_s += time.monotonic() - started
            yield from unpacker.add(raw)

    @property
    def receipt(self) -> Receipt:
        """Valid once `tensors()` is exhausted."""
        assert len(self._checksums) == len(self._manifest.chunks)
        total = version_checksum(self._manifest.manifest_id, self._checksums)
        return Receipt(self._version, total, self._manifest.total_bytes, self._receive_s)

    def _take(self, chunk: Chunk) -> Tensor:
        packed_header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        self._group.broadcast(packed_header, self._time_left())
        header = ChunkHeader.parse(packed_header)
        header.check(self._version, chunk)
        # New memory each time: the tensors handed out are views of it, and a model may keep one for a while.
        raw = torch.empty(chunk.num_bytes, dtype=torch.uint8)
        self._group.broadcast(raw, self._time_left())
        actual = checksum(raw)
        if actual != header.checksum:
            raise ChunkCorrupt(self._version, chunk.index, header.checksum, actual)
        self._checksums.append(actual)
        return raw

    def _time_left(self) -> float:
        if self._aborted.is_set():
            raise TransferAborted(f"receiving of version {self._version} was given up")
        return min(self._deadline - time.monotonic(), self._stall_timeout_s)
