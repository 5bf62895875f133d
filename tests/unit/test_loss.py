"""Losses against numbers worked out by hand, their gradients included."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.batch import MicroBatch, sequence_weights
from services.trainer.learn.loss import LossOutput, compute_loss
from services.trainer.learn.policy import TokenScores, token_scores
from tests.support.learner import LOSSES, micro_batch

MASKS = get_args(AlgorithmConfig.model_fields["mask"].annotation)


def tokens(
    ratios: list[float],
    advantages: list[float],
    weights: list[float] | None = None,
    behaviour: float = 0.5,
    lengths: list[int] | None = None,
) -> tuple[MicroBatch, TokenScores]:
    """Tokens of probability `ratios` × `behaviour` under π and `behaviour` under μ, in one sequence unless `lengths` differ."""
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64) * behaviour).requires_grad_()
    mu = torch.full((len(ratios),), math.log(behaviour), dtype=torch.float64)
    factors = torch.tensor(weights or [1.0] * len(ratios), dtype=torch.float64)
    batch = micro_batch(mu, torch.tensor(advantages, dtype=torch.float64), factors, lengths or [len(ratios)])
    return batch, TokenScores(logprobs, torch.zeros_like(logprobs))


def gradient(scores: TokenScores, output: LossOutput) -> list[float]:
    output.loss.backward()
    return scores.logprobs.grad.tolist()


def log(value: float) -> float:
    return math.log(value)


@dataclass(frozen=True)
class Case:
    """What `config` makes of `tokens(*data, **more)`."""

    config: dict[str, Any]
    data: tuple[list[float], ...]
    gradient: list[float]
    loss: float | None = None
    clipped: list[int] = field(default_factory=list)
    """Indices of tokens, as are `masked`."""
    masked: list[int] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
BY_HAND = {
    # −weight · min(5, w) · A · log π with log π = log(0.5, 1, 4, 0.25)
    "reinforce truncates the weight and sends no gradient through it": Case(
        {"clamp": 5.0},
        ([1.0, 2.0, 8.0, 0.5], [1.0, -1.0, 3.0, 2.0], [0.5, 1.0, 1.0, 1.0]),
        [-0.5, 2.0, -15.0, -1.0],
        loss=-(0.5 * 1 * 1 * log(0.5) + 0.0 + 5 * 3 * log(4) + 0.5 * 2 * log(0.25)),
        clipped=[2],
    ),
    # −(min(1.5, 1.3) + min(−1.5, −1.3) + min(0.5, 0.8) + min(−0.5, −0.8) + 2.2)
    **{
        f"{loss} cuts the gradient only where it would go further": Case(
            {"loss": loss, **CLIPS},
            ([1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]),
            [0.0, 1.5, -0.5, 0.0, -2.2],
            loss=-(1.3 - 1.5 + 0.5 - 0.8 + 2.2),
            clipped=[0, 3],
        )
        for loss in ("ppo_clip", "grpo")
    },
    # Sequences of 2, 1 and 3 tokens, averaged as published: s = √(2 · 0.5) = 1, 1.5, and ∛4 = 1.59, cut at 1.3;
    # gradient −s · A / (3 · length) of each token of a sequence that is not cut
    "gspo clips the ratio of a sequence": Case(
        {"loss": "gspo", **CLIPS},
        ([2.0, 0.5, 1.5, 2.0, 2.0, 1.0], [3.0, 3.0, -2.0, 1.0, 1.0, 1.0], [1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9]),
        [-0.5, -0.5, 1.0, 0.0, 0.0, 0.0],
        loss=-(1 * 3 + 1.5 * -2 + 1.3 * 1) / 3,
        clipped=[3, 4, 5],
        more={"lengths": [2, 1, 3]},
    ),
    # −clip(r) · A · log π with log π = log(0.75, 0.25, 0.55)
    "cispo bounds the weight and keeps every token's gradient": Case(
        {"loss": "cispo", **CLIPS},
        ([1.5, 0.5, 1.1], [1.0, -1.0, 2.0]),
        [-1.3, 0.8, -2.2],
        loss=-(1.3 * log(0.75) - 0.8 * log(0.25) + 2.2 * log(0.55)),
        clipped=[0, 1],
    ),
    "cispo alone bounds weights from above only": Case(
        {"loss": "cispo"}, ([0.01, 4.9, 8.0], [1.0, 1.0, 1.0]), [-0.01, -4.9, -5.0], clipped=[2], more={"behaviour": 0.1}
    ),
    "icepop leaves out tokens and keeps the others' weights": Case(
        {"clamp": 10.0, "mask": "icepop"},
        ([0.49, 0.51, 4.9, 5.1], [1.0, 1.0, -1.0, 2.0], [0.25] * 4),
        [0.0, -0.25 * 0.51, 0.25 * 4.9, 0.0],
        loss=-0.25 * (0.51 * log(0.255) - 4.9 * log(2.45)),
        masked=[0, 3],
    ),
    "bounds of a mask are the recipe's": Case(
        {"mask": "icepop", "mask_low": 0.0, "mask_high": 1.1},
        ([0.01, 0.9, 1.2], [1.0, 1.0, 1.0]),
        [-0.01, -0.9, 0.0],
        masked=[2],
    ),
    # √(0.2 · 0.9) = 0.42 and 10 are out of [0.5, 5]; √(0.4 · 0.7) = 0.53 is inside, though one of its tokens is not
    "a sequence is left out for its geometric mean": Case(
        {"clamp": 5.0, "mask": "sequence"},
        ([0.2, 0.9, 0.4, 0.7, 10.0], [1.0] * 5),
        [0.0, 0.0, -0.4, -0.7, 0.0],
        masked=[0, 1, 4],
        more={"lengths": [2, 2, 1]},
    ),
    # Mean log μ / π: −log(0.2 · 0.5) / 2 = 1.15 for the first two, 0.36 and −1.6 for the others; δ = 0.5
    "an off-policy sequence is left out when its advantage is negative": Case(
        {"clamp": 6.0, "mask": "off_policy_sequence"},
        ([0.2, 0.5, 0.2, 0.5, 0.7, 5.0], [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
        [0.0, 0.0, -0.2, -0.5, 0.7, 5.0],
        masked=[0, 1],
        more={"lengths": [2, 2, 1, 1]},
    ),
    "and at a lower δ more of them": Case(
        {"clamp": 6.0, "mask": "off_policy_sequence", "mask_kl": 0.3},
        ([0.2, 0.5, 0.2, 0.5, 0.7, 5.0], [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0]),
        [0.0, 0.0, -0.2, -0.5, 0.0, 5.0],
        masked=[0, 1, 4],
        more={"lengths": [2, 2, 1, 1]},
    ),
    **{
        f"a weight of zero masks a token of {loss}": Case(
            {"loss": loss, "clip_low": 0.5, "clip_high": 0.5}, ([1.1, 1.1], [1.0, 1.0], [1.0, 0.0]), [-1.1, 0.0]
        )
        for loss in LOSSES
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_and_masks_by_hand(name: str) -> None:
    case = BY_HAND[name]
    batch, scores = tokens(*case.data, **case.more)
    output = compute_loss(batch, scores, AlgorithmConfig(**case.config))
    assert case.loss is None or output.loss.item() == pytest.approx(case.loss)
    assert gradient(scores, output) == pytest.approx(case.gradient)
    assert output.clipped.nonzero().flatten().tolist() == case.clipped
    assert output.masked.nonzero().flatten().tolist() == case.masked
    assert output.log_weights.exp().tolist() == pytest.approx(case.data[0])


@given(st.lists(st.lists(st.floats(0.2, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 99))
def test_gspos_token_form_has_the_gradient_of_the_sequence_objective(ratios: list[list[float]], seed: int) -> None:
    advantages = np.random.default_rng(seed).normal(size=len(ratios)).tolist()
    lengths = [len(of_one) for of_one in ratios]
    flat = [ratio for of_one in ratios for ratio in of_one]
    of_token = [advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    weights = [1 / (length * len(lengths)) for length in lengths for _ in range(length)]
    batch, scores = tokens(flat, of_token, weights, lengths=lengths)
    ours = gradient(scores, compute_loss(batch, scores, AlgorithmConfig(loss="gspo", clip_low=0.3, clip_high=0.4)))

    leaf = scores.logprobs.detach().requires_grad_()
    terms = []
    for one, advantage in zip((leaf - batch.behaviour_logprobs).split(lengths), advantages, strict=True):
        s = one.mean().exp()
        terms.append(torch.minimum(s * advantage, s.clamp(0.7, 1.4) * advantage))
    (-torch.stack(terms).mean()).backward()
    assert ours == pytest.approx(leaf.grad.tolist(), abs=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_no_float_holds_give_finite_gradients(loss: str) -> None:
    batch, scores = tokens([1.0, 1.0], [1.0, -1.0])
    far = replace(batch, behaviour_logprobs=batch.behaviour_logprobs - 1000)
    output = compute_loss(far, scores, AlgorithmConfig(loss=loss))
    assert np.isfinite(gradient(scores, output)).all()
    assert output.log_weights.tolist() == pytest.approx([1000.0, 1000.0])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_tokens_has_a_gradient_of_zero(loss: str, mask: str) -> None:
    """A rank with nothing to do takes part in a step's backward pass all the same."""
    parameter = torch.ones(3, requires_grad=True)
    logprobs, constant = parameter[torch.zeros(0, dtype=torch.long)], torch.zeros(0)
    empty = micro_batch(constant, constant, constant, [])
    config = AlgorithmConfig(loss=loss, mask=mask, kl_coefficient=0.1, entropy_coefficient=0.1)
    output = compute_loss(empty, TokenScores(logprobs, logprobs * 2), config, constant)
    output.loss.backward()
    assert (output.loss.item(), output.masked.shape, output.clipped.shape) == (0.0, (0,), (0,))
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_masked_token_has_no_policy_gradient_whatever_the_loss(loss: str) -> None:
    """Its place in GSPO's mean of the sequence stays; with KL to a reference, that term's gradient stays too."""
    config = AlgorithmConfig(loss=loss, mask="icepop", clip_low=0.5, clip_high=0.5)
    batch, scores = tokens([1.1, 8.0, 0.125], [1.0, -1.0, 1.0])
    output = compute_loss(batch, scores, config)
    gradients = gradient(scores, output)
    assert (output.masked.tolist(), output.clipped.tolist()) == ([False, True, True], [False] * 3)
    assert gradients[0] < -0.9
    assert gradients[1:] == [0.0, 0.0]

    _, again = tokens([1.1, 8.0, 0.125], [1.0, -1.0, 1.0])
    reference = again.logprobs.detach() - math.log(2)
    held = compute_loss(batch, again, config.model_copy(update={"kl_coefficient": 0.1}), reference)
    # d k3 / d log π = 1 - reference / π = 0.5
    assert gradient(again, held)[1:] == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_never_hides_what_is_not_finite(mask: str) -> None:
    data = tokens([1.0, math.nan], [-1.0, -1.0])
    assert math.isnan(compute_loss(*data, AlgorithmConfig(mask=mask)).loss.item())


