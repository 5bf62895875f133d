"""The verifier's process: the gRPC service, its workers, its health, the spans of its calls.

It scores nothing itself and imports no reward.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial

import grpc
from grpc import aio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.address import announce
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import VerifierSettings
from pipelinerl.service.tls import server_credentials
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.telemetry.spans import before_ns, child, trace_in, trace_of
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from services.verifier.metrics import UNKNOWN_TASK, VerifierMetrics
from services.verifier.pool import QueueFull, RewardPool, run_pool

log = logging.getLogger(__name__)

SERVICE_NAME = "pipelinerl.v1.VerifierService"


class CallSpans:
    """The spans of one call, from its arrival to `end`: one for each item that has a trace, and in it one for its reward."""

    def __init__(self, items: Iterable[verifier_pb2.VerifyItem]) -> None:
        self._spans: dict[str, Span] = {}
        for item in items:
            if (trace := trace_in({"traceparent": item.traceparent})) is not None:
                about = {a.SEQUENCE_ID: item.sequence_id, a.TASK: item.task, **a.rpc(f"{SERVICE_NAME}/Verify")}
                span = child(trace, "sequence.verify", kind=SpanKind.SERVER, attributes=about)
                self._spans[item.sequence_id] = span

    def scored(self, result: verifier_pb2.VerifyResult) -> None:
        """As soon as it is: the reward's span ends now. What was before it is the wait for a worker."""
        span = self._spans.get(result.sequence_id)
        if span is not None:
            status = status_name(result.status)
            about: a.Attributes = {a.STATUS: status, a.REWARD: result.reward}
            reward = child(trace_of(span), "reward.score", attributes=about, began_at=before_ns(result.seconds))
            if result.status != verifier_pb2.VERIFY_STATUS_OK:
                reward.set_status(Status(StatusCode.ERROR, status))
            reward.end()

    def end(self, code: str) -> None:
        """The call is answered with this status, by name."""
        for span in self._spans.values():
            span.set_attribute(a.RPC_STATUS, code)
            if code != "OK":
                span.set_status(Status(StatusCode.ERROR, code))
            span.end()


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers for one recipe's task; items of another one get UNKNOWN_TASK."""

    def __init__(self, task: str, pool: RewardPool, metrics: VerifierMetrics) -> None:
        self._task, self._pool, self._metrics = task, pool, metrics

    async def Verify(
        self, request: verifier_pb2.VerifyRequest, context: aio.ServicerContext
    ) -> verifier_pb2.VerifyResponse:
        """RESOURCE_EXHAUSTED when the items do not fit in the queue now, INVALID_ARGUMENT when they never will."""
        started_s, code = time.perf_counter(), grpc.StatusCode.INTERNAL
        spans, most = CallSpans(request.items), self._pool.max_queue
        try:
            if len(request.items) > most:
                code = grpc.StatusCode.INVALID_ARGUMENT
                await context.abort(code, f"items = {len(request.items)}: max_queue is {most}; send fewer at once")
            ours = [item for item in request.items if item.task == self._task]
            scored = iter(await self._pool.score(ours, spans.scored))
            results = [next(scored) if item.task == self._task else self._unknown(item) for item in request.items]
            code = grpc.StatusCode.OK
        except QueueFull as full:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, str(full))
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            spans.end(code.name)
            self._metrics.calls.labels(code.name).inc()
            self._metrics.call_seconds.observe(time.perf_counter() - started_s)
        for item, result in zip(request.items, results, strict=True):
            self._metrics.count(item.task if item.task == self._task else UNKNOWN_TASK, result)
        return verifier_pb2.VerifyResponse(results=results)

    def _unknown(self, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
        return verifier_pb2.VerifyResult(
            sequence_id=item.sequence_id,
            status=verifier_pb2.VERIFY_STATUS_UNKNOWN_TASK,
            message=f"task {item.task!r:.100}: this verifier serves {self._task!r}",
        )


async def serve(settings: VerifierSettings, stop: asyncio.Event, log_context: LogContext) -> None:
    """Serves until `stop`. Raises `UserError` for a recipe or a reward that does not exist, `ServiceError` for a port
    in use."""
    recipe = load_recipe(settings.recipe)
    registry, readiness = RunRegistry(settings.run), Readiness("starting reward workers")
    task, metrics = recipe.task.name, VerifierMetrics(registry, recipe.task.name)
    async with (
        watch_loop() as watch,
        serve_http(
            health_app(readiness, registry, loop_watch=watch), settings.http_host, settings.http_port
        ) as http_port,
        run_pool(recipe, metrics, readiness, workers=settings.workers, max_queue=settings.max_queue) as pool,
        serve_grpc(
            partial(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, VerifierServicer(task, pool, metrics)),
            [SERVICE_NAME],
            settings.grpc_host,
            settings.grpc_port,
            credentials=server_credentials(settings.tls_dir),
        ) as grpc_port,
    ):
        where = {"grpc_port": grpc_port, "http_port": http_port, "workers": settings.workers}
        log.info("serving rewards of task %s by scorer %s", task, recipe.reward.scorer, extra=where)
        announce(settings, grpc_port, http_port)
        await stop.wait()
        readiness.reason = "stopping"
