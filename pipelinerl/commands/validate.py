"""`pipelinerl validate RECIPE` lists everything that is wrong with a recipe. `pipelinerl doctor RECIPE|RUN` lists why a recipe
would not learn, or why a run does not, the gravest cause first. Both call the rewards of a recipe. Neither changes anything.

A recipe for a cluster can be checked on a laptop. Things that this machine lacks, such as a GPU, are listed, but the recipe
still counts as valid. With `--gpu-memory`, `validate` also adds up the memory that is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import reprlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelinerl.commands.plan import size_of
from pipelinerl.doctor.findings import GRAVITIES, Finding
from pipelinerl.doctor.recipes import MISTAKE, adopted, findings_of
from pipelinerl.doctor.runs import examine_run
from pipelinerl.errors import FieldError, Lacking, counted, first_line, one_of
from pipelinerl.kube import checks
from pipelinerl.local.placing import placed_here
from pipelinerl.local.processes import living_names
from pipelinerl.recipe.devices import Device
from pipelinerl.recipe.fields import NATS, Recipe
from pipelinerl.recipe.loading import RecipeError, find_recipe, load_recipe, modules_beside, parse_yaml, understood
from pipelinerl.recipe.model_folder import known_model, known_parameters, token_counter
from pipelinerl.recipe.preflight import Examination, doubts, examine, files_in
from pipelinerl.recipe.rehearsal import rehearsed
from pipelinerl.rl import memory, placement
from pipelinerl.rl.memory import GIB, Model
from pipelinerl.rl.throughput import recipe_lag
from pipelinerl.run_dir import NAMED_IN, RunDir
from pipelinerl.service.logs import printable
from pipelinerl.tasks.rows import ABSENT, files_at, known_format, value_in
from pipelinerl.tasks.source import Source

_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|GB)", re.IGNORECASE)
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])\d+(?:\.\d+)?[MB](?![a-z])", re.IGNORECASE)
_EXPERTS_IN_NAME = re.compile(r"(?<![\w.])\d+E(?![a-z])", re.IGNORECASE)
"""Matches 16E in a name such as 17B-16E, where 17B counts only the parameters that one token uses."""
_ROUNDED = 1.1
"""Factor for a size that is read from a name, because names round down. For example, a "7B" has 7.6 billion parameters."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = 120


def validate(args: argparse.Namespace) -> int:
    """Print a summary and return exit code 0. Raises `UserError` with everything that is wrong."""
    recipe = load_recipe(args.recipe, args.overrides)
    modules = modules_beside(recipe, find_recipe(args.recipe))
    examined = Examination() if args.fields_only else examine(recipe, args.reward_rows, modules, prompts=True)
    mistakes = [problem for problem in examined.problems if not isinstance(problem, Lacking)]
    if args.chart_values is not None:
        mistakes += chart_problems(args.chart_values, recipe)
    needed, told = _memory(recipe, args)
    if mistakes := [*mistakes, *told]:
        raise RecipeError(recipe.name, mistakes)
    data, warned = data_outline(recipe, examined.sources)
    shares = recipe.sets_by_place
    called = {place: [call for call in examined.calls if call.place == place] for place in shares}
    titles = {place: f"{share.name}: " if place else "" for place, share in shares.items()}
    data += [("rewards", titles[place] + rehearsed(shares[place], calls)) for place, calls in called.items() if calls]
    data += examined.preview.rows
    print("\n".join([f"{recipe.name}: valid", *(f"  {line}" for line in understood(args.overrides))]))
    for name, value in [*outline(recipe), *data, *needed]:
        print(printable(f"  {name:<11}  {value}"))
    warnings, lacking = [*(one for _, one in doubts(recipe, examined)), *warned], list(examined.problems)
    try:
        placed_here(recipe)
    except FieldError as problem:
        lacking.append(problem)
    for title, problems in (("warning", warnings), ("not runnable on this machine", lacking)):
        if lines := [f"  - {problem}" for problem in problems]:
            print(f"{title}:", *map(printable, lines), sep="\n")
    return 0


