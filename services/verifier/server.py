"""The verifier's main process: serve gRPC calls, start worker processes, and call judges. It runs no reward itself."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from itertools import compress

import grpc
from grpc import aio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from pipelinerl.errors import UserError
from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.grpc import serve_calls
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import retry_forever
from pipelinerl.service.settings import VerifierSettings
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.telemetry.tracing import before_ns, child, trace_in, trace_of
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from services.verifier.episode_pool import NO_TEMPLATE, EpisodeLost, EpisodePool
from services.verifier.episode_worker import is_confined
from services.verifier.judge import Judge, api_key
from services.verifier.metrics import VerifierMetrics
from services.verifier.pool import NO_WORKER, QueueFull, RewardPool
from services.verifier.rewards.compose import failed

log = logging.getLogger(__name__)

SERVICE_NAME = "pipelinerl.v1.VerifierService"


def _server_span(asked: verifier_pb2.VerifyItem | verifier_pb2.EpisodeRequest, name: str, call: str) -> Span:
    about = attributes.rpc(f"{SERVICE_NAME}/{call}") | {attributes.SEQUENCE_ID: asked.sequence_id, attributes.TASK: asked.task}
    return child(trace_in({"traceparent": asked.traceparent}), name, kind=SpanKind.SERVER, attributes=about)


def _add_reward_span(parent: Span, result: verifier_pb2.VerifyResult) -> None:
    status = status_name(result.status)
    about: attributes.Attributes = {attributes.STATUS: status, attributes.REWARD: result.reward}
    reward = child(trace_of(parent), "reward.score", attributes=about, began_at=before_ns(result.seconds))
    if result.status != verifier_pb2.VERIFY_STATUS_OK:
        reward.set_status(Status(StatusCode.ERROR, status))
    reward.end()


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves the tasks of one recipe: `RunEpisode` serves tasks with episodes, `Verify` all others. The result for a task that
    is not in the recipe, or that belongs to the other call, is UNKNOWN_TASK."""

    def __init__(
        self, recipe: Recipe, metrics: VerifierMetrics, *, pool: RewardPool | None, episodes: EpisodePool | None
    ) -> None:
        self._tasks = {name: share.task.is_episodic for name, share in recipe.problem_sets.items()}
        """For each task, whether its samples are episodes."""
        self._metrics, self._pool, self._episodes = metrics, pool, episodes

    async def Verify(self, request: verifier_pb2.VerifyRequest, context: aio.ServicerContext) -> verifier_pb2.VerifyResponse:
        """Score items. Fails with RESOURCE_EXHAUSTED if the queue is full, INVALID_ARGUMENT for more than `max_queue` items."""
        spans = {item.sequence_id: _server_span(item, "sequence.verify", "Verify") for item in request.items}
        with self._metrics.call_seconds.time(), ExitStack() as stack:
            for span in spans.values():
                stack.enter_context(span)
            async with self._answering(context, *spans.values()):
                results = await self._scored(request.items, lambda result: _add_reward_span(spans[result.sequence_id], result))
        for item, result in zip(request.items, results, strict=True):
            self._metrics.count(item.task, result)
        return verifier_pb2.VerifyResponse(results=results)

    async def RunEpisode(self, request: verifier_pb2.EpisodeRequest, context: aio.ServicerContext) -> verifier_pb2.VerifyResult:
        """Run an episode. The status is RESOURCE_EXHAUSTED if too many run, UNAVAILABLE if this one must be run again."""
        with _server_span(request, "episode.run", "RunEpisode") as span:
            async with self._answering(context, span):
                if self._episodes is None or not self._tasks.get(request.task):
                    result = self._unknown(request)
                else:
                    result = await self._run(self._episodes, request)
            span.set_attributes({attributes.STATUS: status_name(result.status), attributes.REWARD: result.reward})
        self._metrics.count(request.task, result, is_episode=True)
        return result

    async def _scored(
        self, items: Sequence[verifier_pb2.VerifyItem], on_result: Callable[[verifier_pb2.VerifyResult], None]
    ) -> list[verifier_pb2.VerifyResult]:
        pool = self._pool
        if pool is not None and len(items) > pool.max_queue:
            raise UserError(f"items = {len(items)}: max_queue is {pool.max_queue}; send fewer at once")
        is_ours = [self._tasks.get(item.task) is False for item in items]
        scored = iter(await pool.score(compress(items, is_ours), on_result) if pool is not None else ())
        return [next(scored) if known else self._unknown(item) for item, known in zip(items, is_ours, strict=True)]

    async def _run(self, episodes: EpisodePool, request: verifier_pb2.EpisodeRequest) -> verifier_pb2.VerifyResult:
        started_s = time.perf_counter()
        ended = await episodes.run(request)
        if isinstance(ended, verifier_pb2.VerifyResult):
            return ended
        assert self._pool is not None, "judged tasks have workers"
        ended.task = request.task
        scoring = partial(self._pool.score, [ended])
        (result,) = await retry_forever(scoring, "score an episode's answer", retried=lambda full: isinstance(full, QueueFull))
        result.answer, result.seconds = ended.completion_text, time.perf_counter() - started_s
        return result

    @asynccontextmanager
    async def _answering(self, context: aio.ServicerContext, *spans: Span) -> AsyncIterator[None]:
        """Abort the call on `QueueFull` and `EpisodeLost`, and record its gRPC status in its spans and in the metrics."""
        code = grpc.StatusCode.INTERNAL
        try:
            yield
            code = grpc.StatusCode.OK
        except (QueueFull, EpisodeLost) as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(error, QueueFull) else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, str(error))
        except UserError:
            code = grpc.StatusCode.INVALID_ARGUMENT
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            for span in spans:
                span.set_attribute(attributes.RPC_STATUS, code.name)
                if code is not grpc.StatusCode.OK:
                    span.set_status(Status(StatusCode.ERROR, code.name))
            self._metrics.calls.labels(code.name).inc()

    def _unknown(self, item: verifier_pb2.VerifyItem | verifier_pb2.EpisodeRequest) -> verifier_pb2.VerifyResult:
        message = f"task {item.task!r:.100}: this verifier serves {', '.join(self._tasks)}"
        return failed(verifier_pb2.VERIFY_STATUS_UNKNOWN_TASK, message, item.sequence_id)


