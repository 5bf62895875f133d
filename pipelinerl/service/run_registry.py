"""A metric registry that puts the run's name on every sample, so that one Prometheus can tell several runs apart.

It knows no metric by name and starts no server. Series of client libraries that say when a counter was created are left out:
they would double the number of counters, and nobody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

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
