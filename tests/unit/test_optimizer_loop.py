"""The optimizer loop of a whole run over a scripted compute side: order of calls, skipped steps, checkpoints on demand,
measuring."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

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
from services.trainer.checkpoint.run_state import load_run_state
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.learn.batch import TrainingGroup
from services.trainer.run import TrainingRun
from tests.support.machine import until
from tests.unit.builders import accuracy_at
from tests.unit.trainer_fakes import FakeActor, FakePolicy, FakeSnapshot, FakeUpdater, ready_group, serving, training_run

STEPS = {"steps": 4, "batch_size": 4, "tokens_per_microbatch": 64}


class Bench:
    """A run whose intake gives one good group at a time, while `may_give`, and whose evaluations fail where `error` is set."""

    def __init__(self, run: TrainingRun, policy: FakePolicy, run_dir: Path) -> None:
        self.run, self.policy, self.run_dir = run, policy, run_dir
        self.loop, self.tracker, self.totals = run.loop, run.tracker, run.recorder.totals
        self.may_give, self.asked = asyncio.Event(), asyncio.Event()
        self.may_give.set()
        self.error: Exception | None = None
        self.evaluated: list[int] = []
        run.intake.take_batch = self.take_batch  # type: ignore[method-assign]
        run.evaluator.evaluate = self.evaluate  # type: ignore[method-assign]

    async def take_batch(self, version: int) -> list[TrainingGroup]:
        self.asked.set()
        await self.may_give.wait()
        return [ready_group(self.run, version)]

    async def evaluate(self, version: int) -> HeldoutResult:
        self.evaluated.append(version)
        if self.error is not None:
            raise self.error
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
async def bench(run_dir: Path, *, skipped: str = "", **sections: Any) -> AsyncIterator[Bench]:
    """Without probes and without evaluations on the way, unless `sections` of the recipe say otherwise."""
    quiet = {"weights": {"probe_every": 0}, "evaluation": {"every_steps": 0}}
    opened = training_run(run_dir, updater=FakeUpdater, **{**quiet, **sections})
    async with opened as (run, policy), asyncio.timeout(120):
        policy.skipped = skipped
        yield Bench(run, policy, run_dir)


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


async def test_a_digest_is_computed_beside_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, beside = threading.Event(), list[bool]()

    def sha256(snapshot: FakeSnapshot) -> bytes:
        if snapshot == "snapshot 1":
            beside.append(second.wait(60))
        return f"digest of {snapshot}".encode()

    monkeypatch.setattr(FakeSnapshot, "sha256", sha256)
    async with bench(tmp_path, record=True) as one:
        step = one.policy.step

        def noted(version: int) -> dict[str, Any]:
            if version == 1:
                second.set()
            return step(version)

        one.policy.step = noted  # type: ignore[method-assign]
        await one.loop.run()
        one.loop.journal.flush()
    assert beside == [True]
    told = [event for _, event in read_events(tmp_path / JOURNAL) if event["event"] == "weights"]
    digests = [(v, f"digest of snapshot {v}".encode().hex()) for v in range(5)]
    assert [(event["version"], event["sha256"]) for event in told] == digests


async def test_checkpoints_that_are_due_and_the_last_one_have_record_and_books_of_their_version(tmp_path: Path) -> None:
    async with bench(tmp_path, checkpoint={"every_steps": 2, "keep": 1}) as one:
        await one.loop.run()
        assert [call for call in one.policy.calls if "checkpoint" in call] == ["checkpoint 2"]
        assert "checkpoint" in one.records[2]["step_s"]  # copying it was at the end of the step before
        # A version is written once, however often it is asked for.
        assert (await one.loop.request_checkpoint()).version == 4
        assert (await one.loop.checkpoints.write(last=True)).version == 4
        assert (await one.loop.request_checkpoint()).version == 4
        assert one.policy.calls.count("checkpoint 4") == 1
        assert list(resumable(tmp_path)) == list(one.loop.checkpoints.positions) == [4]
        state = load_run_state(resumable(tmp_path)[4].parent)
        assert (state.policy_version, state.tracker["ledger"]["closed"]["trained"]) == (4, 8)
        assert state.figures["report"]["totals"]["steps"] == 4


async def test_a_failed_evaluation_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        one.error = ServiceError("no held-out problem has a verdict")
        await one.loop.run()
        assert (one.evaluated, one.totals.heldout, one.loop.version) == ([0, 4], [], 4)


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
    limit = {**STEPS, "steps": 8, "max_skipped_steps": 3}
    async with bench(tmp_path, skipped="loss not finite", trainer=limit) as one:
        with pytest.raises(ServiceError, match=r"last 3 .* skipped \(loss not finite\).*lower trainer.learning_rate"):
            await one.loop.run()
        assert len(one.records) == 3
        assert one.tracker.ledger.counts["trained"] == 0
        assert one.tracker.ledger.reasons(Outcome.FAILED) == {"step skipped": 6}


async def test_a_good_step_between_skipped_ones_lets_the_run_go_on(tmp_path: Path) -> None:
    async with bench(tmp_path, trainer={**STEPS, "steps": 5, "max_skipped_steps": 3}) as one:
        step, good = one.policy.step, 2

        def mostly_skipped(version: int) -> dict[str, Any]:
            one.policy.skipped = "" if version == good else "loss not finite"
            return step(version)

        one.policy.step = mostly_skipped  # type: ignore[method-assign]
        await one.loop.run()
        assert one.loop.version == 5


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
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.sleep(0)
        running.cancel()
        one.loop.close()
        with pytest.raises(ServiceError, match="the run has ended"):
            await request
        with pytest.raises(ServiceError, match="the run has ended"):
            await one.loop.request_checkpoint()
        assert "checkpoint 0" not in one.policy.calls


async def test_a_caller_that_leaves_takes_its_request_along(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        running = await one.in_first_step()
        request = asyncio.create_task(one.loop.request_checkpoint())
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        one.policy.may_step.set()
        await running
        assert [call for call in one.policy.calls if "checkpoint" in call] == []


async def test_a_loop_that_is_stopped_stops_measuring(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        measuring = asyncio.Event()

        async def forever(version: int) -> HeldoutResult:
            measuring.set()
            await asyncio.Event().wait()
            raise AssertionError("waits for ever")

        one.run.evaluator.evaluate = forever  # type: ignore[method-assign]
        running = await one.waiting()
        await measuring.wait()
        task = one.loop._measuring
        running.cancel()
        await asyncio.wait((running, task))
        assert task.cancelled()


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
