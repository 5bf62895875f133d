"""`pipelinerl replay`: prepare the trainer's environment for a recorded run, and compute its steps again."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from pipelinerl.errors import FieldError
from pipelinerl.initial_model import built_folder, cache_folder, is_built, is_complete
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import parse_override, recipe_of_run
from pipelinerl.recipe.model_folder import model_folder
from pipelinerl.run_dir import RunDir, check_folder, run_name

_DECIDED_EARLIER = ("advantage", "normalize_std", "filter_equal_rewards", "max_lag", "max_lag_of", "conventional_g")
"""Fields of `algorithm` that shaped the recorded data or its advantages."""


def replay(args: argparse.Namespace) -> int:
    """Replay the steps. Return the exit code: 1 if a version has another digest than in the run."""
    check_folder(args.run, "RUN")
    if not (args.run / "recipe.yaml").is_file():
        raise FieldError("RUN", str(args.run), "has no recipe.yaml: give the folder of a run")
    run = RunDir(args.run, run_name(args.run, "RUN"))
    recipe = recipe_of_run(run.recipe)
    if not recipe.record:
        raise FieldError("record", False, "the run kept no sequences; run its recipe again with --set record=true")
    if args.tokens and args.step is None:
        raise FieldError("--tokens", True, "needs --step N, whose tokens it shows")
    for override in args.overrides:
        check_override(override)
    first, last = (args.step, args.step) if args.step is not None else (args.first, args.last)
    given = {"--from": first, "--to": last, "--tokens-of": args.step if args.tokens else None, "--most": args.most}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    options += [word for override in args.overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "services.trainer.replay", *options]
    return subprocess.run(command, env=_environment(run, recipe), check=False).returncode


def check_override(override: str) -> None:
    """Raise `FieldError` for a field that cannot change what a step makes of its recorded data. Pure."""
    path, value = parse_override(override)
    if path[0] not in ("trainer", "algorithm") or not path[1:] or (path[0] == "algorithm" and path[1] in _DECIDED_EARLIER):
        fix = "was decided before the data were recorded; name a field of trainer, or the loss, a mask or a term of algorithm"
        raise FieldError(".".join(path), value, fix)


def _environment(run: RunDir, recipe: Recipe) -> dict[str, str]:
    settings = {
        "run": run.name,
        "recipe": str(run.recipe.resolve()),
        "run_dir": str(run.path.resolve()),
        "model_dir": _initial_model(run, recipe),
        "instance": "replay",
        "verifier": "none",
    }
    return {**os.environ, **{f"PIPELINERL_{name.upper()}": value for name, value in settings.items()}}


def _initial_model(run: RunDir, recipe: Recipe) -> str:
    """Return the folder of the run's initial model; "" for a hub model. Raises `FieldError` if it is gone from the cache."""
    if not is_built(recipe.model):
        folder = model_folder(recipe.model)
        return "" if folder is None else str(folder.resolve())
    cache = run.path if recipe.model.source == "checkpoint" else cache_folder(os.environ)
    folder = built_folder(recipe, run.name, cache / "models")
    if not is_complete(folder):
        fix = f"its initial model is no longer at {folder}; start any run of this recipe, which builds it again"
        raise FieldError("RUN", str(run.path), fix)
    return str(folder)
