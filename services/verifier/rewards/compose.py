"""The whole reward of a completion: weighted terms, kept apart, that add up to it.

reward = correct * score + format_weight * [the form matches] + overlong penalty

From a recipe's words to the reward they mean. Libraries are imported here, by the scorer that needs them.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import SCORERS, RewardConfig, TaskConfig
from services.verifier.rewards.item import BadReference, BadReward, RewardInput, Score, Scorer
from services.verifier.rewards.json_schema import json_schema_scorer
from services.verifier.rewards.math import math_scorer
from services.verifier.rewards.reasoning_gym import reasoning_gym_scorer
from services.verifier.rewards.text import AnswerPattern, FormatPattern, exact, overlong_penalty, regex
from services.verifier.rewards.user import user_scorer

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


def make_reward(config: RewardConfig, task: TaskConfig) -> ComposedReward:
    """Raises `FieldError` for a scorer, a reasoning-gym family or a function that does not exist, with near names."""
    return ComposedReward(config, make_scorer(config, task), graded=":" in config.scorer)


def make_scorer(config: RewardConfig, task: TaskConfig) -> Scorer:
    """What `reward.scorer` names. Raises `FieldError`."""
    match config.scorer:
        case "task" if task.source == "reasoning_gym":
            return reasoning_gym_scorer(task.name)
        case "task" | "exact":
            return exact
        case "regex":
            return regex
        case "math":
            return math_scorer(config.timeout_s)
        case "json_schema":
            return json_schema_scorer(config.json_schema)
        case path if ":" in path:
            return user_scorer(path)
    near = difflib.get_close_matches(config.scorer, SCORERS, n=3) or SCORERS
    raise FieldError("reward.scorer", config.scorer, f"no such scorer; did you mean {' or '.join(near)}?")
