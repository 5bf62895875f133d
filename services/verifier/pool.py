"""Scores items in worker processes, so that a reward that hangs, dies or takes all memory costs its own item only.

Each worker's loop consumes chunks of the queue and produces results; it waits for items, for the worker's next result and for
the reward's deadline. Callers unblock the first, workers the second, the clock the third.

Several items go to a worker in one message; results come one by one, so the item that runs is always known. Past its deadline a
worker is killed, with what it started, and that item has timed out. When a worker dies, the item under way is tried once more
alone, since what died may have been shot from outside or hurt by an earlier item; a second death is its own. The other items of
the chunk go back to the queue, and do so already when one item keeps them waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipelinerl.errors import PipelineRLError, ServiceError, UserError
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import retry_forever
from pipelinerl.v1 import verifier_pb2
from services.verifier.metrics import VerifierMetrics
from services.verifier.worker_process import Loss, WorkerGone, WorkerProcess, WorkerSetup, start_worker

log = logging.getLogger(__name__)

MOST_DEATHS = 2
CHUNK_S = 0.02
"""Work that one message to a worker should hold, seconds."""
MOST_CHUNK = 64
SHARE_AFTER_S = 0.1
"""How long one item may keep the rest of its chunk from the other workers, seconds."""


class QueueFull(PipelineRLError):
    """Attributes: `num_items` that do not fit beside `waiting` ones in `capacity`."""

    def __init__(self, num_items: int, waiting: int, capacity: int) -> None:
        self.num_items, self.waiting, self.capacity = num_items, waiting, capacity
        super().__init__(f"{num_items} items do not fit: {waiting} of max_queue = {capacity} are waiting")


@dataclass(eq=False)
class Job:
    """One item on its way. Its future gets one result, the first; the future is cancelled when the caller leaves."""

    item: verifier_pb2.VerifyItem
    on_result: Callable[[verifier_pb2.VerifyResult], None] = lambda result: None
    future: asyncio.Future[verifier_pb2.VerifyResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    deaths: int = 0
    """Workers that died on it."""
    is_queued: bool = False

    def resolve(self, result: verifier_pb2.VerifyResult) -> None:
        """Only the first result counts."""
        if not self.future.done():
            self.future.set_result(result)
            self.on_result(result)

    def fail(self, status: verifier_pb2.VerifyStatus, message: str, seconds: float = 0.0) -> None:
        item = self.item.sequence_id
        self.resolve(verifier_pb2.VerifyResult(sequence_id=item, status=status, message=message, seconds=seconds))

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for it, and it is not in the queue."""
        return not (self.future.done() or self.is_queued)


