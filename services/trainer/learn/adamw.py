"""Which AdamW a recipe asks for, and its learning rate. Not here: clipping, skipping and masters (`optimizer.py`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelinerl.config.recipe import TrainerConfig
from pipelinerl.errors import FieldError


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
