"""A metric registry that puts the run's name on every sample, so that one Prometheus can tell several runs apart.

It knows no metric by name and starts no server. Series of client libraries that say when a counter was created are left out:
they would double the number of counters, and nobody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
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
        super().__init__()
        self._run = run
        self.families: list[Family] = []
        """Those that were described, in order."""

    def describe(self, family: Family) -> None:
        """Notes what a metric is; called where it is registered."""
        self.families.append(family)

    def collect(self) -> Iterator[Metric]:
        run = {LABEL: self._run}
        for family in super().collect():
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            created = f"{family.name}_created"
            labelled.samples = [
                Sample(sample.name, {**run, **sample.labels}, *sample[2:])
                for sample in family.samples
                if sample.name != created
            ]
            yield labelled
