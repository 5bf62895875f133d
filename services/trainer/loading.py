"""Load, check and shard the model for one rank's learner, from the recipe and the rank's place.

Rank 0 loads the weights and finds out how to call the model. It tells the other ranks, which read only the model's
configuration. A single rank keeps whole weights on its device. A state to resume from is restored last, because the reference
of the KL term is the initial policy.

Shards are FSDP2's (`torch.distributed.fsdp.fully_shard`). The weights go from rank 0's host memory to all ranks, layer by
layer, and each rank keeps its shard. So no device ever holds more than one whole layer, or the whole rest outside the layers.
Trained weights are stored in float32 and computed in the recipe's dtype. Their gradients are summed in float32, not averaged,
because each term of the loss already has its weight within the whole step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipelinerl import __version__
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.memory import GIB, Model, state_bytes, trainer_problem
from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.checkpointer import load_value_head
from services.trainer.checkpoint.state_files import restore
from services.trainer.distributed.world import Message, RankLayout, World, agree, join_ranks, world_of_ranks
from services.trainer.learn.context_parallel import RowPart, key_repeats
from services.trainer.learn.model import DTYPES, blank_policy, compile_policy, decoder_layers, frozen_copy, load_policy
from services.trainer.learn.policy import Policy, add_value_head
from services.trainer.learn.step import Learner

log = logging.getLogger(__name__)


def load_learner(recipe: Recipe, source: str, ranks: RankSettings, resume: Path | None = None, revision: str = "") -> Learner:
    """Return this rank's learner for the model in folder (or hub id) `source`, with the state in folder `resume`.

    All ranks must call this, but only rank 0 passes `resume`. `revision`: the pod template's revision, if there is a pod.
    Raises `FieldError`, `ServiceError` if ranks differ in pipelinerl version, recipe or revision, and the errors of `restore`.
    """
    if recipe.trainer.threads:
        torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    disable_progress_bar()  # it would fill the log
    device = rank_device(ranks.local_rank)
    if ranks.world_size > 1:
        join_ranks(device)
        digest = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
        agree({"version": __version__, "recipe": digest[:12], "pod template": revision})
        return sharded_learner(recipe, source, device, resume)
    for name in ("context_parallel", "shard_ranks"):
        if (value := getattr(recipe.trainer, name)) > 1:
            raise FieldError(f"trainer.{name}", value, "needs as many ranks; raise trainer.nproc, or use 1")
    policy = load_policy(
        source,
        recipe.model,
        device=device,
        gradient_checkpointing=recipe.trainer.gradient_checkpointing,
        lora=recipe.trainer.lora,
    )
    return _learner(policy, recipe, source, World(RankLayout(), device), resume)


def sharded_learner(recipe: Recipe, source: str, device: torch.device, resume: Path | None = None) -> Learner:
    """Return this rank's learner. All ranks must have joined before; see `load_learner`."""
    world = world_of_ranks(recipe.trainer.context_parallel, recipe.trainer.shard_ranks, device)
    assert world.links is not None
    recompute, lora = recipe.trainer.gradient_checkpointing, recipe.trainer.lora
    if world.is_first:  # the model in host memory, checked
        policy = load_policy(source, recipe.model, gradient_checkpointing=recompute, lora=lora)
        facts = {"attention": policy.attention, "own_logits": policy.own_logits, "resume": str(resume or "")}
        world.links.tell_all(Message("model", facts))
    else:  # its shape, and rank 0's resume folder
        found = world.links.hear().fields
        attention, own_logits = found["attention"], found["own_logits"]
        policy = blank_policy(source, recipe.model, attention, own_logits, gradient_checkpointing=recompute, lora=lora)
        resume = Path(found["resume"]) if found["resume"] else None
    return _learner(policy, recipe, source, world, resume)


def _learner(whole: Policy, recipe: Recipe, source: str, world: World, resume: Path | None) -> Learner:
    """Return the learner for a policy that is not sharded yet."""
    if recipe.algorithm.advantage == "value":
        add_value_head(whole)
        if whole.device.type != "meta":  # saved beside the model, or new
            load_value_head(whole, Path(source))
    if recipe.trainer.compile:
        compile_policy(whole, world.device)
    check_memory(recipe, whole, world)
    dtype = DTYPES[recipe.model.dtype]

    def sharded(policy: Policy) -> Policy:
        if world.mesh is None:
            return policy
        return shard_policy(policy, world, dtype, reshard=recipe.trainer.reshard_after_forward)

    # With adapters the base weights are the reference; otherwise it is a second copy of the weights.
    needs_reference = recipe.algorithm.kl_coefficient > 0 and recipe.trainer.lora is None
    frozen = frozen_copy(whole) if needs_reference else None
    policy = sharded(whole)
    learner = Learner(
        policy,
        recipe.algorithm,
        recipe.trainer,
        temperature=recipe.sampling.temperature,
        world=world,
        reference=sharded(frozen) if frozen is not None else None,
        compute_dtype=dtype,
    )
    if resume is not None:
        restore(learner, resume)
    return learner


def check_memory(recipe: Recipe, whole: Policy, world: World) -> None:
    """Raise `FieldError` if this rank's device cannot hold its part of weights, gradients and optimizer state. Warn if they
    leave little memory for activations. A CPU is not checked."""
    if world.device.type != "cuda":
        return
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    model, ranks = Model.of(recipe, parameters), world.layout.shard_ranks
    memory_gib = torch.cuda.mem_get_info(world.device)[1] / GIB
    problem = trainer_problem(recipe, model, memory_gib, ranks)
    if problem is not None and state_bytes(recipe, model) > memory_gib * GIB * ranks:
        raise problem
    if problem is not None:
        log.warning("%s", problem)


def rank_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings that depend on a row's longest position. A rank with only a part of the row does not know it."""


def shard_policy(policy: Policy, world: World, dtype: torch.dtype, *, reshard: bool = True) -> Policy:
    """Shard `policy` over the ranks of `world`. All ranks must call this. The policy then computes in `dtype`.

    `reshard`: drop gathered weights after each forward pass and gather them again for the backward pass, which saves memory but
    costs traffic. Raises `FieldError` if the model's heads do not divide among the ranks of a row.
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
    """Return this rank's part of each row; None if each rank has whole rows. Raises `FieldError` if ranks cannot share rows of
    this model."""
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
    """Copy rank 0's parameters and buffers of `modules`, without submodules, to every rank's device. Tied tensors stay tied. No
    reference is kept, so that sharding can free the whole tensors."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensor is kept, so that its id is not reused
    for module in modules:
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in list(named(recurse=False, remove_duplicate=False)):
                if id(tensor) not in moved:
                    moved[id(tensor)] = (tensor, _from_first(tensor, world))
                setattr(module, name, moved[id(tensor)][1])


def _from_first(tensor: Tensor, world: World) -> Tensor:
    """Return rank 0's `tensor` on this rank's device, as a parameter if it is a parameter."""
    dtype = torch.float32 if tensor.requires_grad else tensor.dtype
    if world.is_first:
        here = tensor.detach().to(world.device, dtype)
    else:
        here = torch.empty_like(tensor, dtype=dtype, device=world.device)
    world.broadcast(here)
    return nn.Parameter(here, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else here
