"""A registry as text for Prometheus, format 0.0.4: the same bytes as prometheus_client's own, in a fraction of the time.

What precedes a value (its name and labels) is kept from scrape to scrape, since only values change, and values are read where
they are: the library makes two objects of each. It knows gauges, counters and histograms, without exemplars and timestamps:
all that MetricSet makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import attrgetter
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pipelinerl.service.reading import Reading
from pipelinerl.service.run_registry import LABEL, RunRegistry, created_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PLAIN = 1e6
"""From here on Go, whose form the library keeps to, writes an exponent."""
_value = attrgetter("_value")
"""Of the library's cell of one series. One attribute is read whole, so that its lock is not needed."""

Labels = tuple[tuple[str, str], ...]
Lines = tuple[list[str], list[float]]
"""What precedes each value, the first one after the metric's head, and the values. Without values: the head alone."""


class Exposition:
    """Writes one registry, again and again. Any thread may ask, and several at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._writers: dict[Collector, _Writer] = {}

    def text(self) -> bytes:
        """All of the registry's metrics, as they are now."""
        if not isinstance(self._registry, RunRegistry):
            return "".join(_families(self._registry.collect())).encode()
        known, writers = self._writers, {}
        beginnings: list[str] = []
        values: list[float] = []
        heads: list[int] = []
        for run, source in self._registry.sources():
            writers[source] = writer = known.get(source) or _writer(run, source)
            before, now = writer.lines()
            if not now:
                heads.append(len(values))
            beginnings += before
            values += now or (0.0,)
        self._writers = writers
        return _joined(beginnings, values, heads).encode()


def _joined(beginnings: list[str], values: list[float], heads: list[int]) -> str:
    """`heads`: where there is no value. Each series of each scrape passes here."""
    plain, least = _PLAIN, -math.inf
    parts = [""] * (2 * len(values))
    parts[::2] = beginnings
    parts[1::2] = [f"{value}\n" if least < value < plain else f"{floatToGoString(value)}\n" for value in values]
    for head in heads:
        parts[2 * head + 1] = ""
    return "".join(parts)


class _Writer(Protocol):
    """Of one metric."""

    def lines(self) -> Lines: ...


def _writer(run: str, source: Any) -> _Writer:
    kind = type(source)
    if kind is Reading:
        return _Readings(run, source)
    if kind is Counter or (kind is Gauge and _is_set(source)):
        return _Singles(run, source)
    return _Histograms(run, source) if kind is Histogram else _Others(run, source)


def _is_set(gauge: Any) -> bool:
    """Whether its one value is kept, not asked for (`set_function`), which a gauge of several values may do for each."""
    return not gauge._labelnames and "_child_samples" not in vars(gauge)


class _Readings:
    def __init__(self, run: str, reading: Reading) -> None:
        self._run, self._reading = run, reading
        self._kept: tuple[list[str] | None, list[str]] = (None, [])

    def lines(self) -> Lines:
        values = self._reading.values()
        series, beginnings = self._kept
        if series != list(values):
            self._kept = series, beginnings = list(values), self._beginnings(values)
        return beginnings, list(values.values())

    def _beginnings(self, values: Iterable[str]) -> list[str]:
        name, label = self._reading.name, self._reading.label
        lines = [_series(self._run, name, ((label, value),) if label else ()) for value in values]
        return _headed(name, self._reading.text, self._reading.kind, lines)


class _Singles:
    """Of a counter, or of a gauge without labels: one line for each child."""

    def __init__(self, run: str, metric: Any) -> None:
        self._run, self._metric = run, metric
        self._kept: tuple[tuple[Any, ...] | None, list[str], list[Any]] = (None, [], [])

    def lines(self) -> Lines:
        children = _children(self._metric)
        series, beginnings, cells = self._kept
        if series != children:
            cells = [child._value for child in children]
            self._kept = _, beginnings, _ = children, self._beginnings(children), cells
        return beginnings, [*map(_value, cells)]

    def _beginnings(self, children: tuple[Any, ...]) -> list[str]:
        kind = self._metric._type
        name = f"{self._metric._name}_total" if kind == "counter" else self._metric._name
        lines = [_series(self._run, name, labels) for labels in _labels(self._metric, children)]
        return _headed(name, self._metric._documentation, kind, lines)


class _Histograms:
    def __init__(self, run: str, histogram: Any) -> None:
        self._run, self._histogram = run, histogram
        self._has_sum = histogram._upper_bounds[0] >= 0
        """The library has none over values that may be negative."""
        self._kept: tuple[tuple[Any, ...] | None, list[str]] = (None, [])

    def lines(self) -> Lines:
        children = _children(self._histogram)
        series, beginnings = self._kept
        if series != children:
            self._kept = _, beginnings = children, self._beginnings(children)
        values: list[float] = []
        for child in children:
            values += accumulate(map(_value, child._buckets))
            values.append(values[-1])
            if self._has_sum:
                values.append(child._sum._value)
        return beginnings, values

    def _beginnings(self, children: tuple[Any, ...]) -> list[str]:
        name, edges = self._histogram._name, [floatToGoString(edge) for edge in self._histogram._upper_bounds]
        totals = ("_count", "_sum") if self._has_sum else ("_count",)
        lines = []
        for labels in _labels(self._histogram, children):
            lines += [_series(self._run, f"{name}_bucket", (*labels, ("le", edge))) for edge in edges]
            lines += [_series(self._run, f"{name}{suffix}", labels) for suffix in totals]
        return _headed(name, self._histogram._documentation, "histogram", lines)


class _Others:
    """Collectors of other kinds, as they give themselves."""

    def __init__(self, run: str, collector: Collector) -> None:
        self._run, self._collector = run, collector

    def lines(self) -> Lines:
        return ["".join(_families(self._collector.collect(), self._run))], []


def _children(metric: Any) -> tuple[Any, ...]:
    """The library's objects, one for each combination of labels, in order; without labels a metric is its own."""
    if not metric._labelnames:
        return (metric,)
    with metric._lock:
        return tuple(metric._metrics.values())


def _labels(metric: Any, children: tuple[Any, ...]) -> list[Labels]:
    """Of each child."""
    names = metric._labelnames
    return [tuple(zip(names, child._labelvalues, strict=True)) if names else () for child in children]


def _headed(name: str, documentation: str, kind: str, lines: list[str]) -> list[str]:
    head = _head(name, documentation, kind)
    return [head + lines[0], *lines[1:]] if lines else [head]


def _families(families: Iterable[Metric], run: str = "") -> Iterator[str]:
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield _head(name, family.documentation, family.type)
        created = created_of(family)
        for sample in family.samples:
            if sample.name != created:
                yield f"{_series(run, sample.name, tuple(sample.labels.items()))}{floatToGoString(sample.value)}\n"


def _head(name: str, documentation: str, kind: str) -> str:
    return f"# HELP {name} {_escaped(documentation)}\n# TYPE {name} {kind}\n"


def _series(run: str, name: str, labels: Labels) -> str:
    """Name, labels in alphabetical order, and a space. `run`: that label's value; empty = it is not there."""
    every = sorted([*labels, (LABEL, run)] if run else labels)
    inside = ",".join(f'{label}="{_escaped(value, quoted=True)}"' for label, value in every)
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text
