"""Rules about combinations of a recipe's fields, and about URLs and commands. `fields` checks single fields, and `preflight`
checks the machine, the data and the user's code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.errors import FieldError, counted, one_of
from pipelinerl.recipe.fields import IMPORT_PATH, NATS, Recipe, RewardConfig, TaskConfig, TrainerConfig

PACKAGED = {
    "arithmetic": ("reasoning_gym", "chain_sum"),
    "repeated-addition": ("reasoning_gym", "repeated_addition"),
    "code": ("reasoning_gym", "one_line_function"),
    "guess": ("environment", "pipelinerl.tasks.environments:GuessNumber"),
    "calculator": ("environment", "pipelinerl.tasks.environments:Calculator"),
}
"""Task (`source`, `name`) of each small model of this package. A model also reads plain prompts of its task from files."""

Broken = Iterator[tuple[str, str]]
"""Pairs of a dotted field and the text that says what is wrong and what to do."""


def undivided(trainer: TrainerConfig, ranks: int) -> Iterator[FieldError]:
    """Yield an error for each field that must divide the number of the trainer's `ranks` and does not."""
    for name in ("context_parallel", "shard_ranks"):
        if (value := getattr(trainer, name)) and ranks % value:
            divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
            fix = f"does not divide the {counted(ranks, 'rank')} of the trainer; use one of {divisors}, or change the number of"
            yield FieldError(f"trainer.{name}", value, f"{fix} ranks (trainer.nproc, or the chart's trainer.nodes and gpus)")


def broken_rules(recipe: Recipe) -> list[FieldError]:
    """Return an error for each rule that the recipe breaks."""
    rules = (_model, _tasks, _lengths, _rewards, _groups, _schedule, _others)
    return [FieldError(field, value_at(recipe, field), fix) for rule in rules for field, fix in rule(recipe)]


def unused_fields(recipe: Recipe) -> Iterator[FieldError]:
    """Yield a warning for each field that differs from its default but has no effect, because of another field's value."""
    algorithm, weights, loss, mask = recipe.algorithm, recipe.weights, recipe.algorithm.loss, recipe.algorithm.mask
    has_episodes = any(share.task.is_episodic for share in recipe.mixture.values())
    sets, rewarded = recipe.sets_by_place.values(), ("environment", "verifiers")  # those take only a part of `reward`
    is_shared = any(one.reward == recipe.reward or one.task.source in rewarded for one in sets)
    is_limit = any(one.max_tokens == recipe.sampling.max_tokens for one in sets)
    rows: list[tuple[bool, str, str, tuple[str, ...]]] = [
        (recipe.mode == "conventional", "mode: conventional", "algorithm.", ("conventional_g",)),
        (loss == "reinforce", "algorithm.loss: reinforce", "algorithm.", ("clamp",)),
        (loss != "reinforce", "algorithm.loss: ppo_clip, grpo, gspo or cispo", "algorithm.", ("clip_low", "clip_high")),
        (mask in ("icepop", "sequence"), "algorithm.mask: icepop or sequence", "algorithm.", ("mask_low", "mask_high")),
        (mask == "off_policy_sequence", "algorithm.mask: off_policy_sequence", "algorithm.", ("mask_kl",)),
        (algorithm.advantage == "value", "algorithm.advantage: value", "algorithm.", ("value_coefficient",)),
        (algorithm.max_lag is not None, "algorithm.max_lag", "algorithm.", ("max_lag_of",)),
        (bool(weights.log_place), "weights.log", "weights.", ("anchor_every", "keep_versions")),
        (weights.probe_every > 0, "weights.probe_every", "weights.", ("probe_tokens", "probe_tolerance", "stop_on_mismatch")),
        (recipe.mode == "pipeline", "mode: pipeline", "weights.", ("recompute_kv",)),
        (recipe.model.source == "hub", "model.source: hub", "model.", ("revision",)),
        (recipe.model.dtype != "float32", "model.dtype: bfloat16", "model.", ("head_dtype",)),
        (is_shared, "a task or set that lacks a `reward` section", "reward.", tuple(RewardConfig.model_fields)),
        (is_limit, "a task or set that lacks max_tokens", "sampling.", ("max_tokens",)),
        (bool(recipe.trackers), "trackers", "", ("tracker_samples",)),
        (has_episodes, "a task with episodes", "actor.", ("episodes_in_progress",)),
    ]
    for place, share in recipe.sets_by_place.items():
        task, episodes = share.task, "task.source: environment, tools, agent or verifiers"
        is_configured = task.source in ("environment", "verifiers") or (task.source == "reasoning_gym" and not task.path)
        rows += [
            (task.is_episodic, episodes, f"{place}task.", ("max_turns", "episode_timeout_s", "turn_timeout_s")),
            (task.source in ("environment", "tools"), "an environment or tools", f"{place}task.", ("answer_timeout_s",)),
            (is_configured, "generated problems or an environment", f"{place}task.", ("config",)),
            (bool(task.path), "task.path", f"{place}task.", ("prompt_field", "answer_field")),
        ]
    for is_used, needed, section, names in rows:
        owner = value_at(recipe, section.removesuffix(".")) if section else recipe
        for name in () if is_used else names:
            value, usual = getattr(owner, name), type(owner).model_fields[name].default
            if value != usual:
                yield FieldError(f"{section}{name}", value, f"has no effect without {needed}; set that, or use {usual!r} here")


