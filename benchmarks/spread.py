"""How ratios of pairs scatter: their median, and the quartiles, between which half of them lie."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    """`name` and `name_quartiles`, rounded. Of one ratio, both quartiles are that."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return {name: round(middle, 4), f"{name}_quartiles": f"{low:.3f} to {high:.3f}"}
