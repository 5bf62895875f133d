"""When a checkpoint is written, that it is of one version, and that a folder which is there is whole.

Tensors and the rest are of the same moment between two steps: a step, from its computation to its entry into the tracker, and
the copying for a checkpoint take turns. Writing goes on beside the next steps, one checkpoint at a time, on a thread of its
own; one that falls due meanwhile is written after it. Everything goes into a hidden folder beside the final one, onto the disk,
and is renamed then: a crash at any point leaves the checkpoint before. Not here: what is in one.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.errors import ServiceError
from pipelinerl.run_dir import CHECKPOINTS, resumable
from services.trainer.checkpoint.files import link_tree, replacing, sync_folder, sync_tree
from services.trainer.checkpoint.run_state import RESUME, RunState

if TYPE_CHECKING:
    from services.trainer.resume import Resume

log = logging.getLogger(__name__)

RUN_ENDED = "the run has ended: no more checkpoints are written"
WriteTensors = Callable[[Path], None]
"""Writes the tensors of one version, which are in host memory, into a checkpoint's folder. Blocks."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    """On disk."""

    folder: Path
    version: int
    position: int
    """Of SEQUENCES: what is up to there will not be read again."""
    seconds: float


def write_checkpoint(
    run_dir: Path, keep: int, write_tensors: WriteTensors, state: RunState, before_rename: Callable[[], None] = lambda: None
) -> WrittenCheckpoint:
    """Blocks until it is on disk, and removes all but the newest `keep`. `write_tensors` and `state` are of the same version.

    `before_rename` runs when all but the name is on disk; what it raises is a failed checkpoint.
    """
    began_s = time.monotonic()
    folder = run_dir / CHECKPOINTS / f"step-{state.policy_version}"
    with replacing(folder) as partial:
        (partial / RESUME).mkdir(parents=True)
        write_tensors(partial)
        state.save(partial / RESUME)
        sync_tree(partial)
        before_rename()
    sync_folder(folder.parent)
    for old in list(resumable(run_dir).values())[:-keep]:
        shutil.rmtree(old.parent.parent, ignore_errors=True)
    return WrittenCheckpoint(folder, state.policy_version, state.position, time.monotonic() - began_s)


class Checkpointer:
    """`begin(version)` copies the tensors, on the compute thread; `capture` the rest, on the event loop."""

    def __init__(
        self, resume: Resume, begin: Callable[[int], Awaitable[WriteTensors]], capture: Callable[[], RunState]
    ) -> None:
        self._resume, self._config, self._begin, self._capture = resume, resume.recipe.checkpoint, begin, capture
        self._began_version, self._began_s = resume.start.version, time.monotonic()
        """Of the newest one, whether or not it is written by now."""
        self._newest: tuple[int, asyncio.Task[WrittenCheckpoint]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._boundary = asyncio.Lock()
        self._over = False
        self._interrupted = False
        """A step was cancelled, or failed: the run ends, and the weights may be ahead of the tracker."""

    @property
    def _busy(self) -> bool:
        return self._newest is not None and not self._newest[1].done()

    def close(self) -> None:
        """One under way is left to itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def if_due(self, version: int) -> None:
        """Begins one and returns once training may go on. What goes wrong with writing is logged, and training goes on."""
        steps, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = steps > 0 and version // steps > self._began_version // steps
        by_time = minutes > 0 and time.monotonic() - self._began_s >= 60 * minutes
        if not self._busy and version > self._began_version and (by_steps or by_time):
            async with self._boundary:
                await self._start()

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Around a step that is computed and entered into the tracker. After the last checkpoint nothing gets in any more."""
        async with self._boundary:
            if self._over:
                await asyncio.Event().wait()  # for the end of the process
            try:
                yield
            except BaseException:
                self._interrupted = True
                raise

    async def write(self, *, anew: bool = False, last: bool = False) -> WrittenCheckpoint:
        """One of now, or of after the step under way; returns when it is on disk. Raises `ServiceError` when it cannot be.

        `anew`: also of a version that is written already, with what has arrived since. `last`: no step begins after it.
        """
        while True:
            async with self._boundary:
                if self._interrupted:
                    raise ServiceError(RUN_ENDED)
                self._over = self._over or last
                if last:
                    await self._idle()
                if not self._busy:
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
        if not anew and self._newest is not None and self._newest[0] == version:
            newest = self._newest[1]
            if not newest.done() or (not newest.cancelled() and newest.exception() is None):
                return newest
        self._began_version, self._began_s = version, time.monotonic()
        write_tensors = await self._begin(version)
        job = self._thread.submit(
            write_checkpoint, self._resume.run_dir, self._config.keep, write_tensors, state, self._resume.journal.sync
        )
        task = asyncio.create_task(self._finish(job, version))
        self._newest = version, task
        task.add_done_callback(self._ended)
        return task

    async def _finish(self, job: Future[WrittenCheckpoint], version: int) -> WrittenCheckpoint:
        try:
            written = await asyncio.wrap_future(job)
        except Exception as error:  # of the disk, torch, or another rank: whatever it is, the run goes on
            raise ServiceError(f"the checkpoint of version {version} is not written: {error or repr(error)}") from error
        log.info("checkpoint of version %d is in %s, after %.2f s", version, written.folder, written.seconds)
        self._resume.checkpoint_written(written)
        await self._resume.uploads.take(written.folder, version)
        return written

    def _ended(self, task: asyncio.Task[WrittenCheckpoint]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s; the one before is still there", task.exception())


def link_export(step_folder: Path, folder: Path) -> Path:
    """Makes `folder` the policy's export that is in a checkpoint: the same files, where the file system can, else copies."""
    with replacing(folder) as partial:
        link_tree(step_folder, partial, RESUME)
    return folder