def value_at(recipe: Recipe, field: str) -> Any:
    """Return the value of a dotted field. A number in `field` is a position in a list."""
    value: Any = recipe
    for name in field.split("."):
        value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def wrong_url(url: str, stores: Sequence[str] = ("s3", "gs", "hf", "file")) -> str:
    """Return the fault of a URL that should name a folder in one of `stores`; empty if it has none."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"is not a URL ({error}); correct it"
    if parts.scheme not in stores or not url.startswith(f"{parts.scheme}://"):
        return f"give the URL of a folder: {', '.join(f'{scheme}://' for scheme in stores)}..."
    if parts.scheme == "file" and parts.netloc:
        return "must have an absolute path, after three slashes: file:///folder"
    if any(map(str.isspace, url)):
        return "must not contain spaces: write %20 for one"
    if parts.username or parts.password:
        return "must not contain credentials: give them in the environment, from a Secret (docs/storage.md)"
    if parts.query or parts.fragment:
        return "must not contain ? or #: give the store's settings in the environment, such as AWS_ENDPOINT_URL"
    if not (parts.path.startswith("/") and parts.path.strip("/") if parts.scheme == "file" else parts.netloc):
        return "names no folder; add one" if parts.scheme == "file" else "names no bucket; add one"
    return ""


def _model(recipe: Recipe) -> Broken:
    model = recipe.model
    needed = {"hub": "a Hugging Face id", "path": "a folder", "checkpoint": "a folder or a URL"}
    if model.source in needed and not model.name:
        yield "model.name", f"is empty: model.source = {model.source!r} needs {needed[model.source]} here"
    if model.source == "checkpoint" and "://" in model.name and (problem := wrong_url(model.name)):
        yield "model.name", problem
    if model.source == "package" and model.name not in PACKAGED:
        yield "model.name", f"is not a small model of this package; use {one_of([*PACKAGED])}"
    if model.source == "hub" and model.name in PACKAGED:  # --set model.source=hub left the old name in place
        yield "model.name", "is a small model of this package, not of the hub; give a Hugging Face id"


def _tasks(recipe: Recipe) -> Broken:
    if not recipe.tasks_by_place:
        yield "task", "a recipe needs this section, or a list of tasks in tasks"
    if recipe.task is not None and recipe.tasks:
        yield "tasks", "cannot be combined with task; give only one of the two"
    names = [one.name for one in recipe.sets_by_place.values()]
    for place, one in recipe.sets_by_place.items():
        if place and (not one.name or names.count(one.name) > 1):
            yield (f"{place}name", "each task and each set needs a unique name, which selects its reward")
        yield from ((f"{place}task.{field}", fix) for field, fix in _task(recipe, one.task))


def _task(recipe: Recipe, task: TaskConfig) -> Broken:
    """Yield pairs (field of `TaskConfig`, problem)."""
    from_file = task.source == "jsonl" and task.prompt_style == "plain"  # `preflight` checks the characters of such prompts
    if recipe.model.source == "package" and recipe.model.name in PACKAGED and not from_file:
        source, name = PACKAGED[recipe.model.name]
        other = "use another model: set model.source to hub, path, checkpoint or smollm2"
        fix = f"the small model {recipe.model.name!r} (model.name) reads only compact prompts of {name} ({source}); {other}"
        if task.source != source:
            yield "source", fix
        elif task.name != name:
            yield "name", fix
        elif task.prompt_style != "compact" and not task.is_episodic:
            yield "prompt_style", f"use compact; {fix}"
        elif task.instruction and not task.is_episodic:
            yield "instruction", f'use ""; {fix}'
    if task.source in ("jsonl", "hub", "tools", "agent") and not task.path:
        needed = "the id of a data set, such as openai/gsm8k," if task.source == "hub" else "a file of problems"
        yield "path", f"is empty: task.source = {task.source!r} needs {needed} here"
    for field in ("subset", "split", "revision"):
        if task.source != "hub" and getattr(task, field) != type(task).model_fields[field].default:
            yield field, f"applies only to task.source = 'hub', not to {task.source!r}; leave it out"
    for field in ("max_rows", "prompt_template", "answer_pattern"):
        if getattr(task, field) and not task.path:
            yield field, "applies only to rows of task.path, which is empty; leave it out"
    if task.prompt_template and task.source in ("environment", "agent"):
        yield "prompt_template", f"is not used: task.source = {task.source!r} writes its prompts itself; leave it out"
    if task.answer_pattern and not task.answer_field:
        yield "answer_pattern", "searches task.answer_field, which is empty; set that field, or leave this one out"
    if task.source == "verifiers" and task.path:
        yield "path", "is not used: with task.source = 'verifiers', the environment brings the problems; leave it out"
    if task.source == "environment" and not IMPORT_PATH.fullmatch(task.name):
        yield "name", "must name a class, such as pkg.module:Class, because task.source = 'environment'"
    if bool(task.tools) != (task.source == "tools"):
        yield "tools", "needs functions, such as pkg.module:function" if not task.tools else "needs source tools; leave it out"
    if len({path.rpartition(":")[2] for path in task.tools}) < len(task.tools):
        yield "tools", "has several functions of the same name, but the policy calls them by name; rename one, or leave it out"
    if bool(task.command.strip() if task.source == "agent" else task.command) != (task.source == "agent"):
        yield "command", "needs a program, such as ./agent.sh" if task.source == "agent" else "needs source agent; leave it out"
    try:
        shlex.split(task.command)
    except ValueError:
        yield "command", "has an unclosed quotation mark; close it"


def _lengths(recipe: Recipe) -> Broken:
    context = recipe.model.max_context
    for place, share in recipe.sets_by_place.items():
        longest, limit = share.max_tokens, f"{place or 'sampling.'}max_tokens"
        if share.reward.overlong.buffer_tokens > longest:
            yield f"{place}reward.overlong.buffer_tokens", f"is more than {limit} ({longest}); use at most that"
        if longest >= context:
            yield limit, f"leaves no room for a prompt in model.max_context ({context}); use less, or raise model.max_context"
    if recipe.trainer.tokens_per_microbatch < context:
        yield "trainer.tokens_per_microbatch", f"cannot hold one sequence of model.max_context; use at least {context}"


def _rewards(recipe: Recipe) -> Broken:
    is_confined = any(one.reward.sandbox and one.reward.is_function for one in recipe.sets_by_place.values())
    for place, share in recipe.sets_by_place.items():
        reward, is_judged = share.reward, share.reward.scorer == "judge"
        if is_judged and reward.judge is None:
            yield f"{place}reward.judge", "reward.scorer = 'judge' needs this section"
        if not is_judged and reward.judge is not None:
            yield f"{place}reward.judge", "applies only to reward.scorer = 'judge'; use that scorer, or leave this section out"
        yield from ((f"{place}reward.{name}", fix) for name, fix in _ignored(share.task, reward))
        for name in ("correct", "format_weight", "overlong.penalty"):
            if abs(value_at(recipe, f"{place}reward.{name}")) > reward.max_abs:
                yield f"{place}reward.{name}", f"is beyond ±reward.max_abs ({reward.max_abs:g}); reduce it, or raise max_abs"
        if reward.scorer == "code" and is_confined:
            yield f"{place}reward.scorer", "cannot be combined with your own function in a sandbox; use reward.sandbox: null"
        if reward.scorer == "code" and share.task.source in ("tools", "agent"):
            yield f"{place}reward.scorer", f"cannot score episodes (task.source = {share.task.source!r}); use another scorer"
        if share.task.source == "agent" and reward.overlong.buffer_tokens:
            yield f"{place}reward.overlong.buffer_tokens", "an agent's answer has no length in tokens; use 0"
        if share.task.source in ("environment", "agent", "verifiers") and reward.truncated == "zero":
            yield f"{place}reward.truncated", f"cannot be zero with task.source = {share.task.source!r}; use score or mask"
        if share.task.source == "verifiers" and reward.sandbox:
            yield f"{place}reward.sandbox", "would block the servers that the package verifiers starts for episodes; use null"


_OF_COMPLETIONS = ("answer_pattern", "format_pattern", "json_schema", "overlong.buffer_tokens", "timeout_s")
_UNFILLED = re.compile(r"(?<![\\\w{])\{(question|problem|query|input|answer|response|output|solution|ground_truth)\}")
_OF_SCORER = {"json_schema": "json_schema", "tests_field": "code", "test_timeout_s": "code"}


def _ignored(task: TaskConfig, reward: RewardConfig) -> Broken:
    """Yield pairs (field of `reward`, fix), mostly for fields that are set but have no effect."""
    told = set(reward.model_dump(exclude_defaults=True))
    if reward.overlong.buffer_tokens:
        told.add("overlong.buffer_tokens")
    elif reward.overlong.penalty != type(reward.overlong).model_fields["penalty"].default:
        yield "overlong.penalty", "has no effect, since reward.overlong.buffer_tokens is 0; set both, or neither"
    if task.source in ("environment", "verifiers"):
        own = f"the environment gives the reward (task.source = {task.source!r})"
        if reward.scorer != "task":
            yield "scorer", f"{own}; use the scorer task (each of several tasks can have a `reward` section)"
        yield from ((name, f"is ignored: {own}; leave it out for this task") for name in _OF_COMPLETIONS if name in told)
    for name, scorer in _OF_SCORER.items():
        if name in told and reward.scorer != scorer:
            yield name, f"applies only to reward.scorer = {scorer!r}; use that scorer, or leave it out"
    if reward.format_weight and not reward.format_pattern:
        yield "format_weight", "adds nothing without reward.format_pattern; set both, or neither"
    if reward.format_pattern and not reward.format_weight:
        yield "format_pattern", "adds nothing, since reward.format_weight is 0; set both, or neither"
    if reward.judge is not None and (unfilled := _UNFILLED.search(reward.judge.template)):
        yield "judge.template", f"{unfilled[0]} would not be replaced; use {{prompt}}, {{completion}} and {{reference}} only"
    if reward.judge is not None and reward.answer_pattern:
        yield "answer_pattern", "is ignored: the judge gets the whole completion; leave it out"
    if reward.sandbox and not (task.is_episodic or reward.is_function or reward.scorer == "code"):
        yield "sandbox", f"applies only to programs and functions, and reward.scorer = {reward.scorer!r} runs none; use null"


def _groups(recipe: Recipe) -> Broken:
    algorithm, size = recipe.algorithm, recipe.sampling.group_size
    if algorithm.advantage != "value" and size < 2:
        fix = f"gives a group's only sample (sampling.group_size = {size}) an advantage of 0, so nothing is learned; "
        yield "algorithm.advantage", f"{fix}use larger groups, or the advantage 'value'"
    if algorithm.advantage == "value" and algorithm.normalize_std:
        yield "algorithm.normalize_std", "the advantage 'value' uses no group statistics; use false"
    if algorithm.advantage != "value" and recipe.trainer.value_learning_rate is not None:
        yield "trainer.value_learning_rate", f"the advantage {algorithm.advantage!r} has no value head; use null here"
    for place, share in recipe.tasks_by_place.items():
        if algorithm.advantage == "value" and share.reward.truncated == "mask":
            yield f"{place}reward.truncated", "the advantage 'value' needs every reward for its baseline; use score or zero"
    if algorithm.filter_equal_rewards and size < 2:
        yield "algorithm.filter_equal_rewards", "drops every group, since sampling.group_size is 1; use false, or larger groups"
    if recipe.trainer.batch_size % size:
        yield "trainer.batch_size", f"must be a multiple of sampling.group_size ({size}), because a batch holds whole groups"


def _schedule(recipe: Recipe) -> Broken:
    trainer = recipe.trainer
    decay, left = trainer.decay_steps, trainer.steps - trainer.warmup_steps
    schedule = f"trainer.schedule = {trainer.schedule!r}"
    if trainer.schedule == "wsd" and left < 1:
        yield "trainer.warmup_steps", f"leaves no step in which {schedule} could decay; use at most {trainer.steps - 1}"
    elif trainer.schedule == "wsd" and not 1 <= decay <= left:
        yield "trainer.decay_steps", f"use 1 to {left}: {schedule} can decay only over the steps after warm-up"
    if trainer.schedule != "wsd" and decay:
        yield "trainer.decay_steps", f"{schedule} does not use this field; use 0 here, or the schedule wsd"
    if trainer.schedule == "constant" and trainer.final_learning_rate:
        yield "trainer.final_learning_rate", f"{schedule} does not decay; use 0 here, or another schedule"
    if trainer.schedule == "inverse_sqrt" and not trainer.warmup_steps:
        yield "trainer.warmup_steps", f"{schedule} decays as √(warmup_steps / step); use at least 1"


def _others(recipe: Recipe) -> Broken:
    max_lag, last_lag = recipe.algorithm.max_lag, recipe.algorithm.conventional_g - 1
    if recipe.mode == "conventional" and max_lag is not None and max_lag < last_lag:
        yield "algorithm.max_lag", f"would drop all data of step {last_lag + 1} of each phase; use null, or at least {last_lag}"
    if recipe.actor.colocate and recipe.mode != "conventional":
        yield "actor.colocate", "needs mode = 'conventional', in which actor and trainer take turns; set that, or use false"
    for name in ("actor.count", "actor.engine.tensor_parallel_size", "trainer.nproc") if recipe.actor.colocate else ():
        if value_at(recipe, name) not in (None, 1):
            yield name, "must be 1 if actor and trainer share a GPU (actor.colocate); use 1, or turn that off"
    if recipe.trainer.context_parallel > 1 and recipe.model.attention != "auto":
        yield "trainer.context_parallel", "needs model.attention = 'auto'; use that, or 1 here"
    lora = recipe.trainer.lora
    if lora is not None and lora.send == "merged" and "bfloat16" in (recipe.model.dtype, recipe.weights.wire_dtype):
        yield "trainer.lora.send", "loses small updates in bfloat16; use adapter, or model.dtype and weights.wire_dtype float32"
    if recipe.evaluation.samples > 1 and not recipe.evaluation.temperature:
        yield "evaluation.samples", "greedy answers to a problem are all the same; use 1, or evaluation.temperature above 0"
    if recipe.checkpoint.upload and (problem := wrong_url(recipe.checkpoint.upload)):
        yield "checkpoint.upload", problem
    if recipe.weights.log not in ("", NATS) and (problem := wrong_url(recipe.weights.log, ("s3", "gs", "file"))):
        yield "weights.log", f"{problem}; or use {NATS!r}"
    if recipe.weights.backend == "log" and recipe.mode == "conventional":
        yield "weights.backend", "lets each actor follow at its own speed, but mode = 'conventional' waits for all; use auto"
