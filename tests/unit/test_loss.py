"""Losses against numbers worked out by hand, their gradients included."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.logprobs import chunked_scores, token_scores
from services.trainer.learn.loss import BatchTotals, LossInputs, LossOutput, compute_loss, k3, token_weights

LOSSES = get_args(AlgorithmConfig.model_fields["loss"].annotation)
MASKS = get_args(AlgorithmConfig.model_fields["mask"].annotation)


def inputs(
    ratios: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    behaviour: float = 0.5,
    lengths: list[int] | None = None,
) -> LossInputs:
    """Tokens of probability `ratios` × `behaviour` under π and `behaviour` under μ, in one sequence unless `lengths` differ."""
    lengths = lengths or [len(ratios)]
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64) * behaviour).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=torch.full((len(ratios),), math.log(behaviour), dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64),
        sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
    )


def gradient(given_inputs: LossInputs, output: LossOutput) -> list[float]:
    output.loss.backward()
    assert given_inputs.logprobs.grad is not None
    return given_inputs.logprobs.grad.tolist()


def test_reinforce_truncates_the_weight_and_sends_no_gradient_through_it() -> None:
    tokens = inputs([1.0, 2.0, 8.0, 0.5], [1.0, -1.0, 3.0, 2.0], [0.5, 1.0, 1.0, 1.0])
    output = compute_loss(tokens, AlgorithmConfig(clamp=5.0))
    # -weight · min(5, w) · A · log π with log π = log(0.5, 1, 4, 0.25)
    expected = -(0.5 * 1 * 1 * math.log(0.5) + 0.0 + 5 * 3 * math.log(4) + 0.5 * 2 * math.log(0.25))
    assert output.loss.item() == pytest.approx(expected)
    assert gradient(tokens, output) == pytest.approx([-0.5, 2.0, -15.0, -1.0])
    assert output.clipped.tolist() == [False, False, True, False]
    assert output.log_weights.exp().tolist() == pytest.approx([1.0, 2.0, 8.0, 0.5])


def test_ppo_clip_cuts_the_gradient_only_where_it_would_go_further() -> None:
    config = AlgorithmConfig(loss="ppo_clip", clip_low=0.2, clip_high=0.3)
    tokens = inputs([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0])
    output = compute_loss(tokens, config)
    # -(min(1.5, 1.3) + min(-1.5, -1.3) + min(0.5, 0.8) + min(-0.5, -0.8) + 2.2)
    assert output.loss.item() == pytest.approx(-(1.3 - 1.5 + 0.5 - 0.8 + 2.2))
    assert gradient(tokens, output) == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.2])
    assert output.clipped.tolist() == [True, False, False, True, False]


def test_gspo_clips_the_ratio_of_a_sequence() -> None:
    """Sequences of 2, 1 and 3 tokens, averaged as published: s = √(2 · 0.5) = 1, 1.5, and ∛4 = 1.59, cut at 1.3."""
    config = AlgorithmConfig(loss="gspo", clip_low=0.2, clip_high=0.3)
    ratios, advantages = [2.0, 0.5, 1.5, 2.0, 2.0, 1.0], [3.0, 3.0, -2.0, 1.0, 1.0, 1.0]
    tokens = inputs(ratios, advantages, [1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9], lengths=[2, 1, 3])
    output = compute_loss(tokens, config)
    assert output.loss.item() == pytest.approx(-(1 * 3 + 1.5 * -2 + 1.3 * 1) / 3)
    # -s · A / (3 · length) of each token of a sequence that is not cut
    assert gradient(tokens, output) == pytest.approx([-0.5, -0.5, 1.0, 0.0, 0.0, 0.0])
    assert output.clipped.tolist() == [False, False, False, True, True, True]


@given(st.lists(st.lists(st.floats(0.2, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 99))
def test_gspos_token_form_has_the_gradient_of_the_sequence_objective(ratios: list[list[float]], seed: int) -> None:
    advantages = np.random.default_rng(seed).normal(size=len(ratios)).tolist()
    lengths = [len(tokens) for tokens in ratios]
    flat = [ratio for tokens in ratios for ratio in tokens]
    of_token = [advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    weights = [1 / (length * len(lengths)) for length in lengths for _ in range(length)]
    tokens = inputs(flat, of_token, weights, lengths=lengths)
    ours = gradient(tokens, compute_loss(tokens, AlgorithmConfig(loss="gspo", clip_low=0.3, clip_high=0.4)))

    leaf = tokens.logprobs.detach().requires_grad_()
    terms = []
    for one, advantage in zip((leaf - tokens.behaviour_logprobs).split(lengths), advantages, strict=True):
        s = one.mean().exp()
        terms.append(torch.minimum(s * advantage, s.clamp(0.7, 1.4) * advantage))
    (-torch.stack(terms).mean()).backward()
    assert leaf.grad is not None
    assert ours == pytest.approx(leaf.grad.tolist(), abs=1e-9)


def test_cispo_bounds_the_weight_and_keeps_every_tokens_gradient() -> None:
    tokens = inputs([1.5, 0.5, 1.1], [1.0, -1.0, 2.0])
    output = compute_loss(tokens, AlgorithmConfig(loss="cispo", clip_low=0.2, clip_high=0.3))
    # -clip(r) · A · log π with log π = log(0.75, 0.25, 0.55)
    assert output.loss.item() == pytest.approx(-(1.3 * math.log(0.75) - 0.8 * math.log(0.25) + 2.2 * math.log(0.55)))
    assert gradient(tokens, output) == pytest.approx([-1.3, 0.8, -2.2])
    assert output.clipped.tolist() == [True, True, False]


def test_cispo_alone_bounds_weights_from_above_only() -> None:
    tokens = inputs([0.01, 4.9, 8.0], [1.0, 1.0, 1.0], behaviour=0.1)
    output = compute_loss(tokens, AlgorithmConfig(loss="cispo"))
    assert gradient(tokens, output) == pytest.approx([-0.01, -4.9, -5.0])
    assert output.clipped.tolist() == [False, False, True]


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_no_float_holds_give_finite_gradients(loss: str) -> None:
    tokens = inputs([1.0, 1.0], [1.0, -1.0])
    far = replace(tokens, behaviour_logprobs=tokens.behaviour_logprobs - 1000)
    output = compute_loss(far, AlgorithmConfig(loss=loss))
    assert np.isfinite(gradient(far, output)).all()
    assert output.log_weights.tolist() == pytest.approx([1000.0, 1000.0])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_of_zero_masks_a_token(loss: str) -> None:
    tokens = inputs([1.1, 1.1], [1.0, 1.0], [1.0, 0.0])
    assert gradient(tokens, compute_loss(tokens, AlgorithmConfig(loss=loss)))[1] == 0.0


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_tokens_has_a_gradient_of_zero(loss: str, mask: str) -> None:
    """A rank with nothing to do takes part in a step's backward pass all the same."""
    parameter = torch.ones(3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    logprobs, constant = parameter[none], torch.zeros(0)
    empty = LossInputs(logprobs, constant, constant, constant, none, 0, logprobs * 2, constant)
    config = AlgorithmConfig(loss=loss, mask=mask, kl_coefficient=0.1, entropy_coefficient=0.1)
    output = compute_loss(empty, config)
    output.loss.backward()
    assert (output.loss.item(), output.masked.shape, output.clipped.shape) == (0.0, (0,), (0,))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]


