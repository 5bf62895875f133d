"""Scores items in worker processes, so that a reward that hangs, dies or takes all memory costs its own item only.

Each worker's loop consumes one item of the queue at a time and produces its result. It waits for an item, for the worker and
for the reward's deadline. Callers unblock the first, the worker the second, the clock the third.

Past its deadline a worker is killed, with what it started, and its item has timed out. When a worker dies, its item is tried
once more, since what died may have been shot from outside or hurt by an earlier item; a second death is its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pipelinerl.errors import PipelineRLError, ServiceError, UserError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import retry_forever
from pipelinerl.v1 import verifier_pb2
from services.verifier.metrics import VerifierMetrics
from services.verifier.worker_process import Loss, WorkerGone, WorkerProcess, start_worker

log = logging.getLogger(__name__)

MOST_DEATHS = 2


class QueueFull(PipelineRLError):
    """There is no room for a call's items now."""


@dataclass(eq=False)
class Job:
    """One item on its way. Its future gets the result, and is cancelled when the caller leaves."""

    item: verifier_pb2.VerifyItem
    on_result: Callable[[verifier_pb2.VerifyResult], None]
    future: asyncio.Future[verifier_pb2.VerifyResult]
    deaths: int = 0
    """Workers that died on it."""

    def resolve(self, result: verifier_pb2.VerifyResult) -> None:
        if not self.future.done():
            self.future.set_result(result)
            self.on_result(result)

    def fail(self, status: verifier_pb2.VerifyStatus, message: str, seconds: float = 0.0) -> None:
        item = self.item.sequence_id
        self.resolve(verifier_pb2.VerifyResult(sequence_id=item, status=status, message=message, seconds=seconds))


@asynccontextmanager
async def run_pool(
    recipe: Recipe, metrics: VerifierMetrics, readiness: Readiness, *, workers: int, max_queue: int
) -> AsyncIterator[RewardPool]:
    """Starts the workers, and ends them with all they started. `readiness` follows whether one is up.

    Raises `UserError` when the recipe's reward does not exist, `ServiceError` when a worker does not come up at first.
    """
    pool = RewardPool(recipe, metrics, readiness, max_queue)
    starts = await asyncio.gather(*(start_worker(recipe) for _ in range(workers)), return_exceptions=True)
    first = [worker for worker in starts if isinstance(worker, WorkerProcess)]
    for failure in starts:
        if isinstance(failure, BaseException):  # all of them or none
            await asyncio.gather(*(worker.kill() for worker in first))
            raise failure
    async with asyncio.TaskGroup() as slots:
        tasks = [slots.create_task(pool.run_slot(worker), name="reward-worker") for worker in first]
        try:
            yield pool
        finally:
            for task in tasks:
                task.cancel()


class RewardPool:
    """Made by `run_pool`. Items wait for a worker first in, first out; what is tried again comes first."""

    def __init__(self, recipe: Recipe, metrics: VerifierMetrics, readiness: Readiness, max_queue: int) -> None:
        self._recipe, self._metrics, self._readiness = recipe, metrics, readiness
        self._timeout_s = recipe.reward.timeout_s
        self.max_queue = max_queue
        self._jobs: deque[Job] = deque()
        self._filled = asyncio.Event()
        self._up = 0
        metrics.queue_items.set_function(lambda: len(self._jobs))
        metrics.queue_capacity.set(max_queue)

    async def score(
        self, items: Iterable[verifier_pb2.VerifyItem], on_result: Callable[[verifier_pb2.VerifyResult], None]
    ) -> list[verifier_pb2.VerifyResult]:
        """One result for each item, in order; `on_result` gets each as it comes. Raises `QueueFull`, with none of them queued.

        Cancelling it takes its items out of the queue.
        """
        loop = asyncio.get_running_loop()
        jobs = [Job(item, on_result, loop.create_future()) for item in items]
        if len(self._jobs) + len(jobs) > self.max_queue:
            raise QueueFull(
                f"{len(jobs)} items do not fit: {len(self._jobs)} of max_queue = {self.max_queue} are waiting"
            )
        self._jobs.extend(jobs)
        self._filled.set()
        try:
            return await asyncio.gather(*(job.future for job in jobs))
        except asyncio.CancelledError:
            self._jobs = deque(job for job in self._jobs if not job.future.done())
            raise

    async def run_slot(self, worker: WorkerProcess) -> None:
        """One worker after the other, until cancelled."""
        while True:
            self._count_up(+1)
            try:
                loss = await self._serve(worker)
            finally:
                self._count_up(-1)
                await worker.kill()
            self._metrics.worker_restarts.labels(loss).inc()
            worker = await retry_forever(
                lambda: start_worker(self._recipe),
                "start a reward worker",
                retried=lambda error: isinstance(error, UserError | ServiceError | OSError),
                level=logging.ERROR,
            )

    def _count_up(self, change: int) -> None:
        self._up += change
        self._metrics.workers.set(self._up)
        self._readiness.reason = "" if self._up else "no reward worker is up"

    async def _serve(self, worker: WorkerProcess) -> Loss:
        """Item after item until the worker is lost; what ended it."""
        while True:
            if not await self._wait_for_job(worker):
                gone = await worker.gone()
                log.warning("reward worker %d ended while idle: %s", worker.pid, gone)
                return gone.loss
            job = self._jobs.popleft()
            if job.future.done():  # its caller has just left
                continue
            try:
                result = await worker.score(job.item, self._timeout_s)
            except TimeoutError:
                self._metrics.timeouts.inc()
                log.warning("reward of %s killed at its deadline of %g s", job.item.sequence_id, self._timeout_s)
                problem = f"the reward took more than reward.timeout_s = {self._timeout_s:g} s and was killed"
                job.fail(verifier_pb2.VERIFY_STATUS_TIMEOUT, problem, self._timeout_s)
                return "timeout"
            except WorkerGone as gone:
                self._try_again(job, gone)
                return gone.loss
            job.resolve(result)

    async def _wait_for_job(self, worker: WorkerProcess) -> bool:
        """Whether there is one; False when the worker ended before."""
        while not self._jobs and not worker.ended.done():
            self._filled.clear()
            filled = asyncio.create_task(self._filled.wait())
            try:
                await asyncio.wait((filled, worker.ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                filled.cancel()
        return not worker.ended.done()

    def _try_again(self, job: Job, gone: WorkerGone) -> None:
        """A worker that retires does so between two items: this one had not begun."""
        if gone.loss != "retirement":
            job.deaths += 1
            log.warning("reward worker died on %s (time %d): %s", job.item.sequence_id, job.deaths, gone)
        if job.deaths >= MOST_DEATHS:
            job.fail(verifier_pb2.VERIFY_STATUS_CRASHED, f"the reward's process died: {gone}"[:500])
        elif not job.future.done():
            self._jobs.appendleft(job)
            self._filled.set()
