"""Compute accuracy on held-out problems with one or more answers each: mean, pass@k and 95 % intervals.

Intervals are Wilson's (1927), which also hold near 0 and 1. One trial is one problem, because answers to the same problem are
not independent. With several answers per problem, intervals are wider than necessary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

MOST_REPORTED = 24
_Z = 1.959964
"""97.5 % quantile of the standard normal distribution."""


def pass_at(k: int, answers: int, right: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k answers is right (Chen et al., arXiv
    2107.03374, equation 1). Of the known `answers` (k or more), `right` are right."""
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def means_of(reported: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each reported number over the answers that report it, for the `MOST_REPORTED` most frequent names."""
    answers = list(reported)
    counts = Counter(name for numbers in answers for name in numbers)
    known = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_REPORTED]
    return {name: fmean(numbers[name] for numbers in answers if name in numbers) for name in sorted(known)}


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of one or more `values` in [0, 1], one per problem, and its 95 % interval."""
        mean, spread = fmean(values), _Z * _Z / len(values)
        middle = mean + spread / 2
        half = _Z * math.sqrt((mean * (1 - mean) + spread / 4) / len(values))
        return cls(mean, max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread)))


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on one set of problems, in the form of metrics.jsonl and summary.json."""

    accuracy: Estimate
    """Mean share of right answers, over problems with a verdict."""
    lower_bound: float
    """Share of right answers if the `unanswered` answers, which have no verdict, count as wrong."""
    unanswered: int
    pass_at: dict[str, Estimate] = field(default_factory=dict)
    """For k = 2, 4, 8, … and for the number of answers per problem, each over problems with at least k verdicts."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Means (see `means_of`) of further numbers that environments or rewards report."""


def accuracy_of(verdicts: Iterable[Sequence[bool | None]]) -> Accuracy | None:
    """Return the accuracy; None if no answer has a verdict (True or False). `verdicts`: equally long lists, one per problem."""
    problems = list(verdicts)
    asked = max(map(len, problems), default=0)
    known = [[one for one in answers if one is not None] for answers in problems]
    if not any(known):
        return None
    ks = sorted({asked, *(2**power for power in range(1, asked.bit_length()))} - {1})
    passed = {k: [pass_at(k, len(answers), sum(answers)) for answers in known if len(answers) >= k] for k in ks}
    accuracy = Estimate.of([fmean(answers) for answers in known if answers])
    num_answers = asked * len(problems)
    lower_bound, unanswered = sum(map(sum, known)) / num_answers, num_answers - sum(map(len, known))
    return Accuracy(accuracy, lower_bound, unanswered, {str(k): Estimate.of(values) for k, values in passed.items() if values})
