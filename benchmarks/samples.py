"""Summaries of repeated measurements: percentiles, and ratios of neighbouring rounds. Pure; it measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of `values` do not exceed (nearest rank): always one that was measured.

    Of fewer than 100 values the 99th percentile is therefore the largest. Raises ValueError where there are none.
    """
    if not values:
        raise ValueError("a percentile of no values")
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]


def paired_ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    """Median of ours / bare over pairs of neighbouring rounds."""
    return statistics.median(a / b for a, b in zip(ours, bare, strict=True))


def milliseconds(seconds: float) -> float:
    """Rounded to microseconds."""
    return round(1000 * seconds, 3)
