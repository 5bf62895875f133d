"""`pipelinerl run --resume DIR`: whether a run can go on in its folder, with which recipe, and from which version.

Only `Resumption.prepare` changes anything. The trainer then finds its checkpoint by itself, as after any restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError
from pipelinerl.local.processes import living
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import Change, check_resumable, load_recipe, read_recipe, recipe_from_data
from pipelinerl.run_dir import RunDir, missing_from, newest_checkpoint, newest_state, read_json
from pipelinerl.run_summary import is_finished

OPTION = "--resume"


@dataclass(frozen=True)
class Resumption:
    """A run that can go on. `version`: of the checkpoint, None without one. `scaled`: drop what `scale` asked for before."""

    run_dir: RunDir
    recipe: Recipe
    changes: tuple[Change, ...]
    version: int | None
    scaled: bool

    def notes(self) -> Iterator[str]:
        """What a person should know before it starts. Pure."""
        if self.version is None:
            yield f"{self.run_dir.name}: there is no checkpoint; the run starts again from version 0"
        else:
            yield f"{self.run_dir.name}: goes on from the checkpoint of version {self.version}"
        yield from (f"recipe changed: {change}" for change in self.changes)
        schedule = self.recipe.trainer.schedule
        if schedule in ("linear", "cosine", "wsd") and any(one.field == "trainer.steps" for one in self.changes):
            yield f"trainer.schedule = {schedule}: the decay now ends with the new last step"

    def prepare(self) -> None:
        """Makes the folder ready for the processes to come."""
        for name in ("logs", "addresses"):
            (self.run_dir.path / name).mkdir(exist_ok=True)
        for stale in (self.run_dir.path / "addresses").glob("*.json"):
            stale.unlink(missing_ok=True)
        if self.scaled:
            self.run_dir.scale.unlink(missing_ok=True)


def plan_resume(run_dir: RunDir, recipe: str | None = None, overrides: Sequence[str] = ()) -> Resumption:
    """`recipe`: file or name of the recipe to go on with; None = the folder's own.

    Raises `FieldError` (a run that goes on or is finished), `ChangedRecipe`, and what `load_recipe` raises.
    """
    old = read_recipe(run_dir.recipe)
    new = load_recipe(recipe, overrides) if recipe else recipe_from_data(old, str(run_dir.recipe), overrides)
    changes = tuple(check_resumable(old, new))
    check_ended(run_dir)
    _check_complete(run_dir, new)
    version = newest_checkpoint(run_dir.path)
    _check_steps(run_dir, new.trainer.steps, version)
    asked = any(text.partition("=")[0].strip() == "actor.count" for text in overrides)
    scaled = asked or any(change.field == "actor.count" for change in changes)
    return Resumption(run_dir, new, changes, version, scaled)


def find_run(folder: Path) -> RunDir:
    """The run in `folder`, by its own name. Raises `FieldError` when there is none that can go on."""
    run_dir, shown = RunDir(folder, ""), str(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        raise FieldError(OPTION, shown, f"{what}; give the folder of a run")
    missing = [file.name for file in (run_dir.recipe, run_dir.identity) if not file.is_file()]
    if missing:
        raise FieldError(OPTION, shown, f"is not the folder of a run: it has no {' and no '.join(missing)}")
    try:
        name = json.loads(run_dir.identity.read_bytes())["run"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FieldError(OPTION, shown, f"its run.json does not name the run: {error!r}") from error
    return RunDir(folder, check_run_name(str(name), OPTION))


def check_ended(run_dir: RunDir) -> None:
    """Raises `FieldError` naming the processes of the run that live."""
    try:
        pids = living(run_dir)
    except FileNotFoundError:
        return  # it ended before it had started any
    except (OSError, ValueError) as error:
        raise FieldError(OPTION, str(run_dir.path), f"its pids.json cannot be read: {error}; remove it") from error
    if pids:
        named = ", ".join(f"{name} (pid {pid})" for name, pid in pids.items())
        raise FieldError(OPTION, str(run_dir.path), f"the run goes on: {named}; wait for its end, or stop it")


@contextlib.contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Keeps a second command out of the folder. Raises `FieldError` when another one is at it; the kernel lets go when the
    process ends, however it ends."""
    with (run_dir.path / ".running").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "another command runs in it; wait for its end, or stop it"
            raise FieldError(OPTION, str(run_dir.path), fix) from None
        yield


def _check_complete(run_dir: RunDir, recipe: Recipe) -> None:
    """Raises `FieldError` for a folder that lacks something, `ChangedRecipe` for a recipe that is not the checkpoint's."""
    try:
        missing, state = missing_from(run_dir.path), newest_state(run_dir.path)
        if state is not None:
            check_resumable(state["recipe"], recipe)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise FieldError(
            OPTION, str(run_dir.path), f"its newest checkpoint cannot be read: {error!r}; remove it"
        ) from error
    if missing:
        raise FieldError(OPTION, str(run_dir.path), missing)


def _check_steps(run_dir: RunDir, steps: int, version: int | None) -> None:
    """Raises `FieldError` when the run has no step left to take, or has taken more than it should."""
    summary = read_json(run_dir.summary)
    finished = is_finished(summary)
    taken = max(version or 0, int(summary.get("steps") or 0) if finished else 0)
    if steps < taken or (steps == taken and finished):
        what = "all of them are taken" if steps == taken else f"{taken} are taken"
        raise FieldError("trainer.steps", steps, f"{what}; raise it: --set trainer.steps={2 * taken}")
