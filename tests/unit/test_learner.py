"""The learner on tiny Llama- and Qwen2-shaped models: packing, padding and micro-batches change nothing; steps do."""

import inspect
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import Sequence
from pipelinerl.recipe.fields import AlgorithmConfig, LoraConfig, ModelConfig, TrainerConfig
from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.checkpointer import VALUE_HEAD_FILE
from services.trainer.checkpoint.state_files import trained_parameters
from services.trainer.learn import attention
from services.trainer.learn.attention import VARLEN, PackedLayout, varlen_attention
from services.trainer.learn.batch import TrainingGroup, host_microbatch
from services.trainer.learn.lora import add_adapters
from services.trainer.learn.model import frozen_copy, hub_arguments, load_policy, wrap_model
from services.trainer.learn.optimizer import PolicyOptimizer, build_adamw, learning_rate
from services.trainer.learn.policy import Float32Head, add_value_head
from services.trainer.learn.step import Learner, PreparedStep
from services.trainer.loading import load_learner
from services.trainer.world import VALUE_HEAD
from tests.support.learner import (
    EPISODES,
    FAMILIES,
    LENGTHS,
    LOSSES,
    SHAPE,
    VOCABULARY,
    assert_same,
    build,
    episodes_of,
    gradients_of,
    group_of,
    model_of,
    near_policy,
    packed_gradients,
    plain_gradients,
    plain_logprobs,
    sequences_of,
    told_anywhere,
)
from tests.unit.builders import make_recipe


@pytest.mark.parametrize("normalization", ["token", "sequence", "batch"])
@pytest.mark.parametrize("mask", ["none", "icepop", "sequence", "off_policy_sequence"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_the_same_packed_into_one_micro_batch_or_several(loss: str, mask: str, normalization: str) -> None:
    model = model_of("llama-tied")
    group = near_policy(model, LENGTHS)
    bounds = {"mask_low": 0.9, "mask_high": 1.1, "mask_kl": 0.05}
    config = AlgorithmConfig(loss=loss, normalization=normalization, mask=mask, **bounds)
    expected, policy = plain_gradients(model, group, config), wrap_model(model)
    for budget in (128, 24):
        assert_same(expected, packed_gradients(policy, group, config, budget))


def parts_of(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).filter(lambda parts: len(parts) % 2 == 1)))


@st.composite
def shapes(draw: st.DrawFn) -> list[list[tuple[int, tuple[int, ...]]]]:
    of_one = st.integers(1, 3).map(lambda number: [(draw(st.integers(1, 9)), parts_of(draw)) for _ in range(number)])
    return draw(st.lists(of_one, min_size=1, max_size=4))


@given(shapes(), st.booleans(), st.permutations(range(12)))
def test_a_row_has_the_sampled_tokens(shape: list[list[tuple[int, tuple[int, ...]]]], share: bool, order: list[int]) -> None:
    """Each with what comes before it in its branch, as the row has it, and with its own log μ, advantage, weight and lag."""
    every = [branch for episode in episodes_of(shape) for branch in episode.all_branches]
    branches = [every[index] for index in order if index < len(every)]
    spans = [tuple(replace(span, version=place) for place, span in enumerate(one.spans)) for one in branches]
    branches = [replace(one, spans=own) for one, own in zip(branches, spans, strict=True)]
    numbers = np.arange(1.0, len(branches) + 1)
    batch = host_microbatch(branches, numbers, numbers / 2, 9, share_prompts=share)
    ends = np.cumsum(batch.lengths).tolist()
    for place, index in enumerate(sorted(range(len(branches)), key=lambda index: -branches[index].num_tokens)):
        branch, own = branches[index], batch.branch_index == place
        tokens = [*branch.prompt_token_ids, *branch.completion_token_ids]
        sampled = [len(branch.prompt_token_ids) + at for turn in branch.turns for at in range(turn.start, turn.end)]
        row = batch.places[ends[place] - batch.lengths[place] : ends[place]]
        assert batch.token_ids[row].tolist() == tokens[:-1]
        assert batch.predictors[own].tolist() == [row[at - 1] for at in sampled]
        assert batch.targets[own].tolist() == [tokens[at] for at in sampled]
        assert batch.behaviour_logprobs[own].tolist() == branch.behaviour_logprobs.tolist()
        assert set(batch.advantages[own]) == {index + 1}
        assert set(batch.weights[own]) == {(index + 1) / 2}
        of_turns = [9 - number for number, turn in enumerate(branch.turns) for _ in range(turn.start, turn.end)]
        assert batch.lags[own].tolist() == of_turns
    assert len(batch.targets) == sum(len(branch.behaviour_logprobs) for branch in branches)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("normalization", ["token", "sequence", "batch"])