# Masks


def test_icepop_leaves_out_tokens_and_keeps_the_others_weights() -> None:
    tokens = inputs([0.49, 0.51, 4.9, 5.1], [1.0, 1.0, -1.0, 2.0], [0.25] * 4)
    output = compute_loss(tokens, AlgorithmConfig(clamp=10.0, mask="icepop"))
    assert output.masked.tolist() == [True, False, False, True]
    assert output.loss.item() == pytest.approx(-0.25 * (0.51 * math.log(0.255) - 4.9 * math.log(2.45)))
    assert gradient(tokens, output) == pytest.approx([0.0, -0.25 * 0.51, 0.25 * 4.9, 0.0])


def test_bounds_of_a_mask_are_the_recipes() -> None:
    tokens = inputs([0.01, 0.9, 1.2], [1.0] * 3)
    config = AlgorithmConfig(mask="icepop", mask_low=0.0, mask_high=1.1)
    assert compute_loss(tokens, config).masked.tolist() == [False, False, True]


def test_a_sequence_is_left_out_for_its_geometric_mean() -> None:
    """√(0.2 · 0.9) = 0.42 and 10 are out of [0.5, 5]; √(0.4 · 0.7) = 0.53 is inside, though one of its tokens is not."""
    tokens = inputs([0.2, 0.9, 0.4, 0.7, 10.0], [1.0] * 5, lengths=[2, 2, 1])
    output = compute_loss(tokens, AlgorithmConfig(clamp=5.0, mask="sequence"))
    assert output.masked.tolist() == [True, True, False, False, True]
    assert gradient(tokens, output) == pytest.approx([0.0, 0.0, -0.4, -0.7, 0.0])


