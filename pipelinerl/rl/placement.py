"""Place a local run: decide which GPU each trainer rank and each actor gets, and what `auto` means on this machine.

A GPU belongs to one process, unless a trainer rank and an actor share it. They share a GPU if only one is free, with
`actor.colocate`, or if `--placement` says so. vLLM then gets the memory that the trainer and weight updates leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelinerl.errors import FieldError, counted
from pipelinerl.recipe.devices import Device
from pipelinerl.recipe.fields import VLLM_SHARE, Recipe
from pipelinerl.recipe.rules import undivided, value_at
from pipelinerl.rl.memory import (
    CONTEXTS_GIB,
    ENGINE_GIB,
    GIB,
    UPDATE_GIB,
    Model,
    accelerator_named,
    engine_gib,
    engine_shares,
    fewest_ranks,
    share_problem,
    shared_gib,
    trainer_problem,
    update_gib,
)
from pipelinerl.rl.planner import best_split, estimated, fewest_together, possible_splits, rank_unit
from pipelinerl.rl.throughput import Lengths

ALIKE_BYTES = 4 * GIB
"""GPUs are ordered by free memory in whole multiples of this size, so that small differences seldom change their order."""
FREE_SHARE = 0.5
"""Share of a GPU's memory that must be free; otherwise, another process counts as using the GPU."""
SHARED_UNKNOWN = 0.4
"""vLLM's share of a GPU that the trainer also uses, if the model's size is unknown."""
OPTION = "--placement"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
AUTOMATIC = ("trainer.nproc", "actor.count", "actor.engine.gpu_memory_utilization", "weights.backend")
"""Fields that a placement fills if they are `auto`."""


class Placement(BaseModel):
    """The GPUs of each process, by their names in CUDA_VISIBLE_DEVICES. `pipelinerl run --placement` accepts it as JSON."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True, extra="forbid")

    trainer: tuple[str, ...]
    actors: tuple[tuple[str, ...], ...]
    spare: tuple[tuple[str, ...], ...] = ()
    """The GPUs of each actor that `pipelinerl scale` may add."""
    trainer_share: float = 1.0
    """Share of a GPU's memory that torch may take for a rank; below 1 if an actor also uses the GPU."""
    automatic: tuple[str, ...] = ()
    """The fields among `AUTOMATIC` that were `auto` in the recipe."""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs of all actors, including those that may be added."""
        return self.actors + self.spare

    @property
    def is_shared(self) -> bool:
        return not set(self.trainer).isdisjoint(uuid for group in self.groups for uuid in group)

    def trainer_environment(self, inherited: Mapping[str, str], *, takes_turns: bool = False) -> dict[str, str]:
        """Return the trainer's environment variables. On a GPU that an actor also uses, they limit torch's memory. With
        `takes_turns`, they also let torch free all unused memory after its turn, even between blocks in use."""
        variables = self.environment(self.trainer)
        if self.trainer_share < 1:
            limit = f"per_process_memory_fraction:{self.trainer_share}"
            pages = "expandable_segments:True" if takes_turns else ""
            variables[ALLOCATOR] = ",".join(filter(None, (inherited.get(ALLOCATOR), pages, limit)))
        return variables

    def environment(self, group: Sequence[str]) -> dict[str, str]:
        """Return the environment variables of a process that uses these GPUs."""
        # NCCL refuses two ranks on one GPU unless it is told to allow them.
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.is_shared else {}
        return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(group)}


def numbered(recipe: Recipe, count: int | None = None, ranks: int | None = None, share: float | None = None) -> Recipe:
    """Return the recipe with `count` actors, `ranks` trainer ranks and vLLM's `share` of memory. None keeps the recipe's value;
    if that is `auto`, the recipe gets 1 actor, 1 rank or vLLM's default share."""
    engine = recipe.actor.engine.model_copy(update={"gpu_memory_utilization": share or recipe.actor.engine.memory_share})
    actor = recipe.actor.model_copy(update={"count": recipe.actor.number if count is None else count, "engine": engine})
    trainer = recipe.trainer.model_copy(update={"nproc": ranks or recipe.trainer.ranks})
    return recipe.model_copy(update={"actor": actor, "trainer": trainer})


