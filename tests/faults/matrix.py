"""Faults in whole runs: real services, vLLM and nats-server under the local runner, hit at chosen points, one after another.

A run gets a list of faults; each waits for its point, is done to the process and everything it started, and counts as
survived when the run has come further than it was before and the service that was hit works again. In the end the run comes
to its last step, and its books add up (`pipelinerl audit`).
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import psutil

from pipelinerl.commands.run import resume
from pipelinerl.local.ending import Ending
from pipelinerl.local.processes import Restarts, session_pids
from pipelinerl.local.progress import open_display
from pipelinerl.local.runner import LocalRun
from pipelinerl.local.services import COMMANDS
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_dir import RunDir, create_run_dir
from pipelinerl.service.retry import Backoff
from tests.faults.points import POINTS, Watcher
from tests.faults.slow import talks
from tests.support.machine import usual_open_files
from tests.support.runs import write_tiny_recipe

SERVICES = ("trainer", "actor-0", "verifier", "nats")
RANK_1 = "rank 1"
"""Of a trainer with several; it may stand for a service in a fault."""
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "restart")
FROZEN_S, HURRY_S = 20.0, 1.0
STEPS_BETWEEN = 3
SURVIVE_WITHIN_S = 600.0
"""Far above what any fault may cost: reached only by something that waits for ever."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """`restart`: told to stop, and killed a second later, as by somebody who has no patience."""

    service: str
    signal: str
    point: str


@dataclass(frozen=True)
class Survived:
    fault: Fault
    step: int
    """The last one before."""
    seconds: float
    """Until a new process of the service worked and a later step was taken; of a frozen one, from when it went on."""


def row(service: str, kind: str) -> list[Fault]:
    """One service and one signal at every point, the idle one first: it is only at the start."""
    return [Fault(service, kind, point) for point in POINTS]


def some_faults(seed: int) -> list[Fault]:
    """One for each service, in any order; signals and points from the seed."""
    chosen = random.Random(seed)
    services = chosen.sample(SERVICES, len(SERVICES))
    points = chosen.sample(POINTS[1:], len(SERVICES))
    return [Fault(service, chosen.choice(SIGNALS), point) for service, point in zip(services, points, strict=True)]


def write_recipe(folder: Path, model: Path, num_faults: int, changes: Mapping[str, Any] = {}) -> Path:
    """A run with room for that many faults, a checkpoint every third step, and rewards that take their time. A third of the
    groups are episodes of three turns."""
    fire: dict[str, Any] = {
        "task": {"heldout_problems": 4},
        "reward": {"scorer": "tests.faults.slow:score", "answer_pattern": ""},
        "trainer": {"steps": (num_faults + 1) * (STEPS_BETWEEN + 5), "learning_rate": 1e-4},
        "weights": {"probe_every": 5, "deadline_s": 15},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 3},
    }
    for section, fields in changes.items():
        fire[section] = {**fire.get(section, {}), **fields} if isinstance(fields, Mapping) else fields
    return write_tiny_recipe(model, folder, fire, tasks=[{"name": "sums", "weight": 2}, talks()])


@contextlib.asynccontextmanager
async def local_run(
    folder: Path, recipe_file: Path, commands: Mapping[str, tuple[str, ...]] = COMMANDS, resumed: RunDir | None = None
) -> AsyncIterator[tuple[RunDir, asyncio.Task[Ending], StringIO]]:
    """A run under the local runner, in this process; it is interrupted where the block ends before the run does."""
    if resumed is not None:
        recipe, run_dir = resume(resumed)[0], resumed
    else:
        recipe = load_recipe(str(recipe_file))
        run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "Läufe 数" / "run")
    out = StringIO()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with usual_open_files(), open_display(out) as display:
        restarts = Restarts(limit=100, limit_unserved=100, backoff=Backoff(0.5, 0.5))
        runner = LocalRun(recipe, run_dir, display, commands, environment=environment, restarts=restarts)
        running = asyncio.create_task(runner.run())
        try:
            yield run_dir, running, out
        finally:
            if not running.done():
                await interrupt(running)


async def run_under_fire(
    folder: Path,
    recipe_file: Path,
    faults: Sequence[Fault],
    commands: Mapping[str, tuple[str, ...]] = COMMANDS,
    *,
    interrupted: bool = False,
) -> tuple[RunDir, list[Survived]]:
    """A run with these faults to its last step or, with `interrupted`, to a Ctrl-C after the last fault.

    Raises `AssertionError` when it does not survive a fault, or does not end well.
    """
    async with local_run(folder, recipe_file, commands) as (run_dir, running, out):
        hitting = asyncio.create_task(_hit_all(run_dir, faults))
        await asyncio.wait((running, hitting), return_when=asyncio.FIRST_COMPLETED)
        assert hitting.done(), f"the run ended before all faults were done: {out.getvalue()}"
        survived = hitting.result()
        ending = await (interrupt(running) if interrupted else asyncio.wait_for(running, SURVIVE_WITHIN_S))
    assert ending is not None, out.getvalue()
    assert ending.exit_code == (130 if interrupted else 0), f"{ending.error}\n{out.getvalue()}"
    return run_dir, survived


async def interrupt(running: asyncio.Task[Ending]) -> Ending | None:
    """Ctrl-C, the runner's own way to end."""
    os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(BaseException):
        return await asyncio.wait_for(running, SURVIVE_WITHIN_S)
    return None


def pids_of(run_dir: RunDir) -> dict[str, int]:
    found: dict[str, int] = json.loads(run_dir.pids.read_bytes())
    return found


async def _hit_all(run_dir: RunDir, faults: Sequence[Fault]) -> list[Survived]:
    watcher = Watcher(run_dir)
    return [await _hit(run_dir, watcher, fault) for fault in faults]


async def _hit(run_dir: RunDir, watcher: Watcher, fault: Fault) -> Survived:
    async with _in_time(f"{fault}: its point did not come"):
        await watcher.at(fault.point)
    service = "trainer" if fault.service == RANK_1 else fault.service
    step, pid = watcher.step(), pids_of(run_dir)[service]
    await _strike(fault, _pid_of_rank_1(pid) if fault.service == RANK_1 else pid)
    began_s = time.monotonic()
    async with _in_time(f"{fault}: the run did not go on from step {step}"):
        while fault.signal != "SIGSTOP" and pids_of(run_dir).get(service, pid) == pid:
            await asyncio.sleep(0.05)
        while not (watcher.step() > step and await watcher.serving(service)):
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began_s
        while watcher.step() < step + STEPS_BETWEEN:
            await asyncio.sleep(0.05)
    return Survived(fault, step, seconds)


@contextlib.asynccontextmanager
async def _in_time(failure: str):  # type: ignore[no-untyped-def]
    try:
        async with asyncio.timeout(SURVIVE_WITHIN_S):
            yield
    except TimeoutError:
        raise AssertionError(failure) from None


async def _strike(fault: Fault, pid: int) -> None:
    match fault.signal:
        case "SIGKILL":
            _signal_all(pid, signal.SIGKILL)
        case "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        case "SIGSTOP":
            _signal_all(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)  # it is this long that it stands still
            _signal_all(pid, signal.SIGCONT)
        case "restart":
            os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(HURRY_S)
            _signal_all(pid, signal.SIGKILL)


def _signal_all(pid: int, number: signal.Signals) -> None:
    for each in {pid, *session_pids(pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def _pid_of_rank_1(trainer: int) -> int:
    """`trainer`: pid of the process that started the ranks."""
    ranks = psutil.Process(trainer).children(recursive=True)
    return next(rank.pid for rank in ranks if rank.environ().get("RANK") == "1")
