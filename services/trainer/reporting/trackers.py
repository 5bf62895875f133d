"""Experiment trackers (Weights & Biases, MLflow, TensorBoard) beside the run: a bounded queue and a thread for each.

The trainer queues points on its event loop and never waits for a tracker: not for its import, its server or an upload. A
tracker that hangs loses its oldest points, and a failing one is warned about once. Only the end of the run waits, for a bounded
time. Library calls are in `tracker_clients.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from pipelinerl.run_summary import StepRecord
from pipelinerl.service.logs import without_secrets
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.reporting.tracker_clients import HELDOUT_VERSION, STEP, TrackedRun, Tracker, open_tracker

log = logging.getLogger(__name__)

BACKLOG = 1000
"""Maximum number of waiting points; a step's record has 3 KB."""
RETRY_OPEN_S = 30.0
"""Seconds between attempts to open the run while the tracker's server cannot be reached."""
FLUSH_S, FLUSH_STOPPED_S = 20.0, 1.5
"""Time after the end of a run, or of one that is stopped early, until unfinished trackers are abandoned."""

THREAD = "tracker "
"""Prefix of the names of trackers' threads."""

Call = Callable[[Tracker], None]


class TrackerThread:
    """Makes the queued calls in order. `lost`: points that the tracker has not taken, including one in progress."""

    def __init__(self, name: str, run: TrackedRun, open_this: Callable[[], Tracker]) -> None:
        """`open_this` imports the tracker's library, which may be missing."""
        self.name, self._run, self._open = name, run, open_this
        self._points: deque[Call] = deque(maxlen=BACKLOG)
        self._end: Call | None = None
        self._changed = threading.Condition()
        self._tracker: Tracker | None = None
        self._retry_at_s = -math.inf
        self._sent = self._taken = 0
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        return self._sent - self._taken

    def send(self, point: Call) -> None:
        """Queue a point and return at once. If the queue is full, the oldest point is dropped."""
        with self._changed:
            self._sent += 1
            if len(self._points) == self._points.maxlen:
                self._warn(f"does not keep up: {len(self._points)} points wait for it, and older ones are dropped")
            self._points.append(point)
            self._changed.notify()

    def end(self, call: Call) -> None:
        """Queue the last call, behind all points."""
        with self._changed:
            self._end = call
            self._changed.notify()

    def close(self, within_s: float) -> None:
        """Block until the last call has returned, for at most `within_s`; log how many points were lost."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._warn("did not finish in time at the run's end, and is abandoned")
            with self._changed:
                self._points.clear()
        if self.lost:
            log.warning("tracker %s: %d of %d points did not reach it", self.name, self.lost, self._sent)

    def _work(self) -> None:
        """Consume the queue until the last call, from `end`; wait for the next call and for the tracker."""
        self._try(lambda tracker: None)  # opens the run before its first step
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._points or self._end)
                if not self._points:
                    break
                point = self._points.popleft()
            self._taken += self._try(point)
        assert self._end is not None
        self._try(self._end)

    def _try(self, call: Call) -> bool:
        """Return whether the tracker took the call. A failed call does not stop the next one."""
        try:
            if self._tracker is None:
                if time.monotonic() < self._retry_at_s:
                    return False
                self._retry_at_s = time.monotonic() + RETRY_OPEN_S
                tracker = self._open()
                tracker.start(self._run)
                self._tracker = tracker
            call(self._tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to a tracker's library
            self._warn(f"failed: {without_secrets(f'{type(error).__name__}: {error}', os.environ)}")
            return False
        return True

    def _warn(self, what: str) -> None:
        """Warn once, because a tracker that cannot be reached would fill the log."""
        if not self._warned:
            self._warned = True
            log.warning("tracker %s %s; training goes on without waiting for it", self.name, what)


class RunTrackers:
    """All trackers of a run. Without trackers in the recipe it does nothing."""

    def __init__(self, trackers: list[TrackerThread] | None = None, version: int = 0) -> None:
        """`version`: optimizer steps that count when the trainer starts."""
        self._trackers, self._last_step = trackers or [], version
        self._abandon_at_s: float | None = None

    def step(self, record: StepRecord) -> None:
        self._last_step, time_s = record["step"], time.time()
        for tracker in self._trackers:
            tracker.send(lambda to: to.log(STEP, record["step"], time_s, step_figures(record)))

    def heldout(self, result: HeldoutResult) -> None:
        time_s = time.time()
        figures = {
            "heldout/accuracy": result.accuracy,
            "heldout/accuracy_lower_bound": result.lower_bound,
            "heldout/unanswered": float(result.num_unanswered),
            **flat({f"heldout/{name}": accuracy.to_json() for name, accuracy in result.sets.items()}),
        }
        for tracker in self._trackers:
            tracker.send(lambda to: to.log(HELDOUT_VERSION, result.version, time_s, figures))

    def end(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Queue the last call. Points sent after the first call of this method are lost."""
        if self._abandon_at_s is None:
            self._abandon_at_s = time.monotonic() + (FLUSH_S if finished else FLUSH_STOPPED_S)
            last_step = self._last_step
            for tracker in self._trackers:
                tracker.end(lambda to: to.end(last_step, flat({"summary": summary}), finished=finished))

    async def close(self) -> None:
        """Wait for unsent points. A run that has not ended counts as stopped."""
        self.end({}, finished=False)
        assert self._abandon_at_s is not None
        within_s = max(0.0, self._abandon_at_s - time.monotonic())
        await asyncio.gather(*(asyncio.to_thread(tracker.close, within_s) for tracker in self._trackers))


