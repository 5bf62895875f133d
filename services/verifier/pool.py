"""Score items in worker processes, so that a reward that hangs, dies or exhausts memory fails only its own item.

If a reward misses its deadline, its worker is killed with all processes it started, and the item times out. If a worker dies,
its item is tried once more, because an outside signal or an earlier item may be the cause. After a second death, the item
fails.

Workers communicate through pipes, with frames of `multiprocessing.connection`: a length, then bytes, which are never unpickled.
The worker first gets the recipe as JSON. It answers with an empty frame, or with an error message for the user. Then it gets
`VerifyItem`s and answers each with a `VerifyResult`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from google.protobuf.message import DecodeError

from pipelinerl.errors import PipelineRLError, ServiceError, UserError, how_ended
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.grpc import MAX_MESSAGE_BYTES
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import retry_forever
from pipelinerl.v1 import verifier_pb2
from services.verifier.confinement import kill_group, kill_tree
from services.verifier.judge import Judge
from services.verifier.metrics import VerifierMetrics
from services.verifier.rewards.compose import failed
from services.verifier.worker import RETIRED

log = logging.getLogger(__name__)

NO_WORKER = "no reward worker is up"
MOST_DEATHS = 2
DIED = "the process of reward"
"""Beginning of the message that an item gets if `MOST_DEATHS` workers died while scoring it."""
START_TIMEOUT_S = 120.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PIPELINERL_PRIVATE_DIR")
_LOGGED_BYTES = 4096
_PRINTED_BYTES, _PRINTED_BYTES_PER_S = 64 * 1024, 4096
"""Limits of one worker's logged output: size of a burst, and rate."""
FRAME_LENGTH = struct.Struct("!I")
"""Length before each frame. It is unsigned, because a reward that writes to the pipe could otherwise send a negative one."""
LONGEST_RESULT_BYTES = MAX_MESSAGE_BYTES // 4096
"""Limit of a worker's result, so that the results of the largest `actor.verify_batch` fit into one answer."""

Loss = Literal["timeout", "death", "retirement"]
"""Why a worker ended. `retirement`: it ended itself between two items, to be replaced."""


class QueueFull(PipelineRLError):
    """The queue has no room for a call's items, or too many episodes are running."""


@dataclass(eq=False)
class Job:
    """One item to score. Its future gets the result, or is cancelled if the gRPC call is cancelled."""

    item: verifier_pb2.VerifyItem
    on_result: Callable[[verifier_pb2.VerifyResult], None]
    future: asyncio.Future[verifier_pb2.VerifyResult]
    deaths: int = 0

    def resolve(self, result: verifier_pb2.VerifyResult) -> None:
        if not self.future.done():
            self.future.set_result(result)
            self.on_result(result)

    def fail(self, status: verifier_pb2.VerifyStatus, message: str, seconds: float = 0.0) -> None:
        self.resolve(failed(status, message, self.item.sequence_id, seconds))


start_again = partial(
    retry_forever, retried=lambda error: isinstance(error, UserError | ServiceError | OSError), level=logging.ERROR
)
"""Function that starts a process in place of one that ended, and retries until the start succeeds."""


