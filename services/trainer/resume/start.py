"""From what does this trainer start? From nothing, or from where this run's trainer was when it last ended.

Looks into the run directory only; the streams are looked at later (`left_behind.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.staleness import FIRST_INCARNATION, Lineage
from pipelinerl.config.changes import check_resumable
from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import FieldError
from pipelinerl.run_folder import CHECKPOINTS, missing_from, resumable
from services.trainer.checkpoint import tidy
from services.trainer.resume.lineage_file import read_lineage, read_recipe, read_training_began
from services.trainer.resume.run_state import RunState, load_run_state

log = logging.getLogger(__name__)

RESUME, STATE = "resume", "state"
"""`checkpoints/step-<v>/resume/state`: folders in a run directory."""


@dataclass(frozen=True)
class Start:
    """`lineage`: this trainer's own. `again`: an incarnation before it has used the run's streams."""

    lineage: Lineage = FIRST_INCARNATION
    again: bool = False
    folder: Path | None = None
    """`…/resume` of the checkpoint to go on from."""
    state: RunState | None = None
    """What is in it."""
    positions: Mapping[int, int] = field(default_factory=dict)
    """Of SEQUENCES, by version of each checkpoint there is, oldest first."""
    saved_at_s: float | None = None
    """Unix time at which the checkpoint was written; without one, at which the run's first trainer began to train. None: none
    has."""

    @property
    def version(self) -> int:
        return self.state.policy_version if self.state else 0

    @property
    def journal_bytes(self) -> int:
        """Of the journal that still count."""
        return self.state.journal_bytes if self.state else 0

    @property
    def tensors(self) -> Path | None:
        return self.folder / STATE if self.folder else None


def find_start(run_dir: Path, run: str, recipe: Recipe) -> Start:
    """Newest checkpoint, or version 0 where the trainer died before its first. Tidies up after one that was killed.

    Raises `UserError` for a recipe that changed more than it may, and as `read_lineage` and `load_run_state` do.
    """
    for parent in (run_dir, run_dir / CHECKPOINTS):
        tidy(parent)
    _check_complete(run_dir)
    lineage = read_lineage(run_dir, run)
    if lineage is None:
        return Start()
    folder = newest_checkpoint(run_dir)
    if folder is None:
        _tell_changes(read_recipe(run_dir), recipe)
        log.warning("the trainer has started before and left no checkpoint: version 0 is trained on again")
        return Start(lineage.restarted(0), again=True, saved_at_s=read_training_began(run_dir))
    state = load_run_state(folder)
    if state.run != run:
        raise FieldError("run_dir", str(run_dir), f"{folder.parent.name} is of run {state.run!r}, not of {run!r}")
    _tell_changes(state.recipe, recipe)
    positions = {
        one.policy_version: one.position
        for one in (load_run_state(path.parent) for path in resumable(run_dir).values())
    }
    saved_at_s = folder.stat().st_mtime
    return Start(lineage.restarted(state.policy_version), True, folder, state, positions, saved_at_s)


def _check_complete(run_dir: Path) -> None:
    try:
        missing = missing_from(run_dir)
    except (ValueError, KeyError) as error:
        missing = f"its journal, or its newest checkpoint, cannot be read: {error!r}; restore it"
    if missing:
        raise FieldError("run_dir", str(run_dir), missing)


def _tell_changes(old: Mapping[str, Any], recipe: Recipe) -> None:
    for change in check_resumable(old, recipe):
        log.info("recipe changed: %s", change)


def evaluates_first(start: Start, recipe: Recipe) -> bool:
    """Whether the version that a trainer begins with is to be evaluated: not when the checkpoint has the result. Pure."""
    every, version = recipe.evaluation.every_steps, start.version
    known = start.state.figures["report"]["totals"]["heldout"] if start.state else []
    due = version in (0, recipe.trainer.steps) or (every > 0 and version % every == 0)
    return due and not any(heldout[0] == version for heldout in known)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Its `resume` folder; None when there is none that a run can go on from."""
    return next((path.parent for path in reversed(resumable(run_dir).values())), None)
