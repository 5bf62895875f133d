"""A metric that is read when it is scraped, or that has no series until it has a value.

For what a plain gauge cannot say: a figure that does not apply is no series, where a gauge would show 0. Everything here may be
called on the HTTP thread: it copies what it reads and waits for nothing.

A metric registry that puts the run's name on every sample, so that one Prometheus can tell several runs apart.

It knows no metric by name and starts no server. Series of client libraries that say when a counter was created are left out:
they would double the number of counters, and nobody asks for them.

A registry as text for Prometheus, format 0.0.4: the same bytes as prometheus_client's own, in a fraction of the time.

What precedes a value (its name and labels) is kept from scrape to scrape, since only values change, and values are read where
they are: the library makes two objects of each. It knows gauges, counters and histograms, without exemplars and timestamps:
all that MetricSet makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

Value = float | None
"""None: no series."""
_FAMILY = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class Reading(Collector):
    """A gauge or counter of at most one label. `name`: as Prometheus stores it.

    `set` and `set_each` give values, `read` and `read_each` say where to get them at each scrape: on another thread than the
    event loop, so that plain attributes may be read there and nothing may be changed.
    """

    def __init__(self, name: str, text: str, label: str = "", kind: Literal["gauge", "counter"] = "gauge") -> None:
        self.name, self.text, self.label, self.kind = name, text, label, kind
        self._values: Callable[[], Mapping[str, Value]] = dict

    def set(self, value: Value) -> None:
        values = {"": value}
        self._values = lambda: values

    def set_each(self, values: Mapping[str, Value]) -> None:
        """By label value; all others lose their series."""
        taken = dict(values)
        self._values = lambda: taken

    def read(self, value: Callable[[], Value]) -> None:
        self._values = lambda: {"": value()}

    def read_each(self, values: Callable[[], Mapping[str, Value]]) -> None:
        self._values = values

    def read_state(self, states: Sequence[str], current: Callable[[], str]) -> None:
        """1 for the current one of `states`, 0 for the others."""

        def values() -> dict[str, Value]:
            now = current()
            return {state: float(state == now) for state in states}

        self._values = values

    def values(self) -> dict[str, float]:
        """By label value, `""` without a label; only what has a value now."""
        return {label: float(value) for label, value in self._values().items() if value is not None}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        family = _FAMILY[self.kind](self.name, self.text, labels=(self.label,) if self.label else ())
        for value_of_label, value in self.values().items():
            family.add_metric((value_of_label,) if self.label else (), value)
        yield family


LABEL = "run"


@dataclass(frozen=True)
class Family:
    """What one exported metric is, for its reference."""

    name: str
    """As Prometheus stores it: a counter's ends with `_total`."""
    kind: str
    """`gauge`, `counter` or `histogram`."""
    text: str
    unit: str
    labels: Mapping[str, Sequence[str] | str]
    """Of each label its values; where they are not known beforehand, what they are."""
    buckets: Sequence[float] = ()
    """Upper edges of a histogram's, inclusive, without the last one, which has none."""


class RunRegistry(CollectorRegistry):
    """A `CollectorRegistry` of the process's part in run `run`."""

    def __init__(self, run: str) -> None:
        self._sources: list[Collector] = []
        super().__init__()
        self._run = run
        self.families: list[Family] = []
        """Those that were described, in order."""

    def describe(self, family: Family) -> None:
        """Notes what a metric is; called where it is registered."""
        self.families.append(family)

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self._sources.append(collector)

    def unregister(self, collector: Collector) -> None:
        super().unregister(collector)
        self._sources.remove(collector)

    def sources(self) -> Iterator[tuple[str, Collector]]:
        """(run, what is registered), without that label: for who writes the label otherwise, which is faster."""
        for collector in tuple(self._sources):
            yield self._run, collector

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            created = created_of(family)
            labelled.samples = [
                Sample(sample.name, {LABEL: self._run, **sample.labels}, *sample[2:])
                for sample in family.samples
                if sample.name != created
            ]
            yield labelled


def created_of(family: Metric) -> str:
    """Name of the series that say when a counter or histogram was created."""
    return f"{family.name}_created"


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
