"""`pipelinerl run RECIPE`: train on this machine, with live progress, into a run directory; `--resume DIR` continues a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipelinerl.commands import Command, add_recipe_arguments
from pipelinerl.errors import FieldError

if TYPE_CHECKING:
    from pipelinerl.recipe.fields import Recipe
    from pipelinerl.rl.placement import Placement
    from pipelinerl.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser, nargs="?")
    parser.add_argument("--actors", metavar="N", type=int, help="actor processes; short for --set actor.count=N")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: <recipe>-<date>-<time>)")
    parser.add_argument(
        "--reward-rows", metavar="N", type=int, default=2,
        help="before the start, call each reward on this many of its problems (default: 2; 0: none, if calls cost money)",
    )  # fmt: skip
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--page-port", metavar="PORT", type=int, default=0, help="port of the live page (default: any free one)")
    page.add_argument("--no-page", action="store_true", help="serve no live page")
    parser.add_argument(
        "--resume", metavar="DIR", type=Path,
        help="continue the run in DIR with its own recipe; RECIPE and --set may change some fields",
    )  # fmt: skip
    parser.add_argument(
        "--placement", metavar="JSON|FILE", default="",
        help="GPUs of each trainer rank and each actor, by UUID or position; a run's placement.json is an example",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-port", metavar="PORT", type=int, default=0,
        help="port on this machine for the runner's /metrics and for /targets, where Prometheus finds the run's services "
        "(default: any free one)",
    )  # fmt: skip


def execute(args: argparse.Namespace) -> int:
    """Return the exit code: 0 trained, 1 failed, 2 failed by a user's mistake, 130 interrupted. Raises `UserError` for a
    mistake that is found before anything is started."""
    import asyncio

    from pipelinerl.local.ending import finish
    from pipelinerl.local.progress import open_display
    from pipelinerl.local.runner import LocalRun
    from pipelinerl.service.logs import LogContext, configure_logging

    page_port, metrics_port = chosen_ports(args)
    overrides = [*args.overrides, *([f"actor.count={args.actors}"] if args.actors is not None else [])]
    with ExitStack() as stack:
        make = _new if args.resume is None else _resumed
        recipe, run_dir, placement, notes = make(args, overrides, stack)
        with open_display() as display:
            configure_logging(LogContext(run_dir.name, "runner", "runner"), level="warning")
            with suppress(OSError):  # if the output is closed, the run notices as well and stops cleanly
                display.note("\n".join([*notes, f"run directory: {run_dir.path}"]))
            local = LocalRun(recipe, run_dir, display, placement=placement, page_port=page_port, metrics_port=metrics_port)
            ending = asyncio.run(local.run())
        return finish(recipe, run_dir, ending)


def chosen_ports(args: argparse.Namespace) -> tuple[int | None, int]:
    """Return the ports of the live page (None: no page) and of the runner's metrics; 0 is any free one. Raises `FieldError`."""
    page_port = None if args.no_page else free_port("--page-port", args.page_port)
    metrics_port = free_port("--metrics-port", args.metrics_port)
    if metrics_port and metrics_port == page_port:
        raise FieldError("--metrics-port", metrics_port, "is the port of --page-port; give another, or 0 for any free one")
    return page_port, metrics_port


def free_port(option: str, port: int) -> int:
    """Return the same port. Raises `FieldError` if it is no port number, or another process listens there."""
    from pipelinerl.local.processes import why_taken

    if not 0 <= port <= 65535:
        raise FieldError(option, port, "give a port from 1 to 65535, or 0 for any free one")
    why = why_taken(port)
    if why:
        raise FieldError(option, port, f"cannot listen there ({why}); give another, or 0")
    return port


_Prepared: TypeAlias = "tuple[Recipe, RunDir, Placement | None, list[str]]"


def _new(args: argparse.Namespace, overrides: Sequence[str], stack: ExitStack) -> _Prepared:
    from datetime import datetime

    from pipelinerl.local.placing import placed_here, write_placement
    from pipelinerl.recipe.loading import load_recipe, understood
    from pipelinerl.recipe.model_folder import known_parameters
    from pipelinerl.recipe.preflight import check_environment, doubts
    from pipelinerl.rl.memory import checkpoint_bytes
    from pipelinerl.run_dir import create_run_dir, locked, open_to_others

    if args.recipe is None:
        raise FieldError("RECIPE", "", "name a recipe, or continue a run with --resume DIR")
    recipe = load_recipe(args.recipe, overrides)
    doubtful = [*doubts(recipe, check_environment(recipe, args.reward_rows))]
    numbered, placement, gpus = placed_here(recipe, args.placement)
    first = checkpoint_bytes(recipe, known_parameters(recipe.model))
    run_dir = create_run_dir(recipe.name, datetime.now(), args.name, args.run_dir, first_checkpoint_bytes=first)
    stack.enter_context(locked(run_dir))
    write_placement(run_dir, recipe, placement)
    warnings = [f"warning: {doubt}" for doubt in filter(None, (*doubtful, open_to_others(run_dir)))]
    title = f"{run_dir.name}: {recipe.description or recipe.name}"
    return numbered, run_dir, placement, [title, *understood(overrides), *warnings, *gpus]


def _resumed(args: argparse.Namespace, overrides: Sequence[str], stack: ExitStack) -> _Prepared:
    from pipelinerl.local.placing import placed_here, write_placement
    from pipelinerl.local.resume import find_run, resume
    from pipelinerl.run_dir import locked

    for option, value in (("--run-dir", args.run_dir), ("--name", args.name)):
        if value is not None:
            raise FieldError(option, str(value), "leave it out: a run that is resumed keeps its folder and its name")
    run_dir = find_run(args.resume)
    stack.enter_context(locked(run_dir))
    recipe, notes = resume(run_dir, args.recipe, overrides, args.reward_rows)
    numbered, placement, gpus = placed_here(recipe, args.placement)
    write_placement(run_dir, recipe, placement)
    return numbered, run_dir, placement, [*notes, *gpus]


COMMAND = Command("run", "train a recipe on this machine", add_arguments, execute)