def test_gradients_of_episodes_are_those_of_each_branch_alone(attention: str, normalization: str) -> None:
    """In one micro-batch or several, which have the branches of an episode apart; by ratios of branches, some masked."""
    model, group = model_of("llama-tied"), group_of(episodes_of(EPISODES))
    changes = {"loss": "gspo", "clip_low": 0.3, "clip_high": 9.0, "mask": "sequence", "mask_low": 0.3, "mask_high": 4.0}
    config = AlgorithmConfig(**changes, normalization=normalization)
    expected = plain_gradients(model, group, config, temperature=0.7)
    policy = wrap_model(model, attention)
    for budget, multiple in ((128, 1), (24, 1), (24, 8)):
        assert_same(expected, packed_gradients(policy, group, config, budget, multiple, temperature=0.7))
    learner = Learner(policy, config, TrainerConfig(tokens_per_microbatch=24))
    metrics = learner.step(learner.prepare([group], 0))
    assert (metrics["sequences_trained"], metrics["tokens_trained"], metrics["lag_histogram"]) == (4, 37, {0: 37})
    assert 0 < metrics["mask_fraction"] < 1


def test_a_sliding_window_is_kept_inside_a_sequence() -> None:
    model = build("mistral", **SHAPE | {"sliding_window": 4})
    policy, sequence = wrap_model(model), sequences_of([(3, 20)])[0]
    assert policy.attention == VARLEN
    expected = plain_logprobs(model, sequence)
    model.set_attn_implementation(policy.attention)
    batch = host_microbatch([sequence], np.zeros(1), np.ones(1), 0).on("cpu")
    torch.testing.assert_close(policy.scores(batch.row, batch.predictors, batch.targets).logprobs, expected)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_the_flash_kernel_equals_padded_rows(window: int | None, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with torch's signature. The second of the shared sequences begins with 3 tokens of the first."""
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)

    def kernel(*args: Tensor, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs).arguments
        ends, (left, right), out = call["cu_seq_q"], call["window_size"], []
        assert (ends.dtype, call["max_q"], right) == (torch.int32, int(ends.diff().max()), 0)
        for begin, end in itertools.pairwise(ends.tolist()):
            q, k, v = (call[name][begin:end].transpose(0, 1) for name in ("query", "key", "value"))
            distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (distance >= 0) & (distance <= (left if left >= 0 else end))
            one = scaled_dot_product_attention(q, k, v, seen, scale=call["scale"], enable_gqa=call["enable_gqa"])
            out.append(one.transpose(0, 1))
        return torch.cat(out)

    places = np.concatenate((np.arange(9), np.arange(3), np.arange(9, 12))) if shared else None
    layout = PackedLayout(np.array([9, 6] if shared else [7, 5]), "cpu", places)
    tokens = [torch.randn(1, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2)]

    def outputs() -> list[Tensor]:
        out, _ = varlen_attention(nn.Identity(), *tokens, None, scaling=0.3, sliding_window=window, packed=layout)
        return [out, *torch.autograd.grad(out.square().sum(), tokens)]

    expected = outputs()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_attend_rows", attention._attend_flash)  # which only a GPU is given
    for mine, padded in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(mine, padded)


