"""A tracker's process, as the trainer sees it: `send` returns at once, whatever the tracker does.

Consumes messages from the trainer's event loop, keeps a bounded number of them, writes them to the process as fast as it
takes them, and counts the answers. Waits for the process alone; nobody waits for it but `close`, for as long as it is told.
A process that ends is not started again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pipelinerl.local.die_with_parent import guarded
from services.trainer.records import to_json

log = logging.getLogger(__name__)

BACKLOG = 1000
"""Messages that wait at most; a step's has 3 KB."""
KILLED_S = 1.0
"""How long a process may take to be gone after SIGKILL."""
POINTS = frozenset({"step", "heldout"})


class TrackerProcess:
    """`lost`: points that the tracker has not taken, those under way included. Used on one event loop."""

    def __init__(self, name: str, command: Sequence[str], *, backlog: int = BACKLOG) -> None:
        self.name, self._command, self._backlog = name, command, backlog
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._unanswered: deque[str] = deque()
        self._changed = asyncio.Event()
        self._process: Process | None = None
        self._gone = self._over = self._warned = False
        self._points = self._taken = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def lost(self) -> int:
        return self._points - self._taken

    def send(self, message: Mapping[str, Any]) -> None:
        """`kind` is `start`, `step`, `heldout` or `end`. Where too many wait, the oldest point makes room."""
        self._points += message["kind"] in POINTS
        if self._gone:
            return
        if len(self._waiting) >= self._backlog:
            oldest = next((one for one in self._waiting if one["kind"] in POINTS), None)
            if oldest is not None:
                self._waiting.remove(oldest)
                self._warn(f"does not keep up: {self._backlog} points wait for it, and older ones are dropped")
        self._waiting.append(message)
        self._changed.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"tracker {self.name}")

    async def close(self, within_s: float) -> None:
        """Until the process has ended, or is killed after `within_s`. Says what was lost."""
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=within_s)
        if not task.done():
            self._warn("was not done in time at the run's end, and is left behind")
            self._kill()
            await asyncio.wait([task], timeout=KILLED_S)
        task.cancel()
        for failure in await asyncio.gather(task, return_exceptions=True):
            if isinstance(failure, Exception):
                log.error("tracker %s: its messages could not be carried", self.name, exc_info=failure)
        if self.lost:
            log.warning("tracker %s: %d of %d points did not reach it", self.name, self.lost, self._points)

    async def _run(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *guarded(tuple(self._command), signal.SIGKILL),
                stdin=PIPE,
                stdout=PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            self._end(f"could not be started: {error}")
            return
        writing = asyncio.create_task(self._write(self._process))
        try:
            await self._read_answers(self._process)
            code = await self._process.wait()
            self._end("" if self._over else f"ended with exit code {code} before the run did")
        finally:
            writing.cancel()
            self._kill()

    async def _write(self, process: Process) -> None:
        """Ends with the process, or after `end`."""
        assert process.stdin is not None
        with suppress(ConnectionError):
            while True:
                while not self._waiting:
                    self._changed.clear()
                    await self._changed.wait()
                message = self._waiting.popleft()
                self._unanswered.append(message["kind"])
                process.stdin.write(to_json(message).encode() + b"\n")
                await process.stdin.drain()

    async def _read_answers(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            kind, error = self._unanswered.popleft(), json.loads(line)["error"]
            if error is not None:
                self._warn(f"failed: {error}")
            elif kind in POINTS:
                self._taken += 1
            self._over = kind == "end"

    def _end(self, why: str) -> None:
        self._gone = True
        self._waiting.clear()
        if why:
            self._warn(why)

    def _warn(self, what: str) -> None:
        """Once: training goes on, and the end tells how much was lost."""
        if not self._warned:
            log.warning("tracker %s %s; training goes on without waiting for it", self.name, what)
        self._warned = True

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
