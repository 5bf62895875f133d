"""AdamW on float32 parameters, with clipping, schedule, and steps that are skipped rather than poisoned.

A model in 16 bit gets float32 master copies: gradients of all micro-batches are summed into them in float32, the
optimizer steps them, and the 16-bit weights, which are what actors serve, are their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.config.recipe import TrainerConfig
from services.trainer.learn.adamw import MOMENTS, begin_moments, build_adamw, set_learning_rate
from services.trainer.learn.schedule import learning_rate
from services.trainer.learn.weights import whole


@dataclass(frozen=True)
class OptimizerReport:
    """One step, taken or not."""

    learning_rate: float
    grad_norm: float
    """Global L2 norm before clipping; NaN or infinite when the step was skipped for it."""
    skipped: str
    """Why no weight changed; "" when the step was taken."""


class PolicyOptimizer:
    """AdamW over the trainable parameters of a model. `backward()` fills gradients, `step` uses and clears them.

    Raises `FieldError` when the recipe's optimizer does not work here.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainerConfig) -> None:
        self.config = config
        self.steps_taken = 0
        """Optimizer steps taken; skipped ones do not count and do not move the schedule."""
        self._live = [parameter for parameter in parameters if parameter.requires_grad]
        self._stepped = [_master_of(parameter) for parameter in self._live]
        self._adamw = build_adamw(_decay_groups(self._stepped, config.weight_decay), config)

    def step(self, loss: float) -> OptimizerReport:
        """Clips, steps and clears the gradients. A non-finite `loss` or gradient changes nothing but is reported."""
        rate = learning_rate(self.steps_taken, self.config)
        norm = float(whole(nn.utils.clip_grad_norm_(self._stepped, self.config.max_grad_norm)))
        skipped = _not_finite(loss, norm)
        if not skipped:
            self._take(rate)
        self._adamw.zero_grad(set_to_none=True)
        return OptimizerReport(rate, norm, skipped)

    def _take(self, rate: float) -> None:
        set_learning_rate(self._adamw, rate)
        self._adamw.step()
        self.publish_masters()
        self.steps_taken += 1

    @torch.no_grad()
    def publish_masters(self) -> None:
        """The 16-bit weights become the rounding of their masters."""
        for live, stepped in self.trained():
            if live is not stepped:
                live.copy_(stepped)

    def trained(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter of the model, float32 parameter that is stepped in its place or the same) of each that is trained."""
        return zip(self._live, self._stepped, strict=True)

    def moments(self, stepped: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's own tensors of a parameter by `MOMENTS`; see `begin_moments`."""
        state = self._adamw.state[stepped]
        return {name: state[name] for name in MOMENTS}

    def begin_moments(self) -> None:
        """See `adamw.begin_moments`. For whoever needs moments of all parameters before all have been stepped."""
        begin_moments(self._adamw)


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself in float32; else a float32 copy that takes over its gradients as they are made."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_gradient(source: Tensor) -> None:
        assert source.grad is not None
        gradient, source.grad = source.grad, None
        # The sum reads 16 bit and writes 32: a float32 copy of the gradient would be twice the traffic.
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(take_gradient)
    return master


def _decay_groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _not_finite(loss: float, norm: float) -> str:
    if not math.isfinite(loss):
        return "loss not finite"
    return "" if math.isfinite(norm) else "gradient not finite"
