"""Load, check and shard the model on every rank.

Rank 0 loads the weights and finds out which attention and output head work; the other ranks read only the configuration. A
single rank keeps whole weights on its device. A checkpoint's state is restored only after the reference of the KL term is
copied, because the reference is the initial policy.

FSDP2 shards the model. The weights go from rank 0's host memory to all ranks, layer by layer. A device thus holds at most one
layer unsharded, or the weights outside the layers. Trained weights are stored in float32; computation uses the recipe's dtype.
Gradients are summed in float32, not averaged, because the terms of the loss are weighted over the whole step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from pipelinerl import __version__
from pipelinerl.errors import FieldError
from pipelinerl.messages.control import Backend
from pipelinerl.prompts import use_chat_template
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.rules import undivided
from pipelinerl.rl.memory import GIB, Model, sends_adapters, snapshot_gib, state_bytes, trainer_problem
from pipelinerl.service.settings import RankSettings
from pipelinerl.transfer.group import HOST, GroupStore, on_device
from pipelinerl.transfer.manifest import chunk_size
from services.trainer.checkpoint.checkpointer import load_value_head
from services.trainer.checkpoint.state_files import restore
from services.trainer.learn.attention import RowPart, key_repeats
from services.trainer.learn.meter import bound_of
from services.trainer.learn.model import (
    DTYPES,
    blank_policy,
    compile_policy,
    decoder_layers,
    frozen_copy,
    hub_arguments,
    load_policy,
)
from services.trainer.learn.policy import Policy, add_value_head
from services.trainer.learn.step import Learner
from services.trainer.weight_sync.sender import WeightSender, adapter_factors, whole_weights
from services.trainer.world import Message, RankLayout, World, join_ranks, world_of_ranks

log = logging.getLogger(__name__)


def weight_sender(
    learner: Learner, recipe: Recipe, backend: Backend, store: GroupStore | None = None, host: str = "127.0.0.1"
) -> WeightSender:
    """Return this learner's sender of weights or adapters. With NCCL, a single rank keeps snapshots on its GPU if they fit."""
    sharded, wire_dtype = learner.world.mesh is not None, str(recipe.weights.wire_dtype)
    if wire_dtype == "model":  # sharded weights are kept in float32, and served in the model's dtype
        wire_dtype = recipe.model.dtype if sharded else ""
    chunk_bytes = chunk_size(recipe.weights.chunk_mib, backend)
    described = adapter_factors if sends_adapters(recipe) else whole_weights
    manifest = described(learner.policy.model, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)
    of_groups = on_device(learner.policy.device) if backend == "nccl" else HOST
    is_kept_there = not sharded and (backend != "nccl" or has_room_for_snapshots(learner.policy, recipe))
    places, stall_s = (of_groups if is_kept_there else HOST, of_groups), min(10.0, recipe.weights.deadline_s)
    return WeightSender(manifest, stall_s, *places, store=store, host=host, backend=backend)


def has_room_for_snapshots(policy: Policy, recipe: Recipe) -> bool:
    """Return whether a single rank's GPU has room for the copies of weights that are sent. Adapters always fit. Whole weights
    must fit beside the training state. If an actor shares the GPU, torch has only part of it, and whole weights never fit."""
    if sends_adapters(recipe) or torch.cuda.get_per_process_memory_fraction(policy.device) < 1:
        return sends_adapters(recipe)
    model = Model.of(recipe, sum(parameter.numel() for parameter in policy.parameters()))
    return snapshot_gib(recipe, model, torch.cuda.mem_get_info(policy.device)[1] / GIB)[0] > 0


