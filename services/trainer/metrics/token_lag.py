"""How old the trained tokens were: a histogram in which each token counts once, and its ends.

The client library's histogram takes one observation at a time; a step brings tokens by the hundred thousand, counted by lag
already. Hence one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pipelinerl.service.metric_set import MetricSet
from services.trainer.report.records import StepRecord

LAG_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Optimizer steps, inclusive: those of the lag buckets, and on to the lags of the paper's setting without a bound."""
NAME = "token_lag_steps"
TEXT = "Token lag at use, optimizer steps; each trained token counts once."


class TokenLagHistogram(Collector):
    """Tokens by lag since the start. Added to on one thread, read on any: what is read is replaced whole."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: tuple[tuple[int, ...], int] = ((0,) * (len(LAG_EDGES) + 1), 0)
        """Tokens of each bucket, and the sum of their lags."""

    def add(self, tokens_by_lag: Mapping[int, int]) -> None:
        counts, total = list(self._state[0]), self._state[1]
        for lag, tokens in tokens_by_lag.items():
            counts[sum(edge < lag for edge in LAG_EDGES)] += tokens
            total += lag * tokens
        self._state = (tuple(counts), total)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts, total = self._state
        edges = [*(f"{float(edge)}" for edge in LAG_EDGES), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(counts)), strict=True))
        yield HistogramMetricFamily(self._name, TEXT, buckets=buckets, sum_value=float(total))


class TokenLagMetrics:
    """See the module."""

    def __init__(self, metrics: MetricSet) -> None:
        self._histogram = TokenLagHistogram(metrics.full_name(NAME))
        metrics.histogram_of(NAME, TEXT, LAG_EDGES, self._histogram)
        self._max = metrics.reading("token_lag_max_steps", "Largest token lag of the last step.")
        self._bound = metrics.reading("token_lag_bound_steps", "algorithm.max_lag; no series without one.")

    def bound(self, max_lag: int | None) -> None:
        """The recipe's."""
        self._bound.set(max_lag)

    def observe(self, record: StepRecord) -> None:
        """Takes one step's record."""
        self._histogram.add({int(lag): tokens for lag, tokens in record["lag_histogram"].items()})
        self._max.set(record.get("lag", {}).get("max"))
