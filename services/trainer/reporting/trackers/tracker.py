"""What a tracker is told of a run, and the interface that each of them has behind it. No tracker's library is imported here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """`params`: the recipe's fields by dotted path. `version`: optimizer steps that count when the trainer starts, 0 for a
    run that begins. `incarnation`: how many times its trainer has started, from 1."""

    name: str
    description: str
    run_dir: str
    params: Mapping[str, str | int | float | bool]
    incarnation: int
    version: int


class Tracker(Protocol):
    """Called in the tracker's own process, in turn; each call may wait for a network and raise what its library raises."""

    def start(self, run: TrackedRun) -> None:
        """Opens the run, or goes on with it where an earlier trainer of it did. Called again when it raised."""

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Figures of one optimizer step. `time_s`: Unix time."""

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        """One evaluation of policy version `version`, which may be older than the last step."""

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        """The run's summary, and all that is not sent yet. `finished`: to its last step, or stopped before."""


class RunId:
    """The identity that a tracker gave a run, kept in the run directory so that a trainer that starts again goes on with it."""

    def __init__(self, run_dir: str, tracker: str) -> None:
        self._path = Path(run_dir) / "trackers" / f"{tracker}.json"

    def read(self) -> str | None:
        """None when there is none yet. Raises `ValueError` or `KeyError` for a file that is not ours."""
        if not self._path.is_file():
            return None
        return str(json.loads(self._path.read_text(encoding="utf-8"))["id"])

    def write(self, value: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"id": value}) + "\n", encoding="utf-8")
        os.replace(partial, self._path)
