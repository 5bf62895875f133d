"""Who waits for whom: what lies on the streams, what is ready to train on, what may still be issued."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.service.metric_set import MetricSet

STREAMS = ("prompts", "sequences")
BY_STREAM = {"stream": STREAMS}


class ReadsLog(Protocol):
    """How far the trainer has come with SEQUENCES."""

    position: int
    """Of the last message read."""

    @property
    def num_ready(self) -> int:
        """Complete groups that wait for a batch."""
        ...


class QueueMetrics:
    """Streams as of the last look at them; the rest is read at each scrape."""

    def __init__(self, metrics: MetricSet, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._seen: dict[str, StreamInfo] = {}
        self._messages = metrics.reading("stream_messages", "Messages that the stream holds.", BY_STREAM)
        self._bytes = metrics.reading("stream_bytes", "Bytes that the stream holds.", BY_STREAM)
        self._oldest = metrics.reading(
            "stream_oldest_seconds", "Age of the stream's oldest message; 0 when it is empty.", BY_STREAM
        )
        self._unread = metrics.reading("unread_sequences", "Messages in SEQUENCES that the trainer has not read.")
        self._ready = metrics.reading("ready_groups", "Complete groups that wait to be trained on.")
        self._allowance = metrics.reading(
            "feeder_allowance_groups", "Groups that the staleness bound lets the feeder issue now."
        )

    def watch(self, reader: ReadsLog, allowance: Callable[[], int]) -> None:
        """Where to read."""
        self._ready.read(lambda: reader.num_ready)
        self._allowance.read(allowance)
        self._unread.read(lambda: unread(self._seen.get("sequences"), reader.position))

    def saw(self, stream: str, info: StreamInfo) -> None:
        """One of `STREAMS`, as it is now."""
        self._seen = seen = {**self._seen, stream: info}
        now_s = self._clock_s()
        self._messages.set_each({name: one.messages for name, one in seen.items()})
        self._bytes.set_each({name: one.bytes for name, one in seen.items()})
        self._oldest.set_each({name: age_s(one, now_s) for name, one in seen.items()})


def unread(log: StreamInfo | None, position: int) -> int | None:
    """Messages after `position`; what was read since the log was looked at counts as nothing. Pure."""
    return None if log is None else max(0, log.last_position - position)


def age_s(info: StreamInfo, now_s: float) -> float:
    """Of the oldest message, seconds; 0 of an empty stream, and where clocks disagree. Pure."""
    return max(0.0, now_s - info.first_at_s) if info.messages and info.first_at_s is not None else 0.0
