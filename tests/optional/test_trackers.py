"""Each tracker's own library, and what it kept, read back. No network.

Run by `make test-trackers`, with the packages beside the environment and not in it (docs/development.md).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.reporting import trackers as run_trackers
from tests.unit.builders import evaluation, make_recipe

for package in ("tensorboard", "mlflow", "wandb"):
    pytest.importorskip(package, reason=f"no {package}: make test-trackers has it")

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
PAGE_KEY = "page-0123456789"
ODD = "a\0\ud800 | <b>\n# 007"
SAMPLE = {"version": 0, "prompt": "12+7=", "terms": {"math": 1.0}, "spans": [[0, 0, 5]]}
"""Parts of a line of samples.jsonl."""
ROW = {"completion": "a\ufffd\ufffd | <b>\n# 007", "reward": 1.0, "reward_terms": '{"math": 1.0}', "length": 5}
"""What a tracker's table has of it."""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(run_trackers, "FLUSH_S", 120.0)
    monkeypatch.setattr(run_trackers, "FLUSH_STOPPED_S", 120.0)
    yield
    assert [record.getMessage() for record in caplog.records if record.name == run_trackers.log.name] == []
    assert KEY not in caplog.text


async def track(run_dir: Path, recipe: Recipe, start: Any, steps: range, *, finished: bool) -> None:
    """A trainer's life: `steps`, an evaluation of the last one's version, the end."""
    (run_dir / "page-key").write_text(PAGE_KEY)
    own = {"run_dir": run_dir, "recipe": run_dir / "recipe.yaml", "page_key": run_dir / "page-key"}
    settings = TrainerSettings(run="tiny-1", instance="trainer", page=True, **own)  # type: ignore[arg-type]
    async with run_trackers.run_trackers(recipe, settings, start, 8000) as trackers:
        for step in steps:
            trackers.sample(SAMPLE | {"step": step, "heldout": False, "completion": ODD, "reward": 1.0})
            trackers.step({"step": step, "ess": 1 / step, "ess_by_lag": {"17+": 0.5}, "mfu": None})
        trackers.sample(SAMPLE | {"step": steps[-1], "heldout": True, "completion": "007", "reward": None})
        trackers.heldout(evaluation(steps[-1]))
        trackers.end({"steps": steps[-1], "interrupted": not finished}, finished=finished)


async def twice(run_dir: Path, name: str) -> None:
    """Steps 1 to 5, stopped; from the checkpoint of 3 on, with more steps to take, 4 to 6 to the end."""
    recipe = make_recipe(trackers=[name], description="a small run")
    await track(run_dir, recipe, Start(), range(1, 6), finished=False)
    longer = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": 6})})
    await track(run_dir, longer, SimpleNamespace(version=3, lineage=SimpleNamespace(incarnation=2)), range(4, 7), finished=True)


async def test_tensorboard_has_each_step_once_after_a_restart(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    await twice(tmp_path, "tensorboard")
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("ess")] == [
        (step, pytest.approx(1 / step)) for step in range(1, 7)
    ]
    assert [(point.step, point.value) for point in read.Scalars("heldout/accuracy")] == [(6, 0.75)]
    assert {"ess_by_lag/17-up", "summary/steps"} < set(read.Tags()["scalars"])
    text = read.Tensors("recipe/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| `trainer.steps` | 6 |" in text
    assert '| `live_page` | "http://127.0.0.1:8000/" |' in text
    tables = read.Tensors("samples/text_summary")
    assert {table.step for table in tables} == {1, 2, 3, 4, 5, 6}
    text = tables[-1].tensor_proto.string_val[0].decode()
    assert "    completion:\n        a\ufffd\ufffd | <b>\n    # 007\n" in text
    assert read.Tensors("heldout/samples/text_summary")[-1].step == 6


async def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    await twice(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("pipelinerl").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny-1", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "ess")
    assert sorted(point.step for point in points) == [1, 2, 3, 4, 4, 5, 5, 6]
    assert run.data.metrics["ess"] == pytest.approx(1 / 6)
    heldout = client.get_metric_history(run.info.run_id, "heldout/accuracy")
    assert sorted((point.step, point.value) for point in heldout) == [(5, 0.75), (6, 0.75)]
    assert run.data.metrics["ess_by_lag/17-up"] == 0.5
    assert run.data.params["trainer.batch_size"] == "4"
    assert run.data.tags["trainer.steps of incarnation 2"] == "6"
    assert run.data.tags["mlflow.note.content"] == "a small run"
    assert run.data.tags["live_page"] == "http://127.0.0.1:8000/"
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/2-000006.json", str(tmp_path))).read_text())
    (odd,) = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    assert odd == ROW | {"step": 6, "version": 0, "problem": "12+7=", "lag": 0}


async def test_wandb_keeps_one_run_for_later_sending(tmp_path: Path) -> None:
    await twice(tmp_path, "wandb")
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"]
    assert run_id.startswith("tiny-1-")
    assert [run_id in folder.name for folder in folders] == [True, True]
    for steps, folder in zip((range(1, 6), range(4, 7)), folders, strict=True):
        data = (folder / f"run-{run_id}.wandb").read_bytes()
        assert all(key in data for key in (b"ess", b"incarnation", b"heldout/accuracy", b"table-file"))
        tables = [json.loads(path.read_text()) for path in (folder / "files").rglob("*.table.json")]
        shown = [dict(zip(table["columns"], table["data"][0], strict=True)) for table in tables]
        trained = [row for row in shown if row["reward"] is not None]
        assert {row["step"] for row in trained} == {*steps}
        assert all(row.items() >= ROW.items() for row in trained)
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert [path for path in files for key in (KEY, PAGE_KEY) if key.encode() in path.read_bytes()] == []
    assert any(b"http://127.0.0.1:8000/" in path.read_bytes() for path in files)
