"""A local run with commands of a benchmark's own in place of some services, ended after a number of optimizer steps."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import log_tail
from pipelinerl.local.progress import open_display
from pipelinerl.local.runner import LocalRun
from pipelinerl.local.services import COMMANDS
from pipelinerl.recipe.fields import Recipe
from pipelinerl.run_dir import RunDir, create_run_dir
from pipelinerl.run_summary import read_jsonl

LOOK_S = 0.5
ROOT = Path(__file__).resolve().parents[1]


def run_steps(
    recipe: Recipe,
    folder: Path,
    commands: Mapping[str, tuple[str, ...]],
    steps: int,
    within_s: float,
    beside: Callable[[RunDir], Awaitable[None]] | None = None,
) -> tuple[RunDir, list[dict[str, Any]]]:
    """The run's folder, `folder`/run, and the records of its first `steps` steps. The run also goes on until `beside` ends.

    A recipe with more steps is interrupted: so actors have work to the end of what is measured. Raises `ServiceError` when the
    run ended before, or not within `within_s` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "run")
    return run_dir, asyncio.run(_run_steps(recipe, run_dir, commands, steps, within_s, beside))


async def _run_steps(
    recipe: Recipe,
    run_dir: RunDir,
    commands: Mapping[str, tuple[str, ...]],
    steps: int,
    within_s: float,
    beside: Callable[[RunDir], Awaitable[None]] | None,
) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open_display(io.StringIO()) as display:
        local = LocalRun(recipe, run_dir, display, {**COMMANDS, **commands}, environment=environment, page_port=None)
        running = asyncio.create_task(local.run())
        other = asyncio.ensure_future(beside(run_dir)) if beside else None
        try:
            async with asyncio.timeout(within_s):
                while not running.done() and len(read_jsonl(run_dir.metrics)) < steps:  # noqa: ASYNC110 - a file grows
                    await asyncio.sleep(LOOK_S)
                if other is not None:
                    await asyncio.wait({other, running}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        if not running.done() and steps < recipe.trainer.steps:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, the runner's own way to end
        if other is not None:
            other.cancel()
            await asyncio.wait({other})
        ending = await running
        if other is not None and not other.cancelled() and (error := other.exception()):
            raise error
    records = read_jsonl(run_dir.metrics)[:steps]
    if len(records) < steps:
        problem = ending.error or log_tail(run_dir.log("trainer"))
        raise ServiceError(f"the run made {len(records)} of {steps} steps within {within_s:g} s: {problem}")
    return records
