"""`pipelinerl replay` and `rollback`: compute a recorded run's steps again, to compare them or to let the run continue from one
of its versions."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.errors import FieldError
from pipelinerl.initial_model import cache_folder
from pipelinerl.local.processes import check_stopped
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import parse_override, recipe_of_run
from pipelinerl.run_dir import NOTHING_THERE, RunDir, newest_checkpoint, resumable, run_name, sync_path, write_whole

_DECIDED_EARLIER = (
    *("advantage", "normalize_std", "filter_equal_rewards", "max_lag", "max_lag_of", "conventional_g"),
    *("batch_size", "max_skipped_steps", "give_up_after_groups"),
)
"""Fields of `algorithm` and `trainer` that took effect before a step was recorded, so that a replay cannot vary them."""


def replay(args: argparse.Namespace) -> int:
    """Compute recorded steps again. Return the exit code: 1 if a version's digest differs from the recorded one."""
    run, recipe = _recorded(args.run)
    if args.tokens and args.step is None:
        raise FieldError("--tokens", True, "needs --step N, whose tokens it shows")
    if args.step is not None and (args.first, args.last) != (None, None):
        raise FieldError("--step", args.step, "selects a single step; leave out --from and --to")
    if args.most < 1:
        raise FieldError("--most", args.most, "must be at least 1")
    for override in args.overrides:
        check_override(override)
    first, last = (args.step, args.step) if args.step is not None else (args.first, args.last)
    return _compute(run, recipe, first=first, last=last, overrides=args.overrides, tokens=args.tokens, most=args.most)


def rollback(args: argparse.Namespace) -> int:
    """Let a stopped run continue from version `args.to`, which is computed again from the recorded steps if it has no
    checkpoint. If that fails, change nothing and return the exit code of the computation. If the command is killed before its
    last change, the run continues as if there had been no rollback."""
    run, recipe = _recorded(args.run)
    if not (run.path / JOURNAL).is_file():
        raise FieldError("RUN", str(args.run), f"has no {JOURNAL}: no trainer of this run has started")
    with run.locked("RUN"), Journal(run.path / JOURNAL, alone=True) as journal:
        check_stopped(run, "RUN")
        if args.to == newest_checkpoint(run.path):
            raise FieldError("--to", args.to, "is where the run continues anyway (the newest checkpoint); give another version")
        if args.to not in resumable(run.path):
            run.check_space("RUN", 0)
            if code := _compute(run, recipe, last=args.to, checkpoint=True):
                print(f"{run.name} was not changed", file=sys.stderr)
                return code
        _forget_streams(resumable(run.path)[args.to])
        journal.write({"event": "rollback", "version": args.to})
        journal.sync()
        aside = _set_aside(run, args.to)
    goes_on = f"pipelinerl run --resume {shlex.quote(str(args.run))}" if run.identity.is_file() else "start its trainer"
    print(f"{run.name} continues from version {args.to}: {goes_on}")
    if aside is not None:
        names = ", ".join(sorted(path.name for path in aside.iterdir()))
        print(f"set aside in {aside}: {names}. Remove this folder when you no longer need them")
    return 0


def _forget_streams(state: Path) -> None:
    """Mark a checkpoint, so that a trainer that continues from it empties the streams first."""
    try:
        content = {**json.loads(state.read_bytes()), "position": NOTHING_THERE}
    except (ValueError, TypeError) as error:
        folder = state.parents[1]
        raise FieldError("--to", folder.name, f"{state} is damaged: {error}; remove {folder}, and try again") from error
    write_whole(state, json.dumps(content) + "\n", durably=True)


def _set_aside(run: RunDir, version: int) -> Path | None:
    """Move the summary, checkpoint/ and the checkpoints after `version` to a new folder, and return it; None if none exist."""
    newer = [path.parents[1] for number, path in resumable(run.path).items() if number > version]
    found = [path for path in (run.summary, run.checkpoint, *newer) if path.exists()]
    if not found:
        return None
    aside = next(path for number in count(1) if not (path := run.undone / str(number)).exists())
    aside.mkdir(parents=True)
    for path in found:  # The newest checkpoint goes last: until then, the run continues from it.
        path.rename(aside / path.name)
    sync_path(run.checkpoints)
    return aside


def _recorded(folder: Path) -> tuple[RunDir, Recipe]:
    """Return the run in `folder`, which must have been recorded, and its recipe."""
    recipe = recipe_of_run(RunDir(folder, "").recipe)
    run = RunDir(folder, run_name(folder, "RUN"))
    if not recipe.record:
        raise FieldError("record", False, "the run kept no sequences; run its recipe again with --set record=true")
    return run, recipe


def check_override(override: str) -> None:
    """Raise `FieldError` if the override has no effect on how a step is computed from its recorded data."""
    path, value = parse_override(override)
    if path[0] not in ("trainer", "algorithm") or not path[1:] or path[1] in _DECIDED_EARLIER:
        fix = "has no effect on recorded data; change fields of trainer, or the loss, masks or terms of algorithm"
        raise FieldError(".".join(path), value, fix)


def _compute(run: RunDir, recipe: Recipe, **options: Any) -> int:
    """Run `services.trainer.replay` with its `Options`, and return its exit code."""
    cache = run.path if recipe.model.source == "checkpoint" else cache_folder(os.environ)
    settings = {"run": run.name, "recipe": str(run.recipe.resolve()), "run_dir": str(run.path.resolve())}
    settings |= {"model_dir": "", "instance": "replay", "nodes": "1", "node": "0"}
    environment = {"PIPELINERL_MODEL_CACHE": str(cache / "models"), **os.environ}
    environment |= {f"PIPELINERL_{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "services.trainer.replay", json.dumps(options)]
    return subprocess.run(command, env=environment, check=False).returncode
