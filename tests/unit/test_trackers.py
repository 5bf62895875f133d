"""Experiment trackers: what they are sent, and that none of them can hold up or end a run."""

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelinerl.service.logs import without_secrets
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.reporting import trackers as trackers_module
from services.trainer.reporting.trackers import (
    STEP,
    Row,
    RunTrackers,
    TrackedRun,
    TrackerThread,
    flat,
    kept_id,
    recipe_params,
    run_trackers,
    sample_row,
    step_figures,
)
from tests.unit.builders import evaluation, make_recipe

RUN = TrackedRun("tiny", "", Path("/runs/tiny"), {}, incarnation=1, version=0)


def test_a_record_becomes_flat_figures_and_leaves_out_what_is_no_number() -> None:
    record = {"step": 7, "ess": 0.9, "lag": {"mean": 1.5}, "ess_by_lag": {"17+": 0.25}, "loss": float("nan"), "mfu": None}
    more = {"skipped": "loss not finite", "heldout_accuracy": 0.5, "lag_histogram": {0: 10, "3": 4, 4: 2}, "joins": [{}]}
    figures = {"ess": 0.9, "lag/mean": 1.5, "ess_by_lag/17-up": 0.25, "skipped": 1.0, "joins": 1.0}
    assert step_figures(record | more) == figures | {"tokens_by_lag/0": 10.0, "tokens_by_lag/3-4": 6.0}
    assert flat({"a": [1, 2], "b": {"c": True}}) == {"b/c": 1.0}


def test_a_recipe_becomes_one_parameter_for_each_field() -> None:
    params = recipe_params(make_recipe(trackers=["mlflow"]))
    assert params["trainer.batch_size"] == 4
    assert params["trackers"] == '["mlflow"]'
    assert not any(isinstance(value, dict | list) for value in params.values())


SAMPLE = {"step": 8, "version": 7, "heldout": False, "prompt": "12+7=", "completion": "19", "reward": 1.0}
SAMPLE |= {"terms": {"math": 1.0}, "spans": [[4, 0, 3], [6, 3, 5]]}
"""Parts of a line of samples.jsonl."""


def test_a_sample_becomes_a_row_with_short_and_harmless_texts() -> None:
    expected = {"step": 8, "version": 7, "problem": "12+7=", "completion": "19", "reward": 1.0}
    assert sample_row(SAMPLE) == {**expected, "reward_terms": '{"math": 1.0}', "lag": 3, "length": 5}
    branches = [{"spans": [[5, 0, 2], [7, 4, 9]]}, {"spans": [[6, 0, 4]]}]
    episode = sample_row({**SAMPLE, "spans": [], "branches": branches})
    assert (episode["lag"], episode["length"]) == (2, 13)
    failed = sample_row({**SAMPLE, "spans": [], "reward": None, "terms": {"\ud800": 0.0}})
    assert (failed["reward"], failed["lag"], failed["length"], failed["reward_terms"]) == (None, 0, 0, '{"\ufffd": 0.0}')
    odd = sample_row({**SAMPLE, "completion": "a\0b\ud800c\x1b[2Jd\te\r\n"})["completion"]
    assert odd == "a\ufffdb\ufffdc\ufffd[2Jd\te\r\n"
    long = sample_row({**SAMPLE, "completion": "x" * 500_000 + "\0" * 500_000})["completion"]
    assert long == "x" * 1000 + " … 998,000 characters left out … " + "\ufffd" * 1000


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("POST https://me:pw@host/api\nAuthorization: abcdef-secret", "POST https://***@host/api Authorization: ***"),
        ("at postgresql://me:a/b@c@host:5432/db: refused", "at postgresql://***@host:5432/db: refused"),
        ("cannot reach http://me:a b@host", "cannot reach ***"),
        ("see http://host/x or mailto:a@b", "see http://host/x or mailto:a@b"),
        ("x" * 1000, "x" * 400),
    ],
)  # fmt: skip
def test_secrets_of_the_environment_and_logins_in_addresses_are_not_logged(text: str, logged: str) -> None:
    environment = {"WANDB_API_KEY": "abcdef-secret", "HOME": "host", "SHORT_KEY": "a", "PROXY_URL": "http://host/x"}
    addresses = {"MLFLOW_TRACKING_URI": "http://me:a b@host", "DATA_URI": "mailto:a@b"}
    assert without_secrets(text, environment | addresses) == logged


class FakeTracker:
    """Cannot be opened `refusals` times, raises `error` at each step, and takes nothing before `go`."""

    def __init__(self, refusals: int = 0, error: BaseException | None = None) -> None:
        self.refusals, self.error, self.took, self.run = refusals, error, list[object](), RUN
        self.called, self.go = threading.Event(), threading.Event()
        self.go.set()

    def opened(self, run: TrackedRun) -> "FakeTracker":
        self._take("start")
        self.run = run
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("nobody there")
        return self

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        if axis == STEP and self.error is not None:
            raise self.error
        self._take(position if axis == STEP else f"{axis} {position}")

    def log_samples(self, axis: str, position: int, rows: list[Row]) -> None:
        if self.error is not None:
            raise self.error
        self._take(f"{len(rows)} samples of {axis} {position}")

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self._take(f"end at {step}, {finished}")

    def _take(self, what: object) -> None:
        self.called.set()
        self.go.wait(60)
        self.took.append(what)


