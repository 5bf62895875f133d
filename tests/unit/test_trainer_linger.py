"""A trainer that lingers: what it still answers after the run's end, and whom it waits for before the run's beginning."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.v1 import trainer_pb2
from services.trainer import loop
from tests.unit.test_trainer_stop import training_run

FINISHED = trainer_pb2.TRAINER_PHASE_FINISHED
IMPATIENT = {"join_timeout_s": 0.01}
LINGERS = "this trainer answers, and does nothing else"


async def until_logged(caplog: pytest.LogCaptureFixture, text: str, times: int = 1) -> None:
    async with asyncio.timeout(10):
        while caplog.text.count(text) < times:
            await asyncio.sleep(0.005)


@pytest.fixture
def at_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every run has trained all its steps."""
    caplog.set_level("INFO")
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr("services.trainer.run.evaluates_first", lambda *_: False)


@pytest.mark.usefixtures("at_its_end")
async def test_a_finished_trainer_answers_until_it_is_told_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with training_run(tmp_path, linger=True) as (run, policy), asyncio.timeout(20):
        run._loop.version, policy.version, policy.num_ranks, stop = 4, 4, 2, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, LINGERS)
        assert not json.loads((tmp_path / "summary.json").read_text())["interrupted"]
        assert (run._status.message().phase, run._status.message().message) == (FINISHED, "")
        assert run._recorder._metrics.registry.get_sample_value("pipelinerl_actor_replicas_wanted") == 1
        assert [step async for step in run._recorder.feed.read(0)] == []
        folder, version = await run._loop.request_checkpoint()
        assert (Path(folder).is_dir(), version) == (True, 4)
        heard = len(policy.calls)
        while len(policy.calls) == heard:  # the other ranks hear that rank 0 is there
            await asyncio.sleep(0.01)
        assert (running.done(), policy.calls[-1]) == (False, "heartbeat")
        stop.set()
        await running
        assert policy.calls[-1] == "end"


@pytest.mark.usefixtures("at_its_end")
async def test_without_linger_a_finished_trainer_ends(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, policy), asyncio.timeout(20):
        run._loop.version = policy.version = 4
        await run.run(asyncio.Event())


@pytest.mark.usefixtures("at_its_end")
async def test_a_trainer_that_lingers_ends_with_an_error_when_a_rank_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with training_run(tmp_path, linger=True) as (run, policy), asyncio.timeout(20):

        def gone() -> None:
            raise RuntimeError("connection closed by peer")

        run._loop.version, policy.version, policy.num_ranks = 4, 4, 2
        running = asyncio.create_task(run.run(asyncio.Event()))
        await until_logged(caplog, LINGERS)
        policy.heartbeat = gone  # type: ignore[method-assign]
        with pytest.raises(ExceptionGroup) as raised:
            await running
        assert raised.group_contains(RuntimeError, match="closed by peer")


async def test_a_trainer_that_is_stopped_does_not_linger(tmp_path: Path) -> None:
    async with training_run(tmp_path, linger=True) as (run, _), asyncio.timeout(20):
        stop = asyncio.Event()
        stop.set()
        await run.run(stop)


async def test_a_trainer_that_lingers_waits_for_actors_as_long_as_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "0 of 1 actors registered within weights.join_timeout_s"
    async with training_run(tmp_path, linger=True, weights=IMPATIENT) as (run, _), asyncio.timeout(20):
        stop = asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, text, times=2)
        assert run._status.message().phase == trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        stop.set()
        await running
    (tmp_path / "without").mkdir()
    async with training_run(tmp_path / "without", weights=IMPATIENT) as (run, _), asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as raised:
            await run.run(asyncio.Event())
        assert raised.group_contains(ServiceError, match=text)