def test_attention_terms_that_would_be_dropped_and_models_whose_state_crosses_sequences_are_refused() -> None:
    tokens = torch.zeros(1, 2, 3, 4)
    with pytest.raises(FieldError, match="needs softcap, which auto lacks: set eager"):
        varlen_attention(nn.Identity(), tokens, tokens, tokens, None, packed=PackedLayout(np.array([3])), softcap=30.0)
    model = build("mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(FieldError, match=r"MambaForCausalLM scores packed sequences.*; use another architecture"):
        wrap_model(model)
    without = patch.object(PreTrainedModel, "set_attn_implementation", side_effect=ImportError("no flash_attn"))
    with without, pytest.raises(FieldError, match=r"attention = 'flash_attention_2': not available here: no flash_attn"):
        wrap_model(model_of("llama-tied"), "flash_attention_2")
    # Its layers do not pass on the packed layout.
    assert wrap_model(build("stablelm", **SHAPE)).attention == "eager"


def test_a_model_that_does_more_to_its_logits_makes_them_itself_and_gets_no_value_head() -> None:
    model = build("granite", **SHAPE | {"logits_scaling": 3.0})
    policy, group = wrap_model(model), group_of(sequences_of(LENGTHS))
    expected = plain_gradients(model, group, AlgorithmConfig())
    model.set_attn_implementation(policy.attention)
    assert_same(expected, packed_gradients(policy, group, AlgorithmConfig()))
    with pytest.raises(FieldError, match=r"algorithm\.advantage = 'value': needs a model with a plain output head"):
        add_value_head(policy)


def test_a_model_that_makes_its_logits_itself_has_them_in_float32_too() -> None:
    model = build("granite", **SHAPE | {"logits_scaling": 0.125}).to(torch.bfloat16)
    policy, tokens = wrap_model(model), np.arange(30) % VOCABULARY
    assert policy.own_logits
    head, hidden = model.get_output_embeddings(), list[torch.Tensor]()
    head.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[0][0].double()))
    found = policy.sequence_logprobs(tokens)
    with torch.no_grad():
        exact = torch.log_softmax(hidden[0] @ head.weight.double().t() / 0.125, -1)
    assert float(exact.std()) > 2
    assert found == pytest.approx(exact.gather(1, torch.from_numpy(tokens)[1:, None])[:, 0].numpy(), abs=1e-5)

    hidden_of_two = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    by_hand = Float32Head(2, 1, bias=False, dtype=torch.bfloat16)
    by_hand.weight.data = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    (0.5 * by_hand(hidden_of_two)).sum().backward()
    assert (hidden_of_two.grad.tolist(), by_hand.weight.grad.tolist()) == ([[1.5, 2.0]], [[0.5, 1.0]])  # type: ignore[union-attr]


def test_dropout_is_off_in_training_and_gradient_checkpointing_changes_no_gradient() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
    sequence, calls = sequences_of([(1, 9)])[0], list[object]()
    for checkpointing in (False, True):
        noisy = build("mixtral", **SHAPE, **experts)
        for model in (model_of("gpt2"), noisy):
            noiseless = plain_logprobs(model.eval(), sequence).detach().numpy()
            policy = wrap_model(model, gradient_checkpointing=checkpointing)
            found = policy.sequence_logprobs(np.append(sequence.prompt_token_ids, sequence.completion_token_ids))
            assert found == pytest.approx(noiseless, abs=1e-5)
    group = group_of(sequences_of(LENGTHS))
    bare = packed_gradients(wrap_model(model_of("llama-tied")), group, AlgorithmConfig())
    checkpointed = wrap_model(model_of("llama-tied"), gradient_checkpointing=True)
    checkpointed.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    assert_same(bare, packed_gradients(checkpointed, group, AlgorithmConfig()))
    assert len(calls) == 2, "the backward pass computes the layer again"


# Shared prompts, and sequences that have no gradient


def of_one_prompt(sequences: list[Sequence]) -> list[Sequence]:
    return [replace(sequence, prompt_token_ids=sequences[0].prompt_token_ids) for sequence in sequences]


