"""How a training run ends when it is stopped: summary first, then one checkpoint, on the compute thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.kube.events import PodRef
from pipelinerl.run_dir import resumable
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start, load_run_state
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.learn.batch import TrainingGroup
from services.trainer.records import RunFiles
from services.trainer.reporting.board import PageBoard
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.recorder import Recorder, Sinks
from services.trainer.reporting.trackers import RunTrackers
from services.trainer.run import TrainingRun
from services.trainer.weight_sync.session import UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import FakePolicy, FakeVerifier

TASK = {"name": "chain_sum", "prompt_style": "compact", "heldout_problems": 2}


@dataclass
class Heard:
    """What would be told to Kubernetes."""

    reasons: list[str] = field(default_factory=list)

    def emit(self, about: PodRef, reason: str, message: str, type_: str, *, always: bool) -> None:
        self.reasons.append(reason)


class Tracked:
    """A tracker that takes its calls at once."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.finished: bool | None = None

    def send(self, call: Callable[[Tracked], None]) -> None:
        call(self)

    def step(self, step: int, time_s: float, figures: dict[str, float]) -> None:
        self.points.append((step, figures))

    heldout = step

    def end(self, call_or_figures: Any, *, finished: bool | None = None) -> None:
        if finished is None:
            call_or_figures(self)
        else:
            self.points.append((0, call_or_figures))
            self.finished = finished


@asynccontextmanager
async def training_run(
    run_dir: Path,
    stop_checkpoint_s: float = 10.0,
    *,
    linger: bool = False,
    board: PageBoard | None = None,
    start: Start | None = None,
    **sections: object,
) -> AsyncIterator[tuple[TrainingRun, FakePolicy]]:
    """A run of no actors that has not begun; `sections` of its recipe."""
    settings = TrainerSettings(
        run=RUN,
        recipe=run_dir / "recipe.yaml",
        instance="trainer",
        verifier="nowhere:1",
        run_dir=run_dir,
        stop_checkpoint_s=stop_checkpoint_s,
        linger=linger,
    )
    policy, verifier = FakePolicy(run_dir), FakeVerifier()
    async with MemoryBus(RUN) as bus:
        await bus.create_streams()
        with RunFiles(run_dir) as files, Journal(run_dir / JOURNAL) as journal:
            recipe, start = make_recipe(task=TASK, **sections), start or Start()
            sinks = Sinks(
                files,
                TrainerMetrics(CollectorRegistry()),
                board,
                RunTrackers([Tracked()]),  # type: ignore[list-item]
                RunEvents(RUN, PodRef("train", "trainer"), Heard()),  # type: ignore[arg-type]
                LogContext(RUN, "trainer", "trainer"),
            )
            recorder = Recorder(recipe, sinks, run=RUN, start=start, tokenizer=policy.tokenizer)
            run = TrainingRun(settings, recipe, policy, bus, verifier, journal, start, recorder)  # type: ignore[arg-type]
            try:
                yield run, policy
            finally:
                policy.may_step.set()


async def stop_during_step(run: TrainingRun, policy: FakePolicy) -> asyncio.Task[None]:
    """The run, stopped in its second step, while that step is on the compute thread."""
    run._loop.version = policy.version = 1
    policy.may_step.clear()
    stop = asyncio.Event()

    async def batch(version: int) -> list[TrainingGroup]:
        group = make_group(900 + version)  # not one that the feeder issues
        run._tracker.issue(group)
        return [TrainingGroup((make_sequence(group, 0), make_sequence(group, 1)), np.array([0.5, -0.5]))]

    run._intake.take_batch = batch  # type: ignore[method-assign]
    run._loop.run = run._loop._step  # type: ignore[method-assign]

    async def no_wait() -> None:
        return

    run._wait_for_actors = no_wait  # type: ignore[method-assign]
    running = asyncio.create_task(run.run(stop))
    await asyncio.to_thread(policy.stepping.wait, 10)
    stop.set()
    return running


