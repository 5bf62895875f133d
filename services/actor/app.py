"""The actor, put together: engine, streams, weight updates, gRPC and HTTP, for the time between start and stop.

Order of start: servers (so that probes answer while vLLM loads), engine, membership, then generation once a version is
served. Order of stop: take nothing new, leave, interrupt what is being generated, let the finisher store what is finished
(for `DRAIN_S` at most), hand the rest over to another actor, end. The end of the run stops no actor: whoever started it does.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress

from pipelinerl.bus.jetstream import CONNECT_TIMEOUT_S, Bus, connect
from pipelinerl.initial_model import model_source
from pipelinerl.kube.client import in_cluster
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.address import announce
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, StartStopped, unless_stopped, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import retry_forever
from pipelinerl.service.settings import ActorSettings
from pipelinerl.service.tls import server_credentials
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.v1 import actor_pb2_grpc
from services.actor.engine import InferenceEngine, StartEngine
from services.actor.finishing import Finisher
from services.actor.generation import GenerationLoop, ServingGate
from services.actor.hand_over import HandOver, HeldGroups
from services.actor.membership import DeletionCost, Heartbeat
from services.actor.metrics import ActorMetrics
from services.actor.server import ActorService
from services.actor.vllm_engine import start_engine
from services.actor.weight_sync.updates import UpdateListener

log = logging.getLogger(__name__)

SERVICE = "pipelinerl.v1.ActorService"
HEALTH_CHECK_S = 2.0
INTERRUPT_S = 1.5
"""For the engine to return what it has. It takes milliseconds, unless a weight update is just being committed."""
DRAIN_S = 2.5
"""For what is finished to be verified and stored after a stop."""
HAND_OVER_S = 3.0
"""For PROMPTS to take the rest. With vLLM's end all this is about 9 s where nothing answers, of the 15 s that a user waits; and
a fraction of a second where everything does."""


async def serve(
    settings: ActorSettings, stop: asyncio.Event, context: LogContext, start: StartEngine = start_engine
) -> None:
    """Runs the actor until `stop` is set. Raises what ended it otherwise."""
    recipe, registry, readiness = load_recipe(settings.recipe), RunRegistry(settings.run), Readiness("vLLM is starting")
    metrics = ActorMetrics(registry)
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(StartStopped))
        loop_watch = await stack.enter_async_context(watch_loop())
        app = health_app(readiness, registry, loop_watch=loop_watch)
        http_port = await stack.enter_async_context(
            serve_http(app, settings.http_host, settings.http_port, own_thread=True)
        )
        engine = await stack.enter_async_context(
            start(
                recipe,
                model_source(recipe, settings),
                stop,
                on_step=metrics.engine_step,
                bind_host=settings.advertise_host,
            )
        )
        readiness.reason = "waiting for NATS"

        def connected() -> Awaitable[Bus]:
            return stack.enter_async_context(
                connect(
                    settings.nats_url,
                    settings.run,
                    name=settings.instance,
                    credentials=settings.nats_credentials,
                    tls_dir=settings.nats_tls_dir,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                )
            )

        bus = await unless_stopped(retry_forever(connected, "connect"), stop)
        verifier = await stack.enter_async_context(
            VerifierClient(settings.verifier, tls_dir=settings.tls_dir, on_failed_try=metrics.verify_try_failed)
        )
        actor = Actor(settings, recipe, engine, bus, verifier, metrics, context, stop)
        server = await stack.enter_async_context(
            serve_grpc(
                actor.add_to_server,
                [SERVICE],
                settings.grpc_host,
                settings.grpc_port,
                credentials=server_credentials(settings.tls_dir),
            )
        )
        await server.set_serving(True)
        address = announce(settings, server.port, http_port)
        await actor.run(address.grpc, readiness)


class Actor:
    """The running parts and their wiring."""

    def __init__(
        self,
        settings: ActorSettings,
        recipe: Recipe,
        engine: InferenceEngine,
        bus: Bus,
        verifier: VerifierClient,
        metrics: ActorMetrics,
        context: LogContext,
        stop: asyncio.Event,
    ) -> None:
        self._settings, self._recipe, self._bus, self._engine = settings, recipe, bus, engine
        self._context, self._stop = context, stop
        self._process = uuid.uuid4().hex[:12]
        self._metrics = metrics
        self._gate = ServingGate(recipe.algorithm.max_lag)
        self._held = HeldGroups()
        self._finisher = Finisher(
            bus,
            verifier,
            self._metrics,
            self._held.published,
            buffer_size=recipe.actor.publish_buffer,
            batch_size=recipe.actor.verify_batch,
        )
        self._generation = GenerationLoop(
            bus,
            engine,
            self._finisher,
            self._held,
            self._gate,
            self._metrics,
            instance=settings.instance,
            sequences_in_progress=recipe.actor.sequences_in_progress,
            max_context=recipe.model.max_context,
        )
        self._updates = UpdateListener(
            bus,
            engine.weights,
            self._gate,
            self._metrics,
            instance=settings.instance,
            process=self._process,
        )
        pod = settings.pod_name or settings.instance
        self._deletion_cost = DeletionCost(
            in_cluster(settings), self._held, engine, self._metrics, pod=pod, uid=settings.pod_uid
        )
        self._service = ActorService(
            instance=settings.instance,
            engine=engine,
            gate=self._gate,
            generation=self._generation,
            updates=self._updates,
            metrics=self._metrics,
            started_at=time.monotonic(),
            max_context=recipe.model.max_context,
        )
        metrics.watch(
            version=lambda: self._gate.served.number if self._gate.served else None,
            ready=lambda: self._gate.is_open,
            held_groups=lambda: self._held.num_groups,
            staging=lambda: self._updates.staging_state,
            most_in_progress=recipe.actor.sequences_in_progress,
        )

    def add_to_server(self, server: object) -> None:
        actor_pb2_grpc.add_ActorServiceServicer_to_server(self._service, server)

    async def run(self, grpc_address: str, readiness: Readiness) -> None:
        heartbeat = Heartbeat(
            self._bus,
            self._gate,
            lambda: self._updates.manifest_id,
            actor=self._settings.instance,
            process=self._process,
            grpc_address=grpc_address,
            ranks=self._recipe.actor.engine.tensor_parallel_size,
            pod_uid=self._settings.pod_uid,
        )
        producing = [self._finisher.run(), self._generation.run()]
        beside = [
            self._updates.run(),
            self._held.keep_alive(self._bus.limits.ack_wait_s / 3),
            heartbeat.run(),
            self._show_state(readiness),
            self._deletion_cost.run(),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                producers = [tasks.create_task(part) for part in producing]
                others = [tasks.create_task(part) for part in beside]
                await self._stop.wait()
                self._gate.drain()
                readiness.reason = "draining"
                tasks.create_task(heartbeat.leave())
                await self._generation.interrupt(INTERRUPT_S)
                try:
                    async with asyncio.timeout(DRAIN_S):
                        await self._finisher.drained()
                except TimeoutError:
                    log.warning(
                        "finished sequences are not verified and stored within %g s, and are handed over", DRAIN_S
                    )
                await _cancelled(producers)
                started, num_groups = time.monotonic(), len(self._held)
                await HandOver(self._bus, self._held, self._metrics, instance=self._settings.instance).run(HAND_OVER_S)
                log.info("stopped; %d groups in hand went back in %.1f s", num_groups, time.monotonic() - started)
                await _cancelled(others)
        finally:
            await heartbeat.leave()

    async def _show_state(self, readiness: Readiness) -> None:
        """Keeps /readyz and the log lines' policy version true, and notices a dead engine."""
        while True:
            await self._engine.check_health()
            readiness.reason = self._gate.reason
            served = self._gate.served
            self._context.policy_version = served.number if served else None
            await asyncio.sleep(HEALTH_CHECK_S)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Returns when they have ended. Their errors are the task group's."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
