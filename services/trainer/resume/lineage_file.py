"""`lineage.json`: how often this run's trainer has started, and from which version each time.

A trainer writes it before it serves anything, so that no two of a run's trainers take themselves for the same incarnation.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipelinerl.algorithms.staleness import Lineage
from pipelinerl.errors import FieldError, UserError
from services.trainer.resume.files import write_json_durably

LINEAGE = "lineage.json"


def read_lineage(run_dir: Path, run: str) -> Lineage | None:
    """None when no trainer has started in this folder. Raises `FieldError` for the folder of another run, `UserError` for a
    file that is not ours."""
    path = run_dir / LINEAGE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, lineage = content["run"], Lineage(tuple(int(start) for start in content["starts"]))
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path} does not say how often the run's trainer started: {error!r}; restore it") from error
    if found != run:
        raise FieldError(
            "run_dir", str(run_dir), f"is the folder of run {found!r}, not of {run!r}: give this run its own"
        )
    return lineage


def write_lineage(run_dir: Path, run: str, lineage: Lineage) -> None:
    """Returns when it is on disk."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json_durably(run_dir / LINEAGE, {"run": run, "starts": list(lineage.starts)})
