"""Experiment trackers: what they are told, and that none of them can hold up or end a run. Each fake is a real process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.reporting.trackers.figures import (
    flat,
    recipe_params,
    scrubbed,
    step_figures,
    tokens_by_lag,
)
from services.trainer.reporting.trackers.process import TrackerProcess
from services.trainer.reporting.trackers.run_trackers import RunTrackers, run_trackers, tracker_command
from services.trainer.reporting.trackers.serving import RETRY_START_S, TrackerServer
from services.trainer.reporting.trackers.tracker import RunId, TrackedRun
from tests.unit.builders import make_recipe

ROOT = Path(__file__).resolve().parents[2]
RUN = {"name": "tiny", "description": "", "run_dir": "/runs/tiny", "params": {}, "incarnation": 1, "version": 0}
START = {"kind": "start", "run": RUN}


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time_s": 1.0, "figures": {"ess": 0.5}}


END = {"kind": "end", "figures": {}, "finished": True}


def test_a_record_becomes_flat_figures_and_leaves_out_what_is_no_number() -> None:
    record = {
        "step": 7,
        "ess": 0.9,
        "lag": {"mean": 1.5, "max": 3},
        "ess_by_lag": {"0": 1.0, "17+": 0.25},
        "loss": float("nan"),
        "mfu": None,
        "skipped": "loss not finite",
        "heldout_accuracy": 0.5,
        "lag_histogram": {0: 10, 3: 4, 4: 2, 40: 1},
        "joins": [{"actor": "actor-1", "version": 3, "join_s": 0.5}],
        "weight_update": None,
    }
    assert step_figures(record) == {
        "ess": 0.9,
        "lag/mean": 1.5,
        "lag/max": 3.0,
        "ess_by_lag/0": 1.0,
        "ess_by_lag/17-up": 0.25,
        "skipped": 1.0,
        "joins": 1.0,
        "tokens_by_lag/0": 10.0,
        "tokens_by_lag/3-4": 6.0,
        "tokens_by_lag/17-up": 1.0,
    }
    assert tokens_by_lag({"5": 2, "8": 1}) == {"5-8": 3}
    assert flat({"a": [1, 2], "b": {"c": True}}) == {"b/c": 1.0}


def test_a_recipe_becomes_one_parameter_for_each_field() -> None:
    params = recipe_params(make_recipe(trackers=["mlflow"]))
    assert params["trainer.batch_size"] == 4
    assert params["trackers"] == '["mlflow"]'
    assert params["algorithm.max_lag"] in ("null", *range(100))
    assert not any(isinstance(value, dict | list) for value in params.values())


def test_secrets_of_the_environment_and_logins_in_addresses_are_not_told() -> None:
    text = "POST https://me:pw1234@host/api\nAuthorization: abcdef-secret refused"
    environment = {"WANDB_API_KEY": "abcdef-secret", "HOME": "host", "SHORT_KEY": "a"}
    assert scrubbed(text, environment) == "POST https://***@host/api Authorization: *** refused"
    assert len(scrubbed("x" * 1000, {})) == 400


def test_a_login_with_any_character_is_not_told() -> None:
    assert scrubbed("at postgresql://me:a/b@c@host:5432/db: refused", {}) == "at postgresql://***@host:5432/db: refused"
    environment = {"MLFLOW_TRACKING_URI": "http://me:a b@host", "PROXY_URL": "http://host/x", "DATA_URI": "mailto:a@b"}
    assert scrubbed("cannot reach http://me:a b@host", environment) == "cannot reach ***"
    assert scrubbed("see http://host/x or mailto:a@b", environment) == "see http://host/x or mailto:a@b"


class InMemory:
    """A tracker that cannot be opened `refusals` times, and fails at the steps `bad`."""

    def __init__(self, refusals: int = 0, bad: frozenset[int] = frozenset()) -> None:
        self.refusals, self.bad, self.took = refusals, bad, list[object]()

    def start(self, run: TrackedRun) -> None:
        self.took.append("start")
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("nobody there")

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        if step in self.bad:
            raise SystemExit(3)
        self.took.append(step)

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        self.took.append(f"heldout {version}")

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        self.took.append(f"end {finished}")


def answers_of(tracker: InMemory, messages: list[dict[str, Any]], clock: Iterator[float]) -> list[str | None]:
    answers: list[str | None] = []
    server = TrackerServer(lambda: tracker, lambda: next(clock))
    server.serve(map(json.dumps, messages), answers.append, lambda error: type(error).__name__)
    return answers


def test_a_failed_call_is_told_and_the_next_is_made() -> None:
    tracker = InMemory(bad=frozenset({1}))
    heldout = {"kind": "heldout", "version": 2, "time_s": 1.0, "figures": {}}
    messages = [START, step(1), step(2), heldout, END, step(3)]
    assert answers_of(tracker, messages, iter([0.0])) == [None, "SystemExit", None, None, None]
    assert tracker.took == ["start", 2, "heldout 2", "end True"]


def test_a_tracker_that_is_away_at_the_start_is_tried_again_after_a_while() -> None:
    tracker = InMemory(refusals=1)
    clock = iter([0.0, 1.0, RETRY_START_S - 1, RETRY_START_S + 1])  # start: asked and failed; two steps
    answers = answers_of(tracker, [START, step(1), step(2), END], clock)
    assert answers == ["ConnectionError", "not open yet, after ConnectionError", None, None]
    assert tracker.took == ["start", "start", 2, "end True"]


@asynccontextmanager
async def fake(mode: str, file: Path, backlog: int = 1000) -> AsyncIterator[TrackerProcess]:
    command = (sys.executable, "-m", "tests.unit.fake_tracker", mode, str(file))
    tracker = TrackerProcess("fake", command, backlog=backlog)
    tracker.start()
    tracker.send(START)
    try:
        yield tracker
    finally:
        await tracker.close(0.0)


async def written(file: Path, lines: int) -> list[Any]:
    async with asyncio.timeout(60):
        while not file.exists() or len(file.read_text().splitlines()) < lines:
            await asyncio.sleep(0.01)
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_all_that_was_sent_has_arrived_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    async with fake("record", tmp_path / "told") as tracker:
        for number in range(1, 4):
            tracker.send(step(number))
        tracker.send(END)
        await tracker.close(60.0)
        assert tracker.lost == 0
    assert await written(tmp_path / "told", 5) == [
        ["start", "tiny"], ["step", 1], ["step", 2], ["step", 3], ["end", True],
    ]  # fmt: skip
    assert caplog.records == []


async def test_a_tracker_that_hangs_holds_nobody_up_and_is_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    async with fake("hang", tmp_path / "told") as tracker:
        await written(tmp_path / "told", 1)
        for number in range(500):
            tracker.send(step(number))
        tracker.send(END)
        process = tracker._process
        assert process is not None
        await tracker.close(0.0)
        assert tracker.lost == 500
    assert process.returncode == -9
    first, last = [record.getMessage() for record in caplog.records]
    assert first == (
        "tracker fake was not done in time at the run's end, and is left behind; training goes on without waiting for it"
    )
    assert last == "tracker fake: 500 of 500 points did not reach it"


async def test_a_tracker_that_is_slow_loses_the_oldest_points_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "told"
    async with fake("slow", file, backlog=3) as tracker:
        await written(file, 1)
        for number in range(10):
            tracker.send(step(number))  # none of them goes out before this coroutine waits
        tracker.send(END)
        file.with_suffix(".go").touch()
        await tracker.close(60.0)
        assert tracker.lost == 8
    assert await written(file, 4) == [["start", "tiny"], ["step", 8], ["step", 9], ["end", True]]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "does not keep up: 3 points wait for it, and older ones are dropped" in warned[0]
    assert warned[1] == "tracker fake: 8 of 10 points did not reach it"


async def test_a_tracker_that_fails_is_told_of_once_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FAKE_API_KEY", "very-hidden-key")
    async with fake("fail", tmp_path / "told") as tracker:
        for number in range(3):
            tracker.send(step(number))
        tracker.send({"kind": "heldout", "version": 3, "time_s": 1.0, "figures": {}})
        tracker.send(END)
        await tracker.close(60.0)
        assert tracker.lost == 3
    first, last = [record.getMessage() for record in caplog.records]
    assert "tracker fake failed: RuntimeError: https://***@tracker refused ***; training goes on" in first
    assert last == "tracker fake: 3 of 4 points did not reach it"
    assert "hidden" not in caplog.text


async def test_a_tracker_that_dies_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    async with fake("die", tmp_path / "told") as tracker, asyncio.timeout(60):
        tracker.send(step(1))
        while not tracker._gone:
            await asyncio.sleep(0.01)
        tracker.send(step(2))
        await tracker.close(60.0)
        assert tracker.lost == 2
    assert "ended with exit code 7 before the run did" in caplog.records[0].getMessage()
    assert len(caplog.records) == 2


@pytest.mark.skipif("trackers" in os.environ.get("PYTHONPATH", ""), reason="the packages are there")
async def test_a_tracker_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    settings = TrainerSettings(
        run="tiny", recipe=tmp_path / "r", instance="trainer", verifier="nowhere:1", run_dir=tmp_path
    )
    async with run_trackers(make_recipe(trackers=["wandb"]), settings, Start()) as trackers:
        trackers.step({"step": 1, "ess": 1.0})
        trackers.end({}, finished=True)
    (first, last) = [record.getMessage() for record in caplog.records]
    assert "tracker wandb failed: MissingPackage: No module named 'wandb'; pip install 'pipelinerl[wandb]'" in first
    assert last == "tracker wandb: 1 of 1 points did not reach it"


async def test_a_run_without_trackers_starts_nothing(tmp_path: Path) -> None:
    trackers = RunTrackers()
    trackers.step({})
    trackers.end({}, finished=True)
    await trackers.close()
    assert tracker_command("mlflow")[1:] == ("-m", "services.trainer.reporting.trackers", "mlflow")


def test_a_runs_identity_outlives_its_trainer(tmp_path: Path) -> None:
    assert RunId(str(tmp_path), "wandb").read() is None
    RunId(str(tmp_path), "wandb").write("tiny-0a1b2c3d")
    assert RunId(str(tmp_path), "wandb").read() == "tiny-0a1b2c3d"
    assert RunId(str(tmp_path), "mlflow").read() is None


def test_what_the_trackers_cannot_be_told_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    class Taking:
        def __init__(self) -> None:
            self.messages: list[str] = []

        def send(self, message: dict[str, Any]) -> None:
            self.messages.append(message["kind"])

    taking = Taking()
    trackers = RunTrackers([taking])  # type: ignore[list-item]
    trackers.step({"step": 1, "lag_histogram": {"no number": 3}})
    trackers.step({"step": 2, "loss": 0.5})
    assert taking.messages == ["step"]
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [ValueError]