async def _sandboxes(recipe: Recipe) -> dict[str, str]:
    """Return the sandbox of each kind of code in the recipe; `none` if any code of the kind runs without one."""
    sets = recipe.problem_sets.values()
    kinds: dict[str, list[bool | None]] = {
        "programs": [share.reward.sandbox is not False for share in sets if share.reward.scorer == "code"],
        "rewards": [share.reward.sandbox for share in sets if share.reward.is_function and not share.task.is_episodic],
        "episodes": [is_confined(share) for share in recipe.episodic_tasks.values()],
    }
    found = {kind: "landlock" if all(confined) else "none" for kind, confined in kinds.items() if confined}
    if found.get("programs") == "landlock":  # landlock or bubblewrap, which only a process with one thread can find out
        command = (sys.executable, "-m", "services.verifier.sandbox")
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        found["programs"] = (await process.communicate())[0].decode().strip()
    return found


async def serve(settings: VerifierSettings, stop: asyncio.Event, log_context: LogContext) -> None:
    """Serve until `stop` is set. Raises `UserError` for a mistake in the recipe, users' code or a judge's API key. Raises
    `ServiceError` if a port is in use or a process does not start."""
    recipe = load_recipe(settings.recipe)
    if settings.reward_modules:
        sys.path.insert(0, str(settings.reward_modules))  # workers inherit this path
    registry, readiness = RunRegistry(settings.run), Readiness()
    metrics, pool, episodes = VerifierMetrics(registry, recipe.problem_sets), None, None
    async with AsyncExitStack() as stack:
        app = health_app(readiness, registry, loop_watch=await stack.enter_async_context(watch_loop()))
        http_port = await stack.enter_async_context(serve_http(app, settings.http_host, settings.http_port))
        if recipe.episodic_tasks:
            episodes = EpisodePool(recipe, metrics, settings.max_episodes)
            await stack.enter_async_context(episodes.running(readiness.part(NO_TEMPLATE)))
        if recipe.scored_tasks:
            judges = {
                name: await stack.enter_async_context(Judge(share.reward, api_key(share.reward.judge), metrics))
                for name, share in recipe.problem_sets.items()
                if share.reward.judge is not None
            }
            pool = RewardPool(recipe, metrics, readiness.part(NO_WORKER), settings.max_queue, judges)
            await stack.enter_async_context(pool.running(settings.workers))
        for code, means in (await _sandboxes(recipe)).items():
            metrics.sandbox.labels(code, means).set(1)
            log.info("sandbox of %s: %s", code, means, extra={"sandbox": means})
        servicer = VerifierServicer(recipe, metrics, pool=pool, episodes=episodes)
        register = partial(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, servicer)
        address = await stack.enter_async_context(serve_calls(settings, register, SERVICE_NAME, http_port))
        where = {"grpc": address.grpc, "http": address.http, "workers": settings.workers}
        log.info("serving %s", ", ".join(recipe.problem_sets), extra=where)
        readiness.reason = ""
        await stop.wait()
        readiness.reason = "stopping"
