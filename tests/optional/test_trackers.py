"""Each tracker's own library, and what it kept, read back. No network.

Run by `make test-trackers`, with the packages beside the environment and not in it (docs/development.md).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.preflight import examine
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.reporting import trackers as run_trackers
from tests.unit.builders import accuracy_at, make_recipe

for package in ("tensorboard", "mlflow", "wandb"):
    pytest.importorskip(package, reason=f"no {package}: make test-trackers has it")

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"


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
    settings = TrainerSettings(
        run="tiny-1", recipe=run_dir / "recipe.yaml", instance="trainer", verifier="nowhere:1", run_dir=run_dir
    )
    async with run_trackers.run_trackers(recipe, settings, start) as trackers:
        for step in steps:
            trackers.step({"step": step, "ess": 1 / step, "ess_by_lag": {"17+": 0.5}, "mfu": None})
        trackers.heldout(HeldoutResult(steps[-1], accuracy_at(0.75, 0.6, 1), num_tokens=9, samples=()))
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


async def test_wandb_keeps_one_run_for_later_sending(tmp_path: Path) -> None:
    await twice(tmp_path, "wandb")
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"]
    assert run_id.startswith("tiny-1-")
    assert [run_id in folder.name for folder in folders] == [True, True]
    rows = [row for folder in folders for row in history(folder / f"run-{run_id}.wandb")]
    steps = [(row["step"], row["ess"], row["incarnation"]) for row in rows if "ess" in row]
    assert steps == [(step, pytest.approx(1 / step), 1) for step in range(1, 6)] + [
        (step, pytest.approx(1 / step), 2) for step in range(4, 7)
    ]
    evaluated = [(row["heldout/version"], row["heldout/accuracy"]) for row in rows if "heldout/version" in row]
    assert evaluated == [(5, 0.75), (6, 0.75)]
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(data) for data in stored(path.read_bytes())]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def stored(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format: blocks of 32 KiB; before each piece its checksum, length, and place in its
    record (1 whole, 2 first, 3 middle, 4 last). The first 7 bytes are W&B's own."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, place = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if place in (1, 4):
            yield record
            record = b""


def test_preflight_finds_the_packages() -> None:
    found = examine(make_recipe(trackers=["tensorboard", "mlflow", "wandb"])).problems
    assert [problem for problem in found if "trackers" in str(problem)] == []
