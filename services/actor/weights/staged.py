"""What a complete receive reports. Torch-free, for those who only pass it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagedWeights:
    """A complete, checked version beside the live weights, in the engine's layout.

    `checksum`: 64 bits over all bytes as they arrived, for the trainer to compare. With several ranks, the slowest's seconds.
    """

    checksum: int
    num_bytes: int
    receive_s: float
    prepare_s: float
