"""Which AdamW a recipe asks for, and its learning rate. Not here: clipping, skipping and masters (`optimizer.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelinerl.config.recipe import TrainerConfig
from pipelinerl.errors import FieldError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Of each parameter: both moments in its shape, and how many steps it has had, a float32 number."""


def build_adamw(groups: list[dict[str, Any]], config: TrainerConfig) -> Optimizer:
    """Over parameter groups of float32 parameters; each may have a `weight_decay` of its own.

    `adamw` keeps both moments in float32, fused where the device can; `adamw_8bit` in 8 bit (`adamw_8bit.py`).
    Raises `FieldError` where the 8-bit one does not work.
    """
    common: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
    }
    if config.optimizer == "adamw":
        fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
        return AdamW(groups, fused=fused, **common)
    try:
        from services.trainer.learn.adamw_8bit import build_adamw_8bit
    except ImportError as error:
        fix = f"needs torchao, which does not import here ({error}): run make adamw8bit, or use adamw"
        raise FieldError("trainer.optimizer", config.optimizer, fix) from error
    return build_adamw_8bit(groups, **common)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Of all groups. One that is kept in a tensor stays in it: a compiled step reads it there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def begin_moments(optimizer: Optimizer) -> None:
    """Gives parameters that were never stepped the moments of 0 that their first step begins with. Forgets gradients.

    The optimizer makes them as it likes them, in a step without gradient at a learning rate of 0, which changes no weight.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    new = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    optimizer.zero_grad(set_to_none=True)
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    if new:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in new:
        optimizer.state[parameter]["step"].zero_()