def load_tokenizer(source: str, recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer of folder or hub id `source`, with the recipe's revision and chat template. Raises `FieldError` if
    the tokenizer does not load, or cannot use the template."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **hub_arguments(source, recipe.model))
    except (OSError, ValueError, ImportError) as error:
        fix = f"its tokenizer does not load; add its files, or name another model: {error}"
        raise FieldError("model.name", source, fix) from error
    use_chat_template(tokenizer, recipe.model)
    return tokenizer


def load_learner(recipe: Recipe, source: str, ranks: RankSettings, resume: Path | None = None, revision: str = "") -> Learner:
    """Return this rank's learner. All ranks must call this. `source`: folder or hub id of the model. `resume`: folder of the
    state to continue from, of which only rank 0's is used. `revision`: the pod template's; empty outside Kubernetes. Raises
    `ServiceError` if ranks differ in pipelinerl version, recipe or revision, `FieldError` if the model cannot be trained with
    this recipe, ranks and memory, and the errors of `restore`."""
    if recipe.trainer.threads:
        torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    disable_progress_bar()  # it would fill the log
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size > 1:
        digest = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()
        join_ranks(device, {"version": __version__, "recipe": digest[:12], "pod template": revision})
    for problem in undivided(recipe.trainer, ranks.world_size):
        raise problem
    if ranks.world_size > 1:
        return sharded_learner(recipe, source, device, resume)
    policy = load_policy(source, recipe.model, recipe.trainer, device)
    return _learner(policy, recipe, source, World(RankLayout(), device), resume)


def sharded_learner(recipe: Recipe, source: str, device: torch.device, resume: Path | None = None) -> Learner:
    """Return this rank's learner, as described in `load_learner`. All ranks must call this, after `join_ranks`."""
    world = world_of_ranks(recipe.trainer.context_parallel, recipe.trainer.shard_ranks, device)
    assert world.links is not None
    if world.is_first:  # load and check the model in host memory
        policy = load_policy(source, recipe.model, recipe.trainer)
        facts = {"attention": policy.attention, "own_logits": policy.own_logits, "resume": str(resume or "")}
        world.links.broadcast(Message("model", facts))
    else:  # build the model without weights, and use rank 0's resume folder
        found = world.links.receive_order().fields
        attention, own_logits = found["attention"], found["own_logits"]
        policy = blank_policy(source, recipe.model, recipe.trainer, attention, own_logits)
        resume = Path(found["resume"]) if found["resume"] else None
    return _learner(policy, recipe, source, world, resume)


def _learner(whole: Policy, recipe: Recipe, source: str, world: World, resume: Path | None) -> Learner:
    if recipe.algorithm.advantage == "value":
        add_value_head(whole)
        if whole.device.type != "meta":  # a head saved beside the model replaces the new one
            load_value_head(whole, Path(source))
    if recipe.trainer.compile:
        compile_policy(whole, world.device)
    check_memory(recipe, whole, world)
    dtype = DTYPES[recipe.model.dtype]
    shard = partial(shard_policy, world=world, dtype=dtype, reshard=recipe.trainer.reshard_after_forward)
    # With adapters, the frozen base weights are the reference. Otherwise the reference is a copy of the initial weights.
    frozen = frozen_copy(whole) if recipe.algorithm.kl_coefficient > 0 and recipe.trainer.lora is None else None
    policy = shard(whole)
    learner = Learner(
        policy,
        recipe.algorithm,
        recipe.trainer,
        temperature=recipe.sampling.temperature,
        world=world,
        reference=shard(frozen) if frozen is not None else policy,
        compute_dtype=dtype,
        bound=bound_of(recipe),
    )
    if resume is not None:
        restore(learner, resume)
    return learner


def check_memory(recipe: Recipe, whole: Policy, world: World) -> None:
    """Raise `FieldError` if this rank's GPU cannot hold its part of the training state. Warn if little memory is left."""
    if world.device.type != "cuda":
        return
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    adapters = trained if recipe.trainer.lora is not None else 0
    model, ranks = Model.of(recipe, parameters - adapters, adapters=adapters), world.layout.shard_ranks
    memory_gib = torch.cuda.mem_get_info(world.device)[1] / GIB
    problem = trainer_problem(recipe, model, memory_gib, ranks)
    if problem is not None and state_bytes(recipe, model) > memory_gib * GIB * ranks:
        raise problem
    if problem is not None:
        log.warning("%s", problem)


def shard_policy(policy: Policy, world: World, dtype: torch.dtype, *, reshard: bool = True) -> Policy:
    """Shard `policy` over the ranks of `world`, to compute in `dtype`, and return it. A single rank's policy stays unchanged.
    All ranks must call this. `reshard`: drop gathered weights after each forward pass, which saves memory but costs traffic.
    Raises `FieldError` if the model has no list of layers, or if its attention cannot split a packed row over ranks."""
    if world.mesh is None:
        return policy
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
    """Return this rank's part of each row; None for whole rows. Raises `FieldError` if ranks cannot share this model's rows."""
    layout = world.layout
    if layout.sequence_ranks == 1:
        return None
    config = model.config.get_text_config()
    if not attention.startswith("pipelinerl"):
        fix = f"needs attention 'auto', and this model has {attention!r}; use 1, or another model"
        raise FieldError("trainer.context_parallel", layout.sequence_ranks, fix)
    heads = config.num_attention_heads
    key_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, layout.sequence_ranks)
    return RowPart(layout.sequence_index, layout.sequence_ranks, world.row_group)


def _bring(modules: Iterable[nn.Module], world: World) -> None:
    """Copy rank 0's parameters and buffers of `modules`, without submodules, to every rank's device. Tied tensors stay tied."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensor is kept, so that its id is not reused
    for module in modules:
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in list(named(recurse=False, remove_duplicate=False)):
                if id(tensor) not in moved:
                    moved[id(tensor)] = (tensor, _from_first(tensor, world))
                setattr(module, name, moved[id(tensor)][1])


def _from_first(tensor: Tensor, world: World) -> Tensor:
    dtype = torch.float32 if tensor.requires_grad else tensor.dtype
    if world.is_first:
        here = tensor.detach().to(world.device, dtype)
    else:
        here = torch.empty_like(tensor, dtype=dtype, device=world.device)
    dist.broadcast(here, 0)
    return nn.Parameter(here, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else here
