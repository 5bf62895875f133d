"""How a training run ends when it is stopped, and when it is finished; and what its counters begin with."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.rl.groups import FIRST_INCARNATION
from pipelinerl.run_dir import resumable
from pipelinerl.v1 import trainer_pb2
from services.trainer import loop
from services.trainer import run as training
from services.trainer.checkpoint.run_state import Start, evaluates_first, load_run_state
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.weight_sync.updater import WeightUpdater
from tests.support.machine import until, until_logged
from tests.unit.builders import RUN, accuracy_at, make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import FakeActor, FakeUpdater, serving, stop_during_step, training_run


async def test_a_stop_writes_the_summary_and_then_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if all actors are gone by then."""
    caplog.set_level("INFO")
    gone = asyncio.Event()

    async def without_actors() -> None:
        await gone.wait()
        raise ServiceError("no actor is left")

    async with training_run(tmp_path) as (run, policy), asyncio.timeout(60):
        run.updater.run = without_actors  # type: ignore[method-assign]
        running = await stop_during_step(run, policy)
        await until(lambda: (tmp_path / "summary.json").exists())
        gone.set()
        await until(lambda: "while the run stops: no actor is left" in caplog.text)
        assert not any("checkpoint" in call for call in policy.calls)
        began_s = run.recorder.metrics.registry.get_sample_value("pipelinerl_trainer_checkpoint_timestamp_seconds")
        assert began_s is not None  # training has begun, and no checkpoint is there: its age counts from here
        run.recorder.heldout(HeldoutResult(1, accuracy_at(0.75, 0.6, 1), num_tokens=9, samples=()))
        policy.may_step.set()
        await running
        assert [call for call in policy.calls if "snapshot" not in call] == ["step 1", "checkpoint 2"]
        assert policy.threads == {"compute"}
        assert policy.checkpoint_saw_summary == [True]
        lines = [record.getMessage() for record in caplog.records]
        assert any(line.startswith(f"run {RUN} trains from version 0 to ") for line in lines), lines
        (end,) = (record for record in caplog.records if record.getMessage() == "run ended")
        assert end.finished is False  # type: ignore[attr-defined]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["interrupted"], summary["policy_version"], summary["sequences"]["trained"]) == (True, 2, 2)
    folder = resumable(tmp_path)[2].parent
    state = load_run_state(folder)
    assert (state.policy_version, state.figures["report"]["totals"]["steps"]) == (2, 1)
    recipe, measured = make_recipe(evaluation={"every_steps": 1}), replace(state, policy_version=1)
    assert [evaluates_first(Start(state=one), recipe) for one in (measured, state)] == [False, True]
    assert (tmp_path / "checkpoint" / "config.json").is_file()
    assert not (tmp_path / "checkpoint" / "resume").exists()
    (tracked,) = run.recorder._trackers._trackers
    ((axis, at, (row, *_)),) = tracked.tables  # type: ignore[attr-defined]
    assert (axis, at, row["step"], row["version"], row["length"]) == ("step", 2, 2, 1, 2)
    heldout, (step, figures), (_, told) = tracked.points  # type: ignore[attr-defined]
    assert heldout == (1, {"heldout/accuracy": 0.75, "heldout/accuracy_lower_bound": 0.6, "heldout/unanswered": 1.0})
    assert (step, figures["sequences/trained"]) == (2, 2.0)
    assert (tracked.finished, told["summary/steps"]) == (False, 1.0)  # type: ignore[attr-defined]


async def test_a_step_that_takes_too_long_costs_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with training_run(tmp_path, settings={"stop_checkpoint_s": 0.1}) as (run, policy), asyncio.timeout(60):
        running = await stop_during_step(run, policy)
        await running
        assert "the checkpoint of version 1 was not written" in caplog.text
        policy.may_step.set()
        for thread in threading.enumerate():
            if thread.name.startswith("compute"):
                await asyncio.to_thread(thread.join, 10)
        assert policy.calls == ["step 1"]
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("linger", [False, True])
async def test_a_run_that_stops_before_its_first_version_has_no_checkpoint(tmp_path: Path, linger: bool) -> None:
    async with training_run(tmp_path, settings={"linger": linger}) as (run, policy), asyncio.timeout(60):
        stop = asyncio.Event()
        stop.set()
        await run.run(stop)
        assert policy.calls == []
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0