class RewardPool:
    """Queue of items and workers that score them. `judges` maps tasks to their judges, which answer before an item enters the
    queue. `readiness` is ready while at least one worker is up."""

    def __init__(
        self, recipe: Recipe, metrics: VerifierMetrics, readiness: Readiness, max_queue: int, judges: Mapping[str, Judge]
    ) -> None:
        self._recipe, self._metrics, self._readiness, self._judges = recipe, metrics, readiness, judges
        self._rewards = {name: share.reward for name, share in recipe.problem_sets.items()}
        self.max_queue = max_queue
        self._jobs: deque[Job] = deque()
        self._filled = asyncio.Event()
        self._up = 0
        metrics.queue_items.set_function(lambda: len(self._jobs))
        metrics.queue_capacity.set(max_queue)

    @asynccontextmanager
    async def running(self, workers: int) -> AsyncIterator[RewardPool]:
        """Start the workers, and kill them at the end. Raises `UserError` for a mistake in the recipe's rewards, and
        `ServiceError` if one of the first workers does not start."""
        starts = await asyncio.gather(*(start_worker(self._recipe) for _ in range(workers)), return_exceptions=True)
        first = [worker for worker in starts if isinstance(worker, WorkerProcess)]
        for failure in starts:
            if isinstance(failure, BaseException):  # all first workers must start
                await asyncio.gather(*(worker.kill() for worker in first))
                raise failure
        async with asyncio.TaskGroup() as slots:
            tasks = [slots.create_task(self.run_slot(worker), name="reward-worker") for worker in first]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()

    async def score(
        self,
        items: Iterable[verifier_pb2.VerifyItem],
        on_result: Callable[[verifier_pb2.VerifyResult], None] = lambda result: None,
    ) -> list[verifier_pb2.VerifyResult]:
        """Return one result per item, in order. `on_result` gets each result as soon as it is ready. Raises `QueueFull`
        and queues no item if there is no room for all. If the call is cancelled, its items leave the queue."""
        loop = asyncio.get_running_loop()
        jobs = [Job(item, on_result, loop.create_future()) for item in items]
        waiting = len(self._jobs) + sum(judge.num_waiting for judge in self._judges.values())
        if waiting + len(jobs) > self.max_queue:
            raise QueueFull(f"no room for {len(jobs)} more items: {waiting} are waiting, and max_queue = {self.max_queue}")
        self._jobs.extend(job for job in jobs if job.item.task not in self._judges)
        self._filled.set()
        try:
            asked = [(job, self._judges[job.item.task].answer(job.item)) for job in jobs if job.item.task in self._judges]
            judged = [self._judge(job, answer) for job, answer in asked]
            await asyncio.gather(*(job.future for job in jobs), *judged)
        except BaseException:
            for job in jobs:
                job.future.cancel()
            self._jobs = deque(job for job in self._jobs if not job.future.done())
            raise
        return [job.future.result() for job in jobs]

    async def _judge(self, job: Job, asked: Awaitable[verifier_pb2.VerifyResult]) -> None:
        """Wait for the judge's answer and queue the item with it; without an answer, fail the item."""
        answer = await asked
        if answer.status != verifier_pb2.VERIFY_STATUS_OK:
            job.fail(answer.status, answer.message)
            return
        job.item.judgement = answer.answer
        self._jobs.append(job)
        self._filled.set()

    async def run_slot(self, worker: WorkerProcess) -> None:
        """Run `worker` and, whenever it ends, a new worker in its place, until cancelled."""
        while True:
            self._count_up(+1)
            try:
                loss = await self._serve(worker)
            finally:
                self._count_up(-1)
                await worker.kill()
            self._metrics.worker_restarts.labels(loss).inc()
            worker = await start_again(lambda: start_worker(self._recipe), "start a reward worker")

    def _count_up(self, change: int) -> None:
        self._up += change
        self._metrics.workers.set(self._up)
        self._readiness.reason = "" if self._up else NO_WORKER

    async def _serve(self, worker: WorkerProcess) -> Loss:
        """Score items of the queue until the worker ends or a reward misses its deadline; return which of these happened."""
        worker.ended.add_done_callback(lambda _: self._filled.set())
        while True:
            while not self._jobs and not worker.ended.done():
                self._filled.clear()
                await self._filled.wait()
            if worker.ended.done():
                gone = await worker.gone()
                log.warning("reward worker %d ended while idle: %s", worker.pid, gone)
                return gone.loss
            job = self._jobs.popleft()
            if job.future.done():  # the caller has left
                continue
            timeout_s = self._rewards[job.item.task].timeout_s
            try:
                result = await worker.score(job.item, timeout_s)
            except TimeoutError:
                self._metrics.timeouts.inc()
                log.warning("killed the reward of %s at its deadline of %g s", job.item.sequence_id, timeout_s)
                problem = f"the reward took more than {timeout_s:g} s (reward.timeout_s) and was killed"
                job.fail(verifier_pb2.VERIFY_STATUS_TIMEOUT, problem, timeout_s)
                return "timeout"
            except WorkerGone as gone:
                self._try_again(job, gone)
                return gone.loss
            job.resolve(result)

    def _try_again(self, job: Job, gone: WorkerGone) -> None:
        """Put the item back at the front of the queue; after `MOST_DEATHS` deaths of workers, fail it."""
        if gone.loss != "retirement":
            job.deaths += 1
            log.warning("reward worker died while scoring %s (death %d): %s", job.item.sequence_id, job.deaths, gone)
        if job.deaths >= MOST_DEATHS:
            scorer = self._rewards[job.item.task].scorer
            job.fail(verifier_pb2.VERIFY_STATUS_CRASHED, f"{DIED} {scorer} died: {gone}")
        elif not job.future.done():
            self._jobs.appendleft(job)
            self._filled.set()


class WorkerGone(Exception):
    """The worker ended or broke the protocol."""

    def __init__(self, how: str, loss: Loss = "death") -> None:
        self.loss = loss
        super().__init__(how)


