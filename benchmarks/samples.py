"""Summaries of repeated measurements: percentiles, ratios of neighbouring rounds, how they scatter. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


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


def spread(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    """Median (`name`) and quartiles (`name_quartiles`), between which half of the ratios lie, rounded."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return {name: round(middle, 4), f"{name}_quartiles": f"{low:.3f} to {high:.3f}"}
