"""`lineage.json`: how often this run's trainer has started, from which version each time, with which recipe last, and when
the first of them began to train.

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

BEGAN = "training_began_s"


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
    recipe: Mapping[str, Any] = _content(run_dir)["recipe"]
    return recipe


def write_lineage(run_dir: Path, run: str, lineage: Lineage, recipe: Recipe) -> None:
    """Returns when it is on disk. When training began stays as it is."""
    run_dir.mkdir(parents=True, exist_ok=True)
    began = {BEGAN: began_s} if (began_s := read_training_began(run_dir)) is not None else {}
    content = {"run": run, "starts": list(lineage.starts), "recipe": recipe.model_dump(mode="json"), **began}
    write_json_durably(run_dir / LINEAGE, content)


def read_training_began(run_dir: Path) -> float | None:
    """Unix time at which the first of the run's trainers began to train; None when none has."""
    if not (run_dir / LINEAGE).is_file():
        return None
    began_s = _content(run_dir).get(BEGAN)
    return float(began_s) if isinstance(began_s, int | float) else None


def note_training_began(run_dir: Path, now_s: float) -> None:
    """Returns when it is on disk. Only the first call in a run's life counts, and only where a trainer has started."""
    if (run_dir / LINEAGE).is_file() and read_training_began(run_dir) is None:
        write_json_durably(run_dir / LINEAGE, {**_content(run_dir), BEGAN: now_s})


def _content(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / LINEAGE).read_text(encoding="utf-8")))
