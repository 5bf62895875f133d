"""Token lag, whether a sequence is still fresh enough to train on, and the effective sample size of importance weights.

Lag is counted in optimizer steps between the version that sampled a token and the version whose gradient is taken.
A version is (incarnation, number): after a restart from v = 20, version 25 of the incarnation before is a policy that
no longer exists, whatever its number.

Effective sample size: (Σ w)² / (N Σ w²), 1 when on-policy. Weights are unclamped, whatever the loss does. Sums are kept as
logarithms, so that weights of e^±1000 neither overflow nor vanish, and sums of two micro-batches or ranks add up to the sums
of both.

Not here: what happens to a stale sequence (`ledger.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pipelinerl.messages.sequences import PolicyVersion, VersionSpan

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Labels, in order of lag. Widths double, because one step more matters at lag 1 and not at lag 100."""
_LARGEST_LAG_OF_BUCKET = np.array((0, 1, 2, 4, 8, 16))
"""Inclusive upper edge of each bucket but the last, which has none. Unit: optimizer steps."""


def lag_bucket(lags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into `LAG_BUCKETS` of each token: int64[tokens] for lags int64[tokens]."""
    return np.searchsorted(_LARGEST_LAG_OF_BUCKET, lags, side="left")


class StaleReason(StrEnum):
    """Why a sequence ends as `dropped_stale`; the ledger counts by these."""

    LAG = "lag above max_lag"
    UNDONE = "version undone by a restart"
    UNKNOWN = "version not made by this run yet"


@dataclass(frozen=True)
class Lineage:
    """Which versions exist. `starts[i]` is the version that incarnation i + 1 began from; the first began from 0."""

    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        assert self.starts, "a lineage has at least one incarnation"
        assert self.starts[0] == 0, "the first incarnation starts from version 0"
        assert all(start >= 0 for start in self.starts), f"negative version in {self.starts}"

    @property
    def incarnation(self) -> int:
        """The running incarnation, counted from 1."""
        return len(self.starts)

    def restarted(self, from_version: int) -> Lineage:
        """The lineage after a restart from the checkpoint of `from_version`."""
        return Lineage((*self.starts, from_version))

    def reason_against(self, version: PolicyVersion, newest: int) -> StaleReason | None:
        """None when `version` is a recorded policy of this run, at most `newest`, that no restart undid."""
        if not 1 <= version.incarnation <= self.incarnation or version.number < self.starts[version.incarnation - 1]:
            return StaleReason.UNKNOWN
        if version.incarnation == self.incarnation:
            return StaleReason.UNKNOWN if version.number > newest else None
        return StaleReason.UNDONE if version.number > min(self.starts[version.incarnation :]) else None


FIRST_INCARNATION = Lineage()


def stale_reason(
    spans: Sequence[VersionSpan], version: int, max_lag: int | None, lineage: Lineage = FIRST_INCARNATION
) -> StaleReason | None:
    """Why a sequence must not be trained on at policy version `version`; None when it may.

    One token is enough: its oldest token's lag above `max_lag` (None = unbounded), or any token of a version that a
    restart undid or that this run has not made.
    """
    for span in spans:
        reason = lineage.reason_against(PolicyVersion(span.incarnation, span.version), newest=version)
        if reason is not None:
            return reason
    if max_lag is not None and spans and version - min(span.version for span in spans) > max_lag:
        return StaleReason.LAG
    return None


def largest_lag(sequences_in_progress: int, longest_tokens: float, mean_tokens: float, batch_size: int) -> int:
    """The paper's g_max = ceil(H·I·L / (L̄·B)) in optimizer steps, for H·I sequences in progress over all actors."""
    return math.ceil(sequences_in_progress * longest_tokens / (mean_tokens * batch_size))


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
