"""A checkpoint that is written while training goes on holds the policy of when it began, as transformers loads it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import RankSettings
from pipelinerl.transfer.chunks import Unpacker, chunk_of
from services.trainer.checkpoint.checkpointer import VALUE_HEAD_FILE, PolicyExport
from services.trainer.checkpoint.state_files import restore
from services.trainer.learn.step import Learner
from services.trainer.loading import load_learner, sharded_learner, weight_sender
from services.trainer.loop import PolicyTrainer
from services.trainer.weight_sync import sender as weight_sender_module
from services.trainer.worker import worker_loop
from services.trainer.world import VALUE_HEAD, WEIGHTS, join_ranks, leave_ranks
from tests.support.learner import LENGTHS, SHAPE, build, group_of, model_of, sequences_of
from tests.unit.ranks import Job, on_ranks
from tests.unit.test_lora import NoTokenizer

GROUP = group_of(sequences_of(LENGTHS))
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, value head": {"model": {"dtype": "bfloat16"}, "algorithm": {"advantage": "value"}},
    "adapters in bfloat16": {"model": {"dtype": "bfloat16"}, "trainer": {"lora": {"rank": 2}}},
}

GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9}
"""As that of Llama 2, which transformers reads but refuses to write, because `do_sample` is not set."""


def trainer_of(learner: Learner, recipe: Recipe) -> PolicyTrainer:
    nothing: Any = None
    tokenizer: Any = NoTokenizer()
    return PolicyTrainer(learner, tokenizer, nothing, recipe)


def checkpoint_beside_training(trainer: PolicyTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.step(trainer.learner.prepare([GROUP], 6))
    then = {name: weight.clone() for name, weight in trainer.learner.gather(WEIGHTS)}
    then |= {f"value_head.{name}": weight.clone() for name, weight in trainer.learner.gather(VALUE_HEAD)}
    with pytest.raises(AssertionError, match="the weights are of version 7, not 6"):
        trainer.begin_checkpoint(6)
    write = trainer.begin_checkpoint(7)
    trainer.step(trainer.learner.prepare([GROUP], 7))
    with torch.no_grad():
        for weight in trainer.learner.policy.parameters():
            weight.fill_(torch.nan)
    folder.mkdir()
    write(folder)
    return then


def check(folder: Path, then: dict[str, torch.Tensor], recipe: Recipe) -> None:
    dtype = getattr(torch, recipe.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    named = dict(model.named_parameters())
    assert {weight.dtype for weight in named.values()} == {dtype}
    assert json.loads((folder / "config.json").read_text())["dtype"] == recipe.model.dtype
    heads = {name for name in then if name.startswith("value_head.")}
    assert named.keys() == then.keys() - heads
    for name, weight in named.items():
        assert torch.equal(weight, then[name].to(dtype)), name
    assert (folder / VALUE_HEAD_FILE).is_file() == bool(heads)
    for name in heads:
        assert torch.equal(load_file(folder / VALUE_HEAD_FILE)[name.removeprefix("value_head.")], then[name])
    assert (folder / "adapter" / "adapter_config.json").is_file() == (recipe.trainer.lora is not None)
    assert json.loads((folder / "pipelinerl.json").read_text()) == {"recipe": "unit", "policy_version": 7, "seed": 0}


@pytest.fixture
def source(tmp_path: Path) -> str:
    model_of("llama-tied", max_position_embeddings=64).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(GENERATION))
    return str(tmp_path / "model")


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_of_when_it_began(source: str, tmp_path: Path, case: str) -> None:
    recipe = Job(source, **CASES[case]).recipe()
    learner = load_learner(recipe, source, RankSettings())
    trainer, folder = trainer_of(learner, recipe), tmp_path / "partial"
    then = checkpoint_beside_training(trainer, folder)
    check(folder, then, recipe)
    assert GENERATION.items() <= json.loads((folder / "generation_config.json").read_text()).items()
    again = load_learner(recipe, source, RankSettings(), folder / "resume" / "state")
    assert again.optimizer.steps_taken == 1
    for name, weight in again.gather(WEIGHTS):
        assert torch.equal(weight, then[name]), name
    restore(learner, folder / "resume" / "state")  # and its weights are numbers again
    assert all(torch.equal(weight, then[name]) for name, weight in learner.gather(WEIGHTS)) == (recipe.trainer.lora is None)


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-tied": lambda: model_of("llama-tied", max_position_embeddings=64),
    "mixtral": lambda: build("mixtral", **SHAPE | EXPERTS, num_local_experts=3),
    "qwen3-moe": lambda: build("qwen3_moe", **SHAPE | EXPERTS, num_experts=3, moe_intermediate_size=16),
}


@pytest.mark.parametrize(("family", "converted"), [("llama-tied", 0), ("mixtral", 3), ("qwen3-moe", 2)])
def test_actors_are_sent_what_files_hold(family: str, converted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture each expert's own weights, under the names of its files, though transformers has them stacked. A snapshot
    asks transformers for `converted` parameters of each layer only."""
    source = str(tmp_path / "model")
    MODELS[family]().save_pretrained(source)
    recipe = Job(source).recipe()
    learner = load_learner(recipe, source, RankSettings())
    sender, tokenizer = weight_sender(learner, recipe, "gloo"), cast(Any, NoTokenizer())
    trainer = PolicyTrainer(learner, tokenizer, sender, recipe)
    asked: list[str] = []

    def revert(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        asked.extend(weights)
        return revert_weight_conversion(model, weights)

    monkeypatch.setattr(weight_sender_module, "revert_weight_conversion", revert)
    snapshot = trainer.snapshot(PolicyVersion(1, 0))
    assert len(asked) == converted * learner.policy.model.config.num_hidden_layers
    unpacker = Unpacker(sender.manifest, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    sent: dict[str, torch.Tensor] = {}
    for chunk in sender.manifest.chunks:
        unpacker.memory_for(chunk).copy_(chunk_of(snapshot.stream, chunk))
        sent |= unpacker.add(chunk)
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert sent.keys() == files.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in files.items())
    assert trainer.snapshot(PolicyVersion(1, 0)) is snapshot
    sha256 = hashlib.sha256(snapshot.stream.numpy().data).digest()
    assert snapshot.sha256() == sha256
    snapshot.stream.zero_()
    assert snapshot.sha256() == sha256, "the journal and the weight log share one digest"


def test_a_mixture_with_adapters_is_written_whole(tmp_path: Path) -> None:
    source, folder = str(tmp_path / "model"), tmp_path / "partial"
    MODELS["qwen3-moe"]().save_pretrained(source)
    lora = {"rank": 2, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    recipe = Job(source, model={"dtype": "bfloat16"}, trainer={"lora": lora}).recipe()
    then = checkpoint_beside_training(trainer_of(load_learner(recipe, source, RankSettings()), recipe), folder)
    check(folder, then, recipe)


def checkpoints_of_ranks(source: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    join_ranks(torch.device("cpu"))
    found = {}
    for case, changes in CASES.items():
        recipe = Job(source, **changes).recipe()
        learner = sharded_learner(recipe, source, torch.device("cpu"))
        if learner.world.is_first:
            trainer = trainer_of(learner, recipe)
            found[case] = checkpoint_beside_training(trainer, folder / case)
            trainer.end()
        else:
            worker_loop(learner)
    leave_ranks()
    return found


def test_so_it_is_of_several_ranks_whose_weights_are_float32_shards(source: str, tmp_path: Path) -> None:
    found = on_ranks(2, checkpoints_of_ranks, source, tmp_path)[0]
    for case, then in found.items():
        check(tmp_path / case, then, Job(source, **CASES[case]).recipe())


def test_an_export_that_fails_leaves_room_for_the_next_checkpoint(source: str, tmp_path: Path) -> None:
    recipe = Job(source).recipe()
    trainer = trainer_of(load_learner(recipe, source, RankSettings()), recipe)
    for name in ("full", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "pipelinerl.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trainer.begin_checkpoint(7)(tmp_path / "full")
    trainer.begin_checkpoint(7)(tmp_path / "folder")
    trainer.begin_checkpoint(7)
    trainer.end()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    class Private:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "chat").mkdir()
            (folder / "chat" / "template").touch(mode=0o600)

    tokenizer: Any = Private()
    weights: dict[str, torch.Tensor] = dict(model_of("llama-tied").named_parameters())
    before = os.umask(umask)
    try:
        export = PolicyExport(model_of("llama-tied"), tokenizer, torch.float32)
        export.staged = {WEIGHTS: weights}
        export.write(tmp_path, {})
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "template", "pipelinerl.json"} <= modes.keys()
    assert set(modes.values()) == {oct(mode)}
