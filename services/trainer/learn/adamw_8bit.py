"""AdamW with both moments in 8 bit: torchao's, block-wise quantised (Dettmers et al., arXiv 2110.02861).

Moments take 2.03 bytes a parameter instead of 8. Tensors of less than 4096 elements, or not of whole blocks of 256, keep
float32 moments; with sharded parameters that is the shard of each rank. The step is compiled by torch, once for each shape,
on anything but a CPU. Imported only when asked for, because torchao takes seconds. Not here: 4-bit and fp8 moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchao.optim import AdamW8bit

from pipelinerl.errors import FieldError

BLOCK = 4096
"""Elements of the smallest tensor whose moments are in 8 bit."""


class EagerAdamW8bit(AdamW8bit):
    """On a CPU the step runs as it is written: that needs no C++ compiler, and is several times slower than compiled."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)


def build_adamw_8bit(groups: list[dict[str, Any]], **arguments: Any) -> Optimizer:
    """Raises `FieldError` where its step does not compile."""
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if all(device.type == "cpu" for device in devices):
        return EagerAdamW8bit(groups, **arguments)
    for device in devices:
        check_compiled_step(device)
    return AdamW8bit(groups, **arguments)


def check_compiled_step(device: torch.device) -> None:
    """Compiles and takes a step of one small tensor (seconds). Raises `FieldError` when this machine cannot."""
    probe = nn.Parameter(torch.zeros(BLOCK, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        AdamW8bit([probe]).step()
    except RuntimeError as error:
        fix = (
            f"its step is compiled by torch, which fails on {device.type} here: {_first_line(error)}; "
            "install a C and C++ compiler (gcc, g++; CC and CXX name others), or use adamw"
        )
        raise FieldError("trainer.optimizer", "adamw_8bit", fix) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
