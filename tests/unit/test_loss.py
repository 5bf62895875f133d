"""Log-probabilities of a head, and losses, against numbers worked out by hand or by the plain formula, gradients included."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.batch import MicroBatch, sequence_weights
from services.trainer.learn.loss import LossOutput, compute_loss
from services.trainer.learn.model import wrap_model
from services.trainer.learn.policy import Head, TokenScores, is_plain_linear, linear_scores, token_scores
from tests.support.learner import LOSSES, micro_batch, model_of

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


def test_a_loss_has_its_published_defaults_unless_the_recipe_says_otherwise() -> None:
    def defaults(**fields: Any) -> tuple[Any, ...]:
        config = AlgorithmConfig(**fields)
        return config.normalize_std, config.normalization, config.clip_low, config.clip_high

    assert defaults(loss="reinforce")[:2] == (False, "batch")
    assert defaults(loss="grpo")[:2] == (True, "sequence")
    assert defaults(loss="cispo") == (True, "token", 1.0, 4.0)
    assert defaults(loss="gspo", normalize_std=False, clip_high=0.1) == (False, "sequence", 3e-4, 0.1)


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


# Scores of a linear head block by block: the values and gradients of the plain formula, and no tensor larger than allowed


@dataclass
class HeadCase:
    """Inputs of a head, and upstream gradients of its two outputs."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    of_logprobs: Tensor
    of_entropy: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]


def head_case(
    tokens: int, words: int, width: int, *, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> HeadCase:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return HeadCase(
        normal(tokens, width).requires_grad_(),
        normal(words, width).requires_grad_(),
        normal(words).requires_grad_() if bias else None,
        torch.randint(0, words, (tokens,), generator=generator),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
    )


def naive(inputs: HeadCase, temperature: float) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias)
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    if temperature != 1.0:
        log_p = torch.log_softmax(log_p / temperature, -1)
    return log_p.gather(1, inputs.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def blockwise(inputs: HeadCase, temperature: float, entropy_grad: bool, max_logits: int) -> tuple[Tensor, Tensor]:
    head = Head(inputs.hidden, inputs.weight, inputs.bias, inputs.targets, temperature, max_logits)
    return linear_scores(head, entropy_grad)


def gradients(inputs: HeadCase, scores: tuple[Tensor, Tensor], entropy_grad: bool) -> list[Tensor]:
    loss = (scores[0] * inputs.of_logprobs).sum()
    if entropy_grad:
        loss = loss + (scores[1] * inputs.of_entropy).sum()
    return list(torch.autograd.grad(loss, inputs.leaves))


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(1, 6),
    st.integers(1, 3000),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_the_formula(
    tokens: int, words: int, width: int, max_logits: int, temperature: float, entropy_grad: bool, bias: bool, seed: int
) -> None:
    inputs = head_case(tokens, words, width, bias=bias, seed=seed)
    expected, actual = naive(inputs, temperature), blockwise(inputs, temperature, entropy_grad, max_logits)
    assert actual[1].requires_grad == entropy_grad
    for one, other in zip(
        (*expected, *gradients(inputs, expected, entropy_grad)),
        (*actual, *gradients(inputs, actual, entropy_grad)),
        strict=True,
    ):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("max_logits", [1, 2, 100])
def test_scores_by_hand(max_logits: int) -> None:
    """Logits (0, log 3, 0) at temperature 1/2 are (0, 2 log 3, 0): probabilities 1/11, 9/11, 1/11. Logits far apart neither
    overflow nor vanish: of 2000, −3000 and 1999 the first has probability 1 / (1 + 1/e)."""
    weight = torch.tensor([[0.0], [math.log(3.0)], [0.0]])
    logprobs, entropy = linear_scores(Head(torch.ones(2, 1), weight, None, torch.tensor([1, 2]), 0.5, max_logits))
    assert logprobs.tolist() == pytest.approx([math.log(9 / 11), math.log(1 / 11)], abs=1e-6)
    by_hand = -(9 / 11 * math.log(9 / 11) + 2 / 11 * math.log(1 / 11))
    assert entropy.tolist() == pytest.approx([by_hand, by_hand], abs=1e-6)

    weight = torch.tensor([[2000.0], [-3000.0], [1999.0]])
    logprobs, entropy = linear_scores(Head(torch.ones(2, 1), weight, None, torch.tensor([0, 1]), 1.0, max_logits))
    p = 1 / (1 + math.exp(-1.0))
    assert logprobs.tolist() == pytest.approx([math.log(p), -5000.0 + math.log(p)])
    assert entropy[0].item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-5)


class LargestMade(TorchDispatchMode):
    """Elements of the largest new tensor of any operation; views of older ones do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize(("max_logits", "largest", "kept"), [(40 * 200, 6000, 3 * 40), (10**6, 40_000, 3 * 40 + 40_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_block_or_the_weight_and_logits_are_kept_only_in_one_block(
    dtype: torch.dtype, max_logits: int, largest: int, kept: int
) -> None:
    """40 tokens x 1000 words are 40,000 logits; a block has 40 x 128 and the weight 1000 x 6. The graph keeps of each token its
    target, normaliser and entropy."""
    inputs, saved = head_case(40, 1000, 6, dtype=dtype), list[Tensor]()
    with LargestMade() as made:
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
            scores = blockwise(inputs, 0.7, True, max_logits)
        gradients(inputs, scores, True)
    assert made.elements == largest
    assert sum(tensor.numel() for tensor in saved if all(tensor is not leaf for leaf in inputs.leaves)) == kept


@pytest.mark.parametrize("max_logits", [64 * 128, 10**6])
def test_logits_of_sixteen_bit_inputs_are_not_rounded_unless_asked(max_logits: int) -> None:
    """Logits of standard deviation 4.8: rounded to bfloat16, log-probabilities are off by hundredths of a nat."""
    inputs = head_case(64, 3000, 23, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = nn.functional.linear(*(leaf.double() for leaf in inputs.leaves))
        exact = torch.log_softmax(logits, -1).gather(1, inputs.targets[:, None])[:, 0]
        arguments = (inputs.hidden, inputs.weight, inputs.bias, inputs.targets, 1.0, max_logits)
        wide, rounded = (linear_scores(Head(*arguments, rounded))[0].double() for rounded in (False, True))
    assert float((wide - exact).abs().max()) < 2e-5
    assert 0.005 < float((rounded - exact).abs().mean()) < 0.05


def test_a_head_that_does_more_is_called_by_the_model() -> None:
    model, tokens = model_of("llama-untied"), torch.tensor([3, 1, 4, 1, 5])
    head = model.lm_head
    assert is_plain_linear(head)
    head.register_forward_hook(lambda module, arguments, output: 2 * output)
    with torch.no_grad():
        hidden = model.model(input_ids=tokens[None, :-1]).last_hidden_state[0]
        doubled = torch.log_softmax(2 * nn.functional.linear(hidden, head.weight, head.bias), -1)
    policy = wrap_model(model)
    assert policy.own_logits
    found = torch.from_numpy(policy.sequence_logprobs(tokens.numpy()))
    torch.testing.assert_close(found, doubled.gather(1, tokens[1:, None])[:, 0], rtol=1e-4, atol=1e-5)