def test_an_off_policy_sequence_is_left_out_when_its_advantage_is_negative() -> None:
    """Mean log μ / π: -log(0.2 · 0.5) / 2 = 1.15 for the first two, 0.36 and -1.6 for the others; δ = 0.5."""
    tokens = inputs([0.2, 0.5, 0.2, 0.5, 0.7, 5.0], [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], lengths=[2, 2, 1, 1])
    config = AlgorithmConfig(mask="off_policy_sequence")
    output = compute_loss(tokens, config)
    assert output.masked.tolist() == [True, True, False, False, False, False]
    assert gradient(tokens, output) == pytest.approx([0.0, 0.0, -0.2, -0.5, 0.7, 5.0])
    strict = compute_loss(tokens, config.model_copy(update={"mask_kl": 0.3}))
    assert strict.masked.tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_token_has_no_policy_gradient_whatever_the_loss(loss: str) -> None:
    """Its place in GSPO's mean of the sequence stays; with KL to a reference, that term's gradient stays too."""
    config = AlgorithmConfig(loss=loss, mask="icepop", clip_low=0.5, clip_high=0.5)
    tokens = inputs([1.1, 8.0, 0.125], [1.0, -1.0, 1.0])
    output = compute_loss(tokens, config)
    gradients = gradient(tokens, output)
    assert (output.masked.tolist(), output.clipped.tolist()) == ([False, True, True], [False] * 3)
    assert gradients[0] < -0.9
    assert gradients[1:] == [0.0, 0.0]

    again = inputs([1.1, 8.0, 0.125], [1.0, -1.0, 1.0])
    with_reference = replace(again, reference_logprobs=again.logprobs.detach() - math.log(2))
    held = compute_loss(with_reference, config.model_copy(update={"kl_coefficient": 0.1}))
    # d k3 / d log π = 1 - reference / π = 0.5
    assert gradient(again, held)[1:] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_never_hides_what_is_not_finite(mask: str) -> None:
    tokens = inputs([1.0, math.nan], [-1.0, -1.0])
    assert math.isnan(compute_loss(tokens, AlgorithmConfig(mask=mask)).loss.item())


def test_k3_by_hand() -> None:
    # reference / π = 2: 2 - log 2 - 1; equal: 0
    estimate = k3(torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.5]).log())
    assert estimate.tolist() == pytest.approx([1 - math.log(2), 0.0])


def test_kl_and_entropy_terms_by_hand() -> None:
    tokens = inputs([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], behaviour=0.25)
    reference = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    entropy = torch.tensor([0.3, 0.5], dtype=torch.float64)
    with_terms = replace(tokens, entropy=entropy, reference_logprobs=reference)
    output = compute_loss(with_terms, AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01))
    kl = 0.5 * (1 - math.log(2))
    assert output.reference_kl.item() == pytest.approx(kl)
    assert output.loss.item() == pytest.approx(0.1 * kl - 0.01 * 0.4)
    # d k3 / d log π = 1 - reference / π
    assert gradient(with_terms, output) == pytest.approx([0.1 * 0.5 * (1 - 2), 0.0])


def test_normalisations_by_hand() -> None:
    # One micro-batch with sequences of 1 and 3 completion tokens, of a step with 4 sequences and 10 tokens.
    lengths, totals = np.array([1, 3]), BatchTotals(num_sequences=4, num_completion_tokens=10)
    assert token_weights(lengths, "token", totals) == pytest.approx([0.1] * 4)
    assert token_weights(lengths, "batch", totals) == pytest.approx([0.25] * 4)
    assert token_weights(lengths, "sequence", totals) == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])


