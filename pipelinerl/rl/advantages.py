"""Advantages of one prompt group, and what a group must have to be trained on.

The learned baseline of the paper's equation 4 is the trainer's to subtract: here `value` leaves rewards unchanged.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import Sequence

Baseline = Literal["group_mean", "leave_one_out", "value"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, in units of reward, so that a nearly constant group does not explode."""


def untrainable_reason(sequence: Sequence, max_context: int, vocab_size: int) -> str:
    """Why `sequence` ends as failed, short and from a fixed set except for the actor's own reason; "" when it is good.

    `max_context`: prompt plus completion tokens at most. `vocab_size`: token ids are below it.
    """
    if sequence.failure:
        return sequence.failure
    if sequence.num_tokens > max_context:
        return "longer than the context"
    if max(sequence.prompt_token_ids.max(), sequence.completion_token_ids.max()) >= vocab_size:
        return "token outside the vocabulary"
    return ""


def smallest_group(baseline: Baseline) -> int:
    """Rewards that the baseline needs at least. A group with fewer good samples cannot be trained on."""
    return 2 if baseline == "leave_one_out" else 1


def group_advantages(
    rewards: list[float] | tuple[float, ...] | NDArray[np.floating],
    baseline: Baseline = "leave_one_out",
    normalize_std: bool = False,
) -> NDArray[np.float64]:
    """Advantage of each sample of one group, float64[n], for rewards [n].

    `group_mean`: r_i - mean(r) (GRPO, arXiv 2402.03300). `leave_one_out`: r_i - mean of the others (RLOO, arXiv
    2402.14740), which is n / (n - 1) times the former. `normalize_std` then divides by the group's sample standard
    deviation (n - 1 in the denominator) plus `STD_FLOOR`. Equal rewards give exactly 0. `value`: r_i itself, of which the
    learned baseline is subtracted token by token (`services/trainer/learn/loss.py`).

    Raises `FieldError` for non-finite rewards and for fewer than `smallest_group(baseline)` of them.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise FieldError("rewards", values.tolist(), "rewards must be finite; fail such samples before this point")
    if values.size < smallest_group(baseline):
        raise FieldError("rewards", values.tolist(), f"baseline {baseline} needs {smallest_group(baseline)} samples")
    if baseline == "value":
        return values.copy()
    shifted = values - values[0]
    centred = shifted - shifted.mean()
    advantages = centred * (values.size / (values.size - 1)) if baseline == "leave_one_out" else centred
    if normalize_std and values.size > 1:
        advantages = advantages / (values.std(ddof=1) + STD_FLOOR)
    return advantages


def all_equal(rewards: list[float] | tuple[float, ...] | NDArray[np.floating]) -> bool:
    """Whether a group carries no signal: what `filter_equal_rewards` drops (DAPO, arXiv 2503.14476)."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool((values == values[0]).all())
