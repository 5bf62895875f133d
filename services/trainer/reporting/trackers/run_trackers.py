"""All trackers of a run, for the trainer: takes its records as they come and returns at once.

Makes messages of them and gives each tracker's process the same. Without trackers in the recipe it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.records import StepRecord
from services.trainer.reporting.trackers.figures import flat, recipe_params, step_figures
from services.trainer.reporting.trackers.process import TrackerProcess
from services.trainer.reporting.trackers.tracker import TrackedRun

log = logging.getLogger(__name__)

FLUSH_S, FLUSH_STOPPED_S = 20.0, 1.5
"""From the end of a run, or of one that is stopped early, until trackers that are not done are left behind."""


class RunTrackers:
    """See the module. `processes` are started already."""

    def __init__(self, processes: Sequence[TrackerProcess] = ()) -> None:
        self._processes = processes
        self._leave_at_s: float | None = None

    def step(self, record: StepRecord) -> None:
        if self._processes:
            self._tell(lambda: {"kind": "step", "step": record["step"], "figures": step_figures(record)})

    def heldout(self, result: HeldoutResult) -> None:
        heldout = {"heldout": {"accuracy": result.accuracy, "unanswered": result.num_unanswered}}
        self._tell(lambda: {"kind": "heldout", "version": result.version, "figures": flat(heldout)})

    def end(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Once. What comes after it is lost."""
        if self._leave_at_s is None:
            self._tell(lambda: {"kind": "end", "figures": flat({"summary": summary}), "finished": finished})
            self._leave_at_s = time.monotonic() + (FLUSH_S if finished else FLUSH_STOPPED_S)

    async def close(self) -> None:
        self.end({}, finished=False)
        assert self._leave_at_s is not None
        within_s = max(0.0, self._leave_at_s - time.monotonic())
        await asyncio.gather(*(process.close(within_s) for process in self._processes))

    def _tell(self, make: Callable[[], dict[str, Any]]) -> None:
        """The boundary between a run and its trackers: what fails here is logged, and ends no run."""
        try:
            message = {"time_s": time.time(), **make()}
            for process in self._processes:
                process.send(message)
        except Exception:
            log.exception("the trackers could not be told; training goes on")


@asynccontextmanager
async def run_trackers(recipe: Recipe, settings: TrainerSettings, start: Start) -> AsyncIterator[RunTrackers]:
    """For the time of the block, a process for each tracker that the recipe names. An end that nobody told is an early one."""
    run = TrackedRun(
        name=settings.run,
        description=recipe.description,
        run_dir=str(settings.run_dir.absolute()),
        params=recipe_params(recipe),
        incarnation=start.lineage.incarnation,
        version=start.version,
    )
    processes = [TrackerProcess(name, tracker_command(name)) for name in recipe.trackers]
    for process in processes:
        process.start()
        process.send({"kind": "start", "run": asdict(run)})
    trackers = RunTrackers(processes)
    try:
        yield trackers
    finally:
        await trackers.close()


def tracker_command(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", "services.trainer.reporting.trackers", name
