"""Groups lost one after another: when it goes on for too long, nothing will ever be trained, and the run should say so.

Pure: stepped by every group that is complete, asked for its verdict. What was stale when its turn came does not count:
newer versions end that by themselves. It closes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipelinerl.config.recipe import Recipe

STEPS_IN_A_ROW, FEWEST_IN_A_ROW = 10, 200
"""Without `trainer.give_up_after_groups`: so many optimizer steps' worth of groups, and so many groups at least."""
_FIXES = {
    "equal rewards": "turn algorithm.filter_equal_rewards off, start from a better policy, or choose easier problems",
    "reward_": "read in the trainer's log what the reward function said, and correct it or choose another reward.scorer",
    "verifier_refused": "look at the verifier's log",
    "engine": "look at the actors' logs",
    "too_large": "raise max_payload of nats-server, or lower sampling.max_tokens",
    "prompt_too_long": "give trainer and actors the same model.max_context",
    "longer than the context": "give trainer and actors the same model.max_context",
    "token outside the vocabulary": "give trainer and actors the same model and tokenizer",
    "prompt group lost": "look at the actors' logs: they could not read the prompts, or somebody purges the streams",
    "unreadable": "run trainer and actors of the same release",
}
_ANY_FIX = "read the warnings in the trainer's log"


def most_lost_in_a_row(recipe: Recipe) -> int:
    """Groups, after which the run is given up."""
    groups_per_step = recipe.trainer.batch_size // recipe.sampling.group_size
    return recipe.trainer.give_up_after_groups or max(STEPS_IN_A_ROW * groups_per_step, FEWEST_IN_A_ROW)


class LossStreak:
    """`limit`: groups in a row that may be lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_groups = 0
        self._reasons: Counter[str] = Counter()

    def good(self) -> None:
        """A group arrived that can be trained on."""
        self._num_groups = 0
        self._reasons.clear()

    def lost(self, reasons: Iterable[str]) -> None:
        """A group arrived of which nothing can be trained on. `reasons`: as the ledger counts them."""
        self._num_groups += 1
        self._reasons.update(reasons)

    @property
    def verdict(self) -> str:
        """What to tell the user when the limit is reached; "" before."""
        if self._num_groups < self._limit:
            return ""
        (reason, count), *_ = self._reasons.most_common(1) or [("unknown", 0)]
        return (
            f"the last {self._num_groups} prompt groups were lost and none between them could be trained on; most "
            f"frequent reason: {reason} ({count} of {self._reasons.total()}). To repair it, {fix_of(reason)}. A run that "
            "needs more patience sets trainer.give_up_after_groups"
        )


def fix_of(reason: str) -> str:
    """What a user can do about a reason of the ledger (docs/errors.md)."""
    return next((fix for beginning, fix in _FIXES.items() if reason.startswith(beginning)), _ANY_FIX)