class JobQueue:
    """Items waiting for a worker, first in, first out; what is put back comes first. Bounded; an item whose caller has left is
    passed over."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: deque[Job] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, jobs: Sequence[Job]) -> None:
        """All or none of them. Raises `QueueFull`."""
        if len(self._jobs) + len(jobs) > self.capacity:
            self._jobs = deque(job for job in self._jobs if not job.future.done())
        if len(self._jobs) + len(jobs) > self.capacity:
            raise QueueFull(len(jobs), len(self._jobs), self.capacity)
        self._enter(jobs)
        self._jobs.extend(jobs)

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that were taken before, those still wanted; they always fit."""
        wanted = [job for job in jobs if job.is_wanted]
        self._enter(wanted)
        self._jobs.extendleft(reversed(wanted))

    async def take(self, share_of: int, most: int) -> list[Job]:
        """Waits for jobs; takes one `share_of`-th of what waits, at most `most`, at least one.

        A job that a worker died on comes alone, so that the next death has one possible cause.
        """
        while True:
            while not self._jobs:
                self._filled.clear()
                await self._filled.wait()
            wanted = min(most, -(-len(self._jobs) // share_of))
            if chunk := list(self._pop(wanted)):
                return chunk

    def _pop(self, wanted: int) -> Iterable[Job]:
        taken = 0
        while self._jobs and taken < wanted:
            if self._jobs[0].deaths and taken:
                return
            job = self._jobs.popleft()
            job.is_queued = False
            if job.future.done():
                continue
            taken += 1
            yield job
            if job.deaths:
                return

    def _enter(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_queued = True
        self._filled.set()


@asynccontextmanager
async def run_pool(
    setup: WorkerSetup,
    metrics: VerifierMetrics,
    readiness: Readiness,
    *,
    workers: int,
    max_queue: int,
) -> AsyncIterator[RewardPool]:
    """Starts the workers, and ends them with all they started. `readiness` follows whether one is up.

    Raises `UserError` when the recipe's reward does not exist, `ServiceError` when a worker does not come up at first.
    """
    pool = RewardPool(setup, metrics, readiness, workers, max_queue)
    starts = await asyncio.gather(*(start_worker(setup) for _ in range(workers)), return_exceptions=True)
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
    """Made by `run_pool`."""

    def __init__(
        self, setup: WorkerSetup, metrics: VerifierMetrics, readiness: Readiness, num_workers: int, max_queue: int
    ) -> None:
        self._setup, self._metrics, self._readiness, self._num_workers = setup, metrics, readiness, num_workers
        self._timeout_s = setup.reward.timeout_s
        self.max_queue = max_queue
        self._queue = JobQueue(max_queue)
        self._up = 0
        self._item_s: float | None = None
        metrics.queue_items.set_function(lambda: len(self._queue))
        metrics.queue_capacity.set(max_queue)

    async def score(
        self, items: Sequence[verifier_pb2.VerifyItem], on_result: Callable[[verifier_pb2.VerifyResult], None]
    ) -> list[verifier_pb2.VerifyResult]:
        """One result for each item, in order; `on_result` gets each as it comes. Raises `QueueFull`.

        Cancelling it takes its items out of the queue.
        """
        jobs = [Job(item, on_result) for item in items]
        self._queue.put(jobs)
        return list(await asyncio.gather(*(job.future for job in jobs)))

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
                lambda: start_worker(self._setup),
                "start a reward worker",
                retried=lambda error: isinstance(error, UserError | ServiceError | OSError),
                level=logging.ERROR,
            )

    def _count_up(self, change: int) -> None:
        self._up += change
        self._metrics.workers.set(self._up)
        self._readiness.reason = "" if self._up else "no reward worker is up"

    async def _serve(self, worker: WorkerProcess) -> Loss:
        """Chunk after chunk until the worker is lost; what ended it."""
        while True:
            chunk = await self._next_chunk(worker)
            if chunk is None:
                gone = await worker.gone()
                log.warning("reward worker %d ended while idle: %s", worker.pid, gone)
                return gone.loss
            loss = await self._score_chunk(worker, chunk)
            if loss is not None:
                return loss

    async def _next_chunk(self, worker: WorkerProcess) -> list[Job] | None:
        """None when the worker ended while there was nothing to do."""
        most = MOST_CHUNK if self._item_s is None else int(CHUNK_S / max(self._item_s, CHUNK_S / MOST_CHUNK))
        take = asyncio.create_task(self._queue.take(self._num_workers, max(most, 1)))
        try:
            await asyncio.wait((take, worker.ended), return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else None
        finally:
            take.cancel()

    async def _score_chunk(self, worker: WorkerProcess, chunk: Sequence[Job]) -> Loss | None:
        """Resolves the chunk's jobs, or puts them back; None when the worker can go on."""
        worker.send(job.item for job in chunk)
        for position, job in enumerate(chunk):
            rest = () if worker.is_stopping else chunk[position + 1 :]
            try:
                result = await self._next_result(worker, job, rest)
            except TimeoutError:
                self._metrics.timeouts.inc()
                log.warning("reward of %s killed at its deadline of %g s", job.item.sequence_id, self._timeout_s)
                problem = f"the reward took more than reward.timeout_s = {self._timeout_s:g} s and was killed"
                job.fail(verifier_pb2.VERIFY_STATUS_TIMEOUT, problem, self._timeout_s)
                self._queue.put_back(() if worker.is_stopping else rest)
                return "timeout"
            except WorkerGone as gone:
                self._died(job, gone)
                self._queue.put_back((job, *(() if worker.is_stopping else rest)))
                return gone.loss
            if result is None:
                return None
            job.resolve(result)
        return await self._wait_for_stop(worker) if worker.is_stopping else None

    async def _next_result(
        self, worker: WorkerProcess, job: Job, rest: Sequence[Job]
    ) -> verifier_pb2.VerifyResult | None:
        """Raises `TimeoutError` at the job's deadline. Gives `rest` to other workers when it would wait long.

        None: the worker has stopped before `job`, which was given to others earlier.
        """
        if rest and self._timeout_s > SHARE_AFTER_S:
            try:
                result = await worker.result(SHARE_AFTER_S)
            except TimeoutError:
                worker.stop_after_item()
                self._queue.put_back(rest)
                result = await worker.result(self._timeout_s - SHARE_AFTER_S)
        else:
            result = await worker.result(self._timeout_s)
        if result is not None:
            if result.sequence_id != job.item.sequence_id:
                raise WorkerGone(f"it answered about {result.sequence_id!r:.100} out of turn")
            self._item_s = result.seconds if self._item_s is None else 0.9 * self._item_s + 0.1 * result.seconds
        return result

    async def _wait_for_stop(self, worker: WorkerProcess) -> Loss | None:
        """It was asked to stop and scored everything nevertheless: its answer is still to come."""
        try:
            await worker.result(self._timeout_s)
        except TimeoutError:
            return "death"
        except WorkerGone as gone:
            return gone.loss
        return None

    def _died(self, job: Job, gone: WorkerGone) -> None:
        if gone.loss == "retirement":
            return
        job.deaths += 1
        log.warning("reward worker died on %s (time %d): %s", job.item.sequence_id, job.deaths, gone)
        if job.deaths >= MOST_DEATHS:
            job.fail(verifier_pb2.VERIFY_STATUS_CRASHED, f"the reward's process died: {gone}"[:500])