def place(recipe: Recipe, devices: Sequence[Device], model: Model | None) -> tuple[Recipe, Placement]:
    """Return the recipe with numbers instead of `auto`, and their placement. The trainer gets its GPUs first, by NVLink and
    then by free memory. `model`: None = unknown, so memory is not checked. Raises `FieldError` if no GPU can be used, or if the
    recipe's numbers or the model do not fit."""
    if not (able := [device for device in devices if device.computes_in(recipe.model.dtype)]):
        raise _cannot_compute(recipe, devices[0])
    free = [device for device in able if device.free_bytes >= FREE_SHARE * device.total_bytes]
    if not free:
        used = ", ".join(f"{device.name} has {device.free_bytes / GIB:.1f} GiB free" for device in able)
        fix = f"other processes use every GPU here ({used}); end them"
        raise FieldError("trainer.nproc", recipe.trainer.nproc or "auto", fix)
    if not recipe.actor.colocate and recipe.actor.count != 0:  # A rank may fit where no actor does.
        rooms = [_room(recipe, model, device, shared=False) for device in free]
        free = [room.device for room in rooms if room.least <= room.most] or free
    left = sorted(free, key=lambda device: -(device.free_bytes // ALIKE_BYTES))
    if len(free) == 1 or recipe.actor.colocate:
        _check_alone(recipe, len(devices))
        only = (max(free, key=lambda device: device.free_bytes).uuid,)
        return _with_numbers(recipe, Placement(trainer=only, actors=(only,)), devices, model)
    ranks, actors = _numbers(recipe, left, len(devices), model)
    trainer, size = _take(left, ranks), recipe.actor.engine.tensor_parallel_size
    groups = tuple(_take(left, size) for _ in range(len(left) // size))
    return _with_numbers(recipe, Placement(trainer=trainer, actors=groups[:actors], spare=groups[actors:]), devices, model)


def pinned(recipe: Recipe, devices: Sequence[Device], text: str, model: Model | None) -> tuple[Recipe, Placement]:
    """Return the recipe with a placement's numbers of ranks and actors, and the placement. `text` is the placement as JSON; it
    may name a GPU by its position in `devices`. Raises `FieldError` for invalid JSON, unknown GPUs or wrong sizes."""
    try:
        given = Placement.model_validate_json(text)
    except ValidationError as error:
        found, example = error.errors()[0], '{"trainer": ["0"], "actors": [["1"], ["2"]]}'
        field = ".".join(map(str, (OPTION, *found["loc"])))
        raise FieldError(field, found["input"], f"{found['msg']}; give JSON such as {example}") from error
    names = {device.uuid: device.uuid for device in devices} | {str(n): device.uuid for n, device in enumerate(devices)}

    def named(group: Sequence[str]) -> tuple[str, ...]:
        for name in group:
            if name not in names:
                fix = "; ".join(f"{number} is {device}" for number, device in enumerate(devices))
                raise FieldError(OPTION, name, f"no such GPU; use a number or UUID of these: {fix}")
        return tuple(names[name] for name in group)

    actors, spare = (tuple(map(named, groups)) for groups in (given.actors, given.spare))
    placement = Placement(trainer=named(given.trainer), actors=actors, spare=spare)
    if recipe.actor.colocate and (len(placement.trainer) != 1 or placement.groups != (placement.trainer,)):
        raise FieldError(OPTION, text, "actor.colocate is for one rank and one actor on the same GPU; name that GPU for both")
    size = recipe.actor.engine.tensor_parallel_size
    of_actors = [uuid for group in placement.groups for uuid in group]
    if not placement.trainer or not placement.actors:
        raise FieldError(OPTION, text, "needs a GPU for the trainer, and GPUs for at least one actor")
    for users in (placement.trainer, of_actors):
        if twice := [uuid for uuid in users if users.count(uuid) > 1]:
            raise FieldError(OPTION, twice[0], "a rank and an actor may share a GPU, but two ranks or two actors may not")
    if wrong := [group for group in placement.groups if len(group) != size]:
        raise FieldError(OPTION, list(wrong[0]), f"give each actor as many GPUs as actor.engine.tensor_parallel_size ({size})")
    return _with_numbers(recipe, placement, devices, model)


def table(placement: Placement, devices: Sequence[Device]) -> Iterator[str]:
    """Yield a line for each GPU: its position, name and memory, and the processes on it."""
    for number, device in enumerate(devices):
        users = [f"trainer rank {rank}" for rank, uuid in enumerate(placement.trainer) if uuid == device.uuid]
        users += [f"actor-{index}" for index, group in enumerate(placement.actors) if device.uuid in group]
        memory = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
        yield f"GPU {number}  {device.name}, {memory}  {' and '.join(users) or 'not used'}"


def _check_alone(recipe: Recipe, num_devices: int) -> None:
    """Raise `FieldError` if the recipe asks for more ranks, actors or GPUs per actor than one GPU allows."""
    here = f"only 1 of {num_devices} GPUs has enough free memory" if num_devices > 1 else "there is one GPU here"
    for field in ("trainer.nproc", "actor.count", "actor.engine.tensor_parallel_size"):
        if (value := value_at(recipe, field)) is not None and value > 1:
            raise FieldError(field, value, f"{here}, so one rank and one actor share it; use 1, or more free GPUs")


def _numbers(recipe: Recipe, free: Sequence[Device], num_devices: int, model: Model | None) -> tuple[int, int]:
    """Return the number of ranks and of actors on two or more free GPUs."""
    size, given, count = recipe.actor.engine.tensor_parallel_size, recipe.trainer.nproc, recipe.actor.count
    if given is not None:
        ranks = given
        actors = (len(free) - ranks) // size if count is None else count
    elif count is not None:
        actors = count
        ranks = _most_ranks(recipe, free, model, len(free) - actors * size)
    else:
        ranks, actors = _divided(recipe, free, model)
    fewest_actors = 0 if count == 0 else 1
    if ranks < 1 or actors < fewest_actors or ranks + actors * size > len(free):
        here = f"{len(free)} GPUs " + (f"of {num_devices} have enough free memory" if num_devices > len(free) else "are here")
        wanted = f"{counted(max(ranks, 1), 'trainer rank')} and {counted(max(actors, 1), 'actor')} of {counted(size, 'GPU')}"
        needed = max(ranks, 1) + max(actors, 1) * size
        fits, beside = _divided(recipe, free, model)
        fix = f"use trainer.nproc={fits} and actor.count={beside}, or auto" if fits and beside else _smaller(recipe)
        alone = 0 if model is None else engine_gib(recipe, model, 1) + update_gib(recipe, model, 1)
        if not beside and size > 1 and fits < len(free) and alone * GIB <= free[-1].free_bytes:
            fix = f"lower actor.engine.tensor_parallel_size ({size}), {fix}"
        field, value = ("trainer.nproc", given) if count is None and given is not None else ("actor.count", count)
        raise FieldError(field, "auto" if value is None else value, f"{wanted} need {needed} GPUs, but {here}; {fix}")
    return ranks, actors


def _divided(recipe: Recipe, free: Sequence[Device], model: Model | None) -> tuple[int, int]:
    """Return the numbers of ranks and of actors in the fastest split by the GPU's data sheet; if the data sheet or the model's
    size is unknown, in a split into about halves. If there are too few GPUs, return the fewest ranks and 0 actors."""
    size, fewest = recipe.actor.engine.tensor_parallel_size, rank_unit(recipe)
    actors = max(1, len(free) // 2 // size)
    if any(device.is_instance for device in free):
        fewest, actors = 1, len(free)
    elif model is not None:
        fits = (ranks for ranks in range(fewest, len(free), fewest) if _fit(recipe, model, free[:ranks]))
        fewest = next(fits, 0) or fewest_together(recipe, model, free[-1].free_bytes / GIB)
        if (sheet := accelerator_named(free[0].name)) is not None and sheet.name and fewest + size <= len(free):
            lengths = Lengths.of_bars([(1, recipe.max_tokens, 1.0)])  # evenly spread
            machine = estimated(sheet._replace(memory=free[fewest - 1].free_bytes), model, recipe, lengths)
            in_progress = recipe.actor.sequences_in_progress
            actors = best_split(possible_splits(recipe, model, machine, lengths, len(free), in_progress)).num_generators
    if (actors := min(actors, (len(free) - fewest) // size)) < 1:
        return fewest, 0
    ranks = _most_ranks(recipe, free, model, len(free) - actors * size)
    return ranks, max(actors, (len(free) - ranks) // size)


def _most_ranks(recipe: Recipe, free: Sequence[Device], model: Model | None, limit: int) -> int:
    """Return the largest multiple of `rank_unit` up to `limit` at which the model fits, or the largest one if it fits at none.
    `free`: GPUs by falling free memory."""
    if any(device.is_instance for device in free):
        return min(limit, 1)  # MIG instances cannot exchange tensors.
    unit = rank_unit(recipe)
    numbers = range(limit // unit * unit, 0, -unit)
    return next((ranks for ranks in numbers if model is None or _fit(recipe, model, free[:ranks])), limit // unit * unit)


def _fit(recipe: Recipe, model: Model, gpus: Sequence[Device]) -> bool:
    return fewest_ranks(recipe, model, min(device.free_bytes for device in gpus) / GIB) <= len(gpus)


def _take(left: list[Device], number: int) -> tuple[str, ...]:
    """Remove `number` GPUs from `left` and return their names: a first GPU, GPUs that NVLink connects with it, then others."""

    # The first GPU has as few links as possible, but at least `number` - 1; if no GPU has so many, as many as possible.
    def order(device: Device) -> tuple[bool, int]:
        links = sum(other.uuid in device.linked for other in left)
        return links + 1 < number, links if links + 1 >= number else -links

    first = min(left, key=order)
    chosen = sorted(left, key=lambda device: device is not first and device.uuid not in first.linked)[:number]
    for device in chosen:
        left.remove(device)
    return tuple(device.uuid for device in chosen)


def _with_numbers(
    recipe: Recipe, placement: Placement, devices: Sequence[Device], model: Model | None
) -> tuple[Recipe, Placement]:
    """Replace `auto` by the placement's numbers. Raises `FieldError` if the GPUs do not suit the recipe or the model."""
    known = {device.uuid: device for device in devices}
    changed = numbered(recipe, len(placement.actors), len(placement.trainer))
    trainer = changed.trainer
    for uneven in undivided(trainer, trainer.ranks):
        raise uneven
    for uuid in (*placement.trainer, *(uuid for group in placement.groups for uuid in group)):
        if not known[uuid].computes_in(recipe.model.dtype):
            raise _cannot_compute(recipe, known[uuid])
    sides = [("trainer.nproc", placement.trainer)]
    sides += [("actor.engine.tensor_parallel_size", group) for group in placement.groups]
    for field, group in sides:
        if len(group) > 1 and any(known[uuid].is_instance for uuid in group):
            raise FieldError(field, len(group), "MIG instances cannot exchange tensors; use 1, or whole GPUs")
    if model is not None and not placement.is_shared:
        rank_gib = min(known[uuid].free_bytes for uuid in placement.trainer) / GIB
        if (problem := trainer_problem(changed, model, rank_gib, trainer.shard_ranks or trainer.ranks)) is not None:
            first = known[placement.trainer[0]]
            raise _too_large(changed, first, {"the trainer": shared_gib(changed, model)[0]}) if first.is_instance else problem
    rooms = [_room(changed, model, known[uuid], uuid in placement.trainer) for group in placement.groups for uuid in group]
    least, most = max((room.least for room in rooms), default=0.01), min((room.most for room in rooms), default=VLLM_SHARE)
    if least > most:
        room = min(rooms, key=lambda room: room.most)
        raise _too_large(changed, room.device, room.uses)
    if (problem := share_problem(recipe, least, most)) is not None:
        raise problem
    share = recipe.actor.engine.gpu_memory_utilization or min(VLLM_SHARE, most)
    of_trainer = max((room.trainer_share for room in rooms), default=0) or 1.0
    return numbered(changed, share=share), placement.model_copy(update={"trainer_share": of_trainer})


class _Room(NamedTuple):
    """Memory of an actor's GPU: the shares that vLLM needs (`least`) and may take (`most`), and `uses` in GiB."""

    device: Device
    least: float
    most: float
    uses: Mapping[str, float]
    trainer_share: float = 0.0
    """Share that torch may take for a trainer rank; 0 = no rank uses the GPU."""


def _room(recipe: Recipe, model: Model | None, device: Device, shared: bool) -> _Room:
    """Return how an actor's GPU memory is used. `shared`: a trainer rank uses the GPU as well. Raises `FieldError` if the
    trainer does not fit beside the sleeping engine (`actor.colocate`)."""
    total, free, turn = device.total_bytes / GIB, device.free_bytes / GIB, device.free_bytes / GIB - ENGINE_GIB
    if model is None:
        cap = SHARED_UNKNOWN if shared else VLLM_SHARE
        uses, trainer = {"vLLM": ENGINE_GIB}, (1 - cap) * total - UPDATE_GIB
        least, most = math.ceil(100 * ENGINE_GIB / total) / 100, min(cap, math.floor(100 * free / total) / 100)
    else:
        computing, trainer = shared_gib(recipe, model)
        if recipe.actor.colocate and computing > turn:
            raise _too_large(recipe, device, {"the trainer": computing, "the sleeping engine": ENGINE_GIB})
        least, most = engine_shares(recipe, model, total, free - shared * trainer)
        uses = {"the trainer": shared * trainer, "weight updates": update_gib(recipe, model), "vLLM": engine_gib(recipe, model)}
    if recipe.actor.colocate:  # torch gets the memory that the sleeping engine leaves
        return _Room(device, least, most, uses, math.floor(100 * (turn - CONTEXTS_GIB) / total) / 100)
    return _Room(device, least, most, uses, shared * math.ceil(100 * trainer / total) / 100)


def _cannot_compute(recipe: Recipe, device: Device) -> FieldError:
    fix = f"{device.name} cannot compute in this dtype (compute capability 8.0 is needed); use float32, or another GPU"
    return FieldError("model.dtype", recipe.model.dtype, fix)


def _too_large(recipe: Recipe, device: Device, uses: Mapping[str, float]) -> FieldError:
    """Return the error that a GPU lacks memory for `uses`, in GiB."""
    needs = ", ".join(f"{gib:.1f} GiB for {use}" for use, gib in uses.items() if gib)
    fix = f"needs {needs}, but {device.name} has {device.free_bytes / GIB:.1f} GiB free; "
    fix += _smaller(recipe, "a larger instance or a whole GPU" if device.is_instance else "more GPUs")
    return FieldError("model.name", recipe.model.name, fix)


def _smaller(recipe: Recipe, more: str = "more GPUs") -> str:
    adapters = "train adapters (trainer.lora), " if recipe.trainer.lora is None else ""
    return f"{adapters}use a smaller model, or {more}"
