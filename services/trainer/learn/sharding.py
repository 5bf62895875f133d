"""A policy whose weights, gradients and optimizer state are spread over ranks (FSDP2, `torch.distributed.fsdp.fully_shard`).

Rank 0 has loaded the model into host memory; the others have only its shape. The weights go from rank 0 to all ranks layer by
layer, and each rank keeps its shard: no rank ever has more than one whole layer, or the part outside the layers, on its device.
Trained weights are kept in float32, the computation uses the recipe's dtype, and gradients are summed in float32. They are
sums, not means, because the terms of the loss already have their weight in the whole step. A single rank needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.distributed.world import World
from services.trainer.learn.context_parallel import RowPart, key_repeats
from services.trainer.learn.model import decoder_layers
from services.trainer.learn.policy import Policy

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest position of a call, but a part of a row sees only its own positions."""


def shard_policy(policy: Policy, world: World, dtype: torch.dtype, *, reshard: bool = True) -> Policy:
    """Shard `policy` over the ranks of `world`, all of which call this. It computes in `dtype`.

    `reshard`: drop gathered weights after each forward pass and gather them again for the backward pass, which takes less
    memory and more traffic. Raises `FieldError` if the model's heads do not divide among the ranks of a row.
    """
    assert world.mesh is not None, "one rank alone has nothing to shard"
    model = policy.model
    model.config.use_cache = False
    model.tie_weights()
    layers = decoder_layers(model)
    if not layers:
        fix = f"{type(model).__name__} has no list of layers to shard; use 1"
        raise FieldError("trainer.nproc", world.layout.size, fix)
    frozen = not any(parameter.requires_grad for parameter in policy.parameters())
    inside = {module for layer in layers for module in layer.modules()}
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        _bring(layer.modules(), world)
        fully_shard(layer, mesh=world.mesh, mp_policy=mixed, reshard_after_forward=reshard or frozen)
    _bring((module for module in policy.modules() if module not in inside), world)
    # The root keeps its weights until the backward pass, if there is one: the output head is used again there.
    fully_shard(policy, mesh=world.mesh, mp_policy=mixed, reshard_after_forward=frozen)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.device, policy.part = world.device, row_part(model, policy.attention, world)
    return policy


def row_part(model: PreTrainedModel, attention: str, world: World) -> RowPart | None:
    """Return this rank's part of each row; None if it has whole rows. Raises `FieldError` for a model that cannot share
    rows."""
    layout = world.layout
    if layout.sequence_ranks == 1:
        return None
    config = model.config.get_text_config()
    if not attention.startswith("pipelinerl"):
        fix = f"needs attention 'auto', and this model has {attention!r}; use 1, or a model without chunked attention"
        raise FieldError("trainer.context_parallel", layout.sequence_ranks, fix)
    heads = config.num_attention_heads
    key_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, layout.sequence_ranks)
    scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling in _LENGTH_DEPENDENT:
        fix = f"does not work with the model's {scaling} rotary embedding, which depends on the row's length; use 1"
        raise FieldError("trainer.context_parallel", layout.sequence_ranks, fix)
    return RowPart(layout.sequence_index, layout.sequence_ranks, world.row_group)


def _bring(modules: Iterable[nn.Module], world: World) -> None:
    """Move rank 0's parameters and buffers of `modules` themselves, without submodules, to every rank's device. Tied ones stay
    tied. No reference is kept, so that sharding can free them."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensor is kept, so that its id is not reused
    for module in modules:
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in list(named(recurse=False, remove_duplicate=False)):
                if id(tensor) not in moved:
                    moved[id(tensor)] = (tensor, _from_first(tensor, world))
                setattr(module, name, moved[id(tensor)][1])


def _from_first(tensor: Tensor, world: World) -> Tensor:
    """Return rank 0's `tensor` on this rank's device; a parameter if it is one."""
    dtype = torch.float32 if tensor.requires_grad else tensor.dtype
    if world.is_first:
        here = tensor.detach().to(world.device, dtype)
    else:
        here = torch.empty_like(tensor, dtype=dtype, device=world.device)
    world.broadcast(here)
    return nn.Parameter(here, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else here
