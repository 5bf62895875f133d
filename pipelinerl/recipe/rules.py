"""What must hold between the fields of a recipe, as one list of rules; all that are broken are told at once.

Pure. What one field allows by itself stands beside it in `fields`; what the machine must have is checked by `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelinerl.errors import FieldError

if TYPE_CHECKING:
    from pipelinerl.recipe.fields import Recipe


class BrokenRules(ValueError):
    """Fields of a recipe contradict each other. Attribute: `problems` (one `FieldError` for each broken rule)."""

    def __init__(self, problems: tuple[FieldError, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def check_rules(recipe: Recipe) -> None:
    """Raises `BrokenRules` with every rule that `recipe` breaks, in the order of its sections."""
    problems = tuple(problem for rule in _RULES for problem in rule(recipe))
    if problems:
        raise BrokenRules(problems)


def _model(recipe: Recipe) -> Iterator[FieldError]:
    model = recipe.model
    if model.source in ("hub", "path") and not model.name:
        needed = "a Hugging Face id" if model.source == "hub" else "a folder"
        yield FieldError("model.name", model.name, f"is empty: model.source = {model.source!r} needs {needed} here")
    if model.source == "warmstart" and model.warmstart is None:
        yield FieldError(
            "model.warmstart", None, "model.source = 'warmstart' needs this section; {} takes its defaults"
        )


def _warm_start_task(recipe: Recipe) -> Iterator[FieldError]:
    """A warm-started model has seen worked sums, and reads nothing else. The first field that says otherwise is named."""
    task, value = recipe.task, ""
    if recipe.model.source != "warmstart":
        return
    if task.source != "reasoning_gym":
        field, value, fix = "task.source", task.source, "has demonstrations of reasoning-gym's chain_sum only;"
    elif task.name != "chain_sum":
        field, value, fix = "task.name", task.name, "has demonstrations of chain_sum only;"
    elif task.prompt_style != "compact":
        field, value, fix = "task.prompt_style", task.prompt_style, "reads compact prompts only; use compact, or"
    else:
        return
    other = "set model.source to another one: hub, path or smollm2"
    yield FieldError(field, value, f"a warm-started model (model.source) {fix} {other}")


def _task(recipe: Recipe) -> Iterator[FieldError]:
    if recipe.task.source == "jsonl" and not recipe.task.path:
        fix = "is empty: task.source = 'jsonl' needs a .jsonl or .parquet file here"
        yield FieldError("task.path", recipe.task.path, fix)


def _lengths(recipe: Recipe) -> Iterator[FieldError]:
    longest, context = recipe.sampling.max_tokens, recipe.model.max_context
    zone, budget = recipe.reward.overlong.buffer_tokens, recipe.trainer.tokens_per_microbatch
    if zone > longest:
        fix = f"is wider than sampling.max_tokens = {longest}; use at most that"
        yield FieldError("reward.overlong.buffer_tokens", zone, fix)
    if longest >= context:
        fix = f"leaves no room for a prompt in model.max_context = {context}; lower it, or raise the context"
        yield FieldError("sampling.max_tokens", longest, fix)
    if budget < context:
        fix = f"cannot hold one sequence of model.max_context = {context} tokens; use at least that"
        yield FieldError("trainer.tokens_per_microbatch", budget, fix)


def _groups(recipe: Recipe) -> Iterator[FieldError]:
    size, batch = recipe.sampling.group_size, recipe.trainer.batch_size
    if recipe.algorithm.advantage == "leave_one_out" and size < 2:
        fix = "needs sampling.group_size of at least 2; raise that, or use group_mean"
        yield FieldError("algorithm.advantage", recipe.algorithm.advantage, fix)
    if recipe.algorithm.advantage == "value" and recipe.algorithm.normalize_std:
        fix = "does not go with algorithm.advantage = 'value', whose advantages are no group's; use false"
        yield FieldError("algorithm.normalize_std", True, fix)
    if recipe.algorithm.filter_equal_rewards and size < 2:
        fix = "drops every group of sampling.group_size = 1; use false, or larger groups"
        yield FieldError("algorithm.filter_equal_rewards", True, fix)
    if batch % size:
        fix = f"is not a multiple of sampling.group_size = {size}: a batch holds whole groups"
        yield FieldError("trainer.batch_size", batch, fix)


def _schedule(recipe: Recipe) -> Iterator[FieldError]:
    trainer = recipe.trainer
    decay, left = trainer.decay_steps, trainer.steps - trainer.warmup_steps
    if trainer.schedule == "wsd" and left < 1:
        fix = f"leaves trainer.schedule = 'wsd' no step of trainer.steps = {trainer.steps} to decay in; lower it"
        yield FieldError("trainer.warmup_steps", trainer.warmup_steps, fix)
    elif trainer.schedule == "wsd" and not 1 <= decay <= left:
        fix = f"trainer.schedule = 'wsd' needs 1 to {left} here, the steps after warm-up"
        yield FieldError("trainer.decay_steps", decay, fix)
    if trainer.schedule != "wsd" and decay:
        fix = f"trainer.schedule = {trainer.schedule!r} has no such phase; use wsd, or 0"
        yield FieldError("trainer.decay_steps", decay, fix)
    if trainer.schedule == "constant" and trainer.final_learning_rate:
        fix = "trainer.schedule = 'constant' does not decay; use linear, cosine, wsd or inverse_sqrt, or 0"
        yield FieldError("trainer.final_learning_rate", trainer.final_learning_rate, fix)
    if trainer.schedule == "inverse_sqrt" and not trainer.warmup_steps:
        fix = "trainer.schedule = 'inverse_sqrt' decays on the scale of its warm-up; use at least 1"
        yield FieldError("trainer.warmup_steps", 0, fix)


def _conventional_lag(recipe: Recipe) -> Iterator[FieldError]:
    max_lag, last_lag = recipe.algorithm.max_lag, recipe.algorithm.conventional_g - 1
    if recipe.mode == "conventional" and max_lag is not None and max_lag < last_lag:
        fix = f"drops what conventional mode trains on in step G = {last_lag + 1}; use null, or {last_lag} and more"
        yield FieldError("algorithm.max_lag", max_lag, fix)


def _ranks(recipe: Recipe) -> Iterator[FieldError]:
    trainer = recipe.trainer
    if trainer.context_parallel > 1 and recipe.model.attention != "auto":
        fix = f"needs model.attention = 'auto', not {recipe.model.attention!r}: only that one shares rows among ranks"
        yield FieldError("trainer.context_parallel", trainer.context_parallel, fix)


_RULES = (_model, _warm_start_task, _task, _lengths, _groups, _conventional_lag, _schedule, _ranks)
