"""`pipelinerl run --resume DIR`: check whether a run can continue in its folder, with which recipe, and from which version.

Only `resume` changes anything. The trainer then finds its checkpoint itself, as after any restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.local.processes import living
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import Change, check_resumable, load_recipe, read_recipe, recipe_from_data, recipe_of_run
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.recipe.preflight import check_environment, doubts
from pipelinerl.rl.memory import checkpoint_bytes
from pipelinerl.run_dir import (
    RunDir,
    check_folder,
    check_space,
    missing_from,
    newest_checkpoint,
    newest_state,
    read_json,
    run_name,
)
from pipelinerl.run_summary import is_finished

OPTION = "--resume"


def resume(
    run_dir: RunDir, recipe: str | None = None, overrides: Sequence[str] = (), reward_rows: int = 0
) -> tuple[Recipe, list[str]]:
    """Prepare the folder for a new start. Returns the recipe, and notes for the user.

    `recipe`: file or name of the recipe to continue with; None = the folder's own. `reward_rows`: as in `examine`.
    Raises, with nothing changed, `FieldError` (the run is running or finished), `ChangedRecipe`, and what `load_recipe`
    and `check_environment` raise.
    """
    old = _with_auto(read_recipe(run_dir.recipe), read_json(run_dir.placement).get("automatic", []))
    if not recipe:
        recipe_of_run(run_dir.recipe)  # whose problems come before those of the overrides
    new = load_recipe(recipe, overrides) if recipe else recipe_from_data(old, str(run_dir.recipe), overrides)
    changes = check_resumable(old, new)
    if pids := living(run_dir, OPTION):
        named = ", ".join(f"{name} (pid {pid})" for name, pid in pids.items())
        raise FieldError(OPTION, str(run_dir.path), f"the run is still running: {named}; wait for its end, or stop it")
    _check_complete(run_dir, new)
    version = newest_checkpoint(run_dir.path)
    _check_steps(run_dir, new.trainer.steps, version)
    warnings = [f"warning: {doubt}" for doubt in doubts(new, check_environment(new, reward_rows))]
    check_space(run_dir, OPTION, checkpoint_bytes(new, known_parameters(new.model)))
    for name in ("logs", "addresses"):
        (run_dir.path / name).mkdir(exist_ok=True)
    for stale in (run_dir.path / "addresses").glob("*.json"):
        stale.unlink(missing_ok=True)
    asked = any(text.partition("=")[0].strip() == "actor.count" for text in overrides)
    if asked or any(change.field == "actor.count" for change in changes):
        run_dir.scale.unlink(missing_ok=True)  # the number that `scale` set before
    return new, [*_notes(run_dir.name, new, changes, version), *warnings]


def _with_auto(data: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """Return the recipe's data as it was before numbers replaced `auto` in these fields."""
    for field in fields:
        *sections, name = field.split(".")
        inside = data
        for section in sections:
            inside = inside[section]
        inside[name] = "auto"
    return data


def _notes(run: str, recipe: Recipe, changes: Sequence[Change], version: int | None) -> Iterator[str]:
    """Yield the notes for the user. `version`: the checkpoint's; None without one."""
    if version is None:
        yield f"{run}: there is no checkpoint; the run starts again from version 0"
    else:
        yield f"{run}: continues from the checkpoint of version {version}"
    yield from (f"recipe changed: {change}" for change in changes)
    schedule = recipe.trainer.schedule
    if schedule in ("linear", "cosine", "wsd") and any(one.field == "trainer.steps" for one in changes):
        yield f"trainer.schedule = {schedule}: the decay now ends with the new last step"


def find_run(folder: Path) -> RunDir:
    """Return the run in `folder`, with its own name. Raises `FieldError` if there is none that can continue."""
    run_dir, shown = RunDir(folder, ""), str(folder)
    check_folder(folder, OPTION)
    missing = [file.name for file in (run_dir.recipe, run_dir.identity) if not file.is_file()]
    if missing:
        raise FieldError(OPTION, shown, f"is not the folder of a run: it has no {' and no '.join(missing)}")
    return RunDir(folder, run_name(folder, OPTION))


def _check_complete(run_dir: RunDir, recipe: Recipe) -> None:
    """Raise `FieldError` for a folder that lacks something, `ChangedRecipe` for a recipe that does not fit the checkpoint."""
    try:
        if missing := missing_from(run_dir.path):
            raise FieldError(OPTION, str(run_dir.path), missing)
        if (state := newest_state(run_dir.path)) is not None:
            check_resumable(state["recipe"], recipe)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise FieldError(OPTION, str(run_dir.path), f"its newest checkpoint cannot be read: {error!r}; remove it") from error


def _check_steps(run_dir: RunDir, steps: int, version: int | None) -> None:
    """Raise `FieldError` if the run has no step left to take, or has taken more than it should."""
    summary = read_json(run_dir.summary)
    finished = is_finished(summary)
    taken = max(version or 0, int(summary.get("steps") or 0) if finished else 0)
    if steps < taken or (steps == taken and finished):
        what = "all of them are taken" if steps == taken else f"{taken} are taken"
        raise FieldError("trainer.steps", steps, f"{what}; raise it: --set trainer.steps={2 * taken}")