def test_grpo_alone_means_grpo_as_published() -> None:
    config = AlgorithmConfig(loss="grpo")
    assert (config.advantage, config.normalize_std, config.normalization) == ("group_mean", True, "sequence")
    assert AlgorithmConfig(loss="grpo", normalize_std=False).normalize_std is False
    assert AlgorithmConfig().normalization == "batch"


def test_gspo_and_cispo_alone_mean_what_was_published() -> None:
    gspo, cispo = AlgorithmConfig(loss="gspo"), AlgorithmConfig(loss="cispo")
    assert (gspo.advantage, gspo.normalize_std, gspo.normalization) == ("group_mean", True, "sequence")
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (cispo.advantage, cispo.normalize_std, cispo.normalization) == ("group_mean", True, "token")
    assert (cispo.clip_low, cispo.clip_high) == (1.0, 4.0)
    assert AlgorithmConfig(loss="gspo", clip_high=0.1).clip_high == 0.1


def test_token_scores_by_hand() -> None:
    # Temperature 0.5 doubles the logits: (0, 2 log 3) gives probabilities 0.1 and 0.9.
    logits = torch.tensor([[0.0, math.log(3.0)]])
    scores = token_scores(logits, torch.tensor([1]), temperature=0.5)
    assert scores.logprobs.item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert scores.entropy.item() == pytest.approx(-(0.1 * math.log(0.1) + 0.9 * math.log(0.9)), abs=1e-6)


def test_a_masked_vocabulary_entry_has_no_entropy() -> None:
    scores = token_scores(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), temperature=1.0)
    assert scores.entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunks_change_neither_scores_nor_gradients(entropy_grad: bool) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 7)
    hidden, targets = torch.randn(10, 4), torch.randint(0, 7, (10,))

    def run(chunk_tokens: int) -> list[torch.Tensor]:
        leaf = hidden.clone().requires_grad_()
        head.zero_grad()
        scores = chunked_scores(leaf, head, targets, 0.8, chunk_tokens, entropy_grad)
        (scores.logprobs.sum() + (scores.entropy.sum() if entropy_grad else 0.0)).backward()
        assert leaf.grad is not None
        assert head.weight.grad is not None
        return [scores.logprobs.detach(), scores.entropy.detach(), leaf.grad, head.weight.grad.clone()]

    for whole, chunked in zip(run(10), run(3), strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-6)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.sampled_from(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(advantages: list[float], loss: str) -> None:
    """At π = μ they all have the gradient −weight · A in log π, and nothing is clipped."""
    tokens = inputs([1.0] * len(advantages), advantages)
    output = compute_loss(tokens, AlgorithmConfig(loss=loss))
    assert gradient(tokens, output) == pytest.approx([-advantage for advantage in advantages])
    assert not output.clipped.any()


def test_a_learned_baseline_by_hand() -> None:
    values = torch.tensor([0.25, 1.5], requires_grad=True)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, 1.0]),
        weights=torch.tensor([0.5, 0.5]),
        sequence_index=torch.tensor([0, 0]),
        num_sequences=1,
        values=values,
    )
    output = compute_loss(inputs, AlgorithmConfig(advantage="value", value_coefficient=0.2))
    # A = R − v = 0.75, −0.5; policy loss 0.5 · (0.75 · 1 − 0.5 · 2); value loss 0.5 · 0.5 · (0.75² + 0.5²)
    assert output.policy_loss.item() == pytest.approx(0.5 * (0.75 - 1.0))
    assert output.value_loss.item() == pytest.approx(0.25 * (0.5625 + 0.25))
    assert output.loss.item() == pytest.approx(-0.125 + 0.2 * 0.203125)
    output.loss.backward()
    assert logprobs.grad is not None
    assert values.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.375, 0.25])  # the policy's gradient takes A as it is
    assert values.grad.tolist() == pytest.approx([0.2 * 0.5 * -0.75, 0.2 * 0.5 * 0.5])  # and none of it reaches v
