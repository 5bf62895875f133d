"""`pipelinerl run`, `scale` and `cache`: start or resume a run on this machine, change the number of its actors, list or remove
cached files.

Nothing is changed before all checks have passed. The trainer of a resumed run finds its checkpoint itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from pipelinerl.doctor.recipes import quick_findings
from pipelinerl.errors import FieldError, ServiceError, counted
from pipelinerl.initial_model import COMPILED, cache_folder
from pipelinerl.local.ending import finish
from pipelinerl.local.following import ask_actor
from pipelinerl.local.placing import placed_here, write_placement
from pipelinerl.local.processes import check_stopped, running_pids, why_taken
from pipelinerl.local.progress import open_display, phase_of
from pipelinerl.local.runner import LocalRun
from pipelinerl.recipe import loading
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.recipe.preflight import check_environment, doubts
from pipelinerl.rl.memory import checkpoint_bytes
from pipelinerl.rl.placement import Placement
from pipelinerl.run_dir import MOST_ACTORS, RunDir, create_run_dir, find_run, newest_state, read_json, write_json
from pipelinerl.run_summary import is_finished
from pipelinerl.service.logs import LogContext, configure_logging
from pipelinerl.service.tls import read_certificates

RESUME = "--resume"
_LOOK_S = 0.5


def run(args: argparse.Namespace) -> int:
    """Start or resume a run, and return the exit code. Raises `UserError` if a check finds a mistake."""
    page_port, metrics_port = chosen_ports(args)
    overrides = [*args.overrides, *([f"actor.count={args.actors}"] if args.actors is not None else [])]
    if args.actors is not None and args.placement:
        raise FieldError("--actors", args.actors, "leave it out: the groups of GPUs in --placement set the number of actors")
    with ExitStack() as stack:
        make = _new if args.resume is None else _resumed
        recipe, run_dir, placement, notes = make(args, overrides, stack)
        with open_display() as display:
            configure_logging(LogContext(run_dir.name, "runner", "runner"), level="warning")
            with suppress(OSError):  # If the output is closed, the run notices this itself and stops cleanly.
                display.note("\n".join([*notes, f"run directory: {run_dir.path}"]))
            local = LocalRun(recipe, run_dir, display, placement=placement, page_port=page_port, metrics_port=metrics_port)
            ending = asyncio.run(local.run())
        return finish(recipe, run_dir, ending)


def chosen_ports(args: argparse.Namespace) -> tuple[int | None, int]:
    """Return ports for the live page (None: no page) and the runner's metrics; 0 = any. Raises `FieldError` for a bad one."""
    for option, port in (("--page-port", args.page_port), ("--metrics-port", args.metrics_port)):
        if not 0 <= port <= 65535:
            raise FieldError(option, port, "give a port from 1 to 65535, or 0 for any free one")
        if why := why_taken(port):
            raise FieldError(option, port, f"cannot listen there ({why}); give another port, or 0 for any free one")
    if 0 < args.metrics_port == args.page_port:
        raise FieldError("--metrics-port", args.metrics_port, "is the port of --page-port; give another, or 0 for any free one")
    return None if args.no_page else args.page_port, args.metrics_port


Prepared = tuple[Recipe, RunDir, Placement | None, list[str]]
"""The recipe with numbers instead of `auto`, the run's folder, the placement (None without a GPU), and notes to print."""


def _new(args: argparse.Namespace, overrides: Sequence[str], stack: ExitStack) -> Prepared:
    if args.recipe is None:
        raise FieldError("RECIPE", "", "name a recipe, or continue a run with --resume DIR")
    recipe = loading.load_recipe(args.recipe, overrides)
    modules = loading.modules_beside(recipe, loading.find_recipe(args.recipe))
    examined = check_environment(recipe, args.reward_rows, modules)
    doubtful = [*(one for _, one in doubts(recipe, examined)), *(one.brief for one in quick_findings(recipe, examined))]
    numbered, placement, gpus = placed_here(recipe, args.placement)
    first = checkpoint_bytes(recipe, known_parameters(recipe.model))
    run_dir = create_run_dir(recipe.name, datetime.now(), args.name, args.run_dir, first_checkpoint_bytes=first)
    stack.enter_context(run_dir.locked())
    write_placement(run_dir, recipe, placement)
    run_dir.keep_modules(modules)
    warnings = [f"warning: {doubt}" for doubt in filter(None, (*doubtful, run_dir.open_to_others()))]
    title = f"{run_dir.name}: {recipe.description or recipe.name}"
    return numbered, run_dir, placement, [title, *loading.understood(overrides), *warnings, *gpus]


def _resumed(args: argparse.Namespace, overrides: Sequence[str], stack: ExitStack) -> Prepared:
    for option, value in (("--run-dir", args.run_dir), ("--name", args.name)):
        if value is not None:
            raise FieldError(option, str(value), "leave it out: a run that is resumed keeps its folder and its name")
    run_dir = find_run(args.resume, RESUME)
    stack.enter_context(run_dir.locked())
    recipe, notes, (numbered, placement, gpus) = resume(run_dir, args.recipe, overrides, args.reward_rows, args.placement)
    write_placement(run_dir, recipe, placement)
    return numbered, run_dir, placement, [*notes, *gpus]


