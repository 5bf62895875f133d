"""The weights as actors load them: whole tensors under the model's own names, wherever and however the trainer keeps them.

Shards are gathered one parameter at a time, so that no rank ever holds more than one whole parameter besides its shard.
Adapters are not told of: what they adapt is given with them merged in. Not here: copying weights anywhere
(`services/trainer/weights/sender.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pipelinerl_torch.low_rank import add_low_rank
from services.trainer.learn.lora import BASE, LayerAdapter, layer_adapters


def served_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of what `served_weights` gives: its names, shapes and dtypes, but not always its values.

    Gathers nothing: one rank may look alone.
    """
    return ((name, parameter) for name, parameter, _ in _served(model))


@torch.no_grad()
def served_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter, tied ones once, in the order of `named_parameters`.

    With sharded weights every rank must go through all of it: each step gathers one parameter, and its adapter.
    """
    for name, parameter, adapter in _served(model):
        weight = whole(parameter)
        if adapter is not None:
            a, b = whole(adapter.a), whole(adapter.b)
            weight = add_low_rank(weight, a, b, adapter.scaling, adapter.transposed)
        yield name, weight


@torch.no_grad()
def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter of a module without adapters, likewise."""
    for name, parameter in module.named_parameters():
        yield name, whole(parameter)


@torch.no_grad()
def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of A and B of each adapted layer, in the dtype that they compute in, as peft's files name them.

    With sharded weights every rank must go through all of it.
    """
    for name, adapter in layer_adapters(model).items():
        for factor_name, factor in zip(factor_names(name), (adapter.a, adapter.b), strict=True):
            yield factor_name, whole(factor).to(adapter.weight.dtype)


def factor_names(layer: str) -> tuple[str, str]:
    """Of A and of B, as peft's files have them."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _served(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, LayerAdapter | None]]:
    """With each parameter the adapter that is merged into it, if any."""
    adapters = layer_adapters(model)
    factors = {id(factor) for adapter in adapters.values() for factor in (adapter.a, adapter.b)}
    of_weight = {id(adapter.weight): adapter for adapter in adapters.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) in factors:
            continue
        owner, _, leaf = name.rpartition(".")
        wrapped = owner.removesuffix(BASE) in adapters
        yield f"{owner.removesuffix(BASE)}.{leaf}" if wrapped else name, parameter, of_weight.get(id(parameter))


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or gathered from its shards."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