def chart_problems(file: Path, recipe: Recipe) -> list[FieldError]:
    """Return the problems of the chart's values in a file. Raises `FieldError` if the file has no values of this chart."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        sizes = size_problems(recipe, values) if values["trainer"]["enabled"] else ()
        return [*checks.problems(values, recipe), *sizes]
    except (OSError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        fix = f"cannot be read as chart values ({first_line(error)}); give values.yaml of the ConfigMap RELEASE-validation"
        raise FieldError("--chart-values", str(file), fix) from error


def data_outline(recipe: Recipe, sources: dict[str, Source]) -> tuple[list[tuple[str, str]], list[FieldError]]:
    """Return (name, value) rows about the user's files. Also return warnings about overlong prompts and unused files."""
    rows, warnings, limit = [], [], recipe.model.max_context
    sets = list(files_in(sources))
    count = token_counter(recipe.model) if sets else None
    for place, source in sets:
        task, tokens = recipe.sets_by_place[place].task, ""
        if count is not None and not task.is_episodic:
            in_chat = task.prompt_style == "chat"
            shared = (task.instruction, task.system_prompt if in_chat else "")
            longest = count("\n".join((*shared, *problem.texts)) for problem in source.problems)
            tokens = f"; longest prompt {longest:,} tokens{' (without the chat template)' if in_chat else ''}"
            if longest >= limit:
                fix = f"its longest prompt, {longest:,} tokens, leaves no room for an answer in model.max_context ({limit})"
                warnings.append(FieldError(f"{place}task.path", task.path, f"{fix}; raise this limit, or drop such problems"))
        found = [] if task.source == "hub" else files_at(task.path)
        files = f"{len(found):,} {one_of(sorted(set(map(known_format, found))))} files, " if len(found) > 1 else ""
        known, name = counted(len(source.problems), "problem"), f"{recipe.sets_by_place[place].name}: " if place else ""
        rows.append(("data", f"{name}{task.path}: {files}{known}, {source.num_heldout:,} held out{tokens}"))
        if (reference := (first := source.problems[0]).reference.get("answer")) is not None:
            given = value_in(first.reference.get("row", {}), task.answer_field)
            origin = f", by task.answer_pattern in {_SHORT.repr(given)}" if task.answer_pattern and given is not ABSENT else ""
            rows.append(("reference", f"{name}{first.place}: {_SHORT.repr(reference)}{origin}"))
        giving = {problem.file for problem in source.problems}
        if not task.max_rows and (others := [file for file in found if str(file).removeprefix(task.path) not in giving]):
            fix = f"{counted(len(others), 'file')}, such as {others[0]}, gave no problem; check whether problems are missing"
            warnings.append(FieldError(f"{place}task.path", task.path, fix))
    return rows, warnings


def outline(recipe: Recipe) -> list[tuple[str, str]]:
    """Return a summary of a recipe as (name, value) rows."""
    algorithm, lag, model, trainer = recipe.algorithm, recipe.algorithm.max_lag, recipe.model, recipe.trainer
    shards = f", {trainer.shard_ranks} share one copy" if trainer.shard_ranks else ""
    rows = f", {trainer.context_parallel} share a row" if trainer.context_parallel > 1 else ""
    answers = f", {recipe.evaluation.samples} answers to each," if recipe.evaluation.samples > 1 else ""
    further = "".join(f", and of {one.name}" for one in recipe.evaluation.sets)
    num_heldout = sum(share.task.heldout_problems for share in recipe.mixture.values())
    often = f"every {counted(steps, 'step')}" if (steps := recipe.evaluation.every_steps) else "at the start and at the end"
    schedule = f"lr {trainer.learning_rate:g} {trainer.schedule}, {trainer.optimizer}"
    terms = [algorithm.loss, f"{algorithm.advantage} baseline", "divided by std" if algorithm.normalize_std else ""]
    terms += [f"normalised by {algorithm.normalization}", f"mask {algorithm.mask}" if algorithm.mask != "none" else ""]
    terms += [f"KL {algorithm.kl_coefficient:g}" if algorithm.kl_coefficient else ""]
    return [
        ("mode", recipe.mode),
        ("model", f"{model.name or model.source}, {model.dtype}, context {model.max_context}"),
        *_tasks(recipe),
        ("sampling", f"{recipe.sampling.group_size} per prompt, at most {recipe.max_tokens} tokens"),
        ("actors", f"{recipe.actor.number} x {recipe.actor.sequences_in_progress} sequences in progress"),
        ("algorithm", ", ".join(filter(None, terms))),
        ("max lag", "unbounded" if lag is None else f"{lag}, of {algorithm.max_lag_of.replace('_', ' ')}"),
        ("largest lag", _largest_lag(recipe)),
        ("trainer", f"{counted(trainer.steps, 'step')} of {trainer.batch_size}, {schedule}"),
        ("trained", "all weights" if trainer.lora is None else f"adapters of rank {trainer.lora.rank}"),
        ("ranks", f"{trainer.ranks}{shards}{rows}"),
        ("evaluation", f"{counted(num_heldout, 'problem')}{answers} {often}{further}"),
    ]


