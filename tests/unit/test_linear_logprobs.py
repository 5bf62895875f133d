"""Scores of a linear head block by block: the values and gradients of the plain formula, and no tensor larger than allowed."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from services.trainer.learn.model import wrap_model
from services.trainer.learn.policy import Head, is_plain_linear, linear_scores
from tests.support.learner import model_of


@dataclass
class Case:
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


def case(tokens: int, words: int, width: int, *, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        normal(tokens, width).requires_grad_(),
        normal(words, width).requires_grad_(),
        normal(words).requires_grad_() if bias else None,
        torch.randint(0, words, (tokens,), generator=generator),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
    )


def naive(inputs: Case, temperature: float) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias)
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    if temperature != 1.0:
        log_p = torch.log_softmax(log_p / temperature, -1)
    return log_p.gather(1, inputs.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def blockwise(inputs: Case, temperature: float, entropy_grad: bool, max_logits: int) -> tuple[Tensor, Tensor]:
    head = Head(inputs.hidden, inputs.weight, inputs.bias, inputs.targets, temperature, max_logits)
    return linear_scores(head, entropy_grad)


def gradients(inputs: Case, scores: tuple[Tensor, Tensor], entropy_grad: bool, **options: Any) -> list[Tensor]:
    loss = (scores[0] * inputs.of_logprobs).sum()
    if entropy_grad:
        loss = loss + (scores[1] * inputs.of_entropy).sum()
    return list(torch.autograd.grad(loss, inputs.leaves, **options))


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
    inputs = case(tokens, words, width, bias=bias, seed=seed)
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


@pytest.mark.parametrize("max_logits", [1, 1000])
def test_without_tokens_gradients_are_zero_and_the_graph_is_whole(max_logits: int) -> None:
    inputs = case(0, 5, 3)
    scores = blockwise(inputs, 1.0, True, max_logits)
    assert [tuple(score.shape) for score in scores] == [(0,), (0,)]
    found = gradients(inputs, scores, True)
    assert [tuple(gradient.shape) for gradient in found] == [(0, 3), (5, 3), (5,)]
    assert all(not gradient.any() for gradient in found)


def test_without_gradients_nothing_is_kept() -> None:
    inputs = case(4, 50, 3)
    with torch.no_grad():
        scores = blockwise(inputs, 1.0, True, 10**6)
    assert all(score.grad_fn is None and not score.requires_grad for score in scores)
    frozen = linear_scores(Head(inputs.hidden.detach(), inputs.weight.detach(), None, inputs.targets))
    assert not frozen[0].requires_grad
    torch.testing.assert_close(scores[0], naive(inputs, 1.0)[0])


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_what_is_trained_has_a_gradient(trained: str) -> None:
    inputs = case(5, 300, 3, bias=False)
    expected = dict(zip(("hidden", "weight"), gradients(inputs, naive(inputs, 1.0), False), strict=True))
    (inputs.weight if trained == "hidden" else inputs.hidden).requires_grad_(False)
    logprobs, _ = blockwise(inputs, 1.0, False, 5 * 128)
    with LargestMade() as made:
        (logprobs * inputs.of_logprobs).sum().backward()
    torch.testing.assert_close(getattr(inputs, trained).grad, expected[trained])
    assert (inputs.hidden.grad is None) == (trained == "weight")
    assert (inputs.weight.grad is None) == (trained == "hidden")
    if trained == "hidden":
        assert made.elements <= 5 * 128, "a frozen weight's gradient was computed"


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_is_larger_than_a_block_or_the_weight(dtype: torch.dtype, entropy_grad: bool) -> None:
    """40 tokens x 1000 words are 40,000 logits; a block has 40 x 128 and the weight 1000 x 6."""
    inputs = case(40, 1000, 6, dtype=dtype)
    with LargestMade() as made:
        gradients(inputs, blockwise(inputs, 0.7, entropy_grad, 40 * 200), entropy_grad)
    assert made.elements == 6000
    with LargestMade() as made:
        gradients(inputs, naive(inputs, 0.7), entropy_grad)
    assert made.elements == 40_000


def saved_elements(inputs: Case, max_logits: int) -> int:
    """Elements that the graph keeps for the backward pass, the head's inputs aside."""
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        blockwise(inputs, 1.0, False, max_logits)
    return sum(tensor.numel() for tensor in kept if all(tensor is not leaf for leaf in inputs.leaves))


