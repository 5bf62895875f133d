"""When saved policies first reach an accuracy, and how sure that is: interpolated crossing times and a bootstrap. Pure.

One run gives a curve: its saved policies, when each was there, and which held-out problems each answers. An accuracy is a
mean over problems, and a time one of a few seeds, so each bootstrap sample draws both anew: problems, alike for all runs,
which answer the same ones, and seeds, alike for all sides, which have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS, SEED = 2000, 0
CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """The V saved policies of one run, in order of time."""

    versions: NDArray[np.int64]
    """[V]: optimizer steps taken."""
    times_s: NDArray[np.float64]
    """[V]: seconds since the run's time zero."""
    right: NDArray[np.bool_]
    """[V, P]: whether policy v answers held-out problem p."""

    @property
    def accuracies(self) -> NDArray[np.float64]:
        """[V]"""
        return self.right.mean(axis=1)

    def crossing_s(self, threshold: float, weights: NDArray[np.float64]) -> float:
        """`crossing_time` where problem p counts `weights[p]` times; `weights` [P] add up to P."""
        return crossing_time(self.times_s, self.right @ weights / len(weights), threshold)


def crossing_time(times_s: NDArray[np.float64], accuracies: NDArray[np.float64], threshold: float) -> float:
    """Seconds at which the accuracy, linear between two policies, first reaches `threshold`; infinite if it never does.

    Both arrays are [V]. A first policy that is there already gives its own time.
    """
    reached = np.flatnonzero(accuracies >= threshold)
    if not len(reached):
        return math.inf
    after = int(reached[0])
    if after == 0:
        return float(times_s[0])
    low, high = accuracies[after - 1], accuracies[after]
    share = (threshold - low) / (high - low)
    return float(times_s[after - 1] + share * (times_s[after] - times_s[after - 1]))


@dataclass(frozen=True)
class Estimate:
    """Infinite where the accuracy is not reached, NaN for a ratio of two such times."""

    value: float
    low: float
    high: float

    @property
    def shown(self) -> float | None:
        """The value, rounded, where there is one."""
        return round(self.value, 3) if math.isfinite(self.value) else None

    @property
    def interval(self) -> str:
        """For a table."""
        return " to ".join(f"{bound:.2f}" if math.isfinite(bound) else "never" for bound in (self.low, self.high))


@dataclass(frozen=True)
class CrossingEstimate:
    """Of one side: medians over seeds."""

    time_s: Estimate
    ratio: Estimate | None
    """Of its time to that of the side it is compared with; above 1: slower."""


def crossing_estimates(
    runs: Mapping[str, Sequence[JudgedRun]], threshold: float, base: str, draws: int = DRAWS
) -> dict[str, CrossingEstimate]:
    """For each side, whose runs are in the order of the same seeds, with the bootstrap's 95 % intervals.

    Ratios are to side `base`; there are none where it is not among them.
    """
    random = np.random.default_rng(SEED)
    problems, seeds = next(iter(runs.values()))[0].right.shape[1], len(next(iter(runs.values())))
    assert all(len(of_side) == seeds for of_side in runs.values()), "every side has a run of every seed"
    found = [_medians(runs, threshold, np.ones(problems), np.arange(seeds))]
    for _ in range(draws):
        weights = random.multinomial(problems, np.full(problems, 1 / problems)).astype(np.float64)
        found.append(_medians(runs, threshold, weights, random.integers(0, seeds, seeds)))
    times = {side: np.array([medians[side] for medians in found]) for side in runs}
    with np.errstate(invalid="ignore"):
        ratios = {side: times[side] / times[base] for side in runs} if base in runs else {}
    return {side: CrossingEstimate(_estimate(times[side]), _estimate(ratios[side]) if ratios else None) for side in runs}


def _medians(
    runs: Mapping[str, Sequence[JudgedRun]], threshold: float, weights: NDArray[np.float64], seeds: NDArray[np.int64]
) -> dict[str, float]:
    found = {side: [run.crossing_s(threshold, weights) for run in of_side] for side, of_side in runs.items()}
    return {side: float(np.median([times[seed] for seed in seeds])) for side, times in found.items()}


def _estimate(values: NDArray[np.float64]) -> Estimate:
    """Of values of which the first is the estimate and the others are samples. Bounds are samples too: there is nothing between
    an infinite one and another. A sample in which neither side reaches the accuracy tells nothing of their ratio; where most
    are such, no bound is known."""
    tail, told = (1 - CONFIDENCE) / 2, values[1:][~np.isnan(values[1:])]
    if 2 * len(told) < len(values) - 1:
        told = values[1:]
    low, high = np.quantile(told, [tail, 1 - tail], method="inverted_cdf")
    return Estimate(float(values[0]), float(low), float(high))
