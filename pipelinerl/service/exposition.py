"""A registry as text for Prometheus, format 0.0.4: the same bytes as prometheus_client's own, in half the time.

What precedes a value (its name and labels) is kept from scrape to scrape, since only values change. It knows gauges, counters
and histograms, without exemplars and timestamps: all that MetricSet makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.utils import floatToGoString

from pipelinerl.service.run_registry import LABEL, RunRegistry, created_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEPT = 1 << 16
"""Series whose beginnings are kept."""
_PLAIN = 1e6
"""From here on Go, whose form the library keeps to, writes an exponent."""


def exposition(registry: CollectorRegistry) -> bytes:
    """All of the registry's metrics, as they are now. Runs on any thread."""
    lines: list[str] = []
    if isinstance(registry, RunRegistry):
        for run, source in registry.sources():
            lines += _histogram(run, source) if type(source) is Histogram else _families(run, source.collect())
    else:
        lines += _families("", registry.collect())
    return "".join(lines).encode()


def _families(run: str, families: Iterable[Metric]) -> Iterator[str]:
    for family in families:
        yield _head(family.name, family.documentation, family.type)
        created = created_of(family)
        for sample in family.samples:
            if sample.name != created:
                yield f"{_series(run, sample.name, tuple(sample.labels.items()))}{_number(sample.value)}\n"


def _histogram(run: str, histogram: Any) -> Iterator[str]:
    """Most series are of histograms. Their counts are read where they are: the library would make two objects of each."""
    yield _head(histogram._name, histogram._documentation, "histogram")
    names = tuple(histogram._labelnames)
    for values, child in _children(histogram):
        labels = tuple(zip(names, values, strict=True))
        starts = _histogram_series(run, histogram._name, labels, tuple(child._upper_bounds))
        counts = list(accumulate(bucket.get() for bucket in child._buckets))
        for start, value in zip(starts, (*counts, counts[-1], child._sum.get()), strict=False):
            yield f"{start}{_number(value)}\n"


def _children(histogram: Any) -> Iterable[tuple[tuple[str, ...], Any]]:
    """By values of the labels; without labels it is its own."""
    if not histogram._labelnames:
        return [((), histogram)]
    with histogram._lock:
        return tuple(histogram._metrics.items())


@lru_cache(maxsize=_KEPT)
def _histogram_series(
    run: str, name: str, labels: tuple[tuple[str, str], ...], bounds: tuple[float, ...]
) -> tuple[str, ...]:
    """Of the buckets, the count and, where there is one, the sum: not over values that may be negative."""
    buckets = [_series(run, f"{name}_bucket", (*labels, ("le", floatToGoString(bound)))) for bound in bounds]
    totals = ["_count", "_sum"] if bounds[0] >= 0 else ["_count"]
    return (*buckets, *(_series(run, f"{name}{suffix}", labels) for suffix in totals))


def _number(value: float) -> str:
    """As Go writes it. Most are plain enough for Python's own form."""
    plain = type(value) is float and (value == 0 or 1e-4 < value < _PLAIN)
    return repr(value) if plain else str(floatToGoString(value))


@lru_cache(maxsize=_KEPT)
def _head(name: str, documentation: str, kind: str) -> str:
    full = f"{name}_total" if kind == "counter" else name
    return f"# HELP {full} {_escaped(documentation)}\n# TYPE {full} {kind}\n"


@lru_cache(maxsize=_KEPT)
def _series(run: str, name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Name, labels in alphabetical order, and a space. `run`: that label's value; empty = it is not there."""
    every = sorted([*labels, (LABEL, run)] if run else labels)
    inside = ",".join(f'{label}="{_escaped(value, quoted=True)}"' for label, value in every)
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text
