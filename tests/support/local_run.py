"""A run of stand-in services under test: its folder, what it printed, and everything that it started."""

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipelinerl.local.ending import Ending
from pipelinerl.local.processes import Restarts, session_pids
from pipelinerl.local.progress import Display
from pipelinerl.local.runner import LocalRun
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_from_data
from pipelinerl.rl.placement import Placement
from pipelinerl.run_dir import RunDir, write_json
from pipelinerl.service.retry import Backoff
from tests.support.machine import until

FAKES = Path(__file__).with_name("fake_services.py").resolve()
COMMANDS = {kind: (sys.executable, str(FAKES), kind) for kind in ("verifier", "trainer", "actor", "model")}
SERVICES = ("nats", "verifier", "actor-0", "trainer")


def recipe(steps: int = 5, **model: Any) -> Recipe:
    model = model or {"source": "hub", "name": "org/model"}
    return recipe_from_data({"name": "tiny", "model": model, "task": {}, "trainer": {"steps": steps}}, "tiny")


class Run:
    """One run under test: its folder, what it printed, and the session ids of everything it started."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        environment: Mapping[str, str],
        stop_within_s: float = 60.0,
        placement: Placement | None = None,
    ) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "addresses").mkdir(exist_ok=True)
        self.dir, self.recipe, self.printed = RunDir(folder, "tiny-run"), recipe, io.StringIO()
        write_json(self.dir.identity, {"run": "tiny-run", "recipe": recipe.name, "started": "2026-03-04T05:06:07+00:00"})
        everything = {**os.environ, "PIPELINERL_CACHE": str(folder.parent / "cache"), **environment}
        restarts = Restarts(limit=2, backoff=Backoff(0.05))
        self.local = LocalRun(
            recipe, self.dir, Display(self.printed, every_s=0), COMMANDS, everything, restarts, placement,
            refresh_s=0.05, stop_within_s=stop_within_s,
        )  # fmt: skip

    async def end(self) -> Ending:
        async with asyncio.timeout(150):
            ending = await self.local.run()
        assert self.left_behind() == []
        return ending

    def pids(self) -> dict[str, int]:
        return json.loads(self.dir.pids.read_text()) if self.dir.pids.is_file() else {}

    def left_behind(self) -> list[int]:
        return [pid for session in self.pids().values() for pid in session_pids(session)]

    async def until_step(self, step: int) -> dict[str, int]:
        metrics = self.dir.metrics
        await until(lambda: metrics.is_file() and f'"step": {step},' in metrics.read_text())
        return self.pids()


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[Ending]]:
    task = asyncio.create_task(run.end())
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def until_pid_changes(run: Run, name: str, old: int) -> int:
    await until(lambda: run.pids()[name] != old)
    return run.pids()[name]
