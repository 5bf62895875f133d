"""Numbers as people read them. Pure; missing values are `-`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 0) -> str:
    """`12 345` or `0.123`; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}".replace(",", " ")


def percent(fraction: float | None) -> str:
    """`41.4%` of 0.414; `-` for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def duration(seconds: float | None) -> str:
    """`42s`, `3m 05s`, `2h 07m`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Iterable[float], width: int) -> str:
    """The values as at most `width` bars, each the mean of its share; empty for fewer than two values."""
    points = list(values)
    if len(points) < 2:
        return ""
    bins = min(width, len(points))
    edges = [i * len(points) // bins for i in range(bins + 1)]
    means = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
