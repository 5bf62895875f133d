"""Scores items in worker processes, so that a reward that hangs, dies or takes all memory costs its own item only.

Each worker's loop consumes one item of the queue at a time and produces its result. It waits for an item, for the worker and
for the reward's deadline. Callers unblock the first, the worker the second, the clock the third.

Past its deadline a worker is killed, with what it started, and its item has timed out. When a worker dies, its item is tried
once more, since what died may have been shot from outside or hurt by an earlier item; a second death is its own.

A worker is started, given items, heard from and ended through pipes. Frames are those of `multiprocessing.connection`: a
length, and bytes that nobody unpickles. The first to the worker is the recipe, as JSON; the first back is text: empty when
the worker is up, otherwise the user's mistake. Then every frame to the worker is a `VerifyItem` and every frame back its
`VerifyResult`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from pipelinerl.errors import PipelineRLError, ServiceError, UserError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.grpc import MAX_MESSAGE_BYTES
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import retry_forever
from pipelinerl.v1 import verifier_pb2
from services.verifier.confinement import kill_group, kill_tree
from services.verifier.metrics import VerifierMetrics
from services.verifier.worker import RETIRED

log = logging.getLogger(__name__)

NO_WORKER = "no reward worker is up"
MOST_DEATHS = 2
DIED = "the process of reward"
"""How the message of an item begins on which so many workers died."""
START_TIMEOUT_S = 120.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PIPELINERL_PRIVATE_DIR")
_LOGGED_BYTES = 4096
_PRINTED_BYTES, _PRINTED_BYTES_PER_S = 64 * 1024, 4096
"""Of what the code in one worker prints: at once, and for long."""
FRAME_LENGTH = struct.Struct("!I")
"""Before each frame. Unsigned, since what a reward writes there must not look like a negative one."""
LONGEST_RESULT_BYTES = MAX_MESSAGE_BYTES // 4096
"""So much of a worker is held here, whatever its code writes; results of the largest `actor.verify_batch` fit an answer."""

Loss = Literal["timeout", "death", "retirement"]
"""What ends a worker. It retires of its own accord and between two items, so that no item is to blame."""


class QueueFull(PipelineRLError):
    """There is no room for a call's items, or its episode, now."""


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
        self._rewards = {name: share.reward for name, share in recipe.problem_sets.items()}
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
            raise QueueFull(f"{len(jobs)} items do not fit: {len(self._jobs)} of max_queue = {self.max_queue} are waiting")
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
        self._readiness.reason = "" if self._up else NO_WORKER

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
            timeout_s = self._rewards[job.item.task].timeout_s
            try:
                result = await worker.score(job.item, timeout_s)
            except TimeoutError:
                self._metrics.timeouts.inc()
                log.warning("reward of %s killed at its deadline of %g s", job.item.sequence_id, timeout_s)
                problem = f"the reward took more than reward.timeout_s = {timeout_s:g} s and was killed"
                job.fail(verifier_pb2.VERIFY_STATUS_TIMEOUT, problem, timeout_s)
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
            scorer = self._rewards[job.item.task].scorer
            job.fail(verifier_pb2.VERIFY_STATUS_CRASHED, f"{DIED} {scorer} died: {gone}"[:500])
        elif not job.future.done():
            self._jobs.appendleft(job)
            self._filled.set()


def how_ended(code: int) -> str:
    """What an exit code says; below 0, a signal."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"


class WorkerGone(Exception):
    """The process ended."""

    def __init__(self, how: str, loss: Loss = "death") -> None:
        self.loss = loss
        super().__init__(how)


class WorkerProcess:
    """Made by `start_worker`; `kill` must follow."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._last_output = ""
        self._output = asyncio.create_task(self._log_output())
        self.ended = asyncio.create_task(process.wait())
        """Done when the process has ended, also while nobody waits for a result."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, payload: bytes) -> None:
        """Queues one frame."""
        self._stdin.write(FRAME_LENGTH.pack(len(payload)) + payload)

    async def score(self, item: verifier_pb2.VerifyItem, within_s: float) -> verifier_pb2.VerifyResult:
        """Raises `TimeoutError`, after which the worker is of no use any more, and `WorkerGone`."""
        self.write(item.SerializeToString())
        payload = await self.read(within_s)
        try:
            result = verifier_pb2.VerifyResult.FromString(payload)
        except DecodeError as error:
            raise WorkerGone("something else than results is in its pipe") from error
        if result.sequence_id != item.sequence_id:
            raise WorkerGone(f"it answered about {result.sequence_id!r:.100} out of turn")
        return result

    async def read(self, within_s: float) -> bytes:
        """The next frame. One that came while this loop was busy is in time. Raises `TimeoutError` and `WorkerGone`."""
        frame = asyncio.create_task(self._next_frame())
        try:
            done, _ = await asyncio.wait((frame,), timeout=within_s)
            if not done:
                raise TimeoutError
            return frame.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self.gone() from None
        finally:
            frame.cancel()

    async def _next_frame(self) -> bytes:
        (length,) = FRAME_LENGTH.unpack(await self._stdout.readexactly(FRAME_LENGTH.size))
        if length > LONGEST_RESULT_BYTES:
            raise WorkerGone(f"a result of {length:,} bytes is in its pipe, and {LONGEST_RESULT_BYTES:,} may be")
        return await self._stdout.readexactly(length)

    async def gone(self) -> WorkerGone:
        """How it ended. Its end of the pipe is closed, or it has exited."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self.ended)
        code = self._process.returncode
        if code is None:
            return WorkerGone("it closed its pipe")
        said = f"; last output: {self._last_output[-200:]}" if self._last_output else ""
        return WorkerGone(how_ended(code) + said, "retirement" if code == RETIRED else "death")

    async def kill(self) -> None:
        """Ends the process and everything it started, and waits until it is reaped."""
        if self._process.returncode is None:
            kill_tree(self.pid)
        else:
            kill_group(self.pid)
        await self.ended
        self._output.cancel()
        self._stdin.close()

    async def _log_output(self) -> None:
        """Passes on what users' code prints, as much as `_PRINTED_BYTES` and `_PRINTED_BYTES_PER_S` let through. Ends with the
        worker's standard error, or by cancellation."""
        assert self._process.stderr is not None
        room, left_out, at_s = float(_PRINTED_BYTES), 0, time.monotonic()
        while chunk := await self._process.stderr.read(_LOGGED_BYTES):
            before_s, at_s = at_s, time.monotonic()
            room = min(_PRINTED_BYTES, room + (at_s - before_s) * _PRINTED_BYTES_PER_S)
            self._last_output = chunk.decode(errors="replace").strip()
            if len(chunk) > room:
                if not left_out:
                    log.warning("it prints too much; more of it is left out of this log", extra={"worker": self.pid})
                left_out += len(chunk)
                continue
            if left_out:
                log.warning("output left out: %d bytes", left_out, extra={"worker": self.pid})
            room, left_out = room - len(chunk), 0
            log.info("output: %s", self._last_output, extra={"worker": self.pid})


async def start_worker(
    recipe: Recipe, module: str = "services.verifier.worker", *arguments: str, pass_fds: tuple[int, ...] = ()
) -> WorkerProcess:
    """A process that has imported its reward, or what else of the user's `module` needs, and is ready.

    It knows where Python finds modules, the locale, one thread per numeric library, and no secrets. Raises `UserError` when the
    recipe names something that does not exist, `ServiceError` when the process does not come up.
    """
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