def test_kl_and_entropy_terms_by_hand() -> None:
    batch, scores = tokens([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], behaviour=0.25)
    reference = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    entropy = torch.tensor([0.3, 0.5], dtype=torch.float64)
    config = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01)
    output = compute_loss(batch, scores._replace(entropy=entropy), config, reference)
    kl = 0.5 * (1 - math.log(2))
    assert output.reference_kl.item() == pytest.approx(kl)
    assert output.loss.item() == pytest.approx(0.1 * kl - 0.01 * 0.4)
    # d k3 / d log π = 1 - reference / π
    assert gradient(scores, output) == pytest.approx([0.1 * 0.5 * (1 - 2), 0.0])


def test_normalisations_by_hand() -> None:
    lengths = np.array([1, 3, 4, 2])
    assert sequence_weights(lengths, "token") == pytest.approx([0.1] * 4)
    assert sequence_weights(lengths, "batch") == pytest.approx([0.25] * 4)
    assert sequence_weights(lengths, "sequence") == pytest.approx([1 / 4, 1 / 12, 1 / 16, 1 / 8])


@pytest.mark.parametrize(
    ("loss", "normalize_std", "normalization", "clips"),
    [
        ("reinforce", False, "batch", None),
        ("grpo", True, "sequence", None),
        ("gspo", True, "sequence", (3e-4, 4e-4)),
        ("cispo", True, "token", (1.0, 4.0)),
    ],
)
def test_a_loss_has_its_published_defaults(
    loss: Any, normalize_std: bool, normalization: str, clips: tuple[float, float] | None
) -> None:
    config = AlgorithmConfig(loss=loss)
    assert (config.normalize_std, config.normalization) == (normalize_std, normalization)
    assert loss == "reinforce" or config.advantage == "group_mean"
    assert clips is None or (config.clip_low, config.clip_high) == clips
    assert AlgorithmConfig(loss=loss, normalize_std=False).normalize_std is False
    assert AlgorithmConfig(loss=loss, clip_high=0.1).clip_high == 0.1