@asynccontextmanager
async def run_trackers(recipe: Recipe, settings: TrainerSettings, start: Start) -> AsyncIterator[RunTrackers]:
    """Open every tracker that the recipe names, and close them at the end of the block."""
    run = TrackedRun(
        name=settings.run,
        description=recipe.description,
        run_dir=settings.run_dir.absolute(),
        params=recipe_params(recipe),
        incarnation=start.lineage.incarnation,
        version=start.version,
    )
    for handler in logging.root.handlers:
        handler.addFilter(is_not_of_a_library)
    threads = [TrackerThread(name, run, partial(open_tracker, name)) for name in recipe.trackers]
    trackers = RunTrackers(threads, start.version)
    try:
        yield trackers
    finally:
        await trackers.close()


def is_not_of_a_library(record: logging.LogRecord) -> bool:
    """Return False for records of a tracker's thread outside our own code (urllib3, requests, warnings): they may hold
    secrets."""
    return not (record.threadName or "").startswith(THREAD) or record.name.startswith(("services.", "pipelinerl."))


_NOT_LOGGED = frozenset({"step", "lag_histogram", "skipped", "joins"})
"""Keys of a step's record that are logged in another form, or are the axis."""


def step_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Turn `{"lag": {"mean": 2}}` into `lag/mean`. Evaluations are left out, since they have their own axis. Pure."""
    plain = {key: value for key, value in record.items() if key not in _NOT_LOGGED and not key.startswith("heldout_")}
    tokens: dict[str, int] = {}  # by lag bucket
    for lag, count in record.get("lag_histogram", {}).items():
        bucket = LAG_BUCKETS[int(lag_bucket(np.array([int(lag)]))[0])]
        tokens[bucket] = tokens.get(bucket, 0) + count
    skipped, joins = bool(record.get("skipped")), len(record.get("joins", ()))
    return flat({**plain, "skipped": skipped, "joins": joins, "tokens_by_lag": tokens})


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number in `values`, by its path. `17+` becomes `17-up`, as some trackers accept no plus. Pure."""
    return {
        path.replace("+", "-up"): float(value)
        for path, value in _leaves(values, "/")
        if isinstance(value, bool | int | float | np.bool_ | np.number) and math.isfinite(float(value))
    }


def recipe_params(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """Return each field of the recipe by its dotted path; lists, null and empty mappings as JSON. Pure."""
    return {
        path: value if isinstance(value, str | bool | int | float) else json.dumps(value, ensure_ascii=False)
        for path, value in _leaves(recipe.model_dump(mode="json"), ".")
    }


def _leaves(values: Mapping[Any, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything that is not a filled mapping, with its path."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value
