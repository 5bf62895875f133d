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
from services.actor.hand_over import HeldGroups, hand_over
from services.actor.membership import DeletionCost, Heartbeat
from services.actor.metrics import STAGING_STATES, ActorMetrics
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
        started = start(
            recipe, model_source(recipe, settings), stop, on_step=metrics.engine_step, bind_host=settings.advertise_host
        )
        engine = await stack.enter_async_context(started)
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
        verifier = VerifierClient(
            settings.verifier,
            tls_dir=settings.tls_dir,
            on_failed_try=lambda code: metrics.verify_failed_tries.labels(code).inc(),
        )
        await stack.enter_async_context(verifier)
        actor = Actor(settings, recipe, engine, bus, verifier, metrics, context, stop)
        credentials = server_credentials(settings.tls_dir)
        served = serve_grpc(actor.add_to, [SERVICE], settings.grpc_host, settings.grpc_port, credentials=credentials)
        server = await stack.enter_async_context(served)
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
        self._metrics, self._context, self._stop = metrics, context, stop
        self._started_s = time.monotonic()
        self._process = uuid.uuid4().hex[:12]
        instance, of_actor = settings.instance, recipe.actor
        self._gate = gate = ServingGate(recipe.algorithm.max_lag)
        self._held = held = HeldGroups()
        self._finisher = Finisher(
            bus,
            verifier,
            metrics,
            held.published,
            buffer_size=of_actor.publish_buffer,
            batch_size=of_actor.verify_batch,
        )
        self._generation = GenerationLoop(
            bus,
            engine,
            self._finisher,
            held,
            gate,
            metrics,
            instance=instance,
            sequences_in_progress=of_actor.sequences_in_progress,
            max_context=recipe.model.max_context,
        )
        self._updates = updates = UpdateListener(
            bus, engine.weights, gate, metrics, instance=instance, process=self._process
        )
        self._deletion_cost = DeletionCost(
            in_cluster(settings), held, engine, metrics, pod=settings.pod_name or instance, uid=settings.pod_uid
        )
        metrics.version.read(lambda: gate.served.number if gate.served else None)
        metrics.ready.read(lambda: float(gate.is_open))
        metrics.held_groups.read(lambda: held.num_groups)
        metrics.staging.read_state(STAGING_STATES, lambda: updates.staging_state)
        metrics.most_in_progress.set(of_actor.sequences_in_progress)

    def add_to(self, server: object) -> None:
        """Has the gRPC server answer from here."""
        service = ActorService(
            instance=self._settings.instance,
            engine=self._engine,
            gate=self._gate,
            generation=self._generation,
            updates=self._updates,
            metrics=self._metrics,
            started_at=self._started_s,
            max_context=self._recipe.model.max_context,
        )
        actor_pb2_grpc.add_ActorServiceServicer_to_server(service, server)

    async def run(self, grpc_address: str, readiness: Readiness) -> None:
        instance = self._settings.instance
        heartbeat = Heartbeat(
            self._bus,
            self._gate,
            lambda: self._updates.manifest_id,
            actor=instance,
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
                await hand_over(self._bus, self._held, self._metrics, instance=instance, timeout_s=HAND_OVER_S)
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
