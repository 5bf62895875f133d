"""A pool of actors that is scaled while some of them are given up or do not want to go. Stand-in programs, real processes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import Launch, ServiceProcess
from pipelinerl.local.supervisor import ActorPool, RestartPolicy, SupervisedService
from tests.support.local_run import until

LIVES = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
DEAF = (
    sys.executable, "-S", "-u", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)",
)  # fmt: skip
DIES = (sys.executable, "-S", "-c", "raise SystemExit(1)")


def pool_of(
    folder: Path, programs: dict[int, tuple[str, ...]], started: list[ServiceProcess], notes: list[str]
) -> ActorPool:
    def make(number: int) -> SupervisedService:
        name = f"actor-{number}"
        launch = Launch(name, programs[number], os.environ, folder / f"{name}.log", folder / f"{name}.json")
        never_again = RestartPolicy(limit=0, limit_unserved=0)
        return SupervisedService(name, lambda: launch, started.append, lambda died, delay_s: None, policy=never_again)

    return ActorPool(make, notes.append, lambda name: None)


async def test_scaling_down_takes_those_that_are_given_up_and_leaves_those_that_live(tmp_path: Path) -> None:
    started: list[ServiceProcess] = []
    notes: list[str] = []
    pool = pool_of(tmp_path, {0: DIES, 1: LIVES}, started, notes)
    await pool.scale(2, 1.0)
    keeping = asyncio.create_task(pool.keep())
    await until(lambda: bool(notes))
    await pool.scale(1, 1.0)
    assert [service.name for service in pool.services] == ["actor-1"]
    assert started[1].returncode is None
    keeping.cancel()
    await asyncio.wait({keeping})
    await pool.stop(1.0)


async def test_an_actor_that_is_being_scaled_away_when_the_run_ends_ends_with_it(tmp_path: Path) -> None:
    started: list[ServiceProcess] = []
    pool = pool_of(tmp_path, {0: LIVES, 1: DEAF}, started, [])
    await pool.scale(2, 1.0)
    await until(lambda: "deaf" in (tmp_path / "actor-1.log").read_text())
    scaling = asyncio.create_task(pool.scale(1, 600.0))
    await until(lambda: len(pool.services) == 1)
    scaling.cancel()
    await asyncio.wait({scaling})
    await pool.stop(0.5)
    assert all(process.returncode is not None for process in started)


async def test_a_start_that_fails_counts_as_a_death(tmp_path: Path) -> None:
    problems: list[ServiceError | None] = [None, ServiceError("no disk"), None, *[ServiceError("no binary")] * 3]
    started: list[ServiceProcess] = []

    def prepare() -> Launch:
        if (problem := problems.pop(0)) is not None:
            raise problem
        return Launch("nats", DIES, os.environ, tmp_path / "nats.log", tmp_path / "nats.json")

    policy = RestartPolicy(limit_unserved=4, first_delay_s=0.001)
    service = SupervisedService("nats", prepare, started.append, lambda died, delay_s: None, policy=policy)
    await service.start()
    with pytest.raises(ServiceError, match="no binary"):
        await service.keep()
    assert (len(started), len(problems)) == (2, 1), "two lived, and four restarts were tried"
