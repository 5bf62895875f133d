"""Placement of a local run: which GPU each trainer rank and each actor gets, and what `auto` means on this machine.

A GPU belongs to one process, with one exception: on a single GPU, the trainer's only rank and the only actor share it, and vLLM
gets the memory that the trainer and weight updates leave. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelinerl.errors import FieldError, counted
from pipelinerl.recipe.devices import Device
from pipelinerl.recipe.fields import VLLM_SHARE, Recipe
from pipelinerl.rl.memory import (
    ENGINE_GIB,
    GIB,
    MODEL_STATE_SHARE,
    Model,
    accelerator_named,
    actor_problem,
    fewest_ranks,
    state_bytes,
    trainer_problem,
    update_gib,
)
from pipelinerl.rl.planner import best_split, estimated, possible_splits
from pipelinerl.rl.throughput import Lengths

FREE_SHARE = 0.5
"""Share of a GPU's memory that must be free, or the GPU counts as used by another process."""
SHARED_UNKNOWN = 0.4
"""vLLM's share of a GPU that it shares with the trainer of a model of unknown size."""
CONTEXTS_GIB = 1.0
"""Memory of the CUDA contexts of two processes."""
LEAST_ACTIVATIONS_GIB = 4.0
"""Memory for activations of a rank on a shared GPU, if `MODEL_STATE_SHARE` leaves less."""
OPTION = "--placement"