@contextmanager
def thread_of(tracker: FakeTracker) -> Iterator[tuple[TrackerThread, RunTrackers]]:
    thread = TrackerThread("fake", lambda: tracker.opened(RUN))
    try:
        yield thread, RunTrackers([thread])
    finally:
        tracker.go.set()
        thread.end(lambda to: None)
        thread.close(60)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == trackers_module.log.name]


async def test_a_tracker_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers_module, "FLUSH_STOPPED_S", 0.01)
    tracker = FakeTracker()
    tracker.go.clear()
    with thread_of(tracker) as (thread, trackers):
        await asyncio.to_thread(tracker.called.wait, 60)
        for step in range(250):
            trackers.sample(SAMPLE)
            trackers.step({"step": step})
        await trackers.close()
        assert (thread.lost, tracker.took) == (500, [])
        first, last = warnings(caplog)
    assert first.startswith("tracker fake did not finish in time at the run's end, and is abandoned; training goes on")
    assert last == "tracker fake: 500 of 500 points did not reach it"


async def test_a_slow_tracker_loses_old_points(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers_module, "BACKLOG", 3)
    tracker = FakeTracker()
    tracker.go.clear()
    with thread_of(tracker) as (thread, trackers):
        await asyncio.to_thread(tracker.called.wait, 60)
        for step in range(10):
            trackers.step({"step": step})
        tracker.go.set()
        trackers.end({}, finished=True)
        await trackers.close()
        assert (thread.lost, tracker.took) == (7, ["start", 7, 8, 9, "end at 9, True"])
        first, last = warnings(caplog)
    assert "does not keep up: 3 points wait for it, and older ones are dropped" in first
    assert last == "tracker fake: 7 of 10 points did not reach it"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
async def test_a_tracker_that_fails_is_warned_of_once_without_secrets(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_API_KEY", "very-hidden-key")
    tracker = FakeTracker(error=error("https://me:hidden-password@tracker refused very-hidden-key"))
    with thread_of(tracker) as (thread, trackers):
        for step in range(3):
            trackers.step({"step": step})
        trackers.sample({**SAMPLE, "heldout": True})
        trackers.heldout(evaluation(3))
        trackers.end({}, finished=True)
        await trackers.close()
        assert (thread.lost, tracker.took) == (4, ["start", "heldout/version 3", "end at 2, True"])
        first, last = warnings(caplog)
    assert f"tracker fake failed: {error.__name__}: https://***@tracker refused ***; training goes on" in first
    assert last == "tracker fake: 4 of 5 points did not reach it"
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("refusals", "retry_open_s", "took"),
    [
        (0, 600.0, ["start", 1, 2, "heldout/version 3", "end at 2, True"]),  # all points have arrived when a run has ended
        (1, 0.0, ["start", "start", 1, 2, "heldout/version 3", "end at 2, True"]),
        (1, 600.0, ["start"]),
    ],
)
async def test_a_tracker_that_is_away_at_the_start_is_tried_again_after_a_while(
    refusals: int, retry_open_s: float, took: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers_module, "RETRY_OPEN_S", retry_open_s)
    tracker = FakeTracker(refusals)
    with thread_of(tracker) as (_, trackers):
        for step in (1, 2):
            trackers.step({"step": step})
        trackers.heldout(evaluation(3))
        trackers.end({}, finished=True)
        await trackers.close()
        assert tracker.took == took
    assert bool(warnings(caplog)) == bool(refusals)


async def test_what_libraries_log_on_a_trackers_thread_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = FakeTracker(error=OSError("away"))

    def opened(name: str, run: TrackedRun) -> FakeTracker:
        logging.getLogger("urllib3.connectionpool").warning("Retrying https://me:secret@host")
        return tracker.opened(run)

    monkeypatch.setattr(trackers_module, "open_tracker", opened)
    (tmp_path / "page-key").write_text("secret-key")
    settings = TrainerSettings(
        run="tiny", recipe=tmp_path / "r", instance="trainer", run_dir=tmp_path, page=True, page_key=tmp_path / "page-key"
    )
    async with run_trackers(make_recipe(trackers=["wandb"]), settings, Start(), 8000) as trackers:
        trackers.step({"step": 1})
        trackers.end({}, finished=True)
    logging.getLogger("urllib3.connectionpool").warning("of another thread")
    assert "secret" not in caplog.text
    assert "of another thread" in caplog.text
    assert "tracker wandb failed: OSError: away" in caplog.text
    assert tracker.run.page == "http://127.0.0.1:8000/", "the live page's address without its key"


def test_a_runs_identity_outlives_its_trainer(tmp_path: Path) -> None:
    assert [kept_id(tmp_path, "wandb", lambda made=made: made) for made in ("tiny-0a1b2c3d", "x")] == ["tiny-0a1b2c3d"] * 2  # type: ignore[misc]
    assert kept_id(tmp_path, "mlflow", lambda: "other") == "other"