BRANCHES = [(5, 9), (5, 3), (5, 1), (5, 17), (5, 2), (5, 8)]
"""(prompt, completion) tokens: 5 + 8 + 2 + 0 + 16 + 1 + 7 = 39 in a row that has the prompt once, 64 else."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("attention", "row_tokens"), [("auto", 39), ("sdpa", 64)])
def test_gradients_of_a_shared_prompt_are_unpacked_gradients(family: str, attention: str, row_tokens: int) -> None:
    model = model_of(family)
    group, others = near_policy(model, BRANCHES), sequences_of(LENGTHS, seed=1)
    group = replace(group, sequences=tuple(of_one_prompt(list(group.sequences))))
    both = group_of([*group.sequences, *others])
    policy = wrap_model(model, attention)
    batch = host_microbatch(list(group.sequences), np.ones(6), np.ones(6), 0, share_prompts=policy.shares_prompts)
    assert (len(batch.token_ids), batch.lengths.sum()) == (row_tokens, 64)
    config = AlgorithmConfig(loss="gspo")
    for budget in (128, 48):
        expected = plain_gradients(model, both, config, temperature=0.7)
        model.set_attn_implementation(policy.attention)
        assert_same(expected, packed_gradients(policy, both, config, budget, temperature=0.7))


def test_logprobs_entropies_and_values_after_a_shared_prompt_are_those_of_each_alone() -> None:
    """Within a sliding window, too; with adapters, the gradients of these alone."""
    model = build("mistral", **SHAPE | {"sliding_window": 7})
    torch.manual_seed(3)
    add_adapters(model, LoraConfig(rank=2))
    policy = wrap_model(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    add_value_head(policy)
    nn.init.normal_(policy.value_head.weight, std=0.1)
    sequences = of_one_prompt(sequences_of(BRANCHES))

    def results(share: bool) -> dict[str, torch.Tensor]:
        batch = host_microbatch(sequences, np.ones(6), np.ones(6), 0, share_prompts=share).on("cpu")
        scores = policy.scores(batch.row, batch.predictors, batch.targets, 0.7, entropy_grad=True)
        (scores.logprobs + scores.entropy + scores.values.square()).mean().backward()
        return {**{k: v.detach() for k, v in scores._asdict().items()}, **gradients_of(policy)}

    assert policy.shares_prompts
    apart, together = results(share=False), results(share=True)
    assert any("lora_A" in name for name in apart)
    assert_same(apart, together)


def test_sequences_of_advantage_zero_have_a_forward_pass_only_and_change_no_figure() -> None:
    policy = wrap_model(model_of("llama-tied"))
    silent, telling = near_policy(policy.model, LENGTHS), group_of(sequences_of(BRANCHES, seed=2))
    silent = replace(silent, advantages=np.zeros(6))
    policy.model.set_attn_implementation(policy.attention)

    def stepped(**algorithm: Any) -> tuple[PreparedStep, dict[str, Any]]:
        trainer = TrainerConfig(learning_rate=1e-9)
        learner = Learner(policy, AlgorithmConfig(**algorithm), trainer, reference=frozen_copy(policy))
        prepared = learner.prepare([silent, telling], 0)
        return prepared, learner.step(prepared)

    prepared, apart = stepped()
    assert [(batch.has_gradient, len(batch.lengths)) for batch in prepared.shares[0]] == [(False, 6), (True, 6)]
    everything, together = stepped(entropy_coefficient=1e-12)  # which all of them have
    assert [batch.has_gradient for batch in everything.shares[0]] == [True]
    assert apart["skipped"] == together["skipped"] == ""
    for name, figure in told_anywhere(apart).items():
        if figure and name not in ("microbatches", "packing_fill"):
            assert figure == pytest.approx(together[name], rel=1e-4, abs=1e-6), name
    assert apart["grad_norm"] > 0.1
    # Other terms of the loss reach them, and a step of nothing else stays a step.
    for other in ({"entropy_coefficient": 0.1}, {"kl_coefficient": 0.1}, {"advantage": "value"}):
        if "advantage" in other:
            add_value_head(policy)
        prepared, _ = stepped(**other)
        assert [batch.has_gradient for batch in prepared.shares[0]] == [True], other
    alone = Learner(policy, AlgorithmConfig(), TrainerConfig()).prepare([silent], 0)
    assert [batch.has_gradient for batch in alone.shares[0]] == [True]


# Scores and metrics


@pytest.mark.parametrize("family", FAMILIES)
def test_score_is_the_models_own_logprobs_at_temperature_one(family: str) -> None:
    model = model_of(family)
    learner = Learner(wrap_model(model), AlgorithmConfig(), TrainerConfig(), temperature=0.5)
    sequence = sequences_of([(1, 15)])[0]
    tokens = np.concatenate((sequence.prompt_token_ids, sequence.completion_token_ids))
    scored = learner.score(tokens)
    assert scored.dtype == np.float32
    assert scored == pytest.approx(plain_logprobs(model, sequence).detach().numpy(), abs=1e-5)


# Steps


@pytest.mark.parametrize(("normalization", "total"), [("token", 1.0), ("batch", 40 / 6)])
def test_a_sum_over_tokens_is_cut_where_their_mean_is(normalization: Any, total: float) -> None:
    """At the weight of all tokens, which `PolicyOptimizer` is told: LENGTHS have 40 completion tokens in 6 sequences."""
    learner = Learner(wrap_model(model_of("llama-tied")), AlgorithmConfig(normalization=normalization), TrainerConfig())
    with patch.object(learner.optimizer, "step", wraps=learner.optimizer.step) as step:
        learner.step(learner.prepare([group_of(sequences_of(LENGTHS))], version=0))
    assert step.call_args.kwargs["total_weight"] == pytest.approx(total)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_said(bad: float) -> None:
    policy = wrap_model(model_of("llama-tied"))
    learner = Learner(policy, AlgorithmConfig(), TrainerConfig(learning_rate=1e-2))
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    sequences = tuple(sequences_of(LENGTHS))
    outcome = learner.step(learner.prepare([TrainingGroup(sequences, np.array([bad, 1, 1, 1, 1, 1]))], version=0))
    assert outcome["skipped"] == "loss not finite"
    trained = ("sequences_trained", "tokens_trained", "lag_histogram")
    assert [outcome[name] for name in trained] == [0, 0, {}]
    assert all(torch.equal(before[name], value) for name, value in policy.model.state_dict().items())
    assert learner.optimizer.steps_taken == 0
    assert not learner.step(learner.prepare([group_of(list(sequences))], version=0))["skipped"]


def test_sixteen_bit_weights_are_the_rounding_of_their_masters() -> None:
    """Norm weights start at 1, where bfloat16 steps by 1/128 up and 1/256 down: 5 steps of about 1e-4 do not show in them."""
    policy = wrap_model(model_of("llama-tied").to(torch.bfloat16))
    live = list(policy.model.parameters())
    learner = Learner(policy, AlgorithmConfig(), TrainerConfig(learning_rate=1e-4))
    group = group_of(sequences_of(LENGTHS))
    assert not any(learner.step(learner.prepare([group], 0))["skipped"] for _ in range(5))
    masters = list(trained_parameters(learner).values())
    assert all(torch.equal(master.bfloat16(), weight) for master, weight in zip(masters, live, strict=True))
    norms = [(master.detach(), weight) for master, weight in zip(masters, live, strict=True) if weight.ndim == 1]
    assert max(float((master - 1).abs().max()) for master, _ in norms) > 3e-4
    assert all(bool((weight == 1).all()) for _, weight in norms)


# The optimizer and the learning rate


UNEQUAL = [(5, 40), (3, 21), (9, 60), (2, 3), (4, 90), (7, 11)]
WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


Stepped = tuple[Tensor, dict[str, Any]]
"""One optimizer step: the change of the weights that the optimizer holds, float32 on the host, and its figures."""


def step_on(device: str, dtype: torch.dtype, family: str = "qwen2-untied") -> Stepped:
    """Of equal weights, which 16 bit can hold, on equal data in several micro-batches.

    With an epsilon far above all gradients AdamW's first step is nearly the gradient; otherwise it would be its sign.
    """
    model = model_of(family, **WIDTHS).to(torch.bfloat16).to(device, dtype)

    def flat(parameters: Iterable[Any]) -> Tensor:
        return torch.cat([parameter.detach().float().cpu().flatten() for parameter in parameters])

    before = flat(model.parameters())
    trainer = TrainerConfig(tokens_per_microbatch=128, learning_rate=1.0, epsilon=1.0, max_grad_norm=1e6)
    learner = Learner(wrap_model(model), AlgorithmConfig(), trainer)
    outcome = learner.step(learner.prepare([group_of(sequences_of(UNEQUAL))], version=0))
    assert not outcome["skipped"]
    assert outcome["microbatches"] > 1
    return flat(trained_parameters(learner).values()) - before, outcome


def assert_near(stepped: Stepped, exact: Stepped, share: float) -> None:
    """The difference of the steps is at most `share` of the step; figures differ by as much, or that many nats."""
    (change, figures), (exact_change, exact_figures) = stepped, exact
    assert float(exact_change.norm()) > 1e-2, "nothing happened"
    assert float((change - exact_change).norm() / exact_change.norm()) < share
    for name in ("loss", "entropy", "grad_norm", "ess"):
        assert figures[name] == pytest.approx(exact_figures[name], rel=share, abs=share), name


def test_a_step_in_sixteen_bit_is_near_that_of_float32() -> None:
    assert_near(step_on("cpu", torch.bfloat16), step_on("cpu", torch.float32), 0.05)


def test_gradients_of_sixteen_bit_are_summed_in_float32() -> None:
    """1 + 2^-8 + 2^-8, one after the other, stays 1 in bfloat16, whose next number is 1 + 2^-7."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = PolicyOptimizer([weight], TrainerConfig(max_grad_norm=1e6))
    for gradient in (1.0, 2**-8, 2**-8):
        (weight * torch.tensor([gradient], dtype=torch.bfloat16)).sum().backward()
        assert weight.grad is None
    assert optimizer.step(0.0, 1.0)["grad_norm"] == 1 + 2**-7


