"""Faults in whole runs: real services, vLLM and nats-server under the local runner, hit at chosen points, one after another.

A run gets a list of faults; each waits for its point, is done to the process and everything it started, and counts as
survived when the run has come further than it was before and the service that was hit works again. In the end the run comes
to its last step, and its books add up (`pipelinerl audit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from pipelinerl.local.ending import Ending
from pipelinerl.local.processes import read_pids, session_pids
from pipelinerl.local.progress import open_display
from pipelinerl.local.runner import LocalRun
from pipelinerl.local.supervisor import RestartPolicy
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_dir import RunDir, create_run_dir
from tests.faults.points import POINTS, Watcher

SERVICES = ("trainer", "actor-0", "verifier", "nats")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "restart")
FROZEN_S, HURRY_S = 20.0, 1.0
STEPS_BETWEEN = 3
SURVIVE_WITHIN_S = 240.0
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


def write_recipe(folder: Path, model: Path, num_faults: int) -> Path:
    """A run of a tiny model with room for that many faults, a checkpoint every third step and rewards that take their time."""
    path = folder / "fire.yaml"
    recipe: dict[str, Any] = {
        "name": "fire",
        "model": {"source": "path", "name": str(model), "max_context": 96},
        "task": {
            "name": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            "prompt_style": "compact",
            "heldout_problems": 4,
        },
        "reward": {"scorer": "tests.faults.slow_reward:score"},
        "sampling": {"group_size": 4, "max_tokens": 64},
        "actor": {"sequences_in_progress": 16, "engine": {"kv_cache_gib": 0.25}},
        "algorithm": {"max_lag": 4},
        "trainer": {
            "steps": (num_faults + 1) * (STEPS_BETWEEN + 5),
            "batch_size": 16,
            "learning_rate": 1e-4,
            "tokens_per_microbatch": 4096,
        },
        "weights": {"chunk_mib": 0.1, "probe_every": 5, "deadline_s": 15},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 3},
    }
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


async def run_under_fire(folder: Path, recipe_file: Path, faults: Sequence[Fault]) -> tuple[RunDir, list[Survived]]:
    """A whole run with these faults. Raises `AssertionError` when it does not survive one, or does not end well."""
    recipe = load_recipe(str(recipe_file))
    run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "run")
    out = StringIO()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open_display(out) as display:
        policy = RestartPolicy(limit=100, limit_unserved=100, first_delay_s=0.5, factor=1.0)
        local_run = LocalRun(recipe, run_dir, display, environment=environment, policy=policy)
        running = asyncio.create_task(local_run.run())
        hitting = asyncio.create_task(_hit_all(run_dir, faults))
        await asyncio.wait((running, hitting), return_when=asyncio.FIRST_COMPLETED)
        assert hitting.done(), f"the run ended before all faults were done: {out.getvalue()}"
        if hitting.exception() is not None:
            await _stop(running)
        survived = hitting.result()
        ending: Ending = await asyncio.wait_for(running, SURVIVE_WITHIN_S)
    assert ending.exit_code == 0, f"{ending.error}\n{out.getvalue()}"
    return run_dir, survived


async def _stop(running: asyncio.Task[Ending]) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # the runner's own way to end
    with contextlib.suppress(BaseException):
        await asyncio.wait_for(running, 30)


async def _hit_all(run_dir: RunDir, faults: Sequence[Fault]) -> list[Survived]:
    watcher = Watcher(run_dir)
    return [await _hit(run_dir, watcher, fault) for fault in faults]


async def _hit(run_dir: RunDir, watcher: Watcher, fault: Fault) -> Survived:
    async with _in_time(f"{fault}: its point did not come"):
        await watcher.at(fault.point)
    step, pid = watcher.step(), read_pids(run_dir)[fault.service]
    await _strike(fault, pid)
    began_s = time.monotonic()
    async with _in_time(f"{fault}: the run did not go on from step {step}"):
        while fault.signal != "SIGSTOP" and read_pids(run_dir).get(fault.service, pid) == pid:
            await asyncio.sleep(0.05)
        while not (watcher.step() > step and await watcher.serving(fault.service)):
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
    """To a service and all that it started."""
    for each in {pid, *session_pids(pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def audit(run_dir: RunDir) -> None:
    """Raises `AssertionError` with the audit's own words unless everything adds up."""
    program = Path(sys.executable).with_name("pipelinerl")
    done = subprocess.run(
        [str(program), "audit", str(run_dir.path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
