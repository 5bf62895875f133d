"""The trainer's end of its page: collects what a page is told, on the event loop, and hands it to the board.

Does nothing at all where the page is off. What is told is made by others: records and samples by `report/run_report.py`, the
state by the caller's `state`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.config.load import recipe_yaml
from pipelinerl.config.recipe import Recipe
from services.trainer.page.board import PageBoard

log = logging.getLogger(__name__)

STATE_EVERY_S = 1.0
_TAIL_BYTES = 1 << 20
_FIRST_LINES = 16
_MOST_PENDING = 16


class RunPage:
    """`board` None: the page is off. `state()` is what is true now. What fails here is logged, and ends no run."""

    def __init__(self, board: PageBoard | None, state: Callable[[], Mapping[str, Any]]) -> None:
        self._board, self._state = board, state
        self._pending: deque[Mapping[str, Any]] = deque(maxlen=_MOST_PENDING)
        """Samples since the last step."""

    def begin(self, run: str, recipe: Recipe, run_dir: Path, records: Iterable[Mapping[str, Any]]) -> None:
        """The run as it is when this trainer starts: its steps so far, and the first and the newest of its samples."""
        if self._board is not None:
            board = self._board
            _guarded(lambda: board.begin(about(run, recipe, run_dir), records, ends_of(run_dir / "samples.jsonl")))

    def sample(self, sample: Mapping[str, Any]) -> None:
        self._pending.append(sample)

    def step(self, record: Mapping[str, Any]) -> None:
        """One optimizer step, with the samples since the one before."""
        samples = list(self._pending)
        self._pending.clear()
        if self._board is not None:
            board = self._board
            _guarded(lambda: board.step(record, samples))

    def publish(self) -> None:
        """The state as it is now."""
        if self._board is not None:
            board = self._board
            _guarded(lambda: board.state(self._state()))

    async def run(self) -> None:
        """Publishes the state about once a second, until cancelled."""
        while self._board is not None:
            self.publish()
            await asyncio.sleep(STATE_EVERY_S)


def _guarded(tell: Callable[[], None]) -> None:
    """The boundary between a run and its page."""
    try:
        tell()
    except Exception:
        log.exception("the live page could not be told; training goes on")


def about(run: str, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """What does not change while a trainer runs."""
    return {
        "run": run,
        "description": recipe.description or recipe.name,
        "mode": recipe.mode,
        "total_steps": recipe.trainer.steps,
        "max_lag": recipe.algorithm.max_lag,
        "recipe": recipe_yaml(recipe),
        "run_dir": str(run_dir),
    }


def ends_of(path: Path) -> Iterator[dict[str, Any]]:
    """The first and the last objects of a .jsonl file of any length; no file is no objects."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for _, line in zip(range(_FIRST_LINES), file, strict=False):
            yield from _object(line)
        begin = file.tell()
        file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        if file.tell() > begin:
            file.readline()  # begins in the middle of a line
        for line in file:
            yield from _object(line)


def _object(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError:  # the end of a trainer that was killed
        return
    if isinstance(value, dict) and isinstance(value.get("step"), int):
        yield value
