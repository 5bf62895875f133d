"""Insert, find and disable peft's low-rank adapters in a model, and yield the weights in the form that actors load.

Adapters have the model's dtype, and the optimizer updates float32 copies. Sharded adapters are themselves float32. Actors load
whole weights with adapters merged in, or A and B of each adapter. Shards are gathered one parameter at a time, to save memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import LoraConfig
from pipelinerl.transfer.chunks import add_low_rank

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import LoraLayer


NAME = "default"
"""peft's name for the only adapter."""
BASE = ".base_layer"
"""Suffix that peft adds to the name of a wrapped layer."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, source: str = "") -> None:
    """Freeze all of `model` and insert new adapters, which have no effect at first. `source`: origin of the model, saved with
    the adapter. Raises `FieldError` if the model or a target cannot have adapters."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = _targets(model, config)
    of_peft = PeftLoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=source or None,
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # used as a number
        use_rslora=config.rslora,
        target_modules=config.target_modules,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets.values()),
    )
    of_peft._register_custom_module({nn.Linear: rounded_once()})
    inject_adapter_in_model(of_peft, model, NAME)
    wrapped = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    if stacked := [name for name, layer in wrapped if not hasattr(layer.get_base_layer(), "weight")]:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
        fix = f"matches {stacked[0]}, one tensor for all experts, which cannot have adapters here; name layers, such as {kinds}"
        raise FieldError("trainer.lora.target_modules", config.target_modules, fix)
    model.requires_grad_(False)
    for adapter in layer_adapters(model).values():
        for factor in (adapter.a, adapter.b):
            factor.data = factor.data.to(adapter.weight.dtype)
            factor.requires_grad_(True)


@cache
def rounded_once() -> type[nn.Module]:
    """Return a subclass of peft's layer for `nn.Linear` that, in 16 bits, adds s · B·(A·x) to W·x before it rounds W·x. peft
    rounds W·x first, and thus loses adapter terms below half a unit in the last place. At first, most are that small."""
    from peft.tuners import lora

    class RoundedOnce(lora.Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base: Any = self.get_base_layer()
            if self.disable_adapters or self.merged or x.dtype == torch.float32:
                whole_sum: Tensor = super().forward(x, *args, **kwargs)
                return whole_sum
            low_rank = self.lora_B[NAME](self.lora_A[NAME](x)) * self.scaling[NAME]
            y: Tensor = torch.addmm(low_rank.flatten(0, -2), x.flatten(0, -2), base.weight.t()).view_as(low_rank)
            return y if base.bias is None else y + base.bias

    return RoundedOnce


def _targets(model: PreTrainedModel, config: LoraConfig) -> dict[str, nn.Module]:
    modules, field = dict(model.named_modules()), "trainer.lora.target_modules"
    head = model.get_output_embeddings()
    body: dict[str, nn.Module]
    body = {name: one for name, one in modules.items() if isinstance(one, nn.Linear | Conv1D) and one is not head}
    if not body:
        raise FieldError(field, config.target_modules, f"{type(model).__name__} has no layer to adapt; remove trainer.lora")
    if config.target_modules == "all-linear":
        return body
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in body}))
    targets: dict[str, nn.Module] = {}
    for part in config.target_modules:
        found = [name for name in modules if name == part or name.endswith(f".{part}")]  # peft's rule
        if not found:
            raise FieldError(field, part, f"the model has no such layer; adapters can go on {kinds}")
        for name in found:
            if name not in body:
                fix = f"matches {name}, which is the output head or not a linear layer; adapters can go on {kinds}"
                raise FieldError(field, config.target_modules, fix)
            targets[name] = body[name]
    return targets


def has_adapters(model: nn.Module) -> bool:
    return bool(getattr(model, "peft_config", None))


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """The adapter of one layer. With sharded weights, its tensors are shards."""

    layer: LoraLayer
    weight: nn.Parameter
    """Weight of the adapted layer: [out, in], or [in, out] if `transposed`."""
    a: nn.Parameter
    """[rank, in]"""
    b: nn.Parameter
    """[out, rank]"""
    scaling: float
    transposed: bool


def layer_adapters(model: nn.Module) -> dict[str, LayerAdapter]:
    """Return the adapter of each adapted layer, by the layer's original name."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    adapters = {}
    for name, wrapped in model.named_modules():
        if isinstance(wrapped, LoraLayer):
            layer: Any = wrapped
            base, a, b = layer.get_base_layer(), layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            scaling = float(layer.scaling[NAME])
            adapters[name] = LayerAdapter(layer, base.weight, a, b, scaling, isinstance(base, Conv1D))
    return adapters


def peft_config(model: nn.Module) -> peft.LoraConfig:
    configs: dict[str, peft.LoraConfig] = model.peft_config  # type: ignore[assignment]
    return dataclasses.replace(configs[NAME], inference_mode=True)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block. Their weights keep `requires_grad`."""
    adapters = layer_adapters(model).values()
    for adapter in adapters:
        adapter.layer.enable_adapters(False)
        for factor in (adapter.a, adapter.b):  # peft freezes them, but gathering must not treat them as frozen
            factor.requires_grad_(True)
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.layer.enable_adapters(True)


@torch.no_grad()
def served_weights(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each parameter of the original model, in its order, with adapters merged; tied parameters come
    once. With sharded weights, every rank must iterate to the end. `dtype`: dtype to which the caller will round. To save
    traffic, shards of weights without an adapter are gathered in this dtype."""
    for name, parameter, adapter in served_parameters(model):
        if adapter is None:
            yield name, whole(parameter, dtype)
        else:  # gather the factors in the weight's dtype, to which `add_low_rank` rounds them
            a, b = (whole(factor, parameter.dtype) for factor in (adapter.a, adapter.b))
            yield name, add_low_rank(whole(parameter), a, b, adapter.scaling, adapter.transposed)


@torch.no_grad()
def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for A and B of each adapted layer, in the adapted weight's dtype. Names are as in peft's files, but
    without the prefix `base_model.model.`. With sharded weights every rank must iterate to the end."""
    for name, adapter in layer_adapters(model).items():
        for factor_name, factor in zip(factor_names(name), (adapter.a, adapter.b), strict=True):
            yield factor_name, whole(factor, adapter.weight.dtype).to(adapter.weight.dtype)


def factor_names(layer: str) -> tuple[str, str]:
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def served_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, LayerAdapter | None]]:
    """Yield (name, parameter, adapter to merge into it or None), named as in `served_weights`. Nothing is gathered."""
    adapters = layer_adapters(model)
    factors = {id(factor) for adapter in adapters.values() for factor in (adapter.a, adapter.b)}
    of_weight = {id(adapter.weight): adapter for adapter in adapters.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) in factors:
            continue
        owner, _, leaf = name.rpartition(".")
        wrapped = owner.removesuffix(BASE) in adapters
        yield f"{owner.removesuffix(BASE)}.{leaf}" if wrapped else name, parameter, of_weight.get(id(parameter))


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor, detached. If it is sharded, gather it, in `dtype` if that has fewer bits."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    is_smaller = dtype is not None and dtype.itemsize < tensor.dtype.itemsize
    shards = cast(DTensor, tensor.detach().to(dtype)) if is_smaller else tensor
    return shards.full_tensor().detach()
