"""A metric that is read when it is scraped, or that has no series until it has a value.

For what a plain gauge cannot say: a figure that does not apply is no series, where a gauge would show 0. Everything here may be
called on the HTTP thread: it copies what it reads and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

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
