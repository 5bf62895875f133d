"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): a slope before the limit instead of a cliff at it.

Finds the answer in a completion. It judges nothing, and a pattern that takes for ever is the worker's deadline's.

Whether the whole completion has the wanted form, whatever it answers.

Text answers: the same text as the reference, or text that a reference pattern describes. No numbers, no folding.
"""

from __future__ import annotations

import re
from functools import lru_cache

from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, reference_answer


def overlong_penalty(completion_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """`penalty` times the equation: 0 up to `max_tokens - buffer_tokens`, -1 from `max_tokens` on, linear between.

    Lengths in tokens; L_max is `max_tokens`, L_cache is `buffer_tokens` (at least 1).
    """
    over = completion_tokens - (max_tokens - buffer_tokens)
    return 0.0 - penalty * min(max(over / buffer_tokens, 0.0), 1.0)


class AnswerPattern:
    """`last_answer(completion)`: group 1 of the last match, stripped; without a pattern, the whole completion."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern) if pattern else None

    def last_answer(self, completion: str) -> str | None:
        """None when the pattern does not match, or its last match leaves group 1 out."""
        if self._pattern is None:
            return completion.strip()
        answer = None
        for match in self._pattern.finditer(completion):
            answer = match.group(1)
        return None if answer is None else answer.strip()


class FormatPattern:
    """`matches(completion)`: the pattern matches all of it, surrounding white space aside."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def matches(self, completion: str) -> bool:
        return self._pattern.fullmatch(completion.strip()) is not None


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