@pytest.mark.parametrize(
    ("max_grad_norm", "total_weight", "bound"),
    [(None, 1.0, 1.0), (None, 4.9, 4.9), (None, 5.1, None), (2.0, 5.1, 2.0), (6.0, 1.0, None)],
)
def test_a_gradient_is_cut_to_the_bound_of_the_recipe_or_to_the_weight_of_all_tokens(
    max_grad_norm: float | None, total_weight: float, bound: float | None
) -> None:
    """A norm of 5; AdamW's first mean is a tenth of what it is given."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = PolicyOptimizer([weight], TrainerConfig(max_grad_norm=max_grad_norm))
    weight.grad = torch.tensor([3.0, 4.0])
    figures = optimizer.step(0.0, total_weight)
    assert (figures["grad_norm"], figures["clipped"], figures["skipped"]) == (5.0, bound is not None, "")
    given = torch.tensor([0.6, 0.8]) * (bound or 5.0)
    torch.testing.assert_close(optimizer.moments(weight)["exp_avg"], given / 10, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("own", "rate"), [(None, 1e-2), (3e-4, 3e-4)])
def test_a_value_head_has_its_own_rate_and_takes_nothing_of_the_policys_norm(own: float | None, rate: float) -> None:
    """AdamW's first step moves each weight by the learning rate, of which a warm-up of four steps gives a quarter."""
    weight, bias, head = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    before = head.weight.item()
    config = TrainerConfig(learning_rate=1e-3, value_learning_rate=own, warmup_steps=4, weight_decay=0.5)
    optimizer = PolicyOptimizer([weight, bias], config, head)
    weight.grad, head.weight.grad, head.bias.grad = torch.full((2, 1), 0.5), torch.full((1, 1), 90.0), torch.ones(1)
    bias.grad = torch.zeros(1)
    figures = optimizer.step(0.0, 1.0)
    assert (figures["learning_rate"], figures["clipped"]) == (2.5e-4, False)
    assert figures["grad_norm"] == pytest.approx(0.5 * 2**0.5)
    assert weight.detach().flatten().tolist() == pytest.approx([1 - 2.5e-4 * (1 + 0.5)] * 2)
    assert bias.item() == 1, "a vector does not decay"
    assert before - head.weight.item() == pytest.approx(rate / 4, rel=1e-3)
    weight.grad, head.weight.grad = torch.ones(2, 1), torch.full((1, 1), torch.inf)
    assert optimizer.step(0.0, 1.0)["skipped"] == "gradient not finite"


