"""The loop of a tracker's own process: messages in, one answer for each.

Consumes lines of JSON from the trainer (`start`, then `step` and `heldout`, then `end`), produces a line for each, in order:
what failed, or null. Waits for the trainer and for the tracker; ends with `end`, or with the stream when the trainer is gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from services.trainer.reporting.trackers.tracker import TrackedRun, Tracker

RETRY_START_S = 30.0
"""Between attempts to open the run, where the tracker was not to be reached."""


class NotStarted(Exception):
    """The tracker could not be opened, and it is not yet time to try again."""


class TrackerServer:
    """`open_tracker` imports the tracker's library, which may be missing."""

    def __init__(self, open_tracker: Callable[[], Tracker], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._open_tracker, self._clock_s = open_tracker, clock_s
        self._tracker: Tracker | None = None
        self._run: TrackedRun | None = None
        self._why_not, self._retry_at_s = "", 0.0

    def serve(
        self, lines: Iterable[str], answer: Callable[[str | None], None], describe: Callable[[BaseException], str]
    ) -> None:
        """Until `end`. A call that fails is told, and the next one is made all the same."""
        for line in lines:
            message = json.loads(line)
            try:
                self._take(message)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to a tracker's library
                answer(str(error) if isinstance(error, NotStarted) else describe(error))
            else:
                answer(None)
            if message["kind"] == "end":
                return

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "start":
            self._run = TrackedRun(**message["run"])
        tracker = self._started()
        match message["kind"]:
            case "step":
                tracker.step(message["step"], message["time_s"], message["figures"])
            case "heldout":
                tracker.heldout(message["version"], message["time_s"], message["figures"])
            case "end":
                tracker.end(message["figures"], finished=message["finished"])

    def _started(self) -> Tracker:
        if self._tracker is not None:
            return self._tracker
        assert self._run is not None, "the first message is start"
        if self._clock_s() < self._retry_at_s:
            raise NotStarted(self._why_not)
        try:
            tracker = self._open_tracker()
            tracker.start(self._run)
        except (Exception, SystemExit) as error:
            self._why_not = f"not open yet, after {type(error).__name__}"
            self._retry_at_s = self._clock_s() + RETRY_START_S
            raise
        self._tracker = tracker
        return tracker
