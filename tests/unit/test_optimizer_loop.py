"""The optimizer loop over a scripted compute side: order of calls, skipped steps, checkpoints on demand, measuring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.feeding import FeederBound
from pipelinerl.rl.ledger import Outcome
from pipelinerl.run_dir import resumable
from services.trainer.checkpoint.checkpointer import CheckpointWriter
from services.trainer.checkpoint.run_state import load_run_state
from services.trainer.data.evaluation import HeldoutResult, Parity
from services.trainer.data.tracker import SequenceTracker
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loop import OptimizerLoop
from tests.unit.builders import make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import FakeActor, FakePolicy, FakeUpdater, make_run_state, serving

BRIEF = {"batch_size": 4, "tokens_per_microbatch": 64}


@dataclass
class FakeIntake:
    """One good group at a time, while `may_give`."""

    tracker: SequenceTracker
    may_give: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    given: int = 0

    async def take_batch(self, version: int) -> list[TrainingGroup]:
        self.asked.set()
        await self.may_give.wait()
        group = make_group(self.given)
        self.given += 1
        self.tracker.issue(group)
        return [TrainingGroup((make_sequence(group, 0), make_sequence(group, 1)), np.array([0.5, -0.5]))]


class FakeFeeder:
    def look_again(self) -> None:
        return


class FakeEvaluator:
    """Fails where `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.evaluated: list[int] = []

    async def evaluate(self, version: int) -> HeldoutResult:
        self.evaluated.append(version)
        if self.error is not None:
            raise self.error
        return HeldoutResult(version, 0.5, 4, 0, ())


@dataclass
class Bench:
    loop: OptimizerLoop
    policy: FakePolicy
    intake: FakeIntake
    tracker: SequenceTracker
    updater: FakeUpdater
    evaluator: FakeEvaluator
    records: list[dict[str, Any]]
    heldout: list[HeldoutResult]
    parities: list[Parity]
    durable: list[int]
    """Versions of checkpoints that are on disk."""
    run_dir: Path


@asynccontextmanager
async def bench(recipe: Recipe | None = None, *, skipped: str = "", give: bool = True) -> AsyncIterator[Bench]:
    with TemporaryDirectory() as folder:
        async with bench_in(Path(folder), recipe or make_recipe(), skipped, give) as one:
            yield one


@asynccontextmanager
async def bench_in(run_dir: Path, recipe: Recipe, skipped: str, give: bool) -> AsyncIterator[Bench]:
    policy, tracker, updater, evaluator = FakePolicy(skipped=skipped), SequenceTracker(), FakeUpdater(), FakeEvaluator()
    intake = FakeIntake(tracker)
    if give:
        intake.may_give.set()
    records: list[dict[str, Any]] = []
    heldout: list[HeldoutResult] = []
    parities: list[Parity] = []
    durable: list[int] = []
    loop = OptimizerLoop(
        recipe,
        policy,
        intake,  # type: ignore[arg-type]
        FakeFeeder(),  # type: ignore[arg-type]
        tracker,
        FeederBound(groups_per_step=2, mode=recipe.mode, max_lag=1, conventional_g=1, total_steps=recipe.trainer.steps),
        updater,  # type: ignore[arg-type]
        evaluator,  # type: ignore[arg-type]
        incarnation=1,
        version=0,
        evaluate_first=True,
        writer=CheckpointWriter(run_dir, keep=2),
        capture=lambda version, skipped: make_run_state(version, tracker),
        on_checkpoint=lambda written: durable.append(written.version),
        probe=np.array([1, 2, 3], dtype=np.int32),
        on_step=lambda record, batch: records.append(record),
        on_heldout=heldout.append,
        on_parity=parities.append,
    )
    try:
        yield Bench(loop, policy, intake, tracker, updater, evaluator, records, heldout, parities, durable, run_dir)
    finally:
        policy.may_step.set()
        loop.close()


def quiet(**sections: object) -> Recipe:
    """Without probes and without evaluations on the way."""
    return make_recipe(weights={"probe_every": 0}, evaluation={"every_steps": 0}, **sections)


async def test_a_run_steps_sends_and_measures() -> None:
    async with bench(quiet()) as one:
        await one.loop.run()
        steps = [f"{what} {step}" for step in range(4) for what in ("snapshot", "step")]
        assert one.policy.calls == [*steps, "snapshot 4"]
        assert one.policy.threads == {"compute"}
        assert [record["step"] for record in one.records] == [1, 2, 3, 4]
        assert [result.version for result in one.heldout] == [0, 4]
        assert one.tracker.ledger.counts.trained == 8
        for record in one.records:
            assert record["idle_s"] == record["step_s"]["snapshot"] + record["step_s"]["send"] > 0


async def test_checkpoints_on_the_way_are_those_that_are_due() -> None:
    async with bench(quiet(checkpoint={"every_steps": 2})) as one:
        await one.loop.run()
        assert [call for call in one.policy.calls if "checkpoint" in call] == ["checkpoint 2"]
        assert (await one.loop.last_checkpoint()).version == 4
        assert one.durable == [2, 4]
        assert "checkpoint" in one.records[2]["step_s"]  # copying it was at the end of the step before


async def test_what_is_captured_has_the_record_and_the_books_of_its_version() -> None:
    async with bench(quiet(checkpoint={"every_steps": 1})) as one:
        await one.loop.run()
        await one.loop.last_checkpoint()
        folder = resumable(one.run_dir)[4].parent
        state = load_run_state(folder)
        assert (state.policy_version, state.books["ledger"]["closed"]["trained"]) == (4, 8)


async def test_a_failed_evaluation_is_left_out_and_the_run_goes_on() -> None:
    async with bench(quiet()) as one:
        one.evaluator.error = ServiceError("no held-out problem has a verdict")
        await one.loop.run()
        assert (one.evaluator.evaluated, one.heldout, one.loop.version) == ([0, 4], [], 4)


async def test_a_probe_measures_the_actors_that_serve() -> None:
    recipe = make_recipe(weights={"probe_every": 1, "probe_tokens": 3}, trainer=dict(BRIEF, steps=1))
    async with serving(a=FakeActor(version=0, logprobs=(-1.0, -2.5))) as addresses, bench(recipe) as one:
        one.updater.members["a"] = type("Member", (), {"grpc_address": addresses["a"]})
        await one.loop.run()
        # The actor stays at version 0, so the probe of version 1 has nobody to compare with.
        assert one.parities == [Parity(0.5, 0)]


async def test_steps_skipped_in_a_row_end_the_run_with_advice() -> None:
    recipe = quiet(trainer=dict(BRIEF, steps=8, max_skipped_steps=3))
    async with bench(recipe, skipped="loss not finite") as one:
        with pytest.raises(ServiceError, match=r"last 3 .* skipped \(loss not finite\).*lower trainer.learning_rate"):
            await one.loop.run()
        assert len(one.records) == 3
        assert one.tracker.ledger.counts.trained == 0
        assert one.tracker.ledger.reasons(Outcome.FAILED) == {"step skipped": 6}


async def test_a_good_step_between_skipped_ones_lets_the_run_go_on() -> None:
    recipe = quiet(trainer=dict(BRIEF, steps=5, max_skipped_steps=3))
    async with bench(recipe) as one:
        step, good = one.policy.step, 2

        def mostly_skipped(version: int) -> dict[str, Any]:
            one.policy.skipped = "" if version == good else "loss not finite"
            return step(version)

        one.policy.step = mostly_skipped  # type: ignore[method-assign]
        await one.loop.run()
        assert one.loop.version == recipe.trainer.steps


async def test_a_checkpoint_is_written_at_once_while_no_batch_comes() -> None:
    async with bench(quiet(), give=False) as one, asyncio.timeout(10):
        running = asyncio.create_task(one.loop.run())
        await one.intake.asked.wait()
        assert await one.loop.request_checkpoint() == (str(one.run_dir / "checkpoints" / "step-0"), 0)
        assert not running.done()
        running.cancel()


async def test_a_checkpoint_during_a_step_waits_for_it_and_has_its_version() -> None:
    async with bench(quiet()) as one, asyncio.timeout(10):
        one.policy.may_step.clear()
        running = asyncio.create_task(one.loop.run())
        await asyncio.to_thread(one.policy.stepping.wait, 10)
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.sleep(0.05)
        assert not request.done()
        one.policy.may_step.set()
        assert (await request)[1] == 1
        await running


async def test_a_checkpoint_after_the_last_step_is_written() -> None:
    async with bench(quiet()) as one:
        await one.loop.run()
        assert (await one.loop.request_checkpoint())[1] == 4


async def test_a_version_is_written_once_however_often_it_is_asked_for() -> None:
    async with bench(quiet()) as one:
        await one.loop.run()
        assert (await one.loop.request_checkpoint())[1] == (await one.loop.last_checkpoint()).version == 4
        assert (await one.loop.last_checkpoint()).version == (await one.loop.request_checkpoint())[1] == 4
        assert one.policy.calls.count("checkpoint 4") == 1


async def test_no_step_begins_after_the_last_checkpoint() -> None:
    async with bench(quiet(), give=False) as one, asyncio.timeout(10):
        running = asyncio.create_task(one.loop.run())
        await one.intake.asked.wait()
        assert (await one.loop.last_checkpoint()).version == 0
        one.intake.may_give.set()
        done, _ = await asyncio.wait({running}, timeout=0.2)
        assert (done, one.loop.version) == (set(), 0)
        running.cancel()


async def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench(quiet(checkpoint={"every_steps": 1})) as one:
        (one.run_dir / "checkpoints").write_text("in the way")
        await one.loop.run()
        assert (one.loop.version, one.durable) == (4, [])
        assert "checkpoint of version 1 is not written" in caplog.text
        with pytest.raises(ServiceError, match="checkpoint of version 4 is not written"):
            await one.loop.last_checkpoint()


async def test_requests_that_were_not_begun_are_refused_at_the_end() -> None:
    async with bench(quiet()) as one, asyncio.timeout(10):
        one.policy.may_step.clear()
        running = asyncio.create_task(one.loop.run())
        await asyncio.to_thread(one.policy.stepping.wait, 10)
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.sleep(0)
        running.cancel()
        one.loop.close()
        with pytest.raises(ServiceError, match="the run has ended"):
            await request
        with pytest.raises(ServiceError, match="the run has ended"):
            await one.loop.request_checkpoint()
        assert "checkpoint 0" not in one.policy.calls


async def test_a_caller_that_leaves_takes_its_request_along() -> None:
    async with bench(quiet()) as one, asyncio.timeout(10):
        one.policy.may_step.clear()
        running = asyncio.create_task(one.loop.run())
        await asyncio.to_thread(one.policy.stepping.wait, 10)
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        one.policy.may_step.set()
        await running
        assert [call for call in one.policy.calls if "checkpoint" in call] == []


async def test_a_loop_that_is_stopped_stops_measuring() -> None:
    async with bench(quiet(), give=False) as one:
        measuring = asyncio.Event()

        async def forever(version: int) -> HeldoutResult:
            measuring.set()
            await asyncio.Event().wait()
            raise AssertionError("waits for ever")

        one.evaluator.evaluate = forever  # type: ignore[method-assign]
        running = asyncio.create_task(one.loop.run())
        await measuring.wait()
        task = one.loop._measuring
        assert task is not None
        running.cancel()
        await asyncio.wait((running, task))
        assert task.cancelled()


async def test_the_next_step_is_planned_while_this_one_is_computed() -> None:
    async with bench(quiet()) as one, asyncio.timeout(10):
        one.policy.may_step.clear()
        running = asyncio.create_task(one.loop.run())
        await asyncio.to_thread(one.policy.stepping.wait, 10)
        await asyncio.to_thread(one.policy.prepared_ahead.wait, 10)
        assert one.policy.calls[-1] == "step 0"
        assert one.policy.planned == [0, 1]
        one.policy.may_step.set()
        await running
        assert one.policy.planned == [0, 1, 2, 3]  # none beyond the last step
