"""Token lag in buckets, the label under which ESS and clip fraction are reported.

Widths double, because one step more matters at lag 1 and not at lag 100.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST_LAG_OF_BUCKET = (0, 1, 2, 4, 8, 16)
"""Inclusive upper edge of each bucket but the last, which has none. Unit: optimizer steps."""

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Labels, in order of lag."""

_EDGES = np.asarray(LARGEST_LAG_OF_BUCKET, dtype=np.int64)


def lag_bucket(lags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into `LAG_BUCKETS` of each token: int64[tokens] for lags int64[tokens]."""
    return np.searchsorted(_EDGES, lags, side="left")
