"""The weights as actors load them: whole tensors under the model's own names, wherever and however the trainer keeps them.

Shards are gathered one parameter at a time, so that no rank ever holds more than one whole parameter besides its shard.
Not here: copying them anywhere (`services/trainer/weights/sender.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter, tied ones once, in the order of `named_parameters`.

    With sharded weights every rank must go through all of it: each step gathers one parameter.
    """
    for name, parameter in module.named_parameters():
        yield name, whole(parameter)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or gathered from its shards."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
