"""The input, output and errors of scorers. A scorer runs on the main thread of a worker's or an episode's process, one item at
a time. This process has a deadline and a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.errors import PipelineRLError
from pipelinerl.tasks.final_answer import FOUND_NONE


@dataclass(frozen=True)
class RewardInput:
    """One completion, as scorers and users' reward functions receive it."""

    prompt: str
    completion: str
    """The whole completion as sampled. Untrusted."""
    answer: str | None
    """The answer that `reward.answer_pattern` found, stripped; None if it found none. Without a pattern, the completion."""
    reference: Mapping[str, Any]
    """The problem's data. Keys: `answer`; `row`, its data row, if a scorer may need it; `dataset`, `entry` (reasoning-gym)."""
    completion_tokens: int = 0
    max_tokens: int = 0
    """Maximum number of tokens with which the completion was sampled; 0 = unknown."""
    finish_reason: str = ""
    """`stop`, `length`, or empty if unknown."""
    judgement: str = ""
    """The judge's answer, if the recipe has a judge. Untrusted."""
    task: str = ""
    sequence_id: str = ""


@dataclass(frozen=True)
class Score:
    """Result of a scorer or of a whole reward. `value`: 0 (wrong) to 1 (right) from a built-in scorer, any number from others.
    `parts`: summands of `value`, if known."""

    value: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


Scorer = Callable[[RewardInput], Score]

NO_ANSWER = Score(0.0, FOUND_NONE)


class BadReference(PipelineRLError):
    """The reference data of an item cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


class BadReward(PipelineRLError):
    """A reward cannot be used, for example because it is not finite."""


def reference_answer(item: RewardInput) -> str:
    """Return the reference's `answer`, stripped. Raises `BadReference` if it is absent, empty or not text."""
    answer = item.reference.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise BadReference("answer", f"must be text for this scorer, not {answer!r}")
    return answer.strip()
