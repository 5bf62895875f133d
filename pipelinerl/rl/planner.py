"""Plan the split of accelerators between actors and trainer and the number of sequences in progress, and predict the rates.

The closed form of `throughput` proposes the fastest split whose largest lag the recipe allows, and the simulator runs it. If
that split drops too many sequences as stale, another one with a lower largest lag or fewer actors is tried. Speeds are
measured, or estimated from the accelerator's data sheet. docs/planning.md lists what is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipelinerl.errors import FieldError, counted
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import groups_per_step
from pipelinerl.rl.memory import (
    ACCELERATORS,
    GIB,
    MODEL_STATE_SHARE,
    Accelerator,
    Model,
    actor_problem,
    fewest_ranks,
    kv_cache_gib,
    sent_bytes,
    state_bytes,
)
from pipelinerl.rl.packing import COPIES_OF_A_TOKEN
from pipelinerl.rl.simulator import Simulation, Timing, simulate
from pipelinerl.rl.throughput import MOST_STALE, DecodeCurve, Lengths, Split, conventional_rate, split

BANDWIDTH_EFFICIENCY = DECODE_EFFICIENCY = 0.6
"""Share of the data sheet's bandwidth and FLOP/s that decoding reaches, fitted to the PipelineRL paper's 7B model on H100."""
TRAINING_EFFICIENCY = 0.4
NETWORK = 12.5e9
"""Bytes per second of a weight update: 100 Gbit/s."""
CONTROL_S = 0.25e-3
"""Seconds per actor for an update's messages, measured with 1,000 members (benchmarks/README.md, control_channel)."""
AS_FAST = 0.99
"""Splits with at least this share of the highest rate count as equally fast, because the estimates have larger errors."""
IN_PROGRESS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FASTEST_STEP_S = 2e-3
"""Shortest decode step that a data sheet predicts well. Engines add milliseconds to each step."""
_MOST_SPLITS = 4096
"""For each H, fewer than twice this many splits are tried, at evenly spaced numbers of actors."""
_MOST_SPANS, _MOST_SEQUENCES = 1_000_000, 60_000
"""Maximum numbers of version spans and sequences in a simulation. If a system exceeds them, a part of it is simulated."""


@dataclass(frozen=True)
class Machine:
    """Speeds and memory. An actor has `per_actor` accelerators and a KV cache of `kv_gib`, and decodes at the rates of
    `decode`, in tokens/s. A trainer rank has `memory_gib`, and trains on one completion token in `training` seconds."""

    name: str
    per_actor: int
    decode: DecodeCurve
    training: float
    kv_gib: float
    memory_gib: float


def tokens_held(lengths: Lengths, prompt_tokens: int) -> float:
    """Return the mean number of KV cache tokens of a sequence in progress. Long ones count more, because they take longer."""
    return prompt_tokens + float(lengths.tokens**2 @ lengths.shares) / (2 * lengths.mean)


def estimated(accelerator: Accelerator, model: Model, recipe: Recipe, lengths: Lengths) -> Machine:
    """Estimate speeds from the data sheet. A decode step reads weights and KV cache once and computes 2 FLOPs per active weight
    and sequence. Training computes 6 FLOPs per active weight and token, or 4 for a frozen weight."""
    per_actor = recipe.actor.engine.tensor_parallel_size
    prompt_tokens = longest_prompt(recipe)
    held_bytes = tokens_held(lengths, prompt_tokens) * model.kv_bytes

    def step_s(in_progress: int) -> float:
        # In a mixture of experts, each token uses a share s of the weights, and H sequences use 1 - (1 - s)^H.
        read = model.weights_bytes * (1 - (1 - model.active_share) ** in_progress)
        moved = (read + in_progress * held_bytes) / (accelerator.bandwidth * BANDWIDTH_EFFICIENCY)
        return (moved + 2 * model.active * in_progress / (accelerator.flops * DECODE_EFFICIENCY)) / per_actor

    memory_gib, per_weight = accelerator.memory / GIB, 6 if recipe.trainer.lora is None else 4
    computed = per_weight * model.active * (1 + prompt_tokens / samples_per_prompt(recipe, lengths) / lengths.mean)
    decode = DecodeCurve(tuple((float(h), h / step_s(h)) for h in IN_PROGRESS))
    training = computed / (accelerator.flops * TRAINING_EFFICIENCY)
    return Machine(accelerator.name, per_actor, decode, training, kv_cache_gib(recipe, model, memory_gib), memory_gib)


def longest_prompt(recipe: Recipe) -> int:
    """Return the number of tokens that the recipe leaves for a prompt."""
    return recipe.model.max_context - recipe.max_tokens


