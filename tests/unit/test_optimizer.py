"""The optimizer: sums of 16-bit gradients in float32, steps near those of float32, what is cut to which norm, the rate of a
value head, and which AdamW a recipe gets."""

import builtins
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from services.trainer.checkpoint.state_files import trained_parameters
from services.trainer.learn.model import wrap_model
from services.trainer.learn.optimizer import PolicyOptimizer, build_adamw
from services.trainer.learn.step import Learner
from tests.support.learner import group_of, model_of, sequences_of

LENGTHS = [(5, 40), (3, 21), (9, 60), (2, 3), (4, 90), (7, 11)]
WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Stepped:
    """One optimizer step."""

    change: Tensor
    """float32[parameters], on the host: of the weights that the optimizer holds."""
    metrics: dict[str, Any]


def step_on(device: str, dtype: torch.dtype, family: str = "qwen2-untied") -> Stepped:
    """Of equal weights, which 16 bit can hold, on equal data in several micro-batches.

    With an epsilon far above all gradients AdamW's first step is nearly the gradient; otherwise it would be its sign.
    """
    model = model_of(family, **WIDTHS).to(torch.bfloat16).to(device, dtype)
    before = _flat(list(model.parameters()))
    trainer = TrainerConfig(tokens_per_microbatch=128, learning_rate=1.0, epsilon=1.0, max_grad_norm=1e6)
    learner = Learner(wrap_model(model), AlgorithmConfig(), trainer)
    outcome = learner.step(learner.prepare([group_of(sequences_of(LENGTHS))], version=0))
    assert not outcome["skipped"]
    assert outcome["microbatches"] > 1
    return Stepped(_flat(list(trained_parameters(learner).values())) - before, outcome)


def _flat(parameters: list[Any]) -> Tensor:
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in parameters])


def assert_near(stepped: Stepped, exact: Stepped, share: float) -> None:
    """The difference of the steps is at most `share` of the step; figures differ by as much, or that many nats."""
    assert float(exact.change.norm()) > 1e-2, "nothing happened"
    assert float((stepped.change - exact.change).norm() / exact.change.norm()) < share
    for name in ("loss", "entropy", "grad_norm", "ess"):
        assert stepped.metrics[name] == pytest.approx(exact.metrics[name], rel=share, abs=share), name


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
    weight, head = nn.Parameter(torch.ones(2, 1)), nn.Linear(1, 1)
    before = head.weight.item()
    config = TrainerConfig(learning_rate=1e-3, value_learning_rate=own, warmup_steps=4, weight_decay=0.5)
    optimizer = PolicyOptimizer([weight], config, head)
    weight.grad, head.weight.grad, head.bias.grad = torch.full((2, 1), 0.5), torch.full((1, 1), 90.0), torch.ones(1)
    figures = optimizer.step(0.0, 1.0)
    assert (figures["learning_rate"], figures["clipped"]) == (2.5e-4, False)
    assert figures["grad_norm"] == pytest.approx(0.5 * 2**0.5)
    assert weight.detach().flatten().tolist() == pytest.approx([1 - 2.5e-4 * (1 + 0.5)] * 2)
    assert before - head.weight.item() == pytest.approx(rate / 4, rel=1e-3)
    weight.grad, head.weight.grad = torch.ones(2, 1), torch.full((1, 1), torch.inf)
    assert optimizer.step(0.0, 1.0)["skipped"] == "gradient not finite"


def test_without_torchao_the_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError("No module named 'torchao'")
        return whole(name, *args, **kwargs)

    groups = [{"params": [nn.Linear(2, 2).weight], "weight_decay": 0.0}]
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FieldError, match=r"needs torchao, which does not import here \(No module named 'torchao'\)"):
        build_adamw(groups, TrainerConfig(optimizer="adamw_8bit"))
    build_adamw(groups, TrainerConfig(optimizer="adamw"))
