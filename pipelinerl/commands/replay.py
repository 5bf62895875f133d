"""`pipelinerl replay` and `rollback`: compute a recorded run's steps again in the trainer's environment, to compare them or to
let the run continue from one of its versions."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path

from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.commands.run_folder import holds_streams, streams_in_folder
from pipelinerl.errors import FieldError
from pipelinerl.initial_model import built_folder, cache_folder, is_built, is_complete
from pipelinerl.local.processes import check_stopped
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import parse_override, recipe_of_run
from pipelinerl.recipe.model_folder import model_folder
from pipelinerl.run_dir import RunDir, newest_checkpoint, resumable, run_name

_DECIDED_EARLIER = ("advantage", "normalize_std", "filter_equal_rewards", "max_lag", "max_lag_of", "conventional_g")
"""Fields of `algorithm` that shaped the recorded data or its advantages."""


def replay(args: argparse.Namespace) -> int:
    """Replay the steps. Return the exit code: 1 if a version has another digest than in the run."""
    run, recipe = _recorded(args.run)
    if args.tokens and args.step is None:
        raise FieldError("--tokens", True, "needs --step N, whose tokens it shows")
    for override in args.overrides:
        check_override(override)
    first, last = (args.step, args.step) if args.step is not None else (args.first, args.last)
    given = [("--from", first), ("--to", last), ("--most", args.most), *(("--set", override) for override in args.overrides)]
    options = [word for option, value in given if value is not None for word in (option, str(value))]
    return _compute(run, recipe, [*options, *["--tokens"] * args.tokens])


def rollback(args: argparse.Namespace) -> int:
    """Let a stopped run continue from version `args.to`. Return the exit code: 1, with nothing changed, if the version cannot
    be computed again."""
    run, recipe = _recorded(args.run)
    if not run.identity.is_file():
        raise FieldError("RUN", str(args.run), f"has no {run.identity.name}: only a run of `pipelinerl run` can be rolled back")
    with run.locked("RUN"):
        check_stopped(run, "RUN")
        if args.to == newest_checkpoint(run.path):
            raise FieldError("--to", args.to, "is the version of the newest checkpoint, from which the run continues anyway")
        if args.to not in resumable(run.path):
            run.check_space("RUN", 0)
            if code := _compute(run, recipe, ["--checkpoint", "--to", str(args.to)]):
                print(f"{run.name} was not changed", file=sys.stderr)
                return code
        if holds_streams(run.path):
            asyncio.run(_empty_streams(run.path))
        with Journal(run.path / JOURNAL) as journal:
            journal.write({"event": "rollback", "version": args.to})
            journal.sync()
        aside = _set_aside(run, args.to)
    print(f"{run.name} continues from version {args.to}: pipelinerl run --resume {shlex.quote(str(args.run))}")
    if aside is not None:
        names = ", ".join(sorted(path.name for path in aside.iterdir()))
        print(f"set aside in {aside}: {names}. Remove this folder when you no longer need them")
    return 0


async def _empty_streams(folder: Path) -> None:
    async with streams_in_folder(folder, to_change=True) as bus:
        await bus.empty()


def _set_aside(run: RunDir, version: int) -> Path | None:
    """Move the checkpoints of later versions, and the results of the run's end, to a new folder. Return it, if any is there."""
    newer = [path.parents[1] for number, path in reversed(resumable(run.path).items()) if number > version]
    found = [path for path in (run.summary, run.checkpoint, *newer) if path.exists()]
    if not found:
        return None
    aside = next(path for number in count(1) if not (path := run.undone / str(number)).exists())
    aside.mkdir(parents=True)
    for path in found:
        path.rename(aside / path.name)
    return aside


def _recorded(folder: Path) -> tuple[RunDir, Recipe]:
    """Return the recorded run in `folder`, and its recipe. Raises `FieldError` if there is none."""
    recipe = recipe_of_run(RunDir(folder, "").recipe)
    run = RunDir(folder, run_name(folder, "RUN"))
    if not recipe.record:
        raise FieldError("record", False, "the run kept no sequences; run its recipe again with --set record=true")
    return run, recipe


def check_override(override: str) -> None:
    """Raise `FieldError` for a field that cannot change what a step makes of its recorded data. Pure."""
    path, value = parse_override(override)
    if path[0] not in ("trainer", "algorithm") or not path[1:] or (path[0] == "algorithm" and path[1] in _DECIDED_EARLIER):
        fix = "was decided before the data were recorded; name a field of trainer, or the loss, a mask or a term of algorithm"
        raise FieldError(".".join(path), value, fix)


def _compute(run: RunDir, recipe: Recipe, options: list[str]) -> int:
    settings = {
        "run": run.name,
        "recipe": str(run.recipe.resolve()),
        "run_dir": str(run.path.resolve()),
        "model_dir": _initial_model(run, recipe),
        "instance": "replay",
        "verifier": "none",
    }
    environment = {**os.environ, **{f"PIPELINERL_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "services.trainer.replay", *options]
    return subprocess.run(command, env=environment, check=False).returncode


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