def samples_per_prompt(recipe: Recipe, lengths: Lengths) -> int:
    """Return how many samples of a group fit in one micro-batch. The first sample's prompt counts in full. Each further sample
    needs a copy of the prompt, whose tokens count 1 / `COPIES_OF_A_TOKEN` each."""
    if recipe.trainer.context_parallel > 1:
        return 1
    prompt_tokens, copied = longest_prompt(recipe), longest_prompt(recipe) / COPIES_OF_A_TOKEN
    fit = (recipe.trainer.tokens_per_microbatch - prompt_tokens + copied) / (lengths.mean + copied)
    return max(1, min(recipe.sampling.group_size, int(fit)))


def weight_update_s(num_bytes: float, num_actors: int) -> float:
    """Return the seconds of one weight update of `num_bytes` over the network and the control channel."""
    return num_bytes / NETWORK + CONTROL_S * num_actors


@dataclass(frozen=True)
class Plan:
    """A split, the reasons for it, and its simulation, which covers a `share` of the system. Units are seconds and tokens/s."""

    machine: Machine
    lengths: Lengths
    split: Split
    played: Simulation
    share: float
    kv_used_gib: float
    conventional: float
    """Highest tokens/s of conventional mode, with G - 1 = the split's largest lag and one weight update per phase."""
    reasons: tuple[str, ...]
    steps: int

    @property
    def hours(self) -> float:
        return self.steps * self.played.duration / self.played.steps / 3600

    @property
    def rate(self) -> float:
        """Tokens/s that the whole system trains on."""
        return self.played.rate / self.share


def most_in_progress(recipe: Recipe, model: Model, machine: Machine, lengths: Lengths) -> int:
    """Return how many sequences fit into an actor's KV cache."""
    return int(machine.kv_gib * GIB / (tokens_held(lengths, longest_prompt(recipe)) * model.kv_bytes))


def misfits(
    recipe: Recipe, model: Model, machine: Machine, lengths: Lengths, num_accelerators: int, h: int | None = None
) -> list[FieldError]:
    """Return an error for each resource that is too small for an actor or the trainer. `h`: sequences in progress, if given."""
    fewest, most = fewest_together(recipe, model, machine.memory_gib), most_in_progress(recipe, model, machine, lengths)
    too_large = actor_problem(recipe, model, machine.memory_gib) if machine.name in ACCELERATORS else None
    found = [too_large] if too_large else []
    if not too_large and not most:
        held = tokens_held(lengths, longest_prompt(recipe))
        fix = f"an actor's KV cache does not hold one sequence, which needs {held * model.kv_bytes / GIB:.2g} GiB; use more"
        found.append(FieldError("kv_gib", machine.kv_gib, fix))
    elif not too_large and h and h > most:
        fix = f"the KV cache of an actor holds {most} sequences; use at most that many"
        found.append(FieldError("--sequences-in-progress", h, fix))
    if num_accelerators < machine.per_actor + fewest:
        fix = f"an actor needs {machine.per_actor} and the trainer needs {fewest}; give at least {machine.per_actor + fewest}"
        found.append(FieldError("--accelerators", num_accelerators, fix))
    return found


