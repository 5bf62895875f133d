"""Run a bounded number of episodes, each in a forked process that is killed at its deadline with all processes it started.

The template is a process that has imported the user's code and forks the episodes (`episode_worker`). If the template dies, its
running episodes are lost, callers must repeat them, and another template is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from pipelinerl.errors import PipelineRLError, how_ended
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_CRASHED, VERIFY_STATUS_TIMEOUT, EpisodeRequest, VerifyItem, VerifyResult
from services.verifier.episode_worker import BEGIN, ENDED, JUDGE, KILL, NOT_FORKED, ORDER, WAITS, WORKS
from services.verifier.metrics import VerifierMetrics
from services.verifier.pool import FRAME_LENGTH, QueueFull, WorkerGone, WorkerProcess, read_frame, start_again, start_worker
from services.verifier.rewards.compose import failed

log = logging.getLogger(__name__)

_LONGEST_FRAME_BYTES = 16 * 1024**2
_ENDS_WITHIN_S = 1.0
"""Seconds within which an episode's process must end after it has closed its socket."""
_ORDER_AGAIN_S = 0.01
"""Seconds between attempts to send an order while the socket to the template is full."""
NO_TEMPLATE = "no episode can be started: the process that forks them is not up"


class EpisodeLost(PipelineRLError):
    """The process that forks episodes died, or could not fork this episode. Another call may succeed."""


