"""Host memory that is used again once nobody holds a tensor in it: new pages cost more than the bytes put into them.

Each buffer is a NumPy array. A tensor over it, and every view of that tensor, shares one storage, which holds one reference to
the array; so the array's reference count says whether anybody still looks at the memory, whoever made the views. What is
still held is left to its holder and replaced. Device memory is not handled: torch's allocator keeps it itself.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

_HELD_BY_NOBODY = 2
"""References to an array in the list, as `sys.getrefcount` sees them: the list's and its own argument's."""


class ReusedMemory:
    """`most`: buffers kept, the larger ones first. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], contents undefined. Nobody else has it as long as a view of it lives."""
        for index in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[index]) == _HELD_BY_NOBODY and self._buffers[index].nbytes >= num_bytes:
                return torch.from_numpy(self._buffers[index])[:num_bytes]
        buffer = np.empty(num_bytes, np.uint8)
        self._buffers.append(buffer)
        self._buffers.sort(key=lambda kept: kept.nbytes)
        del self._buffers[: -self._most]  # who holds one of these keeps it
        return torch.from_numpy(buffer)
