"""A tracker's process without a tracker: `python -m tests.unit.fake_tracker MODE FILE` writes what it is told to FILE.

Modes: `record`; `hang`: no call ever returns; `slow`: none returns until FILE.go is there; `fail`: steps raise, with a
secret in the message; `die`: ends at its first step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from services.trainer.reporting.trackers.__main__ import serve
from services.trainer.reporting.trackers.tracker import TrackedRun


class FakeTracker:
    def __init__(self, mode: str, path: Path) -> None:
        self._mode, self._path = mode, path

    def start(self, run: TrackedRun) -> None:
        self._note("start", run.name)

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        if self._mode == "fail":
            raise RuntimeError(f"https://me:hidden-password@tracker refused {os.environ['FAKE_API_KEY']}")
        if self._mode == "die":
            os._exit(7)
        self._note("step", step)

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._note("heldout", version)

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        self._note("end", finished)

    def _note(self, *what: object) -> None:
        print("what a library prints is no answer", flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")
        while self._mode == "hang" or (self._mode == "slow" and not self._path.with_suffix(".go").exists()):
            time.sleep(0.005)


if __name__ == "__main__":
    serve(lambda: FakeTracker(sys.argv[1], Path(sys.argv[2])))