@dataclass(eq=False)
class Template:
    """The process that forks episodes, and its socket. `ended`: futures of episodes' exit codes; None if this process died."""

    process: WorkerProcess
    orders: socket.socket
    ended: dict[int, asyncio.Future[int | None]] = field(default_factory=dict)

    def read_end(self) -> None:
        message = self.orders.recv(ENDED.size)
        if not message:
            asyncio.get_running_loop().remove_reader(self.orders)
            return
        number, code = ENDED.unpack(message)
        self.ended.pop(number).set_result(code)

    async def order(self, what: bytes, number: int, *descriptors: int) -> None:
        """Send an order. Raises `OSError` if the process is gone."""
        while True:
            try:
                socket.send_fds(self.orders, [ORDER.pack(what, number)], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(_ORDER_AGAIN_S)

    async def close(self) -> None:
        """Kill the process with all its episodes, which are then lost."""
        asyncio.get_running_loop().remove_reader(self.orders)
        await self.process.kill()
        self.orders.close()
        for ended in self.ended.values():
            ended.set_result(None)
        self.ended.clear()


async def start_template(recipe: Recipe) -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        arguments = (str(theirs.fileno()), os.environ.get("PYTHONPATH", ""))
        module, inherited = "services.verifier.episode_worker", (theirs.fileno(),)
        try:
            template = Template(await start_worker(recipe, module, *arguments, pass_fds=inherited), ours)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    asyncio.get_running_loop().add_reader(ours, template.read_end)
    return template


class EpisodePool:
    """The process that forks episodes (the template), and its running episodes."""

    def __init__(self, recipe: Recipe, metrics: VerifierMetrics, max_episodes: int) -> None:
        self._recipe, self._metrics, self._max_episodes = recipe, metrics, max_episodes
        self._tasks = recipe.episodic_tasks
        self._template: Template | None = None
        self._numbers = 0
        metrics.episodes.set_function(lambda: len(self._template.ended) if self._template is not None else 0)
        metrics.episode_capacity.set(max_episodes)

    @asynccontextmanager
    async def running(self, readiness: Readiness) -> AsyncIterator[EpisodePool]:
        """Start the template, and kill it at the end. Raises `UserError` for a mistake in users' code, and `ServiceError` if
        the template does not start."""
        template = await start_template(self._recipe)
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(self._keep_template(template, readiness), name="episode-template")
            try:
                yield self
            finally:
                keeper.cancel()

    async def _keep_template(self, template: Template, readiness: Readiness) -> None:
        """Start another template whenever one dies, until cancelled."""
        while True:
            self._template, readiness.reason = template, ""
            try:
                await asyncio.shield(template.process.ended)
                log.error("the process that forks episodes died: %s", await template.process.gone())
            finally:
                self._template, readiness.reason = None, NO_TEMPLATE
                await template.close()
            self._metrics.worker_restarts.labels("death").inc()
            template = await start_again(lambda: start_template(self._recipe), "start the process that forks episodes")

    async def run(self, request: EpisodeRequest) -> VerifyResult | VerifyItem:
        """Run an episode. When all its processes are gone, return its result or the item to judge. Cancelling the call kills
        them. Raises `QueueFull` if too many episodes run, and `EpisodeLost` if another call may succeed."""
        template = self._template
        if template is None:
            raise EpisodeLost("the process that forks episodes is being started")
        if len(template.ended) >= self._max_episodes:
            raise QueueFull(f"{self._max_episodes} episodes, the maximum (max_episodes), are already running")
        began_s = time.monotonic()
        self._numbers += 1
        number, ended = self._numbers, asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        template.ended[number] = ended
        with ours:
            try:
                with theirs:
                    await template.order(BEGIN, number, theirs.fileno())
            except BaseException as error:
                template.ended.pop(number, None)
                if isinstance(error, OSError):
                    raise EpisodeLost(f"cannot fork an episode: {error}") from error
                raise
            try:
                reader, writer = await asyncio.open_unix_connection(sock=ours)
                try:
                    payload = request.SerializeToString()
                    writer.write(FRAME_LENGTH.pack(len(payload)) + payload)
                    return await self._result(request, reader, ended)
                except (TimeoutError, WorkerGone) as error:
                    log.warning("episode %s: %s", request.sequence_id, error)
                    status = VERIFY_STATUS_TIMEOUT if isinstance(error, TimeoutError) else VERIFY_STATUS_CRASHED
                    message = f"the episode {str(error).removeprefix('it ')}"
                    return failed(status, message, request.sequence_id, time.monotonic() - began_s)
                finally:
                    writer.transport.abort()
            finally:
                with contextlib.suppress(OSError):  # the template is gone, and the episode with it
                    if not ended.done():
                        await template.order(KILL, number)
                await asyncio.shield(ended)  # the future is still set if this call is cancelled again

    async def _result(
        self, request: EpisodeRequest, reader: asyncio.StreamReader, ended: asyncio.Future[int | None]
    ) -> VerifyResult | VerifyItem:
        """Wait for the result. Raises `TimeoutError`, `EpisodeLost` (template failed) or `WorkerGone` (episode failed)."""
        task, judge = self._tasks[request.task].task, self._tasks[request.task].reward.judge
        works = task.source in ("environment", "tools")  # agents and the package `verifiers` never send `WAITS`
        began_s = time.monotonic()
        while True:
            left_s = began_s + task.episode_timeout_s - time.monotonic()
            within_s = min(left_s, task.answer_timeout_s) if works else left_s
            try:
                frame = await read_frame(reader, within_s, _LONGEST_FRAME_BYTES)
            except TimeoutError:
                self._metrics.timeouts.inc()
                name, how = "episode_timeout_s", "took more than"
                if within_s != left_s:
                    name, how = "answer_timeout_s", "waited for its environment's code for more than"
                raise TimeoutError(f"it {how} {getattr(task, name):g} s (task.{name}) and was killed") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                await asyncio.wait((ended,), timeout=_ENDS_WITHIN_S)
                if not ended.done():
                    raise WorkerGone("it closed its socket") from None
                if (code := ended.result()) is None:
                    raise EpisodeLost("the process that forks episodes died") from None
                if code == NOT_FORKED:
                    raise EpisodeLost("no process could be forked for the episode; the verifier's log says why") from None
                raise WorkerGone(f"it died with {how_ended(code)}") from None
            if frame in (WAITS, WORKS):
                works = frame == WORKS
                continue
            kind = VerifyItem if judge is not None and frame.startswith(JUDGE) else VerifyResult
            try:
                result = kind.FromString(frame.removeprefix(JUDGE))
            except DecodeError:
                result = kind()
            if result.sequence_id != request.sequence_id:
                raise WorkerGone("it wrote something other than results to its socket")
            return result
