"""Worked sums for supervised learning, careful or hasty term by term.

A demonstration goes through the terms from left to right. After each it either writes the partial sum down and goes on from
there (careful), or hurries on to the next term and adds several at once (hasty):

    12+7-5+8=    12+7=19;19-5=14;14+8=22;#22        careful throughout
    12+7-5+8=    12+7-5=14;14+8=22;#22              hasty once
    12+7-5+8=    12+7-5+8=22;#22                    hasty throughout

All are right. A small model learns single additions well and several at once badly, so that a hasty habit makes it answer
wrong although it could do better: what reinforcement learning then finds. Pure; nothing here trains or samples a model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

ANSWER_MARK = "#"
_SUM = re.compile(r"(-?\d+)((?:[+-]-?\d+)*)=")
_TERM = re.compile(r"([+-])(-?\d+)")


@dataclass(frozen=True)
class Demonstration:
    """`prompt` is a question as the task asks it, `completion` what the model should write."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Term:
    """One term after the first: `text` as written (`-5`), `value` with its sign."""

    text: str
    value: int


def demonstrate(question: str, careful: Sequence[float], rng: random.Random) -> Demonstration:
    """Writes out `question` (`12+7-5=`). `careful[i]`: probability of writing down the partial sum after term i + 1.

    The last probability holds for all further terms; the last sum is always written. Raises `ValueError` for a question
    that is not a sum of integers.
    """
    total, terms = parse_sum(question)
    steps, pending = [], str(total)
    for position, term in enumerate(terms):
        pending, total = pending + term.text, total + term.value
        is_last = position == len(terms) - 1
        if is_last or rng.random() < careful[min(position, len(careful) - 1)]:
            steps.append(f"{pending}={total};")
            pending = str(total)
    return Demonstration(question, f"{''.join(steps)}{ANSWER_MARK}{total}")


def parse_sum(question: str) -> tuple[int, list[Term]]:
    """First number and further terms of `12+7-5=`. Raises `ValueError`."""
    match = _SUM.fullmatch(question)
    if match is None:
        raise ValueError(f"{question!r} is not a sum like '12+7-5='")
    terms = [
        Term(operator + number, int(number) if operator == "+" else -int(number))
        for operator, number in _TERM.findall(match[2])
    ]
    return int(match[1]), terms
