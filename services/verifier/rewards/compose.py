"""The whole reward of a completion: weighted terms, kept apart, that add up to it.

reward = correct * score + format_weight * [the form matches] + overlong penalty
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.config.recipe import RewardConfig
from services.verifier.rewards.answer import AnswerPattern
from services.verifier.rewards.format import FormatPattern
from services.verifier.rewards.item import BadReference, BadReward, RewardInput, Score, Scorer
from services.verifier.rewards.overlong import overlong_penalty

_ALMOST = 1e-9
"""How far below 1 a score may be and still count as right: room for a scorer's rounding."""


@dataclass(frozen=True)
class Reward:
    """`value` is finite and the sum of `terms`. `reason` says, for a person, what took something away."""

    value: float
    terms: dict[str, float]
    reason: str = ""


class ComposedReward:
    """A recipe's reward. `graded`: the scorer's number counts as it is, whatever `binary` says (a user's function)."""

    def __init__(self, config: RewardConfig, scorer: Scorer, *, graded: bool = False) -> None:
        self._config, self._scorer = config, scorer
        self._binary = config.binary and not graded
        self._answer = AnswerPattern(config.answer_pattern)
        self._format = FormatPattern(config.format_pattern) if config.format_pattern else None

    def find_answer(self, completion: str) -> str | None:
        return self._answer.last_answer(completion)

    def __call__(self, item: RewardInput) -> Reward:
        """Raises `BadReference`, `BadReward`, and whatever a scorer raises."""
        score = self._scorer(item)
        terms, reasons = self._answer_terms(score), [score.reason] if score.reason else []
        if self._format is not None:
            matches = self._format.matches(item.completion)
            terms["format"] = self._config.format_weight * matches
            reasons += [] if matches else ["the completion does not match reward.format_pattern"]
        if self._config.overlong.buffer_tokens:
            terms["overlong"] = self._overlong(item)
        return Reward(_sum(terms), terms, "; ".join(reasons))

    def _answer_terms(self, score: Score) -> dict[str, float]:
        if score.parts and not self._binary:
            return {f"answer.{name}": self._config.correct * part for name, part in score.parts.items()}
        if math.isnan(score.value):
            raise BadReward("the scorer returned nan")
        value = float(score.value >= 1.0 - _ALMOST) if self._binary else score.value
        return {"answer": self._config.correct * value}

    def _overlong(self, item: RewardInput) -> float:
        overlong = self._config.overlong
        if item.max_tokens < 1:
            raise BadReference("max_tokens", "0, and reward.overlong needs the limit the completion was sampled under")
        return overlong_penalty(item.completion_tokens, item.max_tokens, overlong.buffer_tokens, overlong.penalty)


def _sum(terms: dict[str, float]) -> float:
    total = sum(terms.values())
    if not math.isfinite(total):
        raise BadReward(f"not a finite number: {', '.join(f'{name} = {term}' for name, term in terms.items())}"[:200])
    return total