def test_without_torchao_the_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(FieldError, match="needs torchao, which does not import here"):
        build_adamw([{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0}], TrainerConfig(optimizer="adamw_8bit"))


@pytest.mark.parametrize(
    ("schedule", "changes", "rates"),
    [
        ("constant", {}, {0: 0.5, 1: 1.0, 2: 1.0, 11: 1.0, 50: 1.0}),
        ("linear", {}, {1: 1.0, 2: 1.0, 7: 0.5, 12: 0.0, 50: 0.0}),
        ("linear", {"final_learning_rate": 0.1}, {0: 0.5, 2: 1.0, 7: 0.55, 12: 0.1, 50: 0.1}),
        ("cosine", {}, {2: 1.0, 7: 0.5, 12: 0.0}),
        ("cosine", {"final_learning_rate": 0.1}, {2: 1.0, 7: 0.55, 12: 0.1}),
        # √(2 / step), and never below 0.1
        ("inverse_sqrt", {"final_learning_rate": 0.1}, {1: 1.0, 2: 1.0, 8: 0.5, 50: 0.2, 2000: 0.1}),
        # Constant up to step 8, then 4 steps down
        ("wsd", {"final_learning_rate": 0.1, "decay_steps": 4}, {0: 0.5, 2: 1, 8: 1, 10: 0.55, 11: 0.325, 12: 0.1, 50: 0.1}),
        ("constant", {"learning_rate": 0.25, "warmup_steps": 0}, {0: 0.25}),
    ],
)  # fmt: skip
def test_learning_rate_by_hand(schedule: str, changes: dict[str, Any], rates: dict[int, float]) -> None:
    config = TrainerConfig(**{"learning_rate": 1.0, "steps": 12, "warmup_steps": 2, "schedule": schedule, **changes})
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(rates)


