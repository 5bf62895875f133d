"""Build the actor from its parts, and run it until it is stopped.

HTTP starts first, so that probes are answered while vLLM loads. Generation begins when the actor serves a policy version. A
stopping actor takes no new groups, removes its registration and interrupts generation. The finisher then has `DRAIN_S` seconds
to store finished sequences, and all other sequences are handed over to another actor.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import grpc
import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.bus.jetstream import Bus, service_bus
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import BusError, FieldError, MessageError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.messages import sequences
from pipelinerl.messages.sequences import PartialSequence, PolicyVersion, PromptGroup, TokenIds
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.prompts import use_chat_template
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.groups import EVALUATION_SLOTS
from pipelinerl.service.grpc import serve_calls
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import GpuTurn, Readiness, StartStopped, background, unless_stopped, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.settings import ActorSettings, host_port
from pipelinerl.tasks.source import Split
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.telemetry.tracing import Trace, child, trace_in, trace_of
from pipelinerl.transfer.stores import LogStore, open_store
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from pipelinerl.v1.control_pb2 import Registration
from services.actor.engine import UNFINISHED, EngineError, InferenceEngine, StartEngine, failed_sequence, start_of
from services.actor.episodes.endpoint import episode_app
from services.actor.episodes.episode import Episodes
from services.actor.episodes.formats import chat_format
from services.actor.generation import FinishedSample, Finisher, GenerationLoop, Sampler, encoded
from services.actor.hand_over import HeldGroups, hand_over
from services.actor.metrics import STAGING_STATES, ActorMetrics
from services.actor.vllm_engine import start_engine
from services.actor.weight_sync.updates import ServingGate, UpdateListener

log = logging.getLogger(__name__)

SERVICE = "pipelinerl.v1.ActorService"
HEALTH_CHECK_S = 2.0
INTERRUPT_S = 1.5
"""Maximum seconds to get unfinished sequences from the engine when the actor stops. A weight commit can delay the engine."""
DRAIN_S = 2.5
HAND_OVER_S = 3.0
"""Maximum seconds to publish unfinished groups on PROMPTS when the actor stops."""
LEAVE_WITHIN_S = 2.0


async def serve(settings: ActorSettings, stop: asyncio.Event, context: LogContext, start: StartEngine = start_engine) -> None:
    """Run the actor until `stop` is set. If an error ends it earlier, raise that error."""
    recipe, registry, readiness = load_recipe(settings.recipe), RunRegistry(settings.run), Readiness("vLLM is starting")
    if not settings.reachable and (backend := recipe.weights.backend) != "log":
        fix = "needs connections to this actor; use log here, or set PIPELINERL_REACHABLE=true"
        raise FieldError("weights.backend", backend, fix)
    metrics = ActorMetrics(registry)
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(StartStopped))
        loop_watch = await stack.enter_async_context(watch_loop())
        app = health_app(readiness, registry, loop_watch=loop_watch)
        http_port = await stack.enter_async_context(serve_http(app, settings.http_host, settings.http_port))
        async with background(report_start(settings, stop)):
            if (turn := GpuTurn.of(recipe, settings)) is not None:
                readiness.reason = "waiting for the GPU, which the trainer uses"
                await unless_stopped(turn.take(), stop)
                readiness.reason = "vLLM is starting"
            model = model_source(recipe, settings)
            started = start(recipe, model, stop, on_step=metrics.engine_step, bind_host=settings.advertise_host)
            engine = await stack.enter_async_context(started)
        gc.freeze()  # vLLM's and torch's objects stay alive; scanning them took a quarter of this process's time
        readiness.reason = "waiting for NATS"
        bus = await stack.enter_async_context(service_bus(settings, stop))
        tries = metrics.verify_failed_tries
        client = VerifierClient(
            settings.verifier, tls_dir=settings.tls_dir, on_failed_try=lambda code: tries.labels(code).inc()
        )
        verifier = await stack.enter_async_context(client)
        episodes = None
        if recipe.episodic_tasks:
            use_chat_template(engine.tokenizer, recipe.model)
            episodes = Episodes(verifier, metrics, recipe, engine.decode)
            chat = chat_format(engine.tokenizer, recipe.model)
            endpoint = episode_app(episodes, chat, metrics, model=recipe.model.name, vocab_size=engine.vocab_size)
            serving = serve_http(endpoint, settings.episode_host, settings.episode_port, on_this_loop=True)
            episode_port = await stack.enter_async_context(serving)
            episodes.address = host_port(settings.advertise_host, episode_port)
            log.info("environments can request turns at %s", episodes.address)
        reading = open_store(recipe.weights.log_place, bus) if recipe.weights.backend == "log" else nullcontext()
        log_store = await stack.enter_async_context(reading)
        actor = Actor(settings, recipe, engine, bus, verifier, metrics, context, stop, episodes, turn, log_store)
        register = partial(actor_pb2_grpc.add_ActorServiceServicer_to_server, actor)
        address = await stack.enter_async_context(serve_calls(settings, register, SERVICE, http_port))
        await actor.run(address.grpc if settings.reachable else "", readiness)


@dataclass(eq=False)
class Actor(actor_pb2_grpc.ActorServiceServicer):
    """Runs the actor's parts, and answers its gRPC calls: state, held-out answers, and log-probabilities for probes."""

    settings: ActorSettings
    recipe: Recipe
    engine: InferenceEngine
    bus: Bus
    verifier: VerifierClient
    metrics: ActorMetrics
    context: LogContext
    stop: asyncio.Event
    episodes: Episodes | None = None
    turn: GpuTurn | None = None
    log_store: LogStore | None = None

    def __post_init__(self) -> None:
        self._process, self._started_s = uuid.uuid4().hex[:12], time.monotonic()
        engine, bus, metrics = self.engine, self.bus, self.metrics
        instance, of_actor = self.settings.instance, self.recipe.actor
        self.gate = gate = ServingGate(self.recipe.algorithm.max_lag)
        self._held = held = HeldGroups()
        sizes = {"buffer_size": of_actor.publish_buffer, "batch_size": of_actor.verify_batch}
        self._finisher = Finisher(bus, self.verifier, metrics, held.published, **sizes)
        max_context = self.recipe.model.max_context
        sampler = partial(Sampler, engine, gate, instance=instance, max_context=max_context, episodes=self.episodes)
        self.training = sampler(places=of_actor.sequences_in_progress, metrics=metrics, keep=held.keep)
        # Evaluation has its own places in the engine, so that training does not wait for it.
        self._heldout = sampler(places=EVALUATION_SLOTS, split=Split.HELDOUT, stopped=self.stop)
        self._heldout_samples = asyncio.Semaphore(EVALUATION_SLOTS)
        samples = self.recipe.samples_in_progress
        self._generation = GenerationLoop(
            bus, self.training, self._finisher, held, gate, metrics, instance=instance, samples_in_progress=samples
        )
        self._updates = updates = UpdateListener(
            bus, engine.weights, gate, metrics, instance=instance, process=self._process, turn=self.turn, log=self.log_store
        )
        metrics.version.read(lambda: gate.served.number if gate.served else None)
        metrics.ready.read(lambda: float(gate.opened.is_set()))
        metrics.held_groups.read(lambda: len(held))
        metrics.staging.read(lambda: dict.fromkeys(STAGING_STATES, 0) | {updates.staging_state: 1})
        metrics.most_in_progress.set(of_actor.sequences_in_progress)

    async def run(self, grpc_address: str, readiness: Readiness) -> None:
        settings, instance = self.settings, self.settings.instance
        me = Registration(
            actor=instance,
            process=self._process,
            grpc_address=grpc_address,
            ranks=self.recipe.actor.engine.tensor_parallel_size,
            pod_uid=settings.pod_uid,
            reads_log=self.log_store is not None,
        )
        heartbeat = Heartbeat(self.bus, self.gate, lambda: self._updates.manifest_id, me)
        try:
            async with asyncio.TaskGroup() as tasks:
                producers = [tasks.create_task(part) for part in (self._finisher.run(), self._generation.run())]
                beating = tasks.create_task(heartbeat.run())
                keeping = self._held.keep_alive(self.bus.limits.ack_wait_s / 3)
                others = [tasks.create_task(part) for part in (self._updates.run(), self._show_state(readiness), keeping)]
                await self.stop.wait()
                beating.cancel()
                self.gate.drain()
                readiness.reason = "draining"
                tasks.create_task(heartbeat.leave())
                await self.training.interrupt(INTERRUPT_S)
                try:
                    async with asyncio.timeout(DRAIN_S):
                        await self._finisher.buffer.join()
                except TimeoutError:
                    log.warning("some finished sequences were not stored within %g s; handing them over", DRAIN_S)
                await _cancelled(producers)
                started = time.monotonic()
                num_groups = await hand_over(self.bus, self._held, self.metrics, instance=instance, timeout_s=HAND_OVER_S)
                log.info("stopped; handed over %d groups in %.1f s", num_groups, time.monotonic() - started)
                await _cancelled(others)
        finally:
            await heartbeat.leave()

    async def _show_state(self, readiness: Readiness) -> None:
        """Keep /readyz and the policy version in log lines up to date. Raises `EngineError` if the engine is dead."""
        while True:
            await self.engine.check_health()
            readiness.reason = self.gate.reason
            served = self.gate.served
            self.context.policy_version = served.number if served else None
            await asyncio.sleep(HEALTH_CHECK_S)

    async def GetState(self, request: actor_pb2.GetStateRequest, context: grpc.aio.ServicerContext) -> actor_pb2.ActorState:
        served = self.gate.served
        return actor_pb2.ActorState(
            instance=self.settings.instance,
            phase=actor_pb2.ActorPhase.Value(f"ACTOR_PHASE_{self.gate.phase.upper()}"),
            policy_version=served.number if served else 0,
            incarnation=served.incarnation if served else 0,
            epoch=self._updates.epoch.epoch if self._updates.epoch else 0,
            sequences_in_progress=self.metrics.busy.running,
            generated_tokens=self.metrics.tokens_total,
            busy_s=self.metrics.busy.total_s,
            uptime_s=time.monotonic() - self._started_s,
            sequences_finished=self.metrics.finished_total,
        )

    async def Generate(
        self, request: actor_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[actor_pb2.GenerateResult]:
        groups = [sequences.decode_group(data, expected_run=self.bus.run) for data in request.groups]
        for group in groups:
            check_vocabulary(group.prompt_token_ids, self.engine.vocab_size, "PromptGroup", "prompt_token_ids")
        trace = trace_in(dict(context.invocation_metadata() or ()))
        about = {**attributes.rpc("pipelinerl.v1.ActorService/Generate"), attributes.PROMPTS: len(groups)}
        with child(trace, "evaluation.generate", kind=SpanKind.SERVER, attributes=about) as span:
            trace = trace_of(span) or trace
            samples = [(group, start_of(group, index)) for group in groups for index in range(group.num_samples)]
            tasks = [asyncio.create_task(self._answer(*sample, trace)) for sample in samples]
            try:
                for finished in asyncio.as_completed(tasks):
                    yield await finished
            finally:
                for task in tasks:
                    task.cancel()

    async def Score(self, request: actor_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> actor_pb2.ScoreResponse:
        tokens = sequences.array_from_bytes(request.token_ids, sequences.INT32, "ScoreRequest", "token_ids")
        check_vocabulary(tokens, self.engine.vocab_size, "ScoreRequest", "token_ids")
        if not 2 <= len(tokens) < self.recipe.model.max_context:
            fix = f"give 2 to {self.recipe.model.max_context - 1}"
            raise MessageError("ScoreRequest", "token_ids", f"{len(tokens)} tokens, {fix}")
        async with self._updates.serving:
            served = self.gate.served
            if served is None or self.gate.asleep:
                raise ServiceError(self.gate.reason)
            logprobs = await self.engine.score(tokens)
        return actor_pb2.ScoreResponse(
            logprobs=logprobs.tobytes(),
            policy_version=served.number,
            incarnation=served.incarnation,
            loader=self._updates.loader,
        )

    async def _answer(self, group: PromptGroup, start: PartialSequence, trace: Trace) -> actor_pb2.GenerateResult:
        """Sample an answer to a held-out problem and get its reward."""
        async with self._heldout_samples:
            try:
                sequence, failure = await self._heldout.sample(group, start, trace), UNFINISHED
            except EngineError as error:  # the engine is dead, which ends the actor within `HEALTH_CHECK_S`
                sequence, failure = None, f"engine: {error}"
        sequence = sequence or failed_sequence(group, start.sample_index, self.settings.instance, failure)
        (scored,) = await self._finisher.rewarded([FinishedSample(group, sequence, trace)])
        return actor_pb2.GenerateResult(sequence=encoded(scored.sequence)[0])


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended. Their task group raises their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def check_vocabulary(token_ids: TokenIds, vocab_size: int, kind: str, field: str) -> None:
    """Raise `MessageError` if a token is outside the vocabulary. Pure."""
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(outside):
        first = outside[0]
        raise MessageError(kind, field, f"token {first} has the id {token_ids[first]}; give ids from 0 to {vocab_size - 1}")


async def report_start(settings: ActorSettings, stop: asyncio.Event) -> None:
    """Keep this actor registered as starting until cancelled, so that the trainer waits for its engine. Each refresh opens a
    new connection, because a forked engine process would inherit a lasting connection and keep it open."""
    me = Registration(actor=settings.instance, process="-", grpc_address="-", ranks=1, phase="starting")
    while True:
        with suppress(BusError):
            async with service_bus(settings, stop) as bus:
                await bus.put_member(me.actor, me.SerializeToString())
        await asyncio.sleep(StreamLimits().member_ttl_s / 3)


class Heartbeat:
    """Refreshes the actor's entry in the membership bucket. `me` holds the fields that never change. `me.process` differs
    at every start, so a restarted actor is a new member. A joining actor counts as starting while `manifest_id()` is empty."""

    def __init__(self, bus: Bus, gate: ServingGate, manifest_id: Callable[[], str], me: Registration) -> None:
        self._bus, self._gate, self._manifest_id, self._me = bus, gate, manifest_id, me
        self._left = False

    async def run(self) -> None:
        """Refresh the registration until cancelled. Repeat a refresh that failed."""
        ttl_s = self._bus.limits.member_ttl_s
        while True:
            await retry_forever(self._refresh, "register this actor", backoff=Backoff(most_s=1.0))
            await asyncio.sleep(ttl_s / 3 if self._manifest_id() else min(ttl_s / 12, 1.0))

    async def leave(self) -> None:
        """Remove this actor's registration. If that fails, it expires. Cancel `run` before this call. A draining actor is
        first registered as draining, so that the trainer can tell an orderly stop from a failure."""
        if self._left:
            return
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                if self._gate.draining:
                    await self._refresh()
                await self._bus.remove_member(self._me.actor)
        except (BusError, TimeoutError) as error:
            log.warning("cannot remove this actor's registration; it will expire: %s", str(error) or "no answer in time")

    async def _refresh(self) -> None:
        await self._bus.put_member(self._me.actor, self.registration().SerializeToString())

    def registration(self) -> Registration:
        served = self._gate.served or PolicyVersion(0, 0)
        now = Registration(policy_version=served.number, incarnation=served.incarnation)
        now.MergeFrom(self._me)
        now.manifest_id, phase = self._manifest_id(), self._gate.phase
        now.phase = "starting" if phase == "joining" and not now.manifest_id else phase
        return now
