"""Effective sample size of importance weights: (Σ w)² / (N Σ w²), 1 when on-policy.

Weights are unclamped, whatever the loss does. Sums are kept as logarithms, so that weights of e^±1000 neither overflow
nor vanish, and sums of two micro-batches or ranks add up to the sums of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl.rl.lag import LAG_BUCKETS, lag_bucket


@dataclass(frozen=True)
class EssSums:
    """log Σ w, log Σ w² and N of some tokens."""

    log_sum: float = -math.inf
    log_sum_squares: float = -math.inf
    count: int = 0

    @classmethod
    def of(cls, log_weights: NDArray[np.floating]) -> EssSums:
        """Of log_weights [tokens], nats. Raises ValueError on NaN or +inf, which no pair of policies can give."""
        values = np.asarray(log_weights, dtype=np.float64)
        if values.size == 0:
            return cls()
        largest = float(values.max())
        if not largest < math.inf:
            raise ValueError(f"log weights must be finite or -inf, their maximum is {largest}")
        if largest == -math.inf:
            return cls(count=values.size)
        scaled = np.exp(values - largest)
        return cls(largest + math.log(scaled.sum()), 2 * largest + math.log((scaled * scaled).sum()), values.size)

    def __add__(self, other: EssSums) -> EssSums:
        return EssSums(
            float(np.logaddexp(self.log_sum, other.log_sum)),
            float(np.logaddexp(self.log_sum_squares, other.log_sum_squares)),
            self.count + other.count,
        )

    @property
    def ratio(self) -> float | None:
        """(Σ w)² / (N Σ w²) in (0, 1]; None without tokens, 0 when every weight is 0."""
        if self.count == 0:
            return None
        if self.log_sum_squares == -math.inf:
            return 0.0
        return min(1.0, math.exp(2 * self.log_sum - self.log_sum_squares - math.log(self.count)))


def ess_by_lag(log_weights: NDArray[np.floating], lags: NDArray[np.int64]) -> dict[str, EssSums]:
    """Sums of each lag bucket that has tokens, by its label, in order of lag. Both arrays are [tokens]."""
    buckets = lag_bucket(lags)
    return {LAG_BUCKETS[index]: EssSums.of(log_weights[buckets == index]) for index in np.unique(buckets)}
