"""Models on their way to a store and back: whole or not taken, and never in training's way. The store is a folder (file://)."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.recipe.loading import RecipeError, recipe_from_data
from pipelinerl.service.retry import Backoff
from services.trainer.checkpoint import store as uploads
from services.trainer.checkpoint.store import LATEST, MANIFEST, fetch_model, put_model
from tests.support.machine import until, until_logged
from tests.unit.builders import RUN
from tests.unit.trainer_fakes import training_run

FILES = {"config.json": b"{}", "model.safetensors": os.urandom(20_000_000), "value_head/model.safetensors": b"v", "empty": b""}


def model(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetched(url: str, folder: Path) -> tuple[str, dict[str, bytes]]:
    folder.mkdir()
    return fetch_model(url, folder), contents(folder)


def test_a_model_comes_back_as_it_was_and_latest_is_the_last_one_put(tmp_path: Path) -> None:
    root = (tmp_path / "store" / "checkpoints").as_uri()
    for version in (1000, 20):  # another run of the same name has begun
        assert put_model(model(tmp_path / "model"), f"{root}/step-{version}") == sum(map(len, FILES.values()))
    with pytest.raises(ServiceError, match=r"the upload to file:.*/step-1000 was given up"):
        put_model(tmp_path / "model", f"{root}/step-1000", iter([False] * len(FILES) + [True]).__next__)
    assert fetched(f"{root}/{LATEST}", tmp_path / "a") == (f"{root}/step-20", FILES)
    assert put_model(tmp_path / "model", f"{root}/step-1000")
    assert fetched(f"{root}/step-1000", tmp_path / "b")[1] == FILES
    assert put_model(model(tmp_path / "other", {"config.json": b"[]"}), f"{root}/step-20") == 2
    assert fetched(f"{root}/step-20", tmp_path / "c")[1] == {"config.json": b"[]"}  # and not what was there before


def test_a_model_that_was_put_in_part_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    whole, url = model(tmp_path / "model"), (tmp_path / "store" / "step-8").as_uri()
    put_model(whole, url)
    (whole / "model.safetensors").unlink()
    (whole / "model.safetensors").symlink_to("/proc/self/mem")  # opens, and cannot be read
    with pytest.raises(OSError, match="Input/output error"):
        put_model(whole, url)
    with pytest.raises(FieldError, match=r"incomplete according to its pipelinerl-manifest.json \(its upload has not ended\)"):
        fetched(url, tmp_path / "a")
    (tmp_path / "store" / "step-8" / MANIFEST).write_text('{"format": 1, "files": {"config.js')
    with pytest.raises(FieldError, match="is incomplete"):
        fetched(url, tmp_path / "b")


@pytest.mark.parametrize("damage", [b"[]", b"{}\n", b""])
def test_damage_is_found_when_a_model_is_fetched(tmp_path: Path, damage: bytes) -> None:
    url = (tmp_path / "store" / "step-8").as_uri()
    put_model(model(tmp_path / "model"), url)
    (tmp_path / "store" / "step-8" / "config.json").write_bytes(damage)
    with pytest.raises(ServiceError, match=r"step-8/config.json does not match pipelinerl-manifest.json"):
        fetched(url, tmp_path / "a")


def test_what_is_no_model_or_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(FieldError, match=r"model.name = .*: there is no model"):
        fetched((store / "step-8").as_uri(), tmp_path / "a")
    model(store / "hub", {"config.json": b"{}", "sub/w": b"w"})  # somebody else's, without a manifest
    assert fetched((store / "hub").as_uri(), tmp_path / "b")[1] == {"config.json": b"{}", "sub/w": b"w"}
    for number, name in enumerate(("../out", "/etc/passwd", "a/../../out", "")):
        (store / "hub" / MANIFEST).write_text(json.dumps({"format": 1, "files": {name: [1, "x"]}}))
        with pytest.raises(FieldError, match="unsafe name"):
            fetched((store / "hub").as_uri(), tmp_path / f"c{number}")
    (store / LATEST).write_text("../../etc")
    with pytest.raises(FieldError, match="unsafe name"):
        fetched((store / LATEST).as_uri(), tmp_path / "d")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("/mnt/bucket", "give the URL of a folder: s3://, gs://, hf://, file://"),
        ("s3:///runs", "names no bucket"),
        ("s3://models/my team", "%20"),
        ("s3://[/runs", "is not a URL"),
        ("file:///", "names no folder"),
        ("file://models/team", "three slashes"),
        ("s3://key:word@bucket/runs", "must not contain credentials"),
        ("s3://bucket/runs?region=x", r"must not contain \? or #"),
    ],
)
def test_a_url_that_cannot_be_is_refused_by_its_field(url: str, problem: str) -> None:
    data = {"name": "tiny", "model": {"name": "/m", "source": "path"}, "task": {}, "checkpoint": {"upload": url}}
    with pytest.raises(RecipeError, match=f"checkpoint.upload = .*{problem}"):
        recipe_from_data(data, "tiny")


@pytest.fixture
def at_its_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("services.trainer.run.evaluates_first", lambda *_: False)
    monkeypatch.setattr(uploads, "BACKOFF", Backoff(0.01, 0.01))


@pytest.mark.usefixtures("at_its_end")
async def test_a_run_ends_when_its_model_is_uploaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, run_dir = tmp_path / "store", tmp_path / "run"
    (tmp_path / "store").touch()  # a file, where no folder can be made
    run_dir.mkdir()
    checkpoint = {"upload": store.as_uri()}
    async with training_run(run_dir, checkpoint=checkpoint) as (run, policy), asyncio.timeout(120):
        run.loop.version, policy.version, stop = 4, 4, asyncio.Event()
        running = asyncio.create_task(run.run(stop))
        await until_logged(caplog, "cannot upload a checkpoint, trying again")
        await until((run_dir / "checkpoint" / "config.json").is_file)  # nothing waits for the store
        registry = run.recorder.metrics.registry
        assert registry.get_sample_value("pipelinerl_trainer_checkpoint_upload_waiting_seconds") > 0  # type: ignore[operator]
        stop.set()
        await running
        assert "the run ends, but its last checkpoint is not uploaded yet" in caplog.text
    store.unlink()
    async with training_run(run_dir, checkpoint=checkpoint) as (run, policy), asyncio.timeout(120):
        run.loop.version, policy.version = 4, 4
        await run.run(asyncio.Event())
        assert run.recorder.metrics.registry.get_sample_value("pipelinerl_trainer_checkpoint_upload_version") == 4
    url = f"{store.as_uri()}/{RUN}/checkpoints"
    assert json.loads((run_dir / uploads.UPLOADED).read_text())["url"] == f"{url}/step-4"
    assert list((run_dir / "uploading").iterdir()) == []
    assert fetched(f"{url}/{LATEST}", tmp_path / "a") == (f"{url}/step-4", {"config.json": b'{"version": 4}'})


@pytest.mark.usefixtures("at_its_end")
async def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "store"
    run_dir.mkdir()
    store.touch()
    async with training_run(run_dir) as (run, _), asyncio.timeout(120):
        sending = uploads.Uploads(store.as_uri(), run_dir, RUN, run.recorder.metrics.uploads)
        async with sending.running():
            for version in (1, 2, 3):
                folder = model(run_dir / "checkpoints" / f"step-{version}", {"config.json": b"%d" % version})
                await sending.take(folder, version)
                (folder / "config.json").unlink()  # it is no longer kept
                await until_logged(caplog, "trying again")
            aside = {path.name for path in (run_dir / "uploading").iterdir()}
            assert "step-3" in aside  # and one that is being tried, at most
            assert len(aside) <= 2
            store.unlink()
            await sending.all_done()
            assert sending.waiting_s == 0
    url = f"{store.as_uri()}/{RUN}/checkpoints"
    assert fetched(f"{url}/{LATEST}", tmp_path / "a") == (f"{url}/step-3", {"config.json": b"3"})
