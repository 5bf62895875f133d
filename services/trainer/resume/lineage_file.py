"""`lineage.json`: how often this run's trainer has started, from which version each time, and with which recipe last.

A trainer writes it before it serves anything, so that no two of a run's trainers take themselves for the same incarnation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.staleness import Lineage
from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import FieldError, UserError
from pipelinerl.run_folder import LINEAGE
from services.trainer.resume.files import write_json_durably


def read_lineage(run_dir: Path, run: str) -> Lineage | None:
    """None when no trainer has started in this folder. Raises `FieldError` for the folder of another run, `UserError` for a
    file that is not ours."""
    path = run_dir / LINEAGE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, lineage = content["run"], Lineage(tuple(int(start) for start in content["starts"]))
        if not isinstance(content["recipe"], dict):
            raise TypeError("recipe")
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path} does not say how often the run's trainer started: {error!r}; restore it") from error
    if found != run:
        raise FieldError(
            "run_dir", str(run_dir), f"is the folder of run {found!r}, not of {run!r}: give this run its own"
        )
    return lineage


def read_recipe(run_dir: Path) -> Mapping[str, Any]:
    """The resolved recipe of the trainer that started last, as plain data."""
    content: Mapping[str, Any] = json.loads((run_dir / LINEAGE).read_text(encoding="utf-8"))["recipe"]
    return content


def write_lineage(run_dir: Path, run: str, lineage: Lineage, recipe: Recipe) -> None:
    """Returns when it is on disk."""
    run_dir.mkdir(parents=True, exist_ok=True)
    content = {"run": run, "starts": list(lineage.starts), "recipe": recipe.model_dump(mode="json")}
    write_json_durably(run_dir / LINEAGE, content)
