"""AdamW in 8 bit beside float32: the same training to within quantisation, a quarter of the memory, states that come back.

Run by `make test-adamw8bit`, with torchao beside the environment and not in it (docs/development.md).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from services.trainer.checkpoint.state_files import restore, stage, trained_parameters, write_state
from services.trainer.learn.model import wrap_model
from services.trainer.learn.optimizer import PolicyOptimizer, build_adamw, check_compiled_step
from services.trainer.learn.step import Learner
from tests.support.learner import LENGTHS, group_of, model_of, sequences_of

subclass_8bit = pytest.importorskip("torchao.optim.subclass_8bit", reason="no torchao: make test-adamw8bit has it")
OptimState8bit = subclass_8bit.OptimState8bit

WIDTH = 64
"""64 × 64 elements are the smallest matrix whose moments are quantised."""


def config(optimizer: str, **changes: Any) -> TrainerConfig:
    return TrainerConfig(**{"optimizer": optimizer, "learning_rate": 1e-2, "warmup_steps": 3, "steps": 200, **changes})


class Regression:
    """Least squares with a known answer: matrix and bias from inputs [128, WIDTH]."""

    def __init__(self, optimizer: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(128, WIDTH, generator=generator)
        self.targets = self.inputs @ torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 + 0.5
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH)
            self.layer.bias.zero_()
        self.optimizer = PolicyOptimizer(self.layer.parameters(), config(optimizer))

    def loss(self) -> Tensor:
        return (self.layer(self.inputs) - self.targets).square().mean()

    def train(self, steps: int) -> float:
        for _ in range(steps):
            loss = self.loss()
            loss.backward()
            assert not self.optimizer.step(loss.item(), 1.0)["skipped"]
        return self.loss().item()


def test_eight_bit_steps_train_as_float32_steps_do() -> None:
    first, exact, rounded = Regression("adamw").loss().item(), Regression("adamw"), Regression("adamw_8bit")
    half = exact.train(60), rounded.train(60)
    end = exact.train(140), rounded.train(140)
    assert half[1] == pytest.approx(half[0], rel=0.05)
    assert half[1] < 0.2 * first
    assert end[1] < 0.02 * first
    moved = (rounded.layer.weight - exact.layer.weight).abs().max().item()
    assert 0 < moved < 0.05
    assert isinstance(rounded.optimizer._adamw.state[rounded.layer.weight]["exp_avg"], OptimState8bit)


def test_a_restored_learner_has_its_moments_in_eight_bit_again(tmp_path: Path) -> None:
    group = group_of(sequences_of(LENGTHS))

    def learner(seed: int) -> Learner:
        model = model_of("qwen2-untied", seed, hidden_size=64, intermediate_size=64)
        return Learner(wrap_model(model), AlgorithmConfig(), config("adamw_8bit", max_grad_norm=0.5))

    first, second = learner(0), learner(1)
    for version in range(3):
        first.step(first.prepare([group], version))
    write_state(stage(first), tmp_path / "state", None)
    restore(second, tmp_path / "state")
    before, after = stage(first), stage(second)
    for name, exact in before.items():
        rounding = 0.01 if name.startswith("exp_avg/") else 0.0  # blocks whose largest is negative get another scale
        atol = rounding * float(exact.abs().max())
        torch.testing.assert_close(after[name], exact, rtol=0, atol=atol, msg=name)
    moments = [second.optimizer.moments(stepped)["exp_avg"] for stepped in trained_parameters(second).values()]
    assert 8 < sum(isinstance(one, OptimState8bit) for one in moments) < len(moments)
    losses = [[one.step(one.prepare([group], version))["loss"] for version in (3, 4, 5)] for one in (first, second)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize(("optimizer", "most"), [("adamw", 8.0), ("adamw_8bit", 0.26 * 8)])
def test_eight_bit_moments_take_a_quarter_of_the_memory(optimizer: str, most: float) -> None:
    parameter = nn.Parameter(torch.zeros(512, 512))
    adamw = build_adamw([{"params": [parameter], "weight_decay": 0.0}], config(optimizer))
    parameter.grad = torch.ones_like(parameter)
    adamw.step()
    moments = [adamw.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
    parts = [getattr(one, name) for one in moments for name in getattr(one, "tensor_attrs", ["data"])]
    assert sum(part.nbytes for part in parts) <= most * 512 * 512


def test_the_schedule_reaches_an_eight_bit_step() -> None:
    """The first step of AdamW moves each weight by the learning rate, which is a third of the peak in the warm-up's first."""
    one = Regression("adamw_8bit")
    before = one.layer.weight.detach().clone()
    one.train(1)
    moves = (one.layer.weight.detach() - before).abs()
    assert moves.median().item() == pytest.approx(1e-2 / 3, rel=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_a_machine_that_cannot_compile_the_step_is_told_what_to_do() -> None:
    from torchao.optim import AdamW8bit

    broken = inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with broken, pytest.raises(FieldError, match=r"trainer\.optimizer = 'adamw_8bit': .*no-such-compiler.*or use adamw"):
        check_compiled_step(AdamW8bit, torch.device("cpu"))