async def read_frame(reader: asyncio.StreamReader, within_s: float, most_bytes: int) -> bytes:
    """Return the next frame. Raises `TimeoutError`, `WorkerGone` for a frame above `most_bytes`, and `IncompleteReadError` or
    `ConnectionError` if the stream ends early. A frame that arrived in time is accepted even if this process reads it late."""

    async def read() -> bytes:
        (length,) = FRAME_LENGTH.unpack(await reader.readexactly(FRAME_LENGTH.size))
        if length > most_bytes:
            raise WorkerGone(f"it wrote a result of {length:,} bytes, and at most {most_bytes:,} are allowed")
        return await reader.readexactly(length)

    frame = asyncio.create_task(read())
    try:
        done, _ = await asyncio.wait((frame,), timeout=within_s)
        if not done:
            raise TimeoutError
        return frame.result()
    finally:
        frame.cancel()


class WorkerProcess:
    """A worker process. Create it with `start_worker`, and end it with `kill`."""

    def __init__(self, process: Process) -> None:
        self._process, self.pid = process, process.pid
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._last_output = ""
        self._output = asyncio.create_task(self._log_output())
        self.ended = asyncio.create_task(process.wait())

    def write(self, payload: bytes) -> None:
        self._stdin.write(FRAME_LENGTH.pack(len(payload)) + payload)

    async def score(self, item: verifier_pb2.VerifyItem, within_s: float) -> verifier_pb2.VerifyResult:
        """Score an item. Raises `WorkerGone` or `TimeoutError`; the worker is then unusable."""
        self.write(item.SerializeToString())
        payload = await self.read(within_s)
        try:
            result = verifier_pb2.VerifyResult.FromString(payload)
        except DecodeError as error:
            raise WorkerGone("it wrote something other than results to its pipe") from error
        if result.sequence_id != item.sequence_id:
            raise WorkerGone(f"it answered with another item's id, {result.sequence_id!r:.100}")
        return result

    async def read(self, within_s: float) -> bytes:
        """Return the next frame. Raises `TimeoutError`, or `WorkerGone` if the worker ended or wrote too long a frame."""
        try:
            return await read_frame(self._stdout, within_s, LONGEST_RESULT_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self.gone() from None

    async def gone(self) -> WorkerGone:
        """Return how the worker ended, after waiting up to a second for its end."""
        await asyncio.wait((self.ended,), timeout=1.0)
        code = self._process.returncode
        if code is None:
            return WorkerGone("it closed its pipe")
        said = f"; last output: {self._last_output[-200:]}" if self._last_output else ""
        return WorkerGone(how_ended(code) + said, "retirement" if code == RETIRED else "death")

    async def kill(self) -> None:
        """Kill the process and all processes it started, and wait until it is reaped."""
        if self._process.returncode is None:
            kill_tree(self.pid)
        else:
            kill_group(self.pid)
        await self.ended
        self._output.cancel()
        self._stdin.close()

    async def _log_output(self) -> None:
        """Log the worker's output until its standard error is closed, within `_PRINTED_BYTES` and `_PRINTED_BYTES_PER_S`."""
        assert self._process.stderr is not None
        room, is_left_out, at_s = float(_PRINTED_BYTES), False, time.monotonic()
        while chunk := await self._process.stderr.read(_LOGGED_BYTES):
            before_s, at_s = at_s, time.monotonic()
            room = min(_PRINTED_BYTES, room + (at_s - before_s) * _PRINTED_BYTES_PER_S)
            self._last_output = chunk.decode(errors="replace").strip()
            if len(chunk) > room:
                if not is_left_out:
                    log.warning("a worker prints too much; some output is left out of this log", extra={"worker": self.pid})
                is_left_out = True
                continue
            room, is_left_out = room - len(chunk), False
            log.info("output: %s", self._last_output, extra={"worker": self.pid})


async def start_worker(
    recipe: Recipe, module: str = "services.verifier.worker", *arguments: str, pass_fds: tuple[int, ...] = ()
) -> WorkerProcess:
    """Start `module` in an environment without secrets, and wait until it has imported the user's code. Raises `UserError` if
    it reports a mistake, such as missing code, and `ServiceError` if it does not start."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    worker = WorkerProcess(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    )
    try:
        worker.write(recipe.model_dump_json().encode())
        if mistake := await worker.read(START_TIMEOUT_S):
            raise UserError(mistake.decode())
    except BaseException as error:
        await worker.kill()
        if isinstance(error, TimeoutError):
            raise ServiceError(f"{module} did not come up within {START_TIMEOUT_S:.0f} s") from error
        if isinstance(error, WorkerGone):
            code = f", importing {' and '.join(names)}" if (names := recipe.user_code) else ""
            raise ServiceError(f"{module} ended while starting{code}: {error}") from error
        raise
    return worker
