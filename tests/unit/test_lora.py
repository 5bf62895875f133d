"""Adapters: they alone are trained, what is served is the policy that they make, and nothing else notices them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import AlgorithmConfig, LoraConfig, ModelConfig, Recipe, TrainerConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.transfer.chunks import add_low_rank
from services.trainer.checkpoint.checkpointer import PolicyExport
from services.trainer.learn.lora import (
    adapter_weights,
    adapters_off,
    add_adapters,
    layer_adapters,
    served_parameters,
    served_weights,
)
from services.trainer.learn.model import frozen_copy, load_policy, wrap_model
from services.trainer.learn.policy import Policy
from services.trainer.learn.step import Learner
from tests.support.learner import LENGTHS, SHAPE, VOCABULARY, build, group_of, model_of, sequences_of
from tests.unit.builders import make_recipe

FAMILIES = ("llama-tied", "qwen2-untied", "gpt2")
"""Tied and untied heads, biases, and weights kept as [in, out]."""
RANK_4 = LoraConfig(rank=4, alpha=8.0)
TOKENS = np.arange(17) % VOCABULARY


def adapted(family: str, lora: LoraConfig = RANK_4, **options: Any) -> Policy:
    base = model_of(family)
    torch.manual_seed(1)
    add_adapters(base, lora)
    return wrap_model(base, **options)


def learner(policy: Policy, **algorithm: Any) -> Learner:
    trainer = TrainerConfig(learning_rate=2e-2, tokens_per_microbatch=64, lora=RANK_4)
    return Learner(policy, AlgorithmConfig(**algorithm), trainer, reference=policy)


def train(policy: Policy, steps: int = 3, **algorithm: Any) -> Learner:
    learning = learner(policy, **algorithm)
    for version in range(steps):
        group = group_of(sequences_of(LENGTHS, seed=version), seed=version)
        assert not learning.step(learning.prepare([group], version))["skipped"]
    return learning


def served(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in served_weights(policy.model)}


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
    weights = served(policy)
    assert [(name, tuple(weight.shape), weight.dtype) for name, weight in weights.items()] == form
    before = dict(original.named_parameters())
    moved = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert moved == {f"{name}.weight" for name in layer_adapters(policy.model)}

    untrained = logprobs(original)
    missing, unexpected = original.load_state_dict(weights, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    np.testing.assert_allclose(logprobs(original), policy.sequence_logprobs(TOKENS), atol=1e-5)
    assert np.abs(logprobs(original) - untrained).max() > 0.05


def test_scaling_is_by_rank_or_by_its_root() -> None:
    for rslora, scaling in ((False, 8 / 4), (True, 8 / 2)):
        policy = adapted("llama-tied", LoraConfig(rank=4, alpha=8.0, rslora=rslora))
        name, adapter = next(iter(layer_adapters(policy.model).items()))
        with torch.no_grad():
            adapter.b.normal_()
        expected = adapter.weight + scaling * adapter.b @ adapter.a
        torch.testing.assert_close(served(policy)[f"{name}.weight"], expected)


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


def test_adapters_come_back_after_an_error() -> None:
    policy = train(adapted("llama-tied")).policy
    before = policy.sequence_logprobs(TOKENS)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(policy.model):
        raise RuntimeError("inside")
    np.testing.assert_array_equal(policy.sequence_logprobs(TOKENS), before)


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def exported(policy: Policy, folder: Path) -> Path:
    tokenizer: PreTrainedTokenizerBase = NoTokenizer()  # type: ignore[assignment]
    export = PolicyExport(policy.model, tokenizer, policy.model.dtype)
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
    lora = LoraConfig(rank=3, alpha=6.0, rslora=True, target_modules=some if targets == "some" else "all-linear")
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


def test_a_model_of_all_weights_has_no_adapter(tmp_path: Path) -> None:
    policy = wrap_model(model_of("llama-tied"))
    assert list(adapter_weights(policy.model)) == []
    assert not (exported(policy, tmp_path / "checkpoint") / "adapter").exists()


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
@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("mixtral", {"num_local_experts": 2}),
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
    ],
)
def test_experts_in_one_tensor_are_refused_and_attention_is_adapted(kind: str, experts: dict[str, int]) -> None:
    mixture = build(kind, **SHAPE, **experts)
    problem = r"'all-linear': matches model.layers.0.mlp.experts, one tensor .*, such as k_proj, o_proj, q_proj, v_proj"
    with pytest.raises(FieldError, match=problem):
        add_adapters(mixture, LoraConfig())
    mixture = build(kind, **SHAPE, **experts)
    add_adapters(mixture, load_recipe("math-moe").trainer.lora)
    assert set(layer_adapters(mixture)) == {f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"}


def test_a_recipe_says_adapters_by_naming_one_field_and_cannot_say_some() -> None:
    sizes = {"tokens_per_microbatch": 64, "batch_size": 4}
    recipe: Recipe = make_recipe(trainer={**sizes, "lora": {"rank": 8}})
    assert recipe.trainer.lora == LoraConfig(rank=8, alpha=32.0, rslora=False, target_modules="all-linear")
    wrong: dict[str, dict[str, Any]] = {"rank": {"rank": 0}, "alpha": {"alpha": 0.0}, "name at least": {"target_modules": []}}
    for field, lora in wrong.items():
        with pytest.raises(ValueError, match=field):
            make_recipe(trainer={**sizes, "lora": lora})


def test_frozen_products_cost_two_passes_of_three() -> None:
    """Three passes of the result are two passes of the frozen products, and three of the adapters' products."""
    whole, adapters = wrap_model(model_of("llama-tied")), adapted("llama-tied")
    group = [group_of(sequences_of(LENGTHS))]
    trained = sum(weight.numel() for weight in adapters.model.parameters() if weight.requires_grad)
    forward, cost = learner(whole).cost_model, learner(adapters).cost_model
    assert 3 * cost.per_token == pytest.approx(2 * forward.per_token + 6 * trained)
    assert 3 * cost.per_output_token == pytest.approx(2 * forward.per_output_token)
    assert cost.per_pair == forward.per_pair > 0
    assert learner(adapters).prepare(group, 0).flops < learner(whole).prepare(group, 0).flops