def _tasks(recipe: Recipe) -> Iterator[tuple[str, str]]:
    total = sum(share.weight for share in recipe.mixture.values())
    for place, share in recipe.tasks_by_place.items():
        task = share.task
        what = task.path if task.source in ("jsonl", "hub") else f"{task.name} ({task.source})"
        parts = (task.path, task.command, *task.tools) if task.is_episodic else (f"{task.prompt_style} prompts",)
        about = ", ".join(filter(None, (what, *parts)))
        if not place:
            yield from (("task", about), ("reward", share.reward.scorer))
            continue
        limits = f"scored by {share.reward.scorer}, at most {share.max_tokens} tokens, {task.heldout_problems} held out"
        yield "task", f"{share.name}, {share.weight / total:.0%} of the prompts: {about}, {limits}"


def _largest_lag(recipe: Recipe) -> str:
    """Return the largest lag as text, in pipeline mode for two assumed mean lengths of completions."""
    longest, actors = recipe.max_tokens, recipe.actor.number
    if recipe.mode == "conventional":
        return f"{recipe_lag(recipe, actors)}: algorithm.conventional_g - 1"
    means = sorted({longest, max(1, longest // 4)}, reverse=True)
    lags = [f"{recipe_lag(recipe, actors, longest, mean)} for a mean length of {mean}" for mean in means]
    return f"{', '.join(lags)} tokens (⌈H I L / (L̄ B)⌉ for I actors, L = {longest})"


def gib_of(text: str) -> float:
    found = _MEMORY.fullmatch(text)
    if not found or not float(found[1]) > 0:
        raise FieldError("--gpu-memory", text, "give a number with GiB or GB, such as 80GiB")
    return float(found[1]) * (1.0 if found[2].lower() == "gib" else 1e9 / 2**30)


def size_problems(recipe: Recipe, values: Mapping[str, Any]) -> Iterator[FieldError]:
    """Yield a problem for each size in the chart's values that is too small for the recipe's model: the trainer's volume, the
    weight log in NATS, and the memory of rank 0's pod (docs/training.md). If the model's size is unknown, the check only
    requires that the volume has a size."""
    trainer, log_gib, model = values["trainer"], values["nats"]["weightsMaxGib"], None
    size = None if trainer["persistence"].get("existingClaim") else trainer["persistence"]["size"]
    with suppress(FieldError):
        model = model_of(recipe, None) if recipe.model.source == "hub" or known_parameters(recipe.model) else None
    if model is None:
        if size == "":
            yield FieldError("trainer.persistence.size", size, "is empty; set the size of the volume, such as 500Gi")
        return
    keep, each = recipe.checkpoint.keep, memory.checkpoint_bytes(recipe, int(model.parameters))
    needed = (keep + 1) * each + model.weights_bytes
    if size is not None and needed > checks.quantity(size or 0):
        why = f"the model, {keep} checkpoints of {each / 1e9:,.0f} GB (checkpoint.keep) and the next one need"
        yield FieldError("trainer.persistence.size", size, f"{why} {needed / GIB:,.0f}Gi; enlarge it, or keep fewer")
    if recipe.weights.log_place == NATS and (least := 3 * model.weights_bytes) > log_gib * GIB:
        fix = f"cannot hold the three whole versions that the weight log keeps; give at least {least / GIB:,.0f}, and enlarge"
        yield FieldError("nats.weightsMaxGib", log_gib, f"{fix} nats.persistence.size, or change recipe.set.weights.log")
    limit = ((trainer.get("resources") or {}).get("limits") or {}).get("memory")
    export, copies = model.weights_bytes / GIB, memory.snapshot_gib(recipe, model)[1]
    needed_gib = export + (each / GIB - export) / trainer["nodes"] + copies
    if limit is not None and needed_gib * GIB > checks.quantity(limit):
        fix = f"cannot hold a checkpoint and {copies:,.0f}Gi for copies of the weights (to send, and for weights.log)"
        yield FieldError("trainer.resources.limits.memory", limit, f"{fix}; give more than {needed_gib:,.0f}Gi")


def model_of(recipe: Recipe, parameters: str | None) -> Model:
    """Return the recipe's model. `parameters`: its size, such as `7.6B`; None = find it. Raises `FieldError` if that fails."""
    name, size = recipe.model.name or recipe.model.source, size_of(parameters) if parameters is not None else 0
    if not (size := size or known_parameters(recipe.model)):
        parts = [part for part in name.split("/") if _SIZE_IN_NAME.search(part)]  # the last part is the most specific
        if not parts or _EXPERTS_IN_NAME.search(name):
            fix = f"the name of the model, {name}, does not tell its size; give the size, all experts included, such as 7.6B"
            raise FieldError("--parameters", None, fix)
        size = _ROUNDED * max(map(size_of, _SIZE_IN_NAME.findall(parts[-1])))
    return known_model(recipe, size)


def _memory(recipe: Recipe, args: argparse.Namespace) -> tuple[list[tuple[str, str]], list[FieldError]]:
    """Return the results of `memory_of`, or empty lists without `--gpu-memory`."""
    if args.gpu_memory is not None:
        return memory_of(recipe, model_of(recipe, args.parameters), gib_of(args.gpu_memory))
    if args.parameters is not None:
        raise FieldError("--parameters", args.parameters, "applies only with --gpu-memory; give both or neither")
    return [], []


def memory_of(recipe: Recipe, model: Model, memory_gib: float) -> tuple[list[tuple[str, str]], list[FieldError]]:
    """Return the rows of `memory_outline`, and a problem for each part of the run that does not fit GPUs of `memory_gib`."""
    if recipe.actor.colocate:
        gpu = Device(uuid="0", name="a GPU of that size", total_bytes=int(memory_gib * GIB), free_bytes=int(memory_gib * GIB))
        try:
            recipe = placement.place(recipe, [gpu], model)[0]
        except FieldError as problem:
            return [], [problem]
        return memory.memory_outline(recipe, model, memory_gib), []
    ranks = memory.ranks_of_a_copy(recipe, model, memory_gib)
    told = memory.actor_problem(recipe, model, memory_gib), memory.trainer_problem(recipe, model, memory_gib, ranks)
    return memory.memory_outline(recipe, model, memory_gib), [problem for problem in told if problem is not None]


_SHOWN = ("step", "prompt", "completion", "reference", "answer", "reason", "reward", "tokens")
"""Keys of a sample that `pipelinerl doctor` shows."""


def doctor(args: argparse.Namespace) -> int:
    """Print the findings. Return exit code 1 if one of them is grave, else 0. Raises `UserError` for wrong arguments."""
    folder = Path(args.subject)
    if is_run := any((folder / name).is_file() for name in NAMED_IN):
        for option, value in (("--set", args.overrides), ("--gpu-memory", args.gpu_memory), ("--parameters", args.parameters)):
            if value:
                raise FieldError(option, value, "applies only to a recipe; leave it out for a run")
    findings = examine_run(folder, is_running=bool(living_names(RunDir(folder, "")))) if is_run else _of_recipe(args)
    told = [one.to_json() | {"sample": one.sample and {key: one.sample.get(key) for key in _SHOWN}} for one in findings]
    data = {"subject": args.subject, "kind": "run" if is_run else "recipe", "findings": told}
    print(json.dumps(data, indent=2, default=str) if args.json else printable("\n".join(_told(args.subject, findings))))
    return 1 if any(one.gravity == "grave" for one in findings) else 0


def _of_recipe(args: argparse.Namespace) -> list[Finding]:
    try:
        recipe = load_recipe(args.subject, args.overrides)
    except RecipeError as error:
        return [adopted(MISTAKE, problem) for problem in error.problems]
    modules, (_, problems) = modules_beside(recipe, find_recipe(args.subject)), _memory(recipe, args)
    return findings_of(recipe, examine(recipe, args.reward_rows, modules), problems)


def _told(subject: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a heading and the lines of each finding. If several have the same sample, only the first shows it."""
    counts = Counter(one.gravity for one in findings)
    told = [f"{counts[one]} grave" if one == "grave" else counted(counts[one], one) for one in GRAVITIES if counts[one]]
    yield f"{subject}: {', '.join(told) or 'nothing found'}"
    wrap = textwrap.TextWrapper(110, subsequent_indent=" " * 12, break_on_hyphens=False).wrap
    shown = list[object]()
    for one in findings:
        rows = [("evidence", one.evidence), ("set", f"{one.field}: {one.fix}"), ("see", one.docs)]
        if one.sample and one.sample not in shown:
            rows += [(key, f"{value!r}"[-200:]) for key in _SHOWN if (value := one.sample.get(key))]
        shown.append(one.sample)
        yield f"\n{one.gravity.upper()}  {one.id}: {one.meaning}"
        for name, text in rows:
            yield from wrap(f"  {name:<11}{text}")
