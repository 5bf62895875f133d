"""Reasons of failures as few words that can be counted. Details are in the logs. Pure.

The metrics of one service, registered under its prefix, each with what it is: the one place where metrics are made.

What it notes goes into docs/metrics.md. A counter or histogram whose label values are known has all its series from the start,
so that a rate sees the first event. Nothing here measures anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from pipelinerl.telemetry.exposition import Family, Reading, RunRegistry

REASON_CHARACTERS = 60
MOST_REASONS = 24
"""Reasons are few as long as services agree on them; what comes beyond is summed up as `OTHER`."""
OTHER = "(other)"


def short_reason(failure: str) -> str:
    """The part before the colon."""
    return failure.partition(":")[0].strip()[:REASON_CHARACTERS] or "unknown"


class BoundedLabels:
    """Short reasons for a counter, whose series stay for good: the first `most` different ones, and `OTHER` for all others."""

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most, self._seen = most, set[str]()

    def of(self, failure: str) -> str:
        reason = short_reason(failure)
        if len(self._seen) < self._most:
            self._seen.add(reason)
        return reason if reason in self._seen else OTHER


Labels = Mapping[str, Sequence[str] | str]
"""See `Family.labels`."""

UNITS = {
    "per_second": "per second",
    "timestamp_seconds": "seconds since 1970 (UTC)",
    "version": "policy version",
    "ratio": "1 (a share)",
    **{
        unit: unit
        for unit in ("seconds", "bytes", "tokens", "nats", "steps", "sequences", "groups", "messages", "items")
    },
}
"""What the end of a metric's name says of its unit."""

_Made = TypeVar("_Made", Counter, Histogram)


class MetricSet:
    """Makes metrics whose names begin with `prefix` on `registry`. `unit`: where the name does not end with it."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix, self._registry = prefix, registry

    def gauge(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Gauge:
        """One that is 0 until it is set, if it has no label."""
        full = self._describe(name, "gauge", text, labels, unit)
        return Gauge(full, text, tuple(labels or ()), registry=self._registry)

    def reading(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Reading:
        """A gauge without a series until it has a value, or one that is read when scraped; of one label at most."""
        full = self._describe(name, "gauge", text, labels, unit)
        return self._register(Reading(full, text, "".join(labels or ())))

    def count(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Reading:
        """The same as a counter: something else counts. `name` ends with `_total`."""
        full = self._describe(name, "counter", text, labels, unit)
        return self._register(Reading(full, text, "".join(labels or ()), "counter"))

    def counter(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Counter:
        """`name` ends with `_total`."""
        full = self._describe(name, "counter", text, labels, unit)
        return _with_series(Counter(full, text, tuple(labels or ()), registry=self._registry), labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Labels | None = None, *, unit: str = ""
    ) -> Histogram:
        """`buckets`: upper edges, inclusive."""
        full = self._describe(name, "histogram", text, labels, unit, buckets)
        made = Histogram(full, text, tuple(labels or ()), registry=self._registry, buckets=tuple(buckets))
        return _with_series(made, labels)

    def histogram_of(
        self, name: str, text: str, buckets: Sequence[float], collector: Collector, *, unit: str = ""
    ) -> None:
        """One that `collector` yields under the full name."""
        self._describe(name, "histogram", text, None, unit, buckets)
        self._registry.register(collector)

    def full_name(self, name: str) -> str:
        return f"{self._prefix}_{name}"

    def _register(self, reading: Reading) -> Reading:
        self._registry.register(reading)
        return reading

    def _describe(
        self, name: str, kind: str, text: str, labels: Labels | None, unit: str, buckets: Sequence[float] = ()
    ) -> str:
        assert (kind == "counter") == name.endswith("_total"), f"{name}: counters, and no others, end with _total"
        assert unit or unit_of(name), f"{name}: its unit is neither in the name nor given"
        full = self.full_name(name)
        if isinstance(self._registry, RunRegistry):
            self._registry.describe(Family(full, kind, text, unit or unit_of(name), dict(labels or {}), tuple(buckets)))
        return full


def unit_of(name: str) -> str:
    """What a metric's name says of its unit; empty when it says nothing. Pure."""
    stem = name.removesuffix("_total")
    return next((unit for ending, unit in UNITS.items() if stem == ending or stem.endswith(f"_{ending}")), "")


def _with_series(made: _Made, labels: Labels | None) -> _Made:
    """Begins the series whose label values are all known."""
    for values in _combinations(labels or {}):
        made.labels(*values)
    return made


def _combinations(labels: Labels) -> Iterator[tuple[str, ...]]:
    known = [values for values in labels.values() if not isinstance(values, str)]
    return product(*known) if labels and len(known) == len(labels) else iter(())