async def test_the_checkpoint_comes_behind_the_step_under_way_and_after_the_summary(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):
        running = await stop_during_step(run, policy)
        while not (tmp_path / "summary.json").exists():
            await asyncio.sleep(0.01)
        assert not any("checkpoint" in call for call in policy.calls)
        began_s = run._recorder._metrics.registry.get_sample_value("pipelinerl_trainer_checkpoint_timestamp_seconds")
        assert began_s is not None  # training has begun, and no checkpoint is there: its age counts from here
        policy.may_step.set()
        await running
        assert [call for call in policy.calls if "snapshot" not in call] == ["step 1", "checkpoint 2"]
        assert policy.threads == {"compute"}
        assert policy.checkpoint_saw_summary == [True]
        assert run._recorder._events._recorder.reasons == ["RunStarted", "CheckpointWritten", "RunStopped"]  # type: ignore[union-attr]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["interrupted"], summary["policy_version"], summary["sequences"]["trained"]) == (True, 2, 2)
    folder = resumable(tmp_path)[2].parent
    state = load_run_state(folder)
    assert (state.policy_version, state.figures["report"]["totals"]["steps"]) == (2, 1)
    assert (tmp_path / "checkpoint" / "config.json").is_file()
    assert not (tmp_path / "checkpoint" / "resume").exists()


async def test_trackers_get_the_step_the_evaluation_and_the_end(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):
        running = await stop_during_step(run, policy)
        run._recorder.heldout(HeldoutResult(1, 0.75, num_problems=4, num_unanswered=1, samples=()))
        policy.may_step.set()
        await running
        (tracked,) = run._recorder._trackers._trackers
    heldout, (step, figures), (_, summary) = tracked.points  # type: ignore[attr-defined]
    assert heldout == (1, {"heldout/accuracy": 0.75, "heldout/unanswered": 1.0})
    assert (step, figures["sequences/trained"]) == (2, 2.0)
    assert (tracked.finished, summary["summary/steps"]) == (False, 1.0)  # type: ignore[attr-defined]


async def test_a_step_that_takes_too_long_costs_the_checkpoint_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with training_run(tmp_path, stop_checkpoint_s=0.1) as (run, policy), asyncio.timeout(20):
        running = await stop_during_step(run, policy)
        await running
        assert "no checkpoint of version 1 yet" in caplog.text
        policy.may_step.set()
        for thread in threading.enumerate():
            if thread.name.startswith("compute"):
                await asyncio.to_thread(thread.join, 10)
        assert policy.calls == ["step 1"]
    assert (tmp_path / "summary.json").exists()


async def test_a_run_that_is_stopped_before_its_first_version_has_no_checkpoint(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):
        stop = asyncio.Event()
        stop.set()
        await run.run(stop)
        assert policy.calls == []
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0


async def test_other_ranks_hear_from_a_run_that_waits_for_actors_and_then_of_its_end(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):
        policy.num_ranks, stop = 2, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        while not policy.calls:
            await asyncio.sleep(0.01)
        stop.set()
        await running
        assert policy.calls == ["heartbeat", "end"]


async def test_a_run_that_waits_ends_when_another_rank_is_gone(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):

        def gone() -> None:
            raise RuntimeError("connection closed by peer")

        policy.num_ranks, policy.heartbeat = 2, gone  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as raised:
            await run.run(asyncio.Event())
        assert raised.group_contains(RuntimeError, match="closed by peer")


async def test_what_may_be_issued_follows_the_actors_that_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K = 2 groups a step, n = 2, H = 6: 2 * 2 + 2 * ceil(6 actors / 2) groups.
    changes = {"algorithm": {"max_lag": None}, "actor": {"sequences_in_progress": 6}}
    trainer = {"steps": 100, "batch_size": 4, "tokens_per_microbatch": 64}
    async with training_run(tmp_path, trainer=trainer, **changes) as (run, _):
        assert run._feeder.allowance == 10
        monkeypatch.setattr(WeightUpdater, "num_present", 8)
        run._feeder._look.clear()
        run._joined("actor-7", UpdateRecord(0))
        assert (run._feeder.allowance, run._feeder._look.is_set()) == (52, True)