def test_token_scores_by_hand_and_a_masked_vocabulary_entry_has_no_entropy() -> None:
    # Temperature 0.5 doubles the logits: (0, 2 log 3) gives probabilities 0.1 and 0.9.
    logits = torch.tensor([[0.0, math.log(3.0)]])
    scores = token_scores(logits, torch.tensor([1]), temperature=0.5)
    assert scores.logprobs.item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert scores.entropy.item() == pytest.approx(-(0.1 * math.log(0.1) + 0.9 * math.log(0.9)), abs=1e-6)
    scores = token_scores(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), temperature=1.0)
    assert scores.entropy.item() == pytest.approx(math.log(2))


def test_a_learned_baseline_by_hand() -> None:
    values = torch.tensor([0.25, 1.5], requires_grad=True)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = micro_batch(logprobs.detach(), torch.ones(2), torch.tensor([0.5, 0.5]), [2])
    scores = TokenScores(logprobs, torch.zeros(2), values)
    output = compute_loss(batch, scores, AlgorithmConfig(advantage="value", value_coefficient=0.2))
    # A = R − v = 0.75, −0.5; policy loss 0.5 · (0.75 · 1 − 0.5 · 2); value loss 0.5 · 0.5 · (0.75² + 0.5²)
    assert output.value_loss.item() == pytest.approx(0.25 * (0.5625 + 0.25))
    assert output.loss.item() == pytest.approx(0.5 * (0.75 - 1.0) + 0.2 * 0.203125)
    output.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.375, 0.25])  # the policy's gradient takes A as it is
    assert values.grad.tolist() == pytest.approx([0.2 * 0.5 * -0.75, 0.2 * 0.5 * 0.5])  # and none of it reaches v