class Placement(BaseModel):
    """GPUs by their names in CUDA_VISIBLE_DEVICES. As JSON, it can be given to `pipelinerl run --placement`."""

    model_config = ConfigDict(frozen=True)

    trainer: tuple[str, ...]
    """The GPU of each rank."""
    actors: tuple[tuple[str, ...], ...]
    """The GPUs of each actor, and then those for actors that `pipelinerl scale` may add."""

    @property
    def is_shared(self) -> bool:
        """Whether an actor uses a GPU of the trainer."""
        return not set(self.trainer).isdisjoint(uuid for group in self.actors for uuid in group)

    def environment(self, group: Sequence[str]) -> dict[str, str]:
        """Return the variables of a process that uses these GPUs. NCCL refuses two ranks on one GPU unless it is told to allow
        them."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(group), **({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.is_shared else {})}


@dataclass(frozen=True)
class Placed:
    """A placement, and the recipe with numbers instead of `auto`."""

    placement: Placement
    recipe: Recipe


AUTOMATIC = ("trainer.nproc", "actor.count", "actor.engine.gpu_memory_utilization")
"""Fields that take `auto`."""


def numbered(recipe: Recipe, count: int | None = None, ranks: int | None = None, share: float | None = None) -> Recipe:
    """Return the recipe with these numbers of actors and ranks and this share of memory; None: its own, or those for a CPU."""
    engine = recipe.actor.engine.model_copy(update={"gpu_memory_utilization": share or recipe.actor.engine.memory_share})
    actor = recipe.actor.model_copy(update={"count": count or recipe.actor.number, "engine": engine})
    trainer = recipe.trainer.model_copy(update={"nproc": ranks or recipe.trainer.ranks})
    return recipe.model_copy(update={"actor": actor, "trainer": trainer})


def place(recipe: Recipe, devices: Sequence[Device], parameters: int) -> Placed:
    """Divide the GPUs. `parameters`: those of the model; 0 = unknown, in which case no memory is calculated.

    Raises `FieldError` for numbers that do not fit, with numbers that do.
    """
    free = [device for device in devices if device.free_bytes >= FREE_SHARE * device.total_bytes]
    if not free:
        used = ", ".join(f"{device.name} has {device.free_bytes / GIB:.1f} GiB free" for device in devices)
        raise FieldError(
            "trainer.nproc", _shown(recipe.trainer.nproc), f"other processes use every GPU here ({used}); end them"
        )
    if len(free) == 1:
        _check_alone(recipe, len(devices))
        only = free[0].uuid
        return _with_numbers(recipe, Placement(trainer=(only,), actors=((only,),)), free, parameters, 1)
    ranks, actors = _numbers(recipe, free, len(devices), parameters)
    size = recipe.actor.engine.tensor_parallel_size
    left = list(free)
    trainer = _take(left, ranks)
    groups = [_take(left, size) for _ in range(len(left) // size)]
    return _with_numbers(recipe, Placement(trainer=trainer, actors=tuple(groups)), free, parameters, actors)


def pinned(recipe: Recipe, devices: Sequence[Device], text: str, parameters: int) -> Placed:
    """Return the placement that `text` describes, JSON of a `Placement`; a number means a position in `devices`. Its numbers of
    ranks and actors replace the recipe's. Raises `FieldError` for invalid JSON, an unknown GPU, or a group of the wrong size.
    """
    try:
        given = Placement.model_validate_json(text)
    except ValidationError as error:
        example = '{"trainer": ["0"], "actors": [["1"], ["2"]]}'
        raise FieldError(OPTION, text, f"{error.errors()[0]['msg']}; give JSON such as {example}") from error
    names = {device.uuid: device.uuid for device in devices} | {str(n): device.uuid for n, device in enumerate(devices)}

    def named(group: Sequence[str]) -> tuple[str, ...]:
        for name in group:
            if name not in names:
                fix = "; ".join(f"{number} is {device}" for number, device in enumerate(devices))
                raise FieldError(OPTION, name, f"no such GPU: {fix}")
        return tuple(names[name] for name in group)

    placement = Placement(trainer=named(given.trainer), actors=tuple(map(named, given.actors)))
    size = recipe.actor.engine.tensor_parallel_size
    if not placement.trainer or not placement.actors or len(set(placement.trainer)) < len(placement.trainer):
        raise FieldError(OPTION, text, "needs a GPU of its own for each trainer rank, and GPUs for at least one actor")
    if wrong := [group for group in given.actors if len(group) != size]:
        raise FieldError(OPTION, list(wrong[0]), f"give each actor actor.engine.tensor_parallel_size = {size} GPUs")
    return _with_numbers(recipe, placement, devices, parameters, len(placement.actors))


def table(placed: Placed, devices: Sequence[Device]) -> Iterator[str]:
    """Yield a line for each GPU: its position, name and memory, and the processes on it."""
    users: dict[str, list[str]] = {device.uuid: [] for device in devices}
    for rank, uuid in enumerate(placed.placement.trainer):
        users[uuid].append(f"trainer rank {rank}")
    for number, group in enumerate(placed.placement.actors[: placed.recipe.actor.number]):
        for uuid in group:
            users[uuid].append(f"actor-{number}")
    for number, device in enumerate(devices):
        memory = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
        yield f"GPU {number}  {device.name}, {memory}  {' and '.join(users[device.uuid]) or 'not used'}"


# --- numbers ------------------------------------------------------------------------------------------------------------


def _check_alone(recipe: Recipe, num_devices: int) -> None:
    """Raise `FieldError` unless one GPU suffices for the numbers of the recipe."""
    here = f"{counted(num_devices, 'GPU')} here, 1 of them free," if num_devices > 1 else "one GPU here,"
    for field, value in (
        ("trainer.nproc", recipe.trainer.nproc),
        ("actor.count", recipe.actor.count),
        ("actor.engine.tensor_parallel_size", recipe.actor.engine.tensor_parallel_size),
    ):
        if value is not None and value > 1:
            raise FieldError(field, value, f"{here} which one rank and one actor share; use 1, or a machine with more GPUs")


def _numbers(recipe: Recipe, free: Sequence[Device], num_devices: int, parameters: int) -> tuple[int, int]:
    """Return the number of ranks and of actors on two or more free GPUs."""
    size, given, count = recipe.actor.engine.tensor_parallel_size, recipe.trainer.nproc, recipe.actor.count
    multiple = math.lcm(recipe.trainer.context_parallel, recipe.trainer.shard_ranks or 1)
    if any(device.is_instance for device in free):
        for field, value in (("trainer.nproc", given or multiple), ("actor.engine.tensor_parallel_size", size)):
            if value > 1:
                raise FieldError(field, value, "MIG instances cannot exchange tensors; use 1, or whole GPUs")
        given = 1
    if given is not None:
        ranks = given
        actors = (len(free) - ranks) // size if count is None else count
    elif count is not None:
        actors = count
        ranks = (len(free) - actors * size) // multiple * multiple
    else:
        ranks, actors = _divided(recipe, free, multiple, parameters)
    if ranks < 1 or actors < 1 or ranks + actors * size > len(free):
        here = counted(len(free), "GPU") + (f" of {num_devices} are free here" if num_devices > len(free) else " are here")
        wanted = f"{counted(max(ranks, 1), 'trainer rank')} and {counted(max(actors, 1), 'actor')} of {counted(size, 'GPU')}"
        needed = max(ranks, 1) + max(actors, 1) * size
        fits, beside = _divided(recipe, free, multiple, parameters)
        fix = f"use trainer.nproc={fits} and actor.count={beside}, or auto" if fits and beside else _smaller(recipe)
        raise FieldError("actor.count", _shown(count), f"{wanted} need {needed} GPUs, and {here}; {fix}")
    return ranks, actors


def _divided(recipe: Recipe, free: Sequence[Device], multiple: int, parameters: int) -> tuple[int, int]:
    """Return the fastest split by the data sheet, for completions of all lengths up to the limit; about half for each side if
    the sheet or the model's size is not known. Either number is 0 if the GPUs do not suffice."""
    size, fewest, half = recipe.actor.engine.tensor_parallel_size, multiple, len(free) // 2
    memory_gib = min(device.total_bytes for device in free) / GIB
    actors = max(1, half // size)
    if parameters:
        model = Model.of(recipe, parameters)
        fewest = math.ceil(fewest_ranks(recipe, model, memory_gib) / multiple) * multiple
        if (sheet := accelerator_named(free[0].name)) is not None and fewest + size <= len(free):
            lengths = Lengths.of_bars([(1, recipe.max_tokens, 1.0)])
            machine = estimated(sheet, model, recipe, lengths)
            in_progress = recipe.actor.sequences_in_progress
            actors = best_split(possible_splits(recipe, model, machine, lengths, len(free), in_progress)).num_generators
    actors = min(actors, (len(free) - fewest) // size)
    return (len(free) - actors * size) // multiple * multiple, max(actors, 0)


def _take(left: list[Device], number: int) -> tuple[str, ...]:
    """Remove that many GPUs from `left` and return their names: from the smallest set of linked GPUs that has enough, else the
    first ones, with linked ones together."""
    islands = _islands(left)
    fitting = [island for island in islands if len(island) >= number]
    chosen = (min(fitting, key=len) if fitting else [device for island in islands for device in island])[:number]
    for device in chosen:
        left.remove(device)
    return tuple(device.uuid for device in chosen)


def _islands(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices in sets that NVLink connects, the largest set first."""
    islands: list[list[Device]] = []
    for device in devices:
        joined = [island for island in islands if any(other.uuid in device.linked for other in island)]
        islands = [island for island in islands if island not in joined]
        islands.append([*(other for island in joined for other in island), device])
    return sorted(islands, key=lambda island: -len(island))


# --- memory -------------------------------------------------------------------------------------------------------------


def _with_numbers(recipe: Recipe, placement: Placement, devices: Sequence[Device], parameters: int, num_actors: int) -> Placed:
    """Replace `auto` by numbers, and check memory if the model's size is known."""
    known = {device.uuid: device for device in devices}
    actors = [known[uuid] for group in placement.actors[:num_actors] for uuid in group]
    model = Model.of(recipe, parameters) if parameters else None
    given, changed = recipe.actor.engine.gpu_memory_utilization, numbered(recipe, num_actors, len(placement.trainer))
    most = _largest_share(changed, model, actors, placement)
    changed = numbered(changed, share=most if given is None else given)
    if model is None:
        return Placed(placement, changed)
    if placement.is_shared:
        if given is not None and given > most:
            fix = f"trainer and weight updates leave less of the GPU that they share; use at most {most}, or auto"
            raise FieldError("actor.engine.gpu_memory_utilization", given, fix)
        return Placed(placement, changed)
    rank_gib = min(known[uuid].total_bytes for uuid in placement.trainer) / GIB
    problem = trainer_problem(changed, model, rank_gib, changed.trainer.shard_ranks or changed.trainer.ranks)
    problem = problem or actor_problem(changed, model, min(device.total_bytes for device in actors) / GIB)
    if problem is not None:
        raise problem
    return Placed(placement, changed)


def _largest_share(recipe: Recipe, model: Model | None, actors: Sequence[Device], placement: Placement) -> float:
    """Return the largest share of its GPUs' memory that vLLM may take. Raises `FieldError` if a GPU that an actor shares with
    the trainer is too small for both."""
    if model is None:
        return SHARED_UNKNOWN if placement.is_shared else VLLM_SHARE
    shared = [device for device in actors if device.uuid in placement.trainer]
    least = min(shared or actors, key=lambda device: device.free_bytes / device.total_bytes)
    total, free, update = least.total_bytes / GIB, least.free_bytes / GIB, update_gib(recipe, model)
    states = 0.0
    if shared:
        held = state_bytes(recipe, model) / GIB / recipe.trainer.ranks
        # A version that is being sent is copied on the device.
        states = max(held / MODEL_STATE_SHARE, held + LEAST_ACTIVATIONS_GIB) + model.weights_bytes / GIB + CONTEXTS_GIB
        longest = model.kv_bytes * recipe.model.max_context / GIB
        engine = ENGINE_GIB + (model.weights_bytes / GIB + longest) / recipe.actor.engine.tensor_parallel_size
        if states + update + engine > free:
            fix = (
                f"{states:.1f} GiB for the trainer, {update:.1f} for weight updates and {engine:.1f} for vLLM do not fit the "
                f"{free:.1f} GiB that are free on {least.name}; {_smaller(recipe)}"
            )
            raise FieldError("model.name", recipe.model.name, fix)
    return max(0.01, min(VLLM_SHARE, math.floor(100 * (free - update - states) / total) / 100))


def _smaller(recipe: Recipe) -> str:
    adapters = "train adapters (trainer.lora), " if recipe.trainer.lora is None else ""
    return f"{adapters}use a smaller model, or more GPUs"


def _shown(value: int | None) -> int | str:
    return "auto" if value is None else value
