"""What precedes each chunk on the wire: int64[6], so that a receiver notices a mix-up before it takes the bytes.

With NCCL it is a small tensor on the device, sent as the chunks are: in order with them, under the same timeouts, and gone with
the communicator when a transfer is given up. The key-value store would be a second channel to keep in step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.types import PolicyVersion
from pipelinerl.weights.errors import OutOfStep
from pipelinerl.weights.manifest import Chunk

MAGIC = 0x50524C31  # "PRL1"; the last digit is the wire format's
HEADER_SIZE = 6


@dataclass(frozen=True)
class ChunkHeader:
    """`checksum`: of the chunk that follows; `num_bytes`: its size."""

    version: PolicyVersion
    chunk: int
    checksum: int
    num_bytes: int

    def to_tensor(self) -> Tensor:
        """int64[6]"""
        version = self.version
        values = [MAGIC, version.incarnation, version.number, self.chunk, self.checksum, self.num_bytes]
        return torch.tensor(values, dtype=torch.int64)

    @classmethod
    def parse(cls, tensor: Tensor) -> ChunkHeader:
        """Raises OutOfStep when this is no header."""
        magic, incarnation, number, chunk, checksum, num_bytes = tensor.tolist()
        if magic != MAGIC:
            raise OutOfStep("magic", f"{MAGIC:#x}", f"{magic:#x}")
        return cls(PolicyVersion(incarnation, number), chunk, checksum, num_bytes)

    def check(self, version: PolicyVersion, chunk: Chunk) -> None:
        """Raises OutOfStep when the chunk announced here is not the one expected."""
        for field, expected, actual in (
            ("version", version, self.version),
            ("chunk", chunk.index, self.chunk),
            ("num_bytes", chunk.num_bytes, self.num_bytes),
        ):
            if expected != actual:
                raise OutOfStep(field, expected, actual)