# Loading


def model_config(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**{"source": "path", "name": str(folder), "max_context": 128, **changes})


def test_what_is_loaded_from_a_hub_is_of_the_recipes_revision(tmp_path: Path) -> None:
    for source, revision, asked in (("a/b", "abc", {"revision": "abc"}), ("a/b", "", {}), (str(tmp_path), "abc", {})):
        config = model_config(tmp_path, source="hub", name="org/model", revision=revision)
        assert hub_arguments(source, config) == {"trust_remote_code": False, **asked}


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    def refused(folder: Path, problem: str) -> None:
        with pytest.raises(FieldError, match=problem):
            load_policy(str(folder), model_config(folder))

    refused(tmp_path / "none", r"model\.name = .*there is no such folder")
    refused(tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    refused(tmp_path, "configuration does not load")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    refused(tmp_path, "its weights are quantised and cannot be trained; name the original checkpoint")
    model = model_of("llama-untied")
    model.save_pretrained(
        tmp_path, state_dict={name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    )
    refused(tmp_path, r"weights are missing.*layers\.1\.mlp")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(tmp_path, "does not load as a causal language model")
    weights.unlink()
    refused(tmp_path, "does not load as a causal language model")


@pytest.mark.parametrize(
    ("fields", "changes", "problem"),
    [
        ({}, {"max_context": 129}, r"max_context = 129: is above the model's max_position_embeddings of 128"),
        # These have effects across sequences.
        (
            {"attention_chunk_size": 64}, {},
            r"max_context = 128: is above the model's attention_chunk_size of 64 tokens; lower it",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}, {},
            r"max_context = 128: is above the model's original_max_position_embeddings of 64 tokens; lower it",
        ),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused(
    fields: dict[str, Any], changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model_of("llama-tied", **fields).save_pretrained(tmp_path)
    load_policy(str(tmp_path), model_config(tmp_path, max_context=64))
    with pytest.raises(FieldError, match=rf"model\.{problem}"):
        load_policy(str(tmp_path), model_config(tmp_path, **changes))


def test_a_context_above_a_window_that_only_a_mask_applies_is_refused_with_packed_attention(tmp_path: Path) -> None:
    build("phimoe", **SHAPE | {"sliding_window": 16}).save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), model_config(tmp_path, max_context=16)).attention == VARLEN
    with pytest.raises(FieldError, match=r"model\.max_context = 128: is above the model's sliding_window of 16 tokens"):
        load_policy(str(tmp_path), model_config(tmp_path))
    policy, sequence = load_policy(str(tmp_path), model_config(tmp_path, attention="eager")), sequences_of([(9, 20)])[0]
    batch = host_microbatch([sequence, sequence], np.zeros(2), np.ones(2), 0).on("cpu")
    with torch.no_grad():
        packed = policy.scores(batch.row, batch.predictors, batch.targets).logprobs
        alone = plain_logprobs(policy.model, sequence)
    torch.testing.assert_close(packed, torch.cat([alone, alone]))
    build("mistral", **SHAPE | {"sliding_window": 16}).save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), model_config(tmp_path)).attention == VARLEN  # its attention receives the window