def test_logits_are_kept_only_where_one_block_holds_them_all() -> None:
    """Of 8 tokens: target, normaliser and entropy; and 8 x 256 logits."""
    inputs = case(8, 256, 3)
    assert saved_elements(inputs, 8 * 255) == 3 * 8
    assert saved_elements(inputs, 8 * 256) == 3 * 8 + 8 * 256


@pytest.mark.parametrize("max_logits", [1000, 10**6])
def test_a_second_backward_pass_and_a_checkpointed_one_give_the_same(max_logits: int) -> None:
    inputs = case(8, 256, 3)
    scores = blockwise(inputs, 0.9, True, max_logits)
    first = gradients(inputs, scores, True, retain_graph=True)
    checkpointed = checkpoint(blockwise, inputs, 0.9, True, max_logits, use_reentrant=False)
    for one, again, other in zip(first, gradients(inputs, scores, True), gradients(inputs, checkpointed, True), strict=True):
        assert torch.equal(one, again)
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bit_gradients_are_no_worse_than_those_of_the_formula(dtype: torch.dtype) -> None:
    """Against float64 on the same 16-bit inputs; a norm of errors, so that single roundings do not decide."""
    inputs = case(64, 2000, 32, dtype=dtype, bias=False)
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in inputs.leaves)
    exact = replace(inputs, hidden=hidden, weight=weight)
    truth = gradients(exact, naive(exact, 1.0), True)

    def errors(found: list[Tensor]) -> list[float]:
        return [float((one.double() - true).norm() / true.norm()) for one, true in zip(found, truth, strict=True)]

    plain = errors(gradients(inputs, naive(inputs, 1.0), True))
    for max_logits in (64 * 128, 10**6):
        scores = blockwise(inputs, 1.0, True, max_logits)
        assert scores[0].dtype == torch.float32
        for ours, theirs in zip(errors(gradients(inputs, scores, True)), plain, strict=True):
            assert 0 < ours < 1.1 * theirs


@pytest.mark.parametrize("max_logits", [64 * 128, 10**6])
def test_logits_of_sixteen_bit_inputs_are_not_rounded_unless_asked(max_logits: int) -> None:
    """Logits of standard deviation 4.8: rounded to bfloat16, log-probabilities are off by hundredths of a nat."""
    inputs = case(64, 3000, 23, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = nn.functional.linear(*(leaf.double() for leaf in inputs.leaves))
        exact = torch.log_softmax(logits, -1).gather(1, inputs.targets[:, None])[:, 0]
        arguments = (inputs.hidden, inputs.weight, inputs.bias, inputs.targets, 1.0, max_logits)
        wide, rounded = (linear_scores(Head(*arguments, rounded))[0].double() for rounded in (False, True))
    assert float((wide - exact).abs().max()) < 2e-5
    assert 0.005 < float((rounded - exact).abs().mean()) < 0.05


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked(width: int, words: int) -> nn.Module:
    head = nn.Linear(width, words)
    head.register_forward_hook(lambda module, arguments, output: 2 * output)
    return head


@pytest.mark.parametrize("make", [Scaled, hooked])
def test_a_head_that_does_more_is_called_by_the_model(make: Any) -> None:
    model, tokens = model_of("llama-untied"), torch.tensor([3, 1, 4, 1, 5])
    assert is_plain_linear(model.lm_head)
    head = make(model.lm_head.in_features, model.lm_head.out_features)
    model.set_output_embeddings(head)
    with torch.no_grad():
        hidden = model.model(input_ids=tokens[None, :-1]).last_hidden_state[0]
        doubled = torch.log_softmax(2 * nn.functional.linear(hidden, head.weight, head.bias), -1)
    policy = wrap_model(model)
    assert policy.own_logits
    found = torch.from_numpy(policy.sequence_logprobs(tokens.numpy()))
    torch.testing.assert_close(found, doubled.gather(1, tokens[1:, None])[:, 0], rtol=1e-4, atol=1e-5)


def test_adapters_around_a_head_are_not_left_out() -> None:
    peft = pytest.importorskip("peft")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5)

    config = peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False)
    assert not is_plain_linear(peft.get_peft_model(Model(), config).base_model.model.head)
