"""`pipelinerl plan RECIPE`: divide accelerators between actors and trainer, and print the expected performance and the
reasons. All figures come from the performance model in `pipelinerl/rl/planner.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from pipelinerl.errors import FieldError, counted
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import RecipeError, load_recipe, problems_of
from pipelinerl.recipe.model_folder import known_model
from pipelinerl.rl.groups import length_bucket
from pipelinerl.rl.memory import ACCELERATORS, Model
from pipelinerl.rl.planner import Machine, Plan, estimated, make_plan, misfits
from pipelinerl.rl.throughput import DecodeCurve, Lengths
from pipelinerl.run_dir import RunDir, read_json
from pipelinerl.run_summary import add_ended, lag_summary, read_jsonl

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MBT])", re.IGNORECASE)
_BAR = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+(?:\.\d+)?))?")


def plan(args: argparse.Namespace) -> int:
    """Print a plan and return exit code 0. Raises `UserError` if no plan can be made."""
    recipe = load_recipe(args.recipe, args.overrides)
    if recipe.mode != "pipeline":
        raise FieldError("mode", recipe.mode, "the performance model covers pipeline mode only; use --set mode=pipeline")
    for option in ("accelerators", "sequences_in_progress", "kv_kib_per_token"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise FieldError(f"--{option.replace('_', '-')}", value, "give a number above 0")
    parameters, active = size_of(args.parameters), args.active_parameters
    model = known_model(recipe, parameters)
    if active is not None:
        model = replace(model, active_share=size_of(active, "--active-parameters") / parameters)
    if model.active_share > 1:
        raise FieldError("--active-parameters", active, f"a token cannot use more than all {args.parameters} parameters")
    if args.kv_kib_per_token:
        model = replace(model, kv_bytes=args.kv_kib_per_token * 1024, kv_source="as given")
    lengths, source = lengths_of(args.lengths, recipe.max_tokens)
    machine = machine_of(args.accelerator, model, recipe, lengths)
    wanted = recipe, model, machine, lengths, args.accelerators, args.sequences_in_progress
    if found := misfits(*wanted):
        raise RecipeError(recipe.name, found)
    plan = make_plan(*wanted, tell=lambda what: print(f"{what} ...", file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(as_json(plan, model), indent=2))
        return 0
    accelerators = counted(args.accelerators, "accelerator")
    print(f"{recipe.name}: a plan for {accelerators} ({machine.name}); all times are modelled")
    for name, value in outline(plan, source, model):
        print(f"  {name:<12}  {value}")
    print("why:", *plan.reasons, sep="\n  - ")
    return 0


def size_of(text: str, option: str = "--parameters") -> float:
    """Return the number of parameters in a text such as `7.6B`. Raises `FieldError`, which names `option`."""
    found = _SIZE.fullmatch(text)
    if not found or not 0 < float(found[1]) < math.inf:
        raise FieldError(option, text, "give a number with M, B or T, such as 7.6B")
    return float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()]


def lengths_of(text: str, max_tokens: int) -> tuple[Lengths, str]:
    """Return completion lengths and a text on their source. `text`: histogram bars or a run's folder. Raises `FieldError`."""
    given = [_BAR.fullmatch(bar.strip()) for bar in text.split(",")]
    if not all(given):
        return trained_lengths(Path(text), max_tokens)
    bars = []
    for bar in filter(None, given):
        first, last, weight = int(bar[1]), int(bar[2] or bar[1]), float(bar[3] or 1)
        if not 1 <= first <= last or weight == 0:
            raise FieldError("--lengths", bar[0], "give a FROM of at least 1, a TO of at least FROM, and a WEIGHT above 0")
        if last > max_tokens:
            raise FieldError("--lengths", bar[0], f"is longer than sampling.max_tokens ({max_tokens}); change one of them")
        bars.append((first, last, weight))
    return Lengths.of_bars(bars), "as given"


