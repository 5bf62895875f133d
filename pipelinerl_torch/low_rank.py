"""Weights with an adapter merged in: one sum, which trainer and actors compute alike.

It knows neither models nor manifests.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def add_low_rank(weight: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """weight + scaling · B·A, computed in float32 and rounded once to the weight's dtype.

    A [rank, in] and B [out, rank] are first rounded to that dtype, in which they take part in the forward pass. Weight
    [out, in], or [in, out] where it is `transposed`.
    """
    a, b = (factor.to(weight.dtype).float() for factor in (a, b))
    left, right = (a.T, b.T) if transposed else (b, a)
    return torch.addmm(weight.float(), left, right, alpha=scaling).to(weight.dtype)
