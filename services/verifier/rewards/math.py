"""Mathematical answers, compared as expressions by math-verify: `1/2`, `0.5` and `\\frac{1}{2}` are one answer.

math-verify interrupts itself by SIGALRM, so this runs on a process's main thread. An answer that it cannot parse or
compare in time is wrong; what an alarm cannot interrupt falls to the worker's deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer, reference_answer

_BARE_MOST = 200
"""Characters of an answer up to which it may be LaTeX without its dollar signs."""


def math_scorer(timeout_s: float) -> Scorer:
    """A scorer whose parts stop themselves well before `timeout_s`. Imports math-verify (about a second)."""
    from math_verify import parse, verify

    alarm_s = int(timeout_s / 4) or None  # whole seconds; parsing and comparing both sides must fit

    def expressions(text: str) -> list[Any]:
        found = parse(text, parsing_timeout=alarm_s)
        if not found and "$" not in text and len(text) <= _BARE_MOST:
            found = parse(f"${text}$", parsing_timeout=alarm_s)
        return found

    reference_expressions = lru_cache(maxsize=1024)(expressions)
    expressions("1")  # builds the parser now rather than under the first item's deadline

    def score(item: RewardInput) -> Score:
        wanted = _reference(reference_expressions, reference_answer(item))
        if item.answer is None:
            return NO_ANSWER
        found = expressions(item.answer)
        if not found:
            return Score(0.0, "no mathematical expression in the answer")
        right = verify(wanted, found, timeout_seconds=alarm_s)
        return Score(1.0) if right else Score(0.0, "not equal to the reference answer")

    return score


def _reference(expressions: Callable[[str], list[Any]], text: str) -> list[Any]:
    wanted = expressions(text)
    if not wanted:
        raise BadReference("answer", f"{text[:80]!r} is not a mathematical expression")
    return wanted
