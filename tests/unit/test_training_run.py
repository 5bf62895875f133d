"""A run over a scripted compute side: the order of calls of its loop, skipped steps, checkpoints on demand, measuring, and its
end when it is stopped or finished."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, call

import numpy as np
import pytest

from pipelinerl.audit.journal import JOURNAL, read_events
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.figures import FIGURES, run_figures
from pipelinerl.rl.groups import IssueRoom
from pipelinerl.rl.ledger import Outcome
from pipelinerl.run_dir import resumable
from pipelinerl.service.lifecycle import GpuTurn
from pipelinerl.v1 import trainer_pb2
from services.trainer import loop
from services.trainer import run as training
from services.trainer.checkpoint.run_state import Start, evaluates_first, load_run_state
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.learn.batch import TrainingGroup
from services.trainer.run import TrainingRun
from services.trainer.weight_sync.updater import WeightUpdater
from tests.support.machine import until, until_logged
from tests.unit.builders import accuracy_at, make_recipe
from tests.unit.trainer_fakes import FakeActor, FakePolicy, FakeUpdater, ready_group, serving, stop_during_step, training_run

STEPS = {"steps": 4, "batch_size": 4, "tokens_per_microbatch": 64}


class Bench:
    """A run whose intake gives one good group at a time, while `may_give`."""

    def __init__(self, run: TrainingRun, policy: FakePolicy) -> None:
        self.run, self.policy = run, policy
        self.loop, self.tracker, self.totals = run.loop, run.tracker, run.recorder.totals
        self.may_give, self.asked = asyncio.Event(), asyncio.Event()
        self.may_give.set()
        run.intake.take_batch = self.take_batch  # type: ignore[method-assign]
        run.evaluator.evaluate = self.evaluate  # type: ignore[method-assign]

    async def take_batch(self, version: int) -> list[TrainingGroup]:
        self.asked.set()
        await self.may_give.wait()
        return [ready_group(self.run, version)]

    async def evaluate(self, version: int) -> HeldoutResult:
        return HeldoutResult(version, accuracy_at(0.5, 0.5, 0), 9, ())

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.run.recorder.feed._records

    async def in_first_step(self) -> asyncio.Task[None]:
        """The loop at work, until its first step is on the compute thread, where it stays until `may_step`."""
        self.policy.may_step.clear()
        running = asyncio.create_task(self.loop.run())
        await asyncio.to_thread(self.policy.stepping.wait, 60)
        return running

    def figure(self, key: str) -> Any:
        return run_figures(self.totals.reduced)[key]

    async def waiting(self) -> asyncio.Task[None]:
        """The loop at work, waiting for its first batch until `may_give`."""
        self.may_give.clear()
        running = asyncio.create_task(self.loop.run())
        await self.asked.wait()
        return running


@asynccontextmanager
async def bench(run_dir: Path, **sections: Any) -> AsyncIterator[Bench]:
    """Without probes and without evaluations on the way, unless `sections` of the recipe say otherwise."""
    quiet = {"weights": {"probe_every": 0}, "evaluation": {"every_steps": 0}}
    opened = training_run(run_dir, updater=FakeUpdater, **{**quiet, **sections})
    async with opened as (run, policy), asyncio.timeout(120):
        yield Bench(run, policy)


async def test_a_run_steps_sends_and_measures(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        waits: list[tuple[float, bool]] = []
        one.run.feeder.begin_step = lambda share, for_max_lag: waits.append((share, for_max_lag))  # type: ignore[method-assign]
        one.run.feeder.bounds.room = lambda *_: IssueRoom(0, 0, len(waits) > 1, 0, None)  # type: ignore[method-assign]
        said, offer, updater = list[tuple[int, str]](), one.run.updater.offer, cast("Any", one.run.updater)

        async def offered(version: int, snapshot: object) -> None:
            said.append((one.run.recorder.status().phase, one.loop.waiting_for))
            await offer(version, snapshot)  # type: ignore[arg-type]

        updater.offer = offered
        one.run.recorder.training_begins()
        await one.loop.run()
        assert set(said) == {(trainer_pb2.TRAINER_PHASE_TRAINING, "actors to take new weights")}
        assert [for_max_lag for _, for_max_lag in waits] == [False, False, True, True]
        assert all(0 <= share <= 1 for share, _ in waits)
        steps = [f"{what} {step}" for step in range(4) for what in ("snapshot", "step")]
        assert one.policy.calls == [*steps, "snapshot 4"]
        assert one.policy.threads == {"compute"}
        assert [record["step"] for record in one.records] == [1, 2, 3, 4]
        assert one.records[0].keys() <= {figure.key for figure in FIGURES}
        assert [(told["version"], told["accuracy"]) for told in one.totals.heldout] == [(0, 0.5), (4, 0.5)]
        assert one.tracker.ledger.counts["trained"] == 8
        for record in one.records:
            assert record["idle_s"] == record["step_s"]["snapshot"] + record["step_s"]["send"] > 0


async def test_checkpoints_that_are_due_and_the_last_one_have_record_and_books_of_their_version(tmp_path: Path) -> None:
    async with bench(tmp_path, record=True, checkpoint={"every_steps": 2, "keep": 1}) as one:
        await one.loop.run()
        assert [call for call in one.policy.calls if "checkpoint" in call] == ["checkpoint 2"]
        assert "checkpoint" in one.records[2]["step_s"]  # copying it was at the end of the step before
        # A version is written once, however often it is asked for.
        asked = await asyncio.gather(one.loop.request_checkpoint(), one.loop.request_checkpoint())
        last = await one.loop.checkpoints.write(last=True)
        assert [written.version for written in (*asked, last)] == [4, 4, 4]
        assert one.policy.calls.count("checkpoint 4") == 1
        assert list(resumable(tmp_path)) == list(one.loop.checkpoints.positions) == [4]
        state = load_run_state(resumable(tmp_path)[4].parent)
        assert (state.policy_version, state.tracker["ledger"]["closed"]["trained"]) == (4, 8)
        assert state.figures["report"]["totals"]["steps"] == 4
    told = [(event["version"], event["sha256"]) for _, event in read_events(tmp_path / JOURNAL) if event["event"] == "weights"]
    assert told == [(version, f"digest of snapshot {version}".encode().hex()) for version in range(5)]


async def test_a_failed_evaluation_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        failing = AsyncMock(side_effect=ServiceError("no answer to the tasks' held-out problems was scored"))
        one.run.evaluator.evaluate = failing  # type: ignore[method-assign]
        await one.loop.run()
        assert (failing.call_args_list, one.totals.heldout, one.loop.version) == ([call(0), call(4)], [], 4)


async def test_a_long_evaluation_stops_no_step_and_actors_get_the_newest_version_after_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        generated, allowed = asyncio.Event(), asyncio.Event()

        async def evaluate(version: int) -> HeldoutResult:
            await generated.wait()
            return HeldoutResult(version, accuracy_at(0.5, 0.5, 0), 9, ())

        async def take_batch(version: int) -> list[TrainingGroup]:
            if version == 3:  # as max_lag would have it
                await allowed.wait()
            return [ready_group(one.run, version)]

        one.run.evaluator.evaluate = evaluate  # type: ignore[method-assign]
        one.run.intake.take_batch = take_batch  # type: ignore[method-assign]
        running = asyncio.create_task(one.loop.run())
        await until(lambda: one.loop.version >= 3)
        updater: Any = one.run.updater
        assert (updater.offered, updater.served_version) == ([0, 1], 0)
        generated.set()
        await until(lambda: updater.served_version >= 3)
        allowed.set()
        await running
        assert updater.offered == [0, 1, 3, 4]
        assert [(told["version"], told["accuracy"]) for told in one.totals.heldout] == [(0, 0.5), (4, 0.5)]
        assert one.figure("commits_held_s") == sum(record["commits_held_s"] for record in one.records) > 0


async def test_a_probe_measures_the_actors_that_serve(tmp_path: Path) -> None:
    weights = {"probe_every": 1, "probe_tokens": 3, "probe_tolerance": 1.0}
    opened = bench(tmp_path, weights=weights, trainer={**STEPS, "steps": 1})
    async with serving(a=FakeActor(version=0, logprobs=(-1.0, -2.5))) as addresses, opened as one:
        one.run.updater.serve(addresses)  # type: ignore[attr-defined]
        await one.loop.run()
        # The actor stays at version 0, so the probe of version 1 has nobody to compare with.
        assert (one.figure("logprob_mismatch_max"), one.figure("parity_failures")) == (0.5, 0)


@pytest.mark.parametrize("late", [False, True])
async def test_a_run_whose_actors_serve_another_policy_trains_nothing(tmp_path: Path, late: bool) -> None:
    """Nor where the first answer to the probe is of no use."""
    actor = FakeActor(version=5 if late else 0, logprobs=(-1.0, -2.5), loader="paused: asked for")
    opened = bench(tmp_path, weights={"probe_every": 50, "probe_tokens": 3})

    async def all_served() -> None:
        if one.policy.calls == ["snapshot 0", "score", "score"]:
            actor.version = 0

    async with serving(a=actor) as addresses, opened as one:
        one.run.updater.serve(addresses)  # type: ignore[attr-defined]
        one.run.updater.all_served = all_served  # type: ignore[method-assign]
        said = r"weights\.probe_tolerance = 0\.001: nothing is trained.* a at version 1:0: .* 0\.5 nats off, .*paused: asked"
        with pytest.raises(FieldError, match=said):
            await one.loop.run()
        assert (one.policy.calls, one.figure("parity_failures")) == (["snapshot 0", "score", "score"], 1)


async def test_a_resumed_run_whose_actors_leave_its_adapters_out_trains_nothing(tmp_path: Path) -> None:
    """Every log-probability is within the tolerance, and half of what the adapters change is missing."""
    base, change = np.full(8, -2.0, np.float32), np.array([4e-4, -4e-4] * 4, np.float32)
    actor = FakeActor(version=0, logprobs=tuple(base + change / 2))
    async with serving(a=actor) as addresses, bench(tmp_path, weights={"probe_every": 50, "probe_tokens": 9}) as one:
        one.run.updater.serve(addresses)  # type: ignore[attr-defined]
        one.policy.score = lambda token_ids, *, adapters=True: base + change * adapters  # type: ignore[method-assign]
        with pytest.raises(FieldError, match=r"nothing is trained.* a at version 1:0: the actor shows 50% \(± 0%\) of"):
            await one.loop.run()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_later_version_that_is_another_policy_is_counted_and_ends_the_run_if_asked(stops: bool, tmp_path: Path) -> None:
    weights = {"probe_every": 1, "probe_tokens": 3, "stop_on_mismatch": stops}
    actor = FakeActor(version=0)
    async with serving(a=actor) as addresses, bench(tmp_path, weights=weights) as one:
        updater: Any = one.run.updater
        updater.serve(addresses)
        offer = updater.offer

        async def offered(version: int, snapshot: object) -> None:
            await offer(version, snapshot)
            if updater.served_version == version > 0:
                actor.version, actor.logprobs = version, (-1.0, -2.5)

        updater.offer = offered
        with pytest.raises(FieldError, match=r"stop_on_mismatch = True: a at version 1:1: ") if stops else nullcontext():
            await one.loop.run()
        assert one.figure("logprob_mismatch_max") == 0.5
        assert one.figure("parity_failures") >= 1


async def test_steps_skipped_in_a_row_end_the_run_with_advice(tmp_path: Path) -> None:
    async with bench(tmp_path, trainer={**STEPS, "steps": 8, "max_skipped_steps": 3}) as one:
        step, good = one.policy.step, 2

        def mostly_skipped(version: int) -> dict[str, Any]:
            one.policy.skipped = "" if version == good else "loss not finite"
            return step(version)

        one.policy.step = mostly_skipped  # type: ignore[method-assign]
        with pytest.raises(ServiceError, match=r"last 3 .* skipped \(loss not finite\).*lower trainer.learning_rate"):
            await one.loop.run()
        assert (len(one.records), one.tracker.ledger.counts["trained"]) == (6, 2)
        assert one.tracker.ledger.reasons(Outcome.FAILED) == {"step skipped": 10}


async def test_a_checkpoint_is_written_at_once_while_no_batch_comes_and_no_step_begins_after_the_last(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        running = await one.waiting()
        written = await one.loop.request_checkpoint()
        assert (written.folder, written.version) == (tmp_path / "checkpoints" / "step-0", 0)
        assert not running.done()
        assert (await one.loop.checkpoints.write(last=True)).version == 0
        one.may_give.set()
        done, _ = await asyncio.wait({running}, timeout=0.2)
        assert (done, one.loop.version) == (set(), 0)
        running.cancel()


async def test_a_checkpoint_during_a_step_waits_for_it_and_the_next_step_is_planned_meanwhile(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        running = await one.in_first_step()
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.to_thread(one.policy.prepared_ahead.wait, 60)
        assert (one.policy.calls[-1], one.policy.planned) == ("step 0", [0, 1])
        await asyncio.sleep(0.05)
        assert not request.done()
        one.policy.may_step.set()
        assert (await request).version == 1
        await running
        assert one.policy.planned == [0, 1, 2, 3]  # none beyond the last step


async def test_a_checkpoint_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(tmp_path, checkpoint={"every_steps": 1}) as one:
        (tmp_path / "checkpoints").write_text("in the way")
        await one.loop.run()
        assert one.loop.version == 4
        with pytest.raises(ServiceError, match="checkpoint of version 4 could not be written"):
            await one.loop.checkpoints.write(last=True)
        assert "checkpoint of version 1 could not be written" in caplog.text  # it may still have been written until now


async def test_requests_that_were_not_begun_are_refused_at_the_end(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        running = await one.in_first_step()
        request, leaving = (asyncio.create_task(one.loop.request_checkpoint()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        running.cancel()
        one.loop.close()
        with pytest.raises(ServiceError, match="the run has ended"):
            await request
        with pytest.raises(ServiceError, match="the run has ended"):
            await one.loop.request_checkpoint()
        assert "checkpoint 0" not in one.policy.calls


async def test_a_phase_is_computed_while_the_engine_sleeps_which_an_evaluation_delays(tmp_path: Path) -> None:
    engine = GpuTurn(tmp_path / "turn")
    await engine.take()
    phases: dict[str, Any] = {"mode": "conventional", "algorithm": {"max_lag": None, "conventional_g": 2}}
    async with bench(tmp_path, actor={"colocate": True}, settings={"gpu_turn": tmp_path / "turn"}, **phases) as one:
        updater, offer, generated = cast("Any", one.run.updater), one.run.updater.offer, asyncio.Event()

        async def order_sleep() -> None:
            one.policy.calls.append(f"sleep {updater.served_version}")
            engine.release()

        async def offered(version: int, snapshot: object) -> None:
            await engine.take()
            one.policy.calls.append(f"wake for {version}")
            await offer(version, snapshot)  # type: ignore[arg-type]

        async def evaluate(version: int) -> HeldoutResult:
            await generated.wait()
            return HeldoutResult(version, accuracy_at(0.5, 0.5, 0), 9, ())

        updater.order_sleep, updater.offer, one.run.evaluator.evaluate = order_sleep, offered, evaluate  # type: ignore[method-assign]
        running = asyncio.create_task(one.loop.run())
        while one.loop.waiting_for != "the engine to sleep":
            await asyncio.sleep(0)
        assert one.policy.calls == (sent := ["snapshot 0", "leave the GPU", "wake for 0"])
        generated.set()
        await running
    turns = (f"sleep {v}, step {v}, step {v + 1}, snapshot {v + 2}, leave the GPU, wake for {v + 2}" for v in (0, 2))
    assert ", ".join(one.policy.calls) == ", ".join((*sent, *turns))


# The end


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
    assert (tracked.finished, tracked.points[-1][1]["summary/steps"]) == (False, 1.0)  # type: ignore[attr-defined]


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


def gone(kind: str) -> None:
    raise RuntimeError("connection closed by peer")


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


async def test_a_frozen_actor_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LOAD_EVERY_S", 0.01)
    monkeypatch.setattr(training, "ANSWER_WITHIN_S", 0.5)
    well, told, opened = FakeActor(), list[set[str]](), training_run(tmp_path, updater=FakeUpdater)
    async with serving(a=FakeActor(frozen=True), b=well) as addresses, opened as (run, _), asyncio.timeout(60):
        run.updater.serve(addresses)  # type: ignore[attr-defined]
        run.recorder.actor_loads = lambda loads, measuring: told.append(set(loads))  # type: ignore[method-assign]
        polling, readers = asyncio.create_task(run._poll_actors()), run.updater.readers
        await until(lambda: told and told[-1] == {"b"} and readers.unreachable == {"a"})
        well.frozen = True
        await until(lambda: not told[-1] and readers.unreachable == {"a", "b"})  # what it said last is not how it is
        well.frozen = False
        await until(lambda: told[-1] == {"b"} and readers.unreachable == {"a"})
        run.updater.serve({})  # type: ignore[attr-defined]
        await until(lambda: not told[-1])
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


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


async def test_other_ranks_hear_from_a_run_that_waits_for_actors_and_then_of_its_end(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(60):
        policy.num_ranks, stop = 2, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until(lambda: policy.calls)
        stop.set()
        await running
        assert policy.calls == ["heartbeat", "end"]