async def test_other_ranks_hear_from_a_run_that_waits_for_actors_and_then_of_its_end(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(60):
        policy.num_ranks, stop = 2, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until(lambda: policy.calls)
        stop.set()
        await running
        assert policy.calls == ["heartbeat", "end"]


def gone(kind: str) -> None:
    raise RuntimeError("connection closed by peer")


async def test_what_may_be_issued_follows_the_registered_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # B = 4, n = 2, H = 6: A * (6 + 2) + 4 samples.
    changes = {"algorithm": {"max_lag": None}, "actor": {"sequences_in_progress": 6}}
    trainer = {"steps": 100, "batch_size": 4, "tokens_per_microbatch": 64}
    async with training_run(tmp_path, trainer=trainer, **changes) as (run, _):
        assert run.feeder.room.allowance == 6
        monkeypatch.setattr(WeightUpdater, "num_present", 8)
        run.feeder._look.clear()
        run.updater.on_change()
        assert (run.feeder.room.allowance, run.feeder._look.is_set()) == (34, True)


FINISHED = trainer_pb2.TRAINER_PHASE_FINISHED
IMPATIENT = {"join_timeout_s": 0.01}
LINGERS = "this trainer only answers requests"


@pytest.fixture
def at_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr("services.trainer.run.evaluates_first", lambda *_: False)


@pytest.mark.usefixtures("at_its_end")
async def test_a_finished_trainer_answers_until_it_is_told_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with training_run(tmp_path, settings={"linger": True}) as (run, policy), asyncio.timeout(60):
        run.loop.version, policy.version, policy.num_ranks, stop = 4, 4, 2, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, LINGERS)
        assert not json.loads((tmp_path / "summary.json").read_text())["interrupted"]
        run.intake.failures["engine"], run.feeder.refused["prompt too long"] = "engine: refused", "prompt too long: problem 1"
        status = run.recorder.status()
        assert (status.phase, status.message, dict(status.failures)) == (FINISHED, "", run.intake.failures | run.feeder.refused)
        assert run.recorder.metrics.registry.get_sample_value("pipelinerl_actor_replicas_wanted") == 1
        assert [step async for step in run.recorder.feed.read(0)] == []
        written = await run.loop.request_checkpoint()
        assert (written.folder.is_dir(), written.version) == (True, 4)
        heard = len(policy.calls)
        await until(lambda: len(policy.calls) != heard)  # the other ranks hear that rank 0 is there
        assert (running.done(), policy.calls[-1]) == (False, "heartbeat")
        stop.set()
        await running
        assert policy.calls[-1] == "end"


@pytest.mark.usefixtures("at_its_end")
@pytest.mark.parametrize("lingers", [False, True])
async def test_an_idle_trainer_ends_with_a_lost_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture, lingers: bool) -> None:
    async with training_run(tmp_path, settings={"linger": lingers}) as (run, policy), asyncio.timeout(60):
        run.loop.version = policy.version = 4 if lingers else 0
        policy.num_ranks = 2
        running = asyncio.create_task(run.run(asyncio.Event()))
        if lingers:
            await until_logged(caplog, LINGERS)
        policy.order = gone  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as raised:
            await running
        assert raised.group_contains(RuntimeError, match="closed by peer")


async def test_a_trainer_waits_for_actors_that_are_starting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "0 of 1 actors registered in"
    async with training_run(tmp_path, settings={"linger": True}, weights=IMPATIENT) as (run, _), asyncio.timeout(60):
        stop = asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, text, times=2)
        assert run.recorder.status().phase == trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        stop.set()
        await running
    (tmp_path / "without").mkdir()
    async with training_run(tmp_path / "without", weights=IMPATIENT) as (run, _), asyncio.timeout(60):
        run.updater.starting.add("actor-7")
        running = asyncio.create_task(run.run(asyncio.Event()))
        await until_logged(caplog, "Still starting: actor-7; still waiting", times=2)
        run.updater.starting.clear()
        with pytest.raises(ExceptionGroup) as raised:
            await running
        assert raised.group_contains(ServiceError, match=text)


async def test_tokens_that_arrived_before_this_start_are_not_in_its_counter(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, _):
        run.intake.tokens_arrived = 1000  # of the checkpoint that it goes on from
        group = make_group(900)
        run.tracker.issue(group)
        sequence = make_sequence(group, 0, completion=(1, 2, 3))
        await run.intake._add(sequence)
        registry = run.recorder.metrics.registry
        assert registry.get_sample_value("pipelinerl_trainer_tokens_arrived_total") == 3
        assert run.intake.tokens_arrived == 1003, "what the run's records go on from"


async def test_a_trainer_that_starts_again_without_a_checkpoint_has_none_to_show(tmp_path: Path) -> None:
    again = Start(FIRST_INCARNATION.restarted(0), again=True)
    async with training_run(tmp_path, start=again) as (run, _):
        assert run.recorder.metrics.registry.get_sample_value("pipelinerl_trainer_checkpoint_version") is None


async def test_a_frozen_actor_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LOAD_EVERY_S", 0.01)
    frozen, well = FakeActor(frozen=True), FakeActor()
    async with (
        serving(a=frozen, b=well) as addresses,
        training_run(tmp_path, updater=FakeUpdater) as (run, _),
        asyncio.timeout(60),
    ):
        run.updater.serve(addresses)  # type: ignore[attr-defined]
        told: list[set[str]] = []
        run.recorder.actor_loads = lambda loads, measuring: told.append(set(loads))  # type: ignore[method-assign]
        polling = asyncio.create_task(run._poll_actors())
        await until(lambda: len(well.asked_by) >= 5)
        assert {"b"} in told
        assert (len(frozen.asked_by), len(set(well.asked_by))) == (1, 1)
        monkeypatch.setattr(training, "ANSWER_WITHIN_S", 0.01)
        well.frozen = True
        await until(lambda: not told[-1])  # what it said last is not how it is
        await until(lambda: run.updater.readers.unreachable == {"a", "b"})
        well.frozen = False
        monkeypatch.setattr(training, "ANSWER_WITHIN_S", 60.0)
        await until(lambda: told[-1])
        assert run.updater.readers.unreachable == {"a"}
        run.updater.serve({})  # type: ignore[attr-defined]
        await until(lambda: not told[-1])
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
