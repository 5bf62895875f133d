"""Load, check and shard the model for one rank's learner, from the recipe and the rank's place.

Rank 0 loads the weights and finds out how to call the model; the other ranks learn that from it and read only the model's
configuration. A single rank keeps whole weights on its device. A state to resume from is restored last, because the reference
of the KL term is the initial policy.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from pipelinerl import __version__
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.memory import GIB, Model, state_bytes, trainer_problem
from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.export import load_value_head
from services.trainer.checkpoint.state_files import restore
from services.trainer.distributed.world import Message, RankLayout, World, agree, join_ranks, world_of_ranks
from services.trainer.learn.model import DTYPES, blank_policy, compile_policy, frozen_copy, load_policy
from services.trainer.learn.policy import Policy, add_value_head
from services.trainer.learn.sharding import shard_policy
from services.trainer.learn.step import Learner

log = logging.getLogger(__name__)


def load_learner(recipe: Recipe, source: str, ranks: RankSettings, resume: Path | None = None, revision: str = "") -> Learner:
    """Return this rank's learner for the model in folder (or hub id) `source`, with the state in folder `resume`.

    With several ranks, all of them must call it; only rank 0 gives `resume`. `revision`: the pod's, if there is one. Raises
    `FieldError`, `ServiceError` if ranks differ in version, recipe or revision, and the errors of `restore`.
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
    """Return this rank's learner once all ranks have met; see `load_learner`."""
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
    """Raise `FieldError` if this rank's device cannot hold its part of weights, gradients and optimizer; warn if they leave
    little for activations. A CPU is not checked."""
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