def make_plan(
    recipe: Recipe,
    model: Model,
    machine: Machine,
    lengths: Lengths,
    num_accelerators: int,
    sequences_in_progress: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan the fastest split within the recipe's lag limit. The recipe must have no `misfits`. `sequences_in_progress`: H; None
    = the best. `tell` gets a line of progress before each simulation. Raises `FieldError` if the lag limit allows no split."""
    held, most = tokens_held(lengths, longest_prompt(recipe)), most_in_progress(recipe, model, machine, lengths)
    fewest, max_lag = fewest_ranks(recipe, model, machine.memory_gib), recipe.algorithm.max_lag
    splits = possible_splits(recipe, model, machine, lengths, num_accelerators, sequences_in_progress)
    allowed = [one for one in splits if max_lag is None or one.largest_lag <= max_lag]
    if not allowed:
        smallest = min(one.largest_lag for one in splits)
        fix = f"the longest sequences have a lag of at least {smallest} in any split of the accelerators; use at least that"
        fix += "" if smallest == 1 else ", or raise trainer.batch_size"
        raise FieldError("algorithm.max_lag", max_lag, fix)
    while True:
        chosen = best_split(allowed)
        h, actors = chosen.sequences_in_progress, counted(chosen.num_generators, "actor")
        tell(f"simulating {actors} with H = {h} and {counted(chosen.num_trainers, 'trainer rank')}")
        update_s = weight_update_s(sent_bytes(recipe, model), chosen.num_generators)
        played, share = play(recipe, machine, lengths, chosen, update_s)
        others = [one for one in allowed if _may_drop_less(one, chosen)]
        if played.stale_share <= MOST_STALE or not others:
            break
        allowed = others
    phase = recipe.trainer.batch_size * (chosen.largest_lag + 1)
    phase_s = update_s + phase * lengths.mean / conventional_rate(
        machine.decode, machine.training / machine.per_actor, lengths, phase, num_accelerators // machine.per_actor
    )
    kv_used_gib = h * held * model.kv_bytes / GIB
    state_gib = state_bytes(recipe, model) / GIB / chosen.num_trainers
    unused = num_accelerators - chosen.num_generators * machine.per_actor - chosen.num_trainers
    takes = f"an actor takes {machine.per_actor}, and context_parallel and shard_ranks need a multiple of {rank_unit(recipe)}"
    reasons = (
        _why_this_split(chosen, max(splits, key=lambda one: one.rate), max_lag),
        _why_this_h(h, sequences_in_progress, most),
        f"{counted(h, 'sequence')}, each with {held:,.0f} tokens of prompt and unfinished completion on average, "
        f"take {kv_used_gib:.1f} of an actor's {machine.kv_gib:.1f} GiB of KV cache",
        f"each trainer rank holds {state_gib:.1f} GiB of weights, gradients and optimizer state; beside activations, "
        f"it has room for {machine.memory_gib * MODEL_STATE_SHARE:.0f} GiB, so at least {counted(fewest, 'rank')} are needed",
        f"lag by the formula ⌈H I L / (L̄ B)⌉ is at most {chosen.largest_lag}; waiting for a group, for a batch and for each "
        f"weight update ({update_s:.2g} s) adds to it",
        *([f"unused: {counted(unused, 'accelerator')} of {num_accelerators:,}, because {takes} ranks"] if unused else []),
        *_warnings(recipe, machine, chosen, fewest, update_s),
    )
    conventional, steps = phase * lengths.mean / phase_s, recipe.trainer.steps
    return Plan(machine, lengths, chosen, played, share, kv_used_gib, conventional, reasons, steps)


def possible_splits(
    recipe: Recipe, model: Model, machine: Machine, lengths: Lengths, num_accelerators: int, h: int | None
) -> list[Split]:
    """Return the splits to try, with `h` sequences in progress; None = with each number in `IN_PROGRESS` that fits."""
    most = most_in_progress(recipe, model, machine, lengths)
    most_actors = (num_accelerators - fewest_together(recipe, model, machine.memory_gib)) // machine.per_actor
    workload, sent = (machine.decode, machine.training, lengths, recipe.trainer.batch_size), sent_bytes(recipe, model)
    return [
        split(*workload, one, actors, left - left % rank_unit(recipe), weight_update_s(sent, actors))
        for one in ([h] if h else [candidate for candidate in IN_PROGRESS if candidate <= most])
        for actors in range(1, most_actors + 1, max(1, most_actors // _MOST_SPLITS))
        for left in [num_accelerators - actors * machine.per_actor]
    ]


def rank_unit(recipe: Recipe) -> int:
    """Return the number that must divide the number of trainer ranks."""
    return math.lcm(recipe.trainer.context_parallel, recipe.trainer.shard_ranks or 1)


def fewest_together(recipe: Recipe, model: Model, memory_gib: float) -> int:
    """Return the smallest multiple of `rank_unit` at which the ranks can hold weights, gradients and optimizer state."""
    unit = rank_unit(recipe)
    return math.ceil(fewest_ranks(recipe, model, memory_gib) / unit) * unit


def best_split(splits: list[Split]) -> Split:
    """Return the split with the smallest lag among those about as fast as the fastest."""
    fast = AS_FAST * max(one.rate for one in splits)
    return min((one for one in splits if one.rate >= fast), key=lambda one: (one.largest_lag, -one.rate))


def _may_drop_less(one: Split, chosen: Split) -> bool:
    """Return whether `one` has a clearly lower largest lag than `chosen`, or far fewer actors and no higher largest lag."""
    fewer = one.largest_lag <= chosen.largest_lag and one.num_generators <= 0.8 * chosen.num_generators
    return fewer or one.largest_lag <= 0.9 * chosen.largest_lag


def _why_this_split(chosen: Split, fastest: Split, max_lag: int | None) -> str:
    times_as_fast = fastest.rate / chosen.rate
    sides = f"{counted(chosen.num_generators, 'actor')} can make {chosen.generation:,.0f} tokens/s, and "
    sides += f"{counted(chosen.num_trainers, 'trainer rank')} can train on {chosen.training:,.0f}"
    if times_as_fast * AS_FAST <= 1:
        return f"{sides}: no other split is noticeably faster"
    if fastest.largest_lag > (math.inf if max_lag is None else max_lag):
        why = f"the largest lag, {fastest.largest_lag}, would be above algorithm.max_lag ({max_lag})"
    else:
        why = f"more than {MOST_STALE:.0%} of the sequences would be dropped as stale"
    faster = f"{counted(fastest.num_generators, 'actor')} with H = {fastest.sequences_in_progress}"
    return f"{sides}; {faster} would be {times_as_fast:.2f} times as fast, but {why}"


def _why_this_h(h: int, given: int | None, most: int) -> str:
    """Return why the plan has H = `h`. `most`: number of sequences that an actor's KV cache holds."""
    holds = f"the KV cache of an actor holds {counted(most, 'sequence')}"
    if given:
        return f"H = {h} was given; {holds}"
    larger = next((one for one in IN_PROGRESS if one > h), None)
    if larger is None:
        return f"H = {h} is the largest that was tried; {holds}"
    if larger > most:
        return f"H = {h}: {holds}, fewer than the next larger H that could be tried, {larger}"
    return f"H = {h}: with a larger H, sequences would be older when they are trained on"


def _warnings(recipe: Recipe, machine: Machine, chosen: Split, fewest: int, update_s: float) -> Iterator[str]:
    """Yield warnings: weight updates bound the rate, fewer accelerators would be as fast, or the estimates are too high."""
    batch_size, max_lag = recipe.trainer.batch_size, recipe.algorithm.max_lag
    if AS_FAST * chosen.updates < min(chosen.generation, chosen.training):
        why = f"a step takes as long as a weight update, {update_s:.2g} s: the trainer waits until its versions are served"
        yield f"{why}; raise trainer.batch_size (now {batch_size})"
    actors = math.ceil(chosen.num_generators * chosen.rate / chosen.generation)
    unit = rank_unit(recipe)
    ranks = math.ceil(max(fewest, chosen.num_trainers * chosen.rate / chosen.training) / unit) * unit
    enough = actors * machine.per_actor + ranks
    if enough < 0.8 * (chosen.num_generators * machine.per_actor + chosen.num_trainers):
        limits = f"trainer.batch_size (now {batch_size})"
        limits += "" if max_lag is None else f" or algorithm.max_lag (now {max_lag})"
        fewer = f"{enough:,} accelerators would be as fast: {counted(actors, 'actor')} and {counted(ranks, 'trainer rank')}"
        yield f"{fewer}; to use all accelerators, raise {limits}"
    step_s = float(machine.decode.step_time(chosen.sequences_in_progress))
    if machine.name in ACCELERATORS and step_s < FASTEST_STEP_S:
        sheet = f"according to the data sheet, a decode step takes {1000 * step_s:.2g} ms, without an engine's overhead"
        yield f"{sheet}: expect a lower rate, or give measured figures with --accelerator FILE"


def play(recipe: Recipe, machine: Machine, lengths: Lengths, chosen: Split, update_s: float) -> tuple[Simulation, float]:
    """Simulate the split. Return the simulation and the simulated share of the system. If the system is large, simulate a
    smaller one with the same proportions; only its random variation is larger."""
    h = chosen.sequences_in_progress
    warmup_steps, steps = 2 * chosen.largest_lag + 5, max(20, chosen.largest_lag)
    per_step, group_size = groups_per_step(recipe), recipe.sampling.group_size
    cost = (warmup_steps + steps) * max(h * chosen.num_generators / _MOST_SPANS, per_step * group_size / _MOST_SEQUENCES)
    num_actors, num_groups = _part(chosen.num_generators, per_step, max(1.0, cost))
    share = num_actors / chosen.num_generators
    actor = recipe.actor.model_copy(update={"sequences_in_progress": h})
    trainer = recipe.trainer.model_copy(update={"batch_size": num_groups * group_size, "steps": 10_000_000})
    part = recipe.model_copy(update={"mode": "pipeline", "actor": actor, "trainer": trainer})
    timing, num_ranks = Timing(machine.decode, machine.training, transfer=update_s), chosen.num_trainers * share
    played = simulate(part, timing, lengths, num_actors=num_actors, num_ranks=num_ranks, warmup_steps=warmup_steps, steps=steps)
    return played, share


def _part(num_actors: int, per_step: int, times_smaller: float) -> tuple[int, int]:
    """Return how many actors and groups per step to simulate: up to `times_smaller` times fewer, in about the same ratio."""
    least = max(num_actors / times_smaller, num_actors * min(1.0, 8 / per_step))  # at least 8 groups, if possible
    fewest = min(num_actors, math.ceil(least))
    tried = range(fewest, min(num_actors, fewest + 8) + 1)

    def error(part: int) -> float:
        exact = per_step * part / num_actors
        return abs(round(exact) / exact - 1)

    best = min(tried, key=error)
    return best, round(per_step * best / num_actors)