def resume(
    run_dir: RunDir, recipe: str | None = None, overrides: Sequence[str] = (), reward_rows: int = 0, placement: str = ""
) -> tuple[Recipe, list[str], tuple[Recipe, Placement | None, list[str]]]:
    """Prepare a run's folder for a new start, with the recipe stored there or with the one named `recipe`. Return the recipe,
    notes for the user, and what `placed_here` returns. Raises `UserError`, and changes nothing, if it cannot continue."""
    old = loading.read_recipe(run_dir.recipe)
    for field in read_json(run_dir.placement).get("automatic") or []:
        loading.set_value(old, field.split("."), "auto")  # A placement had replaced `auto` with a number.
    if not recipe:
        loading.recipe_of_run(run_dir.recipe)  # Problems of the file are reported before those of the overrides.
    new = loading.load_recipe(recipe, overrides) if recipe else loading.recipe_from_data(old, str(run_dir.recipe), overrides)
    changes = loading.check_resumable(old, new)
    check_stopped(run_dir, RESUME)
    version, state = None, newest_state(run_dir.path, RESUME)
    if state is not None:
        version = state["policy_version"]
        loading.check_resumable(state["recipe"], new)
    summary, steps = read_json(run_dir.summary), new.trainer.steps
    taken = max(version or 0, int(summary.get("steps") or 0) if is_finished(summary) else 0)
    if steps < taken or (steps == taken and is_finished(summary)):
        what = "all of them have been taken" if steps == taken else f"{taken} have been taken"
        raise FieldError("trainer.steps", steps, f"{what}; raise it: --set trainer.steps={2 * taken}")
    modules = loading.modules_beside(new, loading.find_recipe(recipe)) if recipe else None
    examined = check_environment(new, reward_rows, modules or (run_dir.modules if run_dir.modules.is_dir() else None))
    warnings = [f"warning: {doubt}" for _, doubt in doubts(new, examined)]
    run_dir.check_space(RESUME, checkpoint_bytes(new, known_parameters(new.model)))
    placed = placed_here(new, placement)
    run_dir.keep_modules(modules)
    for name in ("logs", "addresses"):
        (run_dir.path / name).mkdir(exist_ok=True)
    for stale in (run_dir.path / "addresses").glob("*.json"):
        stale.unlink(missing_ok=True)
    asked = any(text.partition("=")[0].strip() == "actor.count" for text in overrides)
    if asked or any(change.field == "actor.count" for change in changes):
        run_dir.scale.unlink(missing_ok=True)  # The new number replaces that of `pipelinerl scale`.
    begins = "there is no checkpoint; the run starts again from version 0"
    goes_on = f"continues from the checkpoint of version {version}"
    notes = [f"{run_dir.name}: {begins if version is None else goes_on}", *(f"recipe changed: {one}" for one in changes)]
    schedule = new.trainer.schedule
    if schedule in ("linear", "cosine", "wsd") and any(one.field == "trainer.steps" for one in changes):
        notes.append(f"trainer.schedule = {schedule}: the decay now ends with the new last step")
    return new, [*notes, *warnings], placed


def scale(args: argparse.Namespace) -> int:
    """Request N actors and wait until they serve. Raises `FieldError` for wrong arguments, `ServiceError` after a timeout."""
    run_dir = RunDir(args.run_dir, args.run_dir.name)
    if not 0 <= args.count <= MOST_ACTORS:
        raise FieldError("N", args.count, f"a run on one machine has 0 to {MOST_ACTORS} actors")
    running_pids(run_dir)
    write_json(run_dir.scale, {"actors": args.count})
    asyncio.run(_until_there(run_dir, args.count, args.timeout))
    return 0


async def _until_there(run_dir: RunDir, count: int, timeout_s: float) -> None:
    """Print the actors' phases until `count` actors serve. Raises `FieldError` if the run ends, `ServiceError` on timeout."""
    certificates = read_certificates(run_dir.credentials.tls_dir, "client")
    shown = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                actors = sorted(name for name in running_pids(run_dir) if name.startswith("actor-"))
                states = await asyncio.gather(*(ask_actor(run_dir.address(name), certificates) for name in actors))
                phases = dict(zip(actors, map(phase_of, states), strict=True))
                line = ", ".join(f"{name} {phase}" for name, phase in phases.items()) or "no actors"
                if line != shown:
                    shown = line
                    print(line, file=sys.stderr, flush=True)
                if len(phases) == count and all(phase == "serving" for phase in phases.values()):
                    return
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        wanted = f"{counted(count, 'actor')} requested, but not all serve after {timeout_s:g} s: {shown}"
        raise ServiceError(f"{wanted}. The run goes on; see its logs") from None


def kept_folders() -> dict[str, Path]:
    """Return the cache's folders of initial models and compiled code, by name."""
    folder = cache_folder(os.environ)
    found = [*sorted(folder.glob("models/[!.]*")), *folder.glob(COMPILED)]
    return {path.name: path for path in found if path.is_dir() and any(path.iterdir())}


def cache(args: argparse.Namespace) -> int:
    """List or remove cached folders. Raises `FieldError` if a name is unknown (before any removal) or a removal fails."""
    folder, kept = cache_folder(os.environ), kept_folders()
    chosen = args.clear or list(kept)
    for name in chosen:
        if name not in kept:
            raise FieldError("--clear", name, f"is not in {folder}; pipelinerl cache lists its entries")
    sizes = {name: sum(path.stat().st_size for path in kept[name].rglob("*") if path.is_file()) for name in chosen}
    for name, size in sizes.items():
        built = datetime.fromtimestamp(kept[name].stat().st_mtime).isoformat(" ", "minutes")
        if args.clear is not None:
            try:
                shutil.rmtree(kept[name])
                if name == COMPILED:
                    kept[name].mkdir()  # Engines of a run in progress need the folder.
            except OSError as error:
                raise FieldError("--clear", name, f"cannot be removed: {error.strerror}") from error
        print(f"{'removed  ' if args.clear is not None else ''}{size / 2**20:9,.1f} MiB  {built}  {name}")
    print(f"{sum(sizes.values()) / 2**20:,.1f} MiB in {counted(len(sizes), 'folder')} of {folder}")
    return 0
