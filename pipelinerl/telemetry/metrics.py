"""Create the metrics of a service, in a registry that puts the run's name on every sample.

This module adds two things to `prometheus_client`. A `Reading` without a value has no series, whereas a gauge would show 0. A
counter or histogram with known label values has all its series from the start, so that a rate includes the first event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

REASON_CHARACTERS = 60
MOST_REASONS = 24
"""Maximum number of different reasons of failures, or names of reported numbers, in one metric; `OTHER` stands for the rest."""
OTHER = "(other)"


def short_reason(failure: str) -> str:
    """Return the part of `failure` before the first colon, cut to `REASON_CHARACTERS`; "unknown" if it is empty."""
    return failure.partition(":")[0].strip()[:REASON_CHARACTERS] or "unknown"


class BoundedLabels:
    """Label values for reasons of failures or names of reported numbers: the first `most` different ones, shortened by
    `short_reason`, and `OTHER` for all further ones."""

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most, self._seen = most, set[str]()

    def of(self, failure: str) -> str:
        reason = short_reason(failure)
        if len(self._seen) < self._most:
            self._seen.add(reason)
        return reason if reason in self._seen else OTHER


Value = float | None
"""Value of a series; None removes the series."""
Values = Value | Mapping[str, Value] | Mapping[tuple[str, ...], Value]
"""One value if the metric has no labels; otherwise, a mapping from the value of its only label, or from a tuple of values."""


class Reading(Collector):
    """A gauge, or a counter if its name ends with `_total`. `set` stores its values; `read` stores a function for them.
    Each scrape calls the function on a thread other than the event loop's, so it must only read plain attributes."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._values: Callable[[], Values] = lambda: None

    def set(self, values: Values) -> None:
        """Replace all values. A series without a new value ends."""
        taken = dict(values) if isinstance(values, Mapping) else values
        self._values = lambda: taken

    def read(self, values: Callable[[], Values]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        family_of = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = family_of(self.name, self.text, labels=self.labels)
        values = self._values()
        for key, value in (values if isinstance(values, Mapping) else {"": values}).items():
            if value is not None:
                family.add_metric(key if isinstance(key, tuple) else (key,) if self.labels else (), value)
        yield family


Labels = Mapping[str, Sequence[str] | str]
"""Possible values of each label, or a description of them if they are not known in advance."""


@dataclass(frozen=True)
class Family:
    """Description of one exported metric for docs/metrics.md. `kind`: gauge, counter or histogram."""

    name: str
    kind: str
    text: str
    unit: str
    labels: Labels
    buckets: Sequence[float] = ()
    """Inclusive upper edges of a histogram's buckets, except the last edge, which is infinite."""


class RunRegistry(CollectorRegistry):
    """The metrics of a process of one run. Every sample has the label `run`. The library's `_created` series are left out."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run
        self.families: list[Family] = []

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [
                sample._replace(labels={"run": self._run, **sample.labels})
                for sample in family.samples
                if sample.name != f"{family.name}_created"
            ]
            yield family


UNITS = {
    "per_second": "per second",
    "timestamp_seconds": "seconds since 1970 (UTC)",
    "version": "policy version",
    "ratio": "1 (a share)",
    **{unit: unit for unit in ("seconds", "bytes", "tokens", "nats", "steps", "sequences", "groups", "messages", "items")},
}
"""Unit of a metric, by the last part of its name."""

_Made = TypeVar("_Made", Counter, Histogram)
_Collector = TypeVar("_Collector", bound=Collector)


class MetricSet:
    """Makes metrics whose names begin with `prefix`, on `registry`. A metric needs `unit` if its name, without a final
    `_total`, does not end with a key of `UNITS`."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._prefix, self._registry = prefix, registry

    def gauge(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Gauge:
        """Make a gauge. A gauge without labels is 0 until it is set."""
        full = self._describe(name, text, labels, unit)
        return Gauge(full, text, tuple(labels or ()), registry=self._registry)

    def reading(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Reading:
        """Make a gauge, or a counter if `name` ends with `_total`. It has no series before `set` or `read` is called."""
        reading = Reading(self._describe(name, text, labels, unit), text, tuple(labels or ()))
        self._registry.register(reading)
        return reading

    def counter(self, name: str, text: str, labels: Labels | None = None, *, unit: str = "") -> Counter:
        """Make a counter. Its `name` must end with `_total`."""
        assert name.endswith("_total"), f"{name}: the name of a counter ends with _total"
        full = self._describe(name, text, labels, unit)
        return _with_series(Counter(full, text, tuple(labels or ()), registry=self._registry), labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Labels | None = None, *, unit: str = ""
    ) -> Histogram:
        """Make a histogram. `buckets`: the inclusive upper edges of its buckets."""
        full = self._describe(name, text, labels, unit, buckets)
        made = Histogram(full, text, tuple(labels or ()), registry=self._registry, buckets=tuple(buckets))
        return _with_series(made, labels)

    def histogram_of(self, name: str, text: str, buckets: Sequence[float], make: Callable[[str], _Collector]) -> _Collector:
        """Describe a histogram for docs/metrics.md, and register its collector, which `make` returns for the full name."""
        collector = make(self._describe(name, text, None, "", buckets))
        self._registry.register(collector)
        return collector

    def _describe(self, name: str, text: str, labels: Labels | None, unit: str, buckets: Sequence[float] = ()) -> str:
        kind = "histogram" if buckets else "counter" if name.endswith("_total") else "gauge"
        stem = name.removesuffix("_total")
        unit = unit or next((words for end, words in UNITS.items() if stem == end or stem.endswith(f"_{end}")), "")
        assert unit, f"{name}: its unit is neither in the name nor given"
        full = f"{self._prefix}_{name}"
        if isinstance(self._registry, RunRegistry):
            self._registry.families.append(Family(full, kind, text, unit, dict(labels or {}), tuple(buckets)))
        return full


def _with_series(made: _Made, labels: Labels | None) -> _Made:
    known = [values for values in (labels or {}).values() if not isinstance(values, str)]
    if labels and len(known) == len(labels):
        for values in product(*known):
            made.labels(*values)
    return made
