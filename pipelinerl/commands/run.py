"""`pipelinerl run RECIPE`: trains on this machine, with live progress, into a run directory."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "run"
HELP = "train a recipe on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file, or the name of one under recipes/")
    parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="override one field of the recipe; the value is YAML (repeatable)",
    )  # fmt: skip
    parser.add_argument("--actors", metavar="N", type=int, help="actor processes; short for --set actor.count=N")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: <recipe>-<date>-<time>)")


def execute(args: argparse.Namespace) -> int:
    """Exit code: 0 trained, 1 failed, 2 failed of what a service calls a user's mistake, 130 interrupted.

    Raises `UserError` for what is wrong before anything is started.
    """
    import asyncio
    from datetime import datetime

    from pipelinerl.config.load import load_recipe
    from pipelinerl.config.preflight import check_environment
    from pipelinerl.local.ending import finish
    from pipelinerl.local.progress import open_display
    from pipelinerl.local.run_dir import create_run_dir
    from pipelinerl.local.runner import LocalRun

    overrides = [*args.overrides, *([f"actor.count={args.actors}"] if args.actors is not None else [])]
    recipe = load_recipe(args.recipe, overrides)
    check_environment(recipe)
    run_dir = create_run_dir(recipe.name, datetime.now(), args.name, args.run_dir)
    with open_display() as display:
        display.note(f"{run_dir.name}: {recipe.description or recipe.name}\nrun directory: {run_dir.path}")
        ending = asyncio.run(LocalRun(recipe, run_dir, display).run())
    return finish(recipe, run_dir, ending)
