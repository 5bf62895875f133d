"""Long runs with vLLM engines that are killed and frozen in every phase of a weight update, and a recipe that still learns."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.runs import PARITY_NATS, RunningCommand, audit, ledger_adds_up, settings, started_run, write_tiny_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1800)]

VICTIM = "actor-1"
PHASES = {"receiving": "announce", "staged": "staged", "committing": "commit", "just after": "serving"}
"""Phase of an update and the control message with which it begins, as far as one can see from outside."""


async def kill(run: RunningCommand) -> None:
    for process in run.processes_of(VICTIM):
        process.kill()
    await run.more_steps()
    await run.until_members(2)


async def freeze(run: RunningCommand) -> None:
    frozen = run.processes_of(VICTIM)
    for process in frozen:
        process.suspend()
    await run.until_members(1)
    await run.more_steps()
    for process in frozen:
        process.resume()
    await run.until_members(2)


@pytest.mark.parametrize("fault", [kill, freeze])
async def test_an_engine_hit_in_every_phase_comes_back(
    tiny_model: Path, tmp_path: Path, fault: Callable[[RunningCommand], Awaitable[None]]
) -> None:
    changes = {"actor": {"count": 2}, "trainer": {"steps": 1_000_000}, "weights": {"deadline_s": 5}}
    quiet = {"evaluation": {"every_steps": 0}, "checkpoint": {"every_steps": 0}}
    with started_run(write_tiny_recipe(tiny_model, tmp_path, changes | quiet), tmp_path / "run") as run:
        await run.until_members(2)
        for message in PHASES.values():
            await run.next_message(message, VICTIM)
            await fault(run)
        assert await run.interrupt() == 130
        summary = run.summary()
    assert ledger_adds_up(summary["sequences"])
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["parity_failures"] == 0
    assert summary.get("restarts", {}) == ({VICTIM: len(PHASES)} if fault is kill else {})
    assert summary["membership"]["joins"] >= 2 + len(PHASES)
    assert summary["membership"]["evictions"] >= len(PHASES)


def test_the_recipe_of_programs_learns(tmp_path: Path) -> None:
    with started_run("code", tmp_path / "run") as run:
        assert run.process.wait(1500) == 0, run.said
        summary = run.summary()
    assert summary["heldout_accuracy_first"] <= 0.8
    assert summary["heldout_accuracy_last"] >= 0.9


async def test_the_default_recipe_learns_with_one_actor_then_three_then_one(tmp_path: Path) -> None:
    """One of the three is killed on the way. Steps enough for engines that start slowly; the accuracy is the recipe's."""
    with started_run("arithmetic", tmp_path / "run", *settings(trainer__steps=400)) as run:
        await run.more_steps()
        await run.scale(3)
        await run.until_members(3)
        for process in run.processes_of(VICTIM):
            process.kill()
        await run.more_steps()
        await run.until_members(3)
        await run.scale(1)
        await run.until_members(1)
        assert await asyncio.to_thread(run.process.wait, 1500) == 0, run.said
        summary = run.summary()
    assert summary["heldout_accuracy_first"] <= 0.5
    assert summary["heldout_accuracy_last"] >= 0.9
    assert summary["restarts"] == {VICTIM: 1}
    assert ledger_adds_up(summary["sequences"])
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    audit(run.run_dir)
