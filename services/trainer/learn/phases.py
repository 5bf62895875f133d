"""Where an optimizer step's time goes, by phase, without making the host wait for the device.

On a CPU a phase lasts as long as its `with` block. On a GPU the block only queues work, so its beginning and end are marked
in the stream: a phase is the time between its marks, in which the device did the phase's work or waited for the host to give
it any. What the device has not finished when the figures are taken is counted with the next step.

Not here: phases of the loop around the step (`services.trainer.loop`), other streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A point in the work of a device, as `torch.cuda.Event` is one."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to `end`; both have been passed."""
        ...


class _Span(NamedTuple):
    phase: str
    start: Mark
    end: Mark


class HostMark:
    """A point in the host's own time."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s, self._at_s = clock_s, 0.0

    def record(self) -> None:
        self._at_s = self._clock_s()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any, /) -> float:
        assert isinstance(end, HostMark)
        return 1000 * (end._at_s - self._at_s)


def mark_for(device: torch.device) -> Callable[[], Mark]:
    """What marks the work of `device`."""
    if device.type == "cuda":
        return lambda: torch.cuda.Event(enable_timing=True)
    return HostMark


class PhaseTimer:
    """`measure` around each piece of work, `take` once in a step."""

    def __init__(self, new_mark: Callable[[], Mark] = HostMark) -> None:
        self._new_mark = new_mark
        self._spans: list[_Span] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """A phase may come many times in a step; phases do not overlap."""
        start, end = self._new_mark(), self._new_mark()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append(_Span(phase, start, end))

    def take(self) -> dict[str, float]:
        """Seconds by phase of all that has ended since it was last taken."""
        seconds: dict[str, float] = {}
        unfinished: list[_Span] = []
        for span in self._spans:
            if span.end.query():
                seconds[span.phase] = seconds.get(span.phase, 0.0) + span.start.elapsed_time(span.end) / 1000
            else:
                unfinished.append(span)
        self._spans = unfinished
        return seconds