def trained_lengths(run_dir: Path, max_tokens: int) -> tuple[Lengths, str]:
    """Return the lengths of all completions in the second half of a run, dropped ones too, and their source. Within a
    power-of-two bucket of metrics.jsonl, lengths are distributed as in samples.jsonl, or evenly if it has none there.
    Raises `FieldError` without such records, or if a length exceeds `max_tokens`."""
    if not run_dir.is_dir():
        fix = "is neither bars (TOKENS:WEIGHT or FROM-TO:WEIGHT, separated by commas) nor the folder of a run"
        raise FieldError("--lengths", str(run_dir), fix)
    files = RunDir(run_dir, run_dir.name)
    records = read_jsonl(files.metrics)
    ended: dict[str, list[int]] = {}
    seen: dict[int, list[int]] = {}
    try:
        for record in records[len(records) // 2 :]:
            add_ended(ended, record)
        counts = {int(bucket): sum(sequences) for bucket, sequences in ended.items()}
        for sample in read_jsonl(files.samples):
            if sample.get("spans") and not sample.get("heldout"):
                seen.setdefault(length_bucket(sample["spans"][-1][2]), []).append(sample["spans"][-1][2])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError("--lengths", str(run_dir), f"has invalid records ({error}); use FROM-TO:WEIGHT instead") from None
    if not any(counts.values()):
        raise FieldError("--lengths", str(run_dir), "has no ended_by_length in metrics.jsonl; use FROM-TO:WEIGHT instead")
    bars: list[tuple[int, int, float]] = []
    for bucket, count in counts.items():
        first = 1 if bucket == length_bucket(1) else bucket // 2 + 1
        if known := seen.get(bucket):
            bars += [(tokens, tokens, count / len(known)) for tokens in known]
        else:
            bars.append((min(first, max_tokens), min(bucket, max_tokens), count))
    lengths = Lengths.of_bars(bars)
    if lengths.longest > max_tokens:
        fix = f"has completions of {lengths.longest} tokens, more than sampling.max_tokens = {max_tokens}; change one of them"
        raise FieldError("--lengths", str(run_dir), fix)
    return lengths, f"{sum(counts.values()):,} completions of {run_dir}"


class MeasuredSpeeds(BaseModel, allow_inf_nan=False):
    """Content of a file of measured speeds."""

    decode: tuple[tuple[float, float], ...] = Field(description="points [sequences in progress, tokens/s] of one actor")
    trained_tokens_per_s: float = Field(gt=0, description="completion tokens per second of one trainer rank")
    kv_gib: float = Field(gt=0, description="GiB for the KV cache of one actor")
    memory_gib: float = Field(gt=0, description="GiB of memory of one trainer rank")


def machine_of(name: str, model: Model, recipe: Recipe, lengths: Lengths) -> Machine:
    """Return a known accelerator, or one with the speeds in the JSON file `name`. If `name` is neither, raise `FieldError`; if
    the file has wrong speeds, raise `RecipeError`."""
    if accelerator := {key.upper(): one for key, one in ACCELERATORS.items()}.get(name.upper()):
        return estimated(accelerator, model, recipe, lengths)
    path = Path(name)
    if not path.is_file():
        raise FieldError("--accelerator", name, f"is neither a file of measured speeds nor one of {', '.join(ACCELERATORS)}")
    try:
        speeds = MeasuredSpeeds.model_validate(read_json(path))
    except ValidationError as error:
        raise RecipeError(f"--accelerator {name}", problems_of(error, MeasuredSpeeds)) from None
    per_actor, training = recipe.actor.engine.tensor_parallel_size, 1 / speeds.trained_tokens_per_s
    return Machine(path.stem, per_actor, DecodeCurve(speeds.decode), training, speeds.kv_gib, speeds.memory_gib)


def outline(plan: Plan, source: str, model: Model) -> list[tuple[str, str]]:
    """Return a plan's summary as (name, value) rows."""
    split, played, lengths, machine = plan.split, plan.played, plan.lengths, plan.machine
    shares = [
        f"{stale / played.finished_by_length[bucket]:.1%} of those with {bucket // 2 + 1:,} to {bucket:,} tokens"
        for bucket, stale in sorted(played.stale_by_length.items())
        if stale >= 0.001 * played.finished_by_length[bucket]
    ]
    by_length = f" ({', '.join(shares)})" if shares else ""
    # Options of `pipelinerl run`. On a cluster, the chart sets these numbers.
    options = f"--set actor.count={split.num_generators} --set actor.sequences_in_progress={split.sequences_in_progress}"
    lag, batch_s, g = lag_summary(played.lag_histogram), played.duration / played.steps, split.largest_lag + 1
    conventional, per_actor = plan.conventional / plan.rate, counted(machine.per_actor, "accelerator")
    return [
        ("lengths", f"mean {lengths.mean:,.0f}, longest {lengths.longest:,} tokens ({source})"),
        ("actors", f"{split.num_generators:,} of {per_actor} each, H = {split.sequences_in_progress}"),
        ("trainer", f"{counted(split.num_trainers, 'accelerator')}, a rank on each"),
        ("throughput", f"{plan.rate / lengths.mean:,.1f} sequences/s, {plan.rate:,.0f} tokens/s; {batch_s:.3g} s a step"),
        ("run", f"{counted(plan.steps, 'step')} take {plan.hours:.3g} h, without start, evaluations and checkpoints"),
        ("token lag", f"mean {lag['mean']:.2f}, p95 {lag['p95']:.0f}, max {lag['max']:.0f}; formula {split.largest_lag}"),
        ("idle", f"trainer {played.trainer_idle:.1%}; actors {played.actor_idle:.1%}; empty slots {played.empty_slots:.1%}"),
        ("stale", f"{played.stale_share:.1%} of the sequences are dropped{by_length}"),
        ("KV cache", f"{plan.kv_used_gib:.1f} of {machine.kv_gib:.1f} GiB on each actor; {model.kv_outline}"),
        ("settings", f"{options} --set trainer.nproc={split.num_trainers}"),
        ("conventional", f"{conventional:.2f} times as fast as this plan, at the same largest lag (G = {g})"),
    ]  # fmt: skip


def as_json(plan: Plan, model: Model) -> dict[str, Any]:
    """Return the plan as plain data. Lengths are in tokens, lags in optimizer steps, `step_s` in seconds, `run_h` in hours."""
    split, played = plan.split, plan.played
    return {
        "modelled": True,
        "accelerator": plan.machine.name,
        "actors": split.num_generators,
        "accelerators_per_actor": plan.machine.per_actor,
        "trainer_ranks": split.num_trainers,
        "sequences_in_progress": split.sequences_in_progress,
        "lengths": {"mean": plan.lengths.mean, "longest": plan.lengths.longest},
        "tokens_per_s": plan.rate,
        "sequences_per_s": plan.rate / plan.lengths.mean,
        "step_s": played.duration / played.steps,
        "run_h": plan.hours,
        "closed_form": {
            "generation_tokens_per_s": split.generation,
            "training_tokens_per_s": split.training,
            "largest_lag": split.largest_lag,
        },
        "lag": lag_summary(played.lag_histogram),
        "lag_histogram": {str(lag): tokens for lag, tokens in sorted(played.lag_histogram.items())},
        "idle": {"trainer": played.trainer_idle, "actors": played.actor_idle, "slots": played.empty_slots},
        "stale_share": played.stale_share,
        "kv_cache_gib": {"used": plan.kv_used_gib, "there_is": plan.machine.kv_gib},
        "kv_bytes_per_token": model.kv_bytes,
        "conventional": {"g": split.largest_lag + 1, "tokens_per_s": plan.conventional},
        "simulated_share": plan.share,
        "reasons": list(plan.reasons),
    }
