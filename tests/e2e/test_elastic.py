"""A run that trains while its actors come, leave, die and freeze: vLLM engines, killed in the middle of weight updates.

What the light members of tests/faults show for every phase, here with the engine: the others go on, the broken one comes
back, and whatever is served afterwards agrees with the trainer's own weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelinerl.bus.jetstream import connect
from tests.e2e.conftest import RUN_TIMEOUT_S, RunningCommand
from tests.e2e.test_run import PARITY_NATS, ledger_adds_up

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningCommand]
VICTIM = "actor-1"
PHASES = {"receiving": "announce", "staged": "staged", "committing": "commit", "just after": "serving"}
"""Phase of an update and the control message with which it begins, as far as one can see from outside."""


@dataclass
class Watched:
    """A run that goes on, with what its files say."""

    run: RunningCommand

    def scale(self, count: int) -> None:
        program = Path(sys.executable).with_name("pipelinerl")
        command = [str(program), "scale", "actors", str(count), "--run-dir", str(self.run.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr + self.run.output.read_text()

    async def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """`condition` of the steps recorded so far."""
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                while not condition(self.run.metrics()):
                    assert self.run.process.poll() is None, self.run.output.read_text()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {what}; {self.run.output.read_text()}") from None

    async def until_members(self, count: int) -> None:
        """A version that was offered from now on is served by so many."""
        began = len(self.run.metrics())
        await self.until(
            lambda steps: any(members_of(step) == count for step in steps[began + 1 :]), f"{count} members"
        )

    async def steps_go_on(self) -> None:
        began = len(self.run.metrics())
        await self.until(lambda steps: len(steps) >= began + 5, "five more steps")

    async def next_message(self, kind: str) -> None:
        """The next control message of this kind; of the victim, where actors say it."""
        server = self.run.run_dir / "nats" / f"nats-server_{self.run.pids()['nats']}.ports"
        url = json.loads(server.read_bytes())["nats"][0]
        name = self.run.output.read_text().partition(":")[0]
        async with connect(url, name, name="test") as bus, bus.watch_control([kind]) as messages:
            earlier = True
            async for message in messages:
                if not earlier and message.actor in ("", VICTIM):
                    return
                earlier = False

    def processes(self) -> list[psutil.Process]:
        """The victim's, its engine's included."""
        actor = psutil.Process(self.run.pids()[VICTIM])
        return [actor, *actor.children(recursive=True)]

    def stop(self) -> dict[str, Any]:
        os.killpg(self.run.process.pid, signal.SIGINT)
        assert self.run.process.wait(20) == 130
        assert self.run.processes_left() == []
        return self.run.summary()


def members_of(step: dict[str, Any]) -> int:
    return step["weight_update"]["members"] if step["weight_update"] else 0


def started(start_run: Start) -> Watched:
    """Until somebody stops it."""
    endless = ("trainer.steps=1000000", "evaluation.every_steps=0", "checkpoint.every_steps=0", "weights.deadline_s=5")
    return Watched(start_run(*(part for setting in endless for part in ("--set", setting))))


async def kill_in(watched: Watched, phase: str) -> None:
    await watched.next_message(PHASES[phase])
    for process in watched.processes():
        process.kill()
    await watched.steps_go_on()
    await watched.until_members(2)


async def freeze_in(watched: Watched, phase: str) -> None:
    await watched.next_message(PHASES[phase])
    frozen = watched.processes()
    for process in frozen:
        process.suspend()
    await watched.until_members(1)
    await watched.steps_go_on()
    for process in frozen:
        process.resume()
    await watched.until_members(2)


async def play(watched: Watched, faults: list[tuple[Callable[[Watched, str], Any], str]]) -> dict[str, Any]:
    """One actor, then two, then the faults of the second one, then one again; returns the run's summary."""
    await watched.steps_go_on()
    await asyncio.to_thread(watched.scale, 2)
    await watched.until_members(2)
    for fault, phase in faults:
        await fault(watched, phase)
    await asyncio.to_thread(watched.scale, 1)
    await watched.until_members(1)
    await watched.steps_go_on()
    return watched.stop()


def check(summary: dict[str, Any], num_kills: int, num_freezes: int) -> None:
    assert ledger_adds_up(summary["sequences"])
    assert summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["parity_failures"] == 0
    assert summary.get("restarts", {}) == ({VICTIM: num_kills} if num_kills else {})
    assert summary["membership"]["joins"] >= 1 + num_kills + num_freezes
    assert summary["membership"]["evictions"] >= num_kills + num_freezes


async def test_actors_come_die_and_leave_while_the_run_goes_on(start_run: Start) -> None:
    check(await play(started(start_run), [(kill_in, "receiving")]), num_kills=1, num_freezes=0)


@pytest.mark.soak
async def test_an_engine_killed_and_frozen_in_every_phase_comes_back(start_run: Start) -> None:
    faults = [(fault, phase) for phase in PHASES for fault in (kill_in, freeze_in)]
    check(await play(started(start_run), faults), num_kills=len(PHASES), num_freezes=len(PHASES))


@pytest.mark.soak
async def test_the_default_recipe_learns_with_one_actor_then_three_then_one(start_run: Start) -> None:
    """One of the three is killed on the way. Steps enough for engines that start slowly; the accuracy is the recipe's."""
    watched = Watched(start_run("--set", "trainer.steps=400", of="arithmetic"))
    await watched.steps_go_on()
    await asyncio.to_thread(watched.scale, 3)
    await watched.until_members(3)
    for process in watched.processes():
        process.kill()
    await watched.steps_go_on()
    await watched.until_members(3)
    await asyncio.to_thread(watched.scale, 1)
    await watched.until_members(1)
    async with asyncio.timeout(900):
        assert await asyncio.to_thread(watched.run.process.wait) == 0
    summary = watched.run.summary()
    assert summary["heldout_accuracy_first"] <= 0.5
    assert summary["heldout_accuracy_last"] >= 0.9
    assert summary["restarts"] == {VICTIM: 1}
    assert ledger_adds_up(summary["sequences"])
    assert summary["logprob_mismatch_max"] <= PARITY_NATS
    print(json.dumps(summary, indent=1))