def test_a_model_without_gradients_in_evaluation_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("llama-tied").save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), model_config(tmp_path))
    monkeypatch.setattr(LlamaMLP, "forward", torch.no_grad()(LlamaMLP.forward))
    with pytest.raises(FieldError, match=r"model\.layers\.1\.mlp\.down_proj computes no gradient in evaluation mode"):
        load_policy(str(tmp_path), model_config(tmp_path))


@pytest.mark.parametrize("max_context", [16, 128])
def test_the_context_chooses_the_rotary_embedding_of_longrope_as_in_vllm(max_context: int, tmp_path: Path) -> None:
    def rope(short: list[float]) -> dict[str, Any]:
        factors = {"short_factor": short, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16}
        return {"rope_parameters": {"rope_type": "longrope", **factors}}

    model_of("llama-tied", **rope([1.0] * 4)).save_pretrained(tmp_path)
    policy, sequence = load_policy(str(tmp_path), model_config(tmp_path, max_context=max_context)), sequences_of([(1, 9)])[0]
    served = model_of("llama-tied", **rope([1.0, 2.0, 3.0, 4.0] if max_context > 16 else [1.0] * 4))
    found = policy.sequence_logprobs(np.append(sequence.prompt_token_ids, sequence.completion_token_ids))
    assert found == pytest.approx(plain_logprobs(served, sequence).detach().numpy(), abs=1e-5)


def test_a_value_head_is_saved_beside_the_model_and_found_there(tmp_path: Path) -> None:
    model_of("llama-tied").save_pretrained(tmp_path)
    recipe = make_recipe(model={"source": "path", "name": str(tmp_path), "max_context": 64}, algorithm={"advantage": "value"})
    first = load_learner(recipe, str(tmp_path), RankSettings())
    with torch.no_grad():
        first.policy.value_head.weight.fill_(0.5)
    (tmp_path / VALUE_HEAD_FILE).parent.mkdir()
    save_file(dict(first.gather(VALUE_HEAD)), tmp_path / VALUE_HEAD_FILE)
    again = load_learner(recipe, str(tmp_path), RankSettings())
    assert dict(again.gather(VALUE_HEAD))["weight"].tolist() == [[0.5] * 32]
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / VALUE_HEAD_FILE)
    with pytest.raises(FieldError, match="does not fit this model"):
        load_learner(recipe, str(tmp_path), RankSettings())
