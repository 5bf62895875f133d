"""What one sequence costs a decoder-only model: a linear term in its tokens and a causal term in pairs of them.

Costs are FLOPs of a forward pass where the model is known (`services/trainer/learn/flops.py`), and tokens where it is not;
planning needs their proportions only. Not here: memory traffic, kernels, padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = Sequence[int] | NDArray[np.integer]
"""One number for each sequence."""


@dataclass(frozen=True)
class CostModel:
    """FLOPs of one forward pass. A pair is a query and a key that it sees, itself included."""

    per_token: float
    """All matrix products of the layers, without attention scores."""
    per_output_token: float = 0.0
    """The output head, which is computed only where a token is predicted."""
    per_pair: float = 0.0
    """Attention scores and their product with the values, over the layers that see the whole sequence."""
    per_windowed_pair: float = 0.0
    """The same over the layers that see the last `window` tokens only."""
    window: int = 0
    """Tokens that a query of a windowed layer sees, itself included; 0 where there are no such layers."""

    def of(self, lengths: Counts, outputs: Counts | None = None) -> NDArray[np.float64]:
        """Cost of each sequence of `lengths` tokens, of which `outputs` are predicted; None = all of them."""
        tokens = np.asarray(lengths, dtype=np.float64)
        predicted = tokens if outputs is None else np.asarray(outputs, dtype=np.float64)
        linear = self.per_token * tokens + self.per_output_token * predicted
        pairs = self.per_pair * causal_pairs(tokens)
        return linear + pairs + self.per_windowed_pair * causal_pairs(tokens, self.window)


UNIT_COST = CostModel(per_token=1.0)
"""A sequence costs its tokens: for planning where nothing is known of the model."""


def causal_pairs(tokens: NDArray[np.float64], window: int | None = None) -> NDArray[np.float64]:
    """Pairs of causal self-attention over n tokens: n (n + 1) / 2, of which a window leaves its width to each query."""
    all_pairs = tokens * (tokens + 1) / 2
    if window is None:
        return all_pairs
    beyond = np.maximum(tokens - window, 0)
    return all_pairs - beyond * (beyond + 1) / 2
