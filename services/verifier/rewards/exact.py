"""Text answers: the same text as the reference, or text that a reference pattern describes. No numbers, no folding."""

from __future__ import annotations

import re
from functools import lru_cache

from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, reference_answer


def exact(item: RewardInput) -> Score:
    """1 when answer and reference are the same text, white space around them aside."""
    wanted = reference_answer(item)
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if item.answer == wanted else Score(0.0, "differs from the reference answer")


def regex(item: RewardInput) -> Score:
    """1 when the reference answer, as a regular expression, matches the whole answer."""
    pattern = _compiled(reference_answer(item))
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if pattern.fullmatch(item.answer) else Score(0.0, "does not match the reference pattern")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadReference("answer", f"{pattern[:80]!r} is not a regular expression: {error}") from error
