"""Accuracy on held-out problems, of several answers to each: the mean, pass@k, and how sure they are; and means of what else is
reported of answers. Pure.

Problems are the independent trials, and answers to one problem are not, so intervals count problems. They are Wilson's (1927),
at 95 %, which hold near 0 and 1 too. For several answers to each problem they are too wide rather than too narrow: what varies
between 0 and 1 varies by p (1 - p) at most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

MOST_REPORTED = 24
"""Names of which `means_of` gives a mean."""
_Z = 1.959964
"""Standard normal quantile of 97.5 %."""


def wilson_interval(share: float, trials: int) -> tuple[float, float]:
    """Where the true share lies with 95 % confidence, for `share` in [0, 1] of at least one trial."""
    spread = _Z * _Z / trials
    middle = share + spread / 2
    half = _Z * math.sqrt((share * (1 - share) + spread / 4) / trials)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def pass_at(k: int, answers: int, right: int) -> float:
    """Probability that one of k answers is right, of which `right` of `answers` >= k were: 1 - C(answers - right, k) /
    C(answers, k), which is unbiased (Chen et al., arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def means_of(reported: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number, by name, over the answers that report it; of the `MOST_REPORTED` most frequent names."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for numbers in reported:
        for name, value in numbers.items():
            values[name].append(value)
    known = sorted(values, key=lambda name: (-len(values[name]), name))[:MOST_REPORTED]
    return {name: fmean(values[name]) for name in sorted(known)}


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        mean = fmean(values)
        return cls(mean, *wilson_interval(mean, len(values)))


@dataclass(frozen=True)
class Accuracy:
    """Of one set of problems. `mean`: over problems that have a verdict, each the share of right answers among those with one.
    `lower_bound`: over all, with answers without a verdict as wrong ones; `num_unanswered` counts these. `pass_at`: by k, over
    problems with at least k verdicts; for k = 2, 4, 8 and so on, and for all that were asked for. `reported`: `means_of` what
    answers with a verdict report.
    """

    mean: Estimate
    lower_bound: float
    num_unanswered: int
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    reported: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl and summary.json."""
        return {
            "accuracy": asdict(self.mean),
            "lower_bound": self.lower_bound,
            "unanswered": self.num_unanswered,
            "pass_at": {str(k): asdict(estimate) for k, estimate in self.pass_at.items()},
            "reported": dict(self.reported),
        }


def accuracy_of(verdicts: Iterable[Sequence[bool | None]]) -> Accuracy | None:
    """`verdicts`: of each problem, equally many; True is right, None has no verdict. None where nothing has one."""
    problems = list(verdicts)
    asked = max(map(len, problems), default=0)
    known = [[one for one in answers if one is not None] for answers in problems]
    if not any(known):
        return None
    ks = sorted({asked, *(2**power for power in range(1, asked.bit_length()))} - {1})
    passed = {k: [pass_at(k, len(answers), sum(answers)) for answers in known if len(answers) >= k] for k in ks}
    return Accuracy(
        Estimate.of([fmean(answers) for answers in known if answers]),
        sum(map(sum, known)) / (asked * len(problems)),
        asked * len(problems) - sum(map(len, known)),
        {k: Estimate.of(values) for k, values in passed.items() if values},
    )
