"""The verifier's process: the gRPC service, its workers, its health. Scores nothing itself and imports no reward."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import grpc
from grpc import aio

from pipelinerl.config.load import load_recipe
from pipelinerl.config.settings import VerifierSettings
from pipelinerl.service.address import ServiceAddress, host_port, write_address
from pipelinerl.service.grpc_server import serve_grpc
from pipelinerl.service.health_app import health_app
from pipelinerl.service.http import serve_http
from pipelinerl.service.logs import LogContext
from pipelinerl.service.readiness import Readiness
from pipelinerl.service.run_registry import RunRegistry
from pipelinerl.service.tls import server_credentials
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from services.verifier.frames import WorkerSetup
from services.verifier.jobs import QueueFull
from services.verifier.metrics import UNKNOWN_TASK, VerifierMetrics
from services.verifier.pool import RewardPool, run_pool

log = logging.getLogger(__name__)

SERVICE_NAME = "pipelinerl.v1.VerifierService"


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers for one recipe's task; items of another one get UNKNOWN_TASK."""

    def __init__(self, task: str, pool: RewardPool, metrics: VerifierMetrics) -> None:
        self._task, self._pool, self._metrics = task, pool, metrics

    async def Verify(
        self, request: verifier_pb2.VerifyRequest, context: aio.ServicerContext
    ) -> verifier_pb2.VerifyResponse:
        """RESOURCE_EXHAUSTED when the items do not fit in the queue now, INVALID_ARGUMENT when they never will."""
        started_s, code = time.perf_counter(), grpc.StatusCode.INTERNAL
        try:
            code, problem, results = await self._answer(request.items)
            if problem:
                await context.abort(code, problem)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._metrics.calls.labels(code.name).inc()
            self._metrics.call_seconds.observe(time.perf_counter() - started_s)
        return verifier_pb2.VerifyResponse(results=results)

    async def _answer(
        self, items: Sequence[verifier_pb2.VerifyItem]
    ) -> tuple[grpc.StatusCode, str, list[verifier_pb2.VerifyResult]]:
        if len(items) > self._pool.capacity:
            problem = f"items = {len(items)}: max_queue is {self._pool.capacity}; send fewer at once"
            return grpc.StatusCode.INVALID_ARGUMENT, problem, []
        try:
            scored = iter(await self._pool.score([item for item in items if item.task == self._task]))
        except QueueFull as full:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(full), []
        results = [next(scored) if item.task == self._task else self._unknown(item) for item in items]
        for item, result in zip(items, results, strict=True):
            self._metrics.count(item.task if item.task == self._task else UNKNOWN_TASK, result)
        return grpc.StatusCode.OK, "", results

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
    metrics = VerifierMetrics(registry)
    metrics.begin(recipe.task.name)

    def on_workers(num_up: int) -> None:
        readiness.set_ready() if num_up else readiness.set_not_ready("no reward worker is up")

    def register(server: aio.Server) -> None:
        servicer = VerifierServicer(recipe.task.name, pool, metrics)
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)

    setup = WorkerSetup(recipe.reward, recipe.task)
    async with (
        serve_http(health_app(readiness, registry), settings.http_host, settings.http_port) as http_port,
        run_pool(setup, metrics, workers=settings.workers, max_queue=settings.max_queue, on_workers=on_workers) as pool,
        serve_grpc(
            register,
            [SERVICE_NAME],
            settings.grpc_host,
            settings.grpc_port,
            credentials=server_credentials(settings.tls_dir),
        ) as grpc_server,
    ):
        await grpc_server.set_serving(True)
        where = {"grpc_port": grpc_server.port, "http_port": http_port, "workers": settings.workers}
        log.info("serving rewards of task %s by scorer %s", recipe.task.name, recipe.reward.scorer, extra=where)
        if settings.address_file is not None:
            host = settings.advertise_host
            address = ServiceAddress(host_port(host, grpc_server.port), host_port(host, http_port), os.getpid())
            write_address(settings.address_file, address)
        await stop.wait()
        readiness.set_not_ready("stopping")
