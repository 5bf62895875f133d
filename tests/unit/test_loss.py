"""Losses against numbers worked out by hand, their gradients included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.config.recipe import AlgorithmConfig
from services.trainer.learn.logprobs import chunked_scores, token_scores
from services.trainer.learn.loss import LossInputs, LossOutput, compute_loss, k3
from services.trainer.learn.normalization import BatchTotals, token_weights


def inputs(
    ratios: list[float], advantages: list[float], weights: list[float] | None = None, behaviour: float = 0.5
) -> LossInputs:
    """Tokens of probability `ratios` × `behaviour` under π and `behaviour` under μ."""
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64) * behaviour).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=torch.full((len(ratios),), math.log(behaviour), dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64),
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


def test_weights_no_float_holds_give_finite_gradients() -> None:
    for loss in ("reinforce", "ppo_clip", "grpo"):
        tokens = inputs([1.0, 1.0], [1.0, -1.0])
        far = LossInputs(tokens.logprobs, tokens.behaviour_logprobs - 1000, tokens.advantages, tokens.weights)
        output = compute_loss(far, AlgorithmConfig(loss=loss))
        assert np.isfinite(gradient(far, output)).all()
        assert output.log_weights.tolist() == pytest.approx([1000.0, 1000.0])


def test_a_weight_of_zero_masks_a_token() -> None:
    for loss in ("reinforce", "ppo_clip", "grpo"):
        tokens = inputs([1.1, 1.1], [1.0, 1.0], [1.0, 0.0])
        assert gradient(tokens, compute_loss(tokens, AlgorithmConfig(loss=loss)))[1] == 0.0


def test_k3_by_hand() -> None:
    # reference / π = 2: 2 - log 2 - 1; equal: 0
    estimate = k3(torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.5]).log())
    assert estimate.tolist() == pytest.approx([1 - math.log(2), 0.0])


def test_kl_and_entropy_terms_by_hand() -> None:
    tokens = inputs([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], behaviour=0.25)
    reference = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    entropy = torch.tensor([0.3, 0.5], dtype=torch.float64)
    with_terms = LossInputs(
        tokens.logprobs, tokens.behaviour_logprobs, tokens.advantages, tokens.weights, entropy, reference
    )
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


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.sampled_from(["reinforce", "ppo_clip", "grpo"]))
def test_on_policy_every_loss_has_the_policy_gradient(advantages: list[float], loss: str) -> None:
    """At π = μ all three have the gradient −weight · A in log π, and nothing is clipped."""
    tokens = inputs([1.0] * len(advantages), advantages)
    output = compute_loss(tokens, AlgorithmConfig(loss=loss))
    assert gradient(tokens, output) == pytest.approx([-advantage for advantage in advantages])
    assert not output.clipped.any()
