"""When a checkpoint is written, and that it is of one version: tensors and books of the same moment between two steps.

A step, from its computation to its entry into the books, and the copying for a checkpoint take turns. Writing goes on beside
the next steps; one that falls due meanwhile is written after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

from pipelinerl.errors import ServiceError
from pipelinerl.recipe.fields import CheckpointConfig
from services.trainer.checkpoint.run_state import RunState
from services.trainer.checkpoint.writer import CheckpointWriter, PendingCheckpoint, WrittenCheckpoint

log = logging.getLogger(__name__)


class Due:
    """Whether a checkpoint is due after a step; pure but for the clock that it is given. `version`: the last one written."""

    def __init__(self, config: CheckpointConfig, version: int, clock_s: Callable[[], float]) -> None:
        self._config, self._clock_s = config, clock_s
        self._last_version, self._last_s = version, clock_s()

    def now(self, version: int) -> bool:
        steps, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = steps > 0 and version // steps > self._last_version // steps
        by_time = minutes > 0 and self._clock_s() - self._last_s >= 60 * minutes
        return version > self._last_version and (by_steps or by_time)

    def began(self, version: int) -> None:
        self._last_version, self._last_s = version, self._clock_s()


class Checkpointer:
    """`begin` copies the tensors, on the compute thread; `capture` the rest, on the event loop."""

    def __init__(
        self,
        due: Due,
        writer: CheckpointWriter,
        begin: Callable[[], Awaitable[PendingCheckpoint]],
        capture: Callable[[], RunState],
        on_written: Callable[[WrittenCheckpoint], None],
    ) -> None:
        self._due, self._writer, self._begin, self._capture = due, writer, begin, capture
        self._on_written = on_written
        self._newest: tuple[int, asyncio.Task[WrittenCheckpoint]] | None = None
        self._boundary = asyncio.Lock()
        self._over = False

    async def if_due(self, version: int) -> None:
        """Begins one and returns once training may go on. What goes wrong with writing is logged, and training goes on."""
        if not self._writer.busy and self._due.now(version):
            async with self._boundary:
                await self._start()

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Around a step that is computed and entered into the books. After the last checkpoint nothing gets in any more."""
        async with self._boundary:
            if self._over:
                await asyncio.Event().wait()  # for the end of the process
            yield

    async def write(self, *, anew: bool = False) -> WrittenCheckpoint:
        """One of now, or of after the step under way; returns when it is on disk. Raises `ServiceError` when it cannot be.

        `anew`: also of a version that is written already, with what has arrived since.
        """
        return await self._write(last=False, anew=anew)

    async def write_last(self) -> WrittenCheckpoint:
        """The same, after which no step begins any more."""
        return await self._write(last=True)

    async def _write(self, *, last: bool, anew: bool = False) -> WrittenCheckpoint:
        while True:
            async with self._boundary:
                self._over = self._over or last
                if last:
                    await self._idle()
                if not self._writer.busy:
                    task = await self._start(anew=anew)
                    break
            await self._idle()  # beside training
        return await asyncio.shield(task)

    async def _idle(self) -> None:
        """Returns when none is being written: the next one is copied to where that one is."""
        while self._newest is not None and not self._newest[1].done():
            await asyncio.wait({self._newest[1]})

    async def _start(self, *, anew: bool = False) -> asyncio.Task[WrittenCheckpoint]:
        """Of the version as it is; that which is written already, or being written, is not written again unless `anew`."""
        state = self._capture()
        version = state.policy_version
        if not anew and self._newest is not None and self._newest[0] == version and not failed(self._newest[1]):
            return self._newest[1]
        self._due.began(version)
        pending = await self._begin()
        task = asyncio.create_task(self._finish(self._writer.write(pending, state), version))
        self._newest = version, task
        task.add_done_callback(self._ended)
        return task

    async def _finish(self, job: Future[WrittenCheckpoint], version: int) -> WrittenCheckpoint:
        try:
            written = await asyncio.wrap_future(job)
        except Exception as error:  # of the disk, torch, or another rank: whatever it is, the run goes on
            raise ServiceError(f"the checkpoint of version {version} is not written: {error or repr(error)}") from error
        log.info("checkpoint of version %d is in %s, after %.2f s", version, written.folder, written.seconds)
        self._on_written(written)
        return written

    def _ended(self, task: asyncio.Task[WrittenCheckpoint]) -> None:
        if failed(task) and not task.cancelled():
            log.error("%s; the one before is still there", task.exception())


def failed(task: asyncio.Task[WrittenCheckpoint]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
