"""Adapters: they alone are trained, what is served is the policy that they make, and nothing else notices them.

A checkpoint that is written while training goes on holds the policy of when it began, as transformers loads it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import AlgorithmConfig, LoraConfig, ModelConfig, Recipe, TrainerConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.settings import RankSettings
from pipelinerl.transfer.chunks import Unpacker, add_low_rank, chunk_of
from services.trainer.checkpoint.checkpointer import VALUE_HEAD_FILE, PolicyExport
from services.trainer.checkpoint.state_files import restore
from services.trainer.learn.lora import add_adapters, layer_adapters, served_parameters, served_weights
from services.trainer.learn.model import frozen_copy, load_policy, wrap_model
from services.trainer.learn.policy import Policy
from services.trainer.learn.step import Learner
from services.trainer.loading import load_learner, sharded_learner, weight_sender
from services.trainer.loop import PolicyTrainer
from services.trainer.weight_sync import sender as weight_sender_module
from services.trainer.worker import worker_loop
from services.trainer.world import VALUE_HEAD, WEIGHTS, join_ranks, leave_ranks
from tests.support.learner import LENGTHS, SHAPE, VOCABULARY, build, group_of, model_of, sequences_of
from tests.unit.ranks import Job, on_ranks

FAMILIES = ("llama-tied", "qwen2-untied", "gpt2")
"""Tied and untied heads, biases, and weights kept as [in, out]."""
RANK_4 = LoraConfig(rank=4, alpha=8.0)
TOKENS = np.arange(17) % VOCABULARY


def adapted(family: str) -> Policy:
    base = model_of(family)
    torch.manual_seed(1)
    add_adapters(base, RANK_4)
    return wrap_model(base)


def learner(policy: Policy, **algorithm: Any) -> Learner:
    trainer = TrainerConfig(learning_rate=2e-2, tokens_per_microbatch=64, lora=RANK_4)
    return Learner(policy, AlgorithmConfig(**algorithm), trainer, reference=policy)


def train(policy: Policy, steps: int = 3, **algorithm: Any) -> Learner:
    learning = learner(policy, **algorithm)
    for version in range(steps):
        group = group_of(sequences_of(LENGTHS, seed=version), seed=version)
        assert not learning.step(learning.prepare([group], version))["skipped"]
    return learning


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> np.ndarray:
    ids = torch.from_numpy(TOKENS)[None]
    logits = model.eval()(input_ids=ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


def test_merging_by_hand_rounds_once() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # [out 2, in 3]
    a, b = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[3.0], [-1.0]])  # B·A = [[3, 0, 6], [-1, 0, -2]]
    expected = torch.tensor([[2.5, 2.0, 6.0], [3.5, 5.0, 5.0]])
    assert torch.equal(add_low_rank(weight, a, b, 0.5, transposed=False), expected)
    assert torch.equal(add_low_rank(weight.T.contiguous(), a, b, 0.5, transposed=True), expected.T)
    # bfloat16 has 256 and then 258. B·A = 1 + 1/512: above 257, hence 258. B·A rounded first is 1, and 257 goes to 256.
    weight = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0], [1 / 512]]), torch.ones(1, 2)
    assert add_low_rank(weight, a, b, 1.0, transposed=False).item() == 258
    # A factor takes part as the forward pass has it, in the weight's dtype: 1 + 1/512 is 1 there.
    assert add_low_rank(weight, torch.tensor([[1 + 1 / 512]]), torch.ones(1, 1), 1.0, transposed=False).item() == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_served_is_the_original_model_in_form_and_the_trained_policy_in_values(family: str) -> None:
    policy, original = adapted(family), model_of(family)
    train(policy)
    form = [(name, tuple(weight.shape), weight.dtype) for name, weight in original.named_parameters()]
    assert [(name, tuple(weight.shape), weight.dtype) for name, weight, _ in served_parameters(policy.model)] == form
    weights = {name: weight.clone() for name, weight in served_weights(policy.model)}
    assert [(name, tuple(weight.shape), weight.dtype) for name, weight in weights.items()] == form
    before = dict(original.named_parameters())
    moved = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert moved == {f"{name}.weight" for name in layer_adapters(policy.model)}

    untrained = logprobs(original)
    missing, unexpected = original.load_state_dict(weights, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    np.testing.assert_allclose(logprobs(original), policy.sequence_logprobs(TOKENS), atol=1e-5)
    assert np.abs(logprobs(original) - untrained).max() > 0.05


def test_sixteen_bit_products_below_half_a_unit_in_the_last_place_survive_on_average() -> None:
    base = model_of("qwen2-untied").to(torch.bfloat16)
    add_adapters(base, RANK_4)
    adapter = layer_adapters(base)["model.layers.0.mlp.up_proj"]
    x = torch.randn(2, 500, adapter.a.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    before = adapter.layer(x)
    assert torch.equal(before, torch.nn.functional.linear(x, adapter.weight))
    with torch.no_grad():
        adapter.b.normal_(std=1e-5)
    changed = adapter.layer(x).float() - before.float()
    product = adapter.scaling * x.float() @ adapter.a.float().T @ adapter.b.float().T
    assert product.abs().mean() < before.abs().mean() / 1000
    assert (changed * product).sum().item() == pytest.approx((product**2).sum().item(), rel=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_model_without_adapters(family: str) -> None:
    policy = adapted(family)
    copy = frozen_copy(policy)  # made before training, as one would without adapters
    with_copy = Learner(policy, AlgorithmConfig(kl_coefficient=0.1), TrainerConfig(lora=RANK_4), reference=copy)
    without = train(policy, kl_coefficient=0.1)
    group = group_of(sequences_of(LENGTHS, seed=7), seed=7)
    np.testing.assert_array_equal(without.score(TOKENS, adapters=False), copy.sequence_logprobs(TOKENS))
    assert np.abs(without.score(TOKENS) - without.score(TOKENS, adapters=False)).max() > 0.05
    told = with_copy.step(with_copy.prepare([group], 3))["reference_kl"]  # at a learning rate that changes next to nothing
    assert without.step(without.prepare([group], 3))["reference_kl"] == pytest.approx(told, rel=1e-3)
    assert told > 1e-3


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "template").touch(mode=0o600)


def exported(policy: Policy, folder: Path) -> Path:
    export = PolicyExport(policy.model, cast(Any, NoTokenizer()), policy.model.dtype)
    folder.mkdir()
    export.stage(learner(policy))
    export.write(folder, {})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", "some"])
def test_checkpoints_load_with_transformers_and_with_peft(family: str, targets: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model_of(family).save_pretrained(tmp_path / "base")
    some = ["c_attn"] if family == "gpt2" else ["q_proj", "mlp.up_proj"]
    lora = LoraConfig(rank=3, alpha=6.0, rslora=targets == "some", target_modules=some if targets == "some" else targets)
    config = ModelConfig(source="path", name=str(tmp_path / "base"), max_context=64)
    policy = load_policy(str(tmp_path / "base"), config, TrainerConfig(lora=lora))
    train(policy)
    folder = exported(policy, tmp_path / "checkpoint")

    expected = policy.sequence_logprobs(TOKENS)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(logprobs(whole), expected, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    np.testing.assert_allclose(logprobs(PeftModel.from_pretrained(base, folder / "adapter")), expected, atol=1e-5)
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["base_model_name_or_path"]) == (3, str(tmp_path / "base"))
    assert written["inference_mode"] is True


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["q_proj", "qkv"], r"trainer.lora.target_modules = 'qkv'.*no such layer.*down_proj.*q_proj"),
        (["lm_head"], "matches lm_head, which is the output head or not a linear layer"),
        (["embed_tokens"], "matches model.embed_tokens, which is the output head or not a linear layer"),
        (["mlp"], "matches model.layers.0.mlp, which is the output head or not a linear layer"),
    ],
)
def test_targets_that_cannot_be(targets: list[str], problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        add_adapters(model_of("llama-tied"), LoraConfig(target_modules=targets))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft's, of the same layers
def test_experts_in_one_tensor_are_refused_and_attention_is_adapted() -> None:
    mixture = MODELS["qwen3-moe"]()
    problem = r"'all-linear': matches model.layers.0.mlp.experts, one tensor .*, such as k_proj, o_proj, q_proj, v_proj"
    with pytest.raises(FieldError, match=problem):
        add_adapters(mixture, LoraConfig())
    mixture = MODELS["qwen3-moe"]()
    add_adapters(mixture, load_recipe("math-moe").trainer.lora)
    assert set(layer_adapters(mixture)) == {f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"}


# Checkpoints, and what actors are sent

GROUP = group_of(sequences_of(LENGTHS))
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, value head": {"model": {"dtype": "bfloat16"}, "algorithm": {"advantage": "value"}},
    "adapters in bfloat16": {"model": {"dtype": "bfloat16"}, "trainer": {"lora": {"rank": 2}}},
}

GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9}
"""As that of Llama 2, which transformers reads but refuses to write, because `do_sample` is not set."""


def trainer_of(learner: Learner, recipe: Recipe, sender: Any = None) -> PolicyTrainer:
    return PolicyTrainer(learner, cast(Any, NoTokenizer()), sender, recipe)


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
    os.umask(umask := os.umask(0))
    files = [path for path in folder.rglob("*") if path.is_file() and "resume" not in path.parts]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}, "others may read what the umask lets them"


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
    sender = weight_sender(learner, recipe, "gloo")
    trainer = trainer_of(learner, recipe, sender)
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
