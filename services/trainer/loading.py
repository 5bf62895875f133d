"""From a recipe and this process's place among the ranks to its learner: the model loaded, checked, and sharded.

Rank 0 loads the weights and finds out how the model is to be called; the others learn that from it and read the model's
configuration only. One rank is plain: whole weights on its device. A state to go on from is given to the learner last: the
reference of the KL term is what the run began from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.files import load_value_head
from services.trainer.checkpoint.state_files import restore
from services.trainer.distributed.world import (
    Message,
    World,
    alone,
    join_ranks,
    world_of_ranks,
)
from services.trainer.learn.compile import compile_layers
from services.trainer.learn.model import DTYPES, blank_policy, frozen_copy, load_policy
from services.trainer.learn.policy import Policy, add_value_head
from services.trainer.learn.sharding import shard_policy
from services.trainer.learn.step import Learner


def load_learner(recipe: Recipe, source: str, ranks: RankSettings, resume: Path | None = None) -> Learner:
    """The learner of this rank, for the model of folder (or hub id) `source`, in the state that folder `resume` holds.

    With several ranks, all of them must call it; `resume` is rank 0's. Raises `FieldError`, and what `restore` raises.
    """
    if recipe.trainer.threads:
        torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    disable_progress_bar()  # which a log would hold as it moves
    device = rank_device(ranks.local_rank)
    if ranks.world_size > 1:
        join_ranks(device)
        return sharded_learner(recipe, source, device, resume)
    _check_alone(recipe)
    policy = load_policy(source, recipe.model, device=device, **_training(recipe))
    _give_value_head(policy, recipe, source)
    _compile_where_wanted(policy, recipe, device)
    learner = _learner(recipe, policy, alone(device), frozen_copy(policy) if _needs_reference(recipe) else None)
    return _resumed(learner, resume)


def sharded_learner(recipe: Recipe, source: str, device: torch.device, resume: Path | None = None) -> Learner:
    """This rank's learner among all ranks that have met; see `load_learner`."""
    world = world_of_ranks(recipe.trainer.context_parallel, recipe.trainer.shard_ranks, device)
    whole, resume = _load_on_first(recipe, source, world, resume)
    _give_value_head(whole, recipe, source)
    _compile_where_wanted(whole, recipe, device)
    frozen = frozen_copy(whole) if _needs_reference(recipe) else None
    policy = _sharded(whole, recipe, world)
    learner = _learner(recipe, policy, world, _sharded(frozen, recipe, world) if frozen is not None else None)
    return _resumed(learner, resume)


def _resumed(learner: Learner, resume: Path | None) -> Learner:
    if resume is not None:
        restore(learner, resume)
    return learner


def _give_value_head(policy: Policy, recipe: Recipe, source: str) -> None:
    """The one that is saved beside the model, else a new one."""
    if recipe.algorithm.advantage == "value":
        add_value_head(policy.scorer)
        if policy.device.type != "meta":
            load_value_head(policy.scorer, Path(source))


def _compile_where_wanted(policy: Policy, recipe: Recipe, device: torch.device) -> None:
    if recipe.trainer.compile:
        compile_layers(policy.model, device)


def _needs_reference(recipe: Recipe) -> bool:
    """Whether there must be a second copy of the weights: what adapters adapt is the reference itself."""
    return recipe.algorithm.kl_coefficient > 0 and recipe.trainer.lora is None


def _training(recipe: Recipe) -> dict[str, Any]:
    """Arguments of the functions that make a policy to train."""
    return {"gradient_checkpointing": recipe.trainer.gradient_checkpointing, "lora": recipe.trainer.lora}


def _learner(recipe: Recipe, policy: Policy, world: World, reference: Policy | None) -> Learner:
    return Learner(
        policy,
        recipe.algorithm,
        recipe.trainer,
        temperature=recipe.sampling.temperature,
        world=world,
        reference=reference,
        compute_dtype=DTYPES[recipe.model.dtype],
    )


def rank_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _check_alone(recipe: Recipe) -> None:
    for name in ("context_parallel", "shard_ranks"):
        value = getattr(recipe.trainer, name)
        if value > 1:
            raise FieldError(f"trainer.{name}", value, "needs as many ranks; raise trainer.nproc, or use 1")


def _load_on_first(recipe: Recipe, source: str, world: World, resume: Path | None) -> tuple[Policy, Path | None]:
    """Rank 0: the model in host memory, checked. Other ranks: its shape, and what rank 0 resumes."""
    assert world.links is not None
    if world.is_first:
        policy = load_policy(source, recipe.model, **_training(recipe))
        facts = {"attention": policy.attention, "own_logits": policy.scorer.own_logits, "resume": str(resume or "")}
        world.links.tell_all(Message("model", facts))
        return policy, resume
    found = world.links.hear().fields
    policy = blank_policy(source, recipe.model, found["attention"], found["own_logits"], **_training(recipe))
    return policy, Path(found["resume"]) if found["resume"] else None


def _sharded(policy: Policy, recipe: Recipe, world: World) -> Policy:
    dtype = DTYPES[recipe.model.dtype]
    return shard_policy(policy, world, dtype, reshard=recipe.trainer.reshard_after_forward)
