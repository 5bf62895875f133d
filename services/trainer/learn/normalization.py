"""How much each completion token counts in a loss, from totals of the whole optimizer step.

Denominators are global, so the losses of micro-batches (and, later, of ranks) add up to the loss of the whole batch,
and their number never changes a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Normalization = Literal["token", "sequence", "batch"]


@dataclass(frozen=True)
class BatchTotals:
    """Of all sequences of one optimizer step, over all micro-batches."""

    num_sequences: int
    num_completion_tokens: int


def token_weights(
    completion_lengths: NDArray[np.int64], normalization: Normalization, totals: BatchTotals
) -> NDArray[np.float32]:
    """float32[sum of completion_lengths]: factor of each token's term.

    `token`: 1 / tokens (DAPO, arXiv 2503.14476). `sequence`: 1 / (its length · sequences) (GRPO, arXiv 2402.03300).
    `batch`: 1 / sequences (the paper, eq. 5; no length normalisation, as Dr. GRPO, arXiv 2503.20783).
    """
    if normalization == "token":
        per_sequence = np.full(len(completion_lengths), 1.0 / totals.num_completion_tokens)
    elif normalization == "sequence":
        per_sequence = 1.0 / (completion_lengths * totals.num_sequences)
    else:
        per_sequence = np.full(len(completion_lengths), 1.0 / totals.num_sequences)
    return np.repeat(per_sequence, completion_lengths).astype(np.float32)
