"""The trainer, put together: model, streams, feeder, intake, weight updates, evaluation, records, servers.

Order of start: servers, model, streams, then the actors are waited for; the first version is sent to them before any prompt
is issued. A trainer that this run has had before goes on from its newest checkpoint (`resume/`). Order of end: last evaluation,
checkpoint, summary, `end` on the control channel. Stopped early (SIGTERM), it ends the step under way and writes a checkpoint,
if both can be done soon enough; a summary is there before that and after it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from typing import Any

from grpc import aio

from pipelinerl.algorithms.feeder_bound import FeederBound, default_backlog
from pipelinerl.algorithms.ledger import Outcome
from pipelinerl.bus.jetstream import CONNECT_TIMEOUT_S, connect
from pipelinerl.bus.protocol import Bus, StreamLimits
from pipelinerl.config.load import load_recipe
from pipelinerl.config.recipe import Recipe
from pipelinerl.config.settings import RankSettings, TrainerSettings
from pipelinerl.control import RunEnd
from pipelinerl.control_codec import encode_control
from pipelinerl.errors import BusError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.journal import JOURNAL, Journal
from pipelinerl.retry import until_taken
from pipelinerl.run_summary import RunSummary
from pipelinerl.service.address import ServiceAddress, host_port, write_address
from pipelinerl.service.grpc_server import serve_grpc
from pipelinerl.service.health_app import health_app
from pipelinerl.service.http import serve_http
from pipelinerl.service.logs import LogContext
from pipelinerl.service.loop_watch import watch_loop
from pipelinerl.service.readiness import Readiness
from pipelinerl.service.run_registry import RunRegistry
from pipelinerl.service.tls import server_credentials
from pipelinerl.service.until_stopped import StartStopped, unless_stopped
from pipelinerl.types import SamplingParams
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from pipelinerl.verify import VerifierClient
from services.trainer.actor_client import ActorClient, ActorLoad
from services.trainer.attendance import MemberChange
from services.trainer.books import Books
from services.trainer.evaluation import HeldoutEvaluator, HeldoutResult
from services.trainer.events import RunEvents, run_events
from services.trainer.feeder import Feeder
from services.trainer.initial_files import initial_files
from services.trainer.intake import Intake
from services.trainer.lane import UpdateRecord
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loop import OptimizerLoop
from services.trainer.metrics import TrainerMetrics
from services.trainer.metrics.outcomes import bounded
from services.trainer.page.board import PageBoard
from services.trainer.page.routes import add_page, guarded, page_hosts
from services.trainer.page.run_page import RunPage
from services.trainer.page.state import member_rows
from services.trainer.pods import watch_actor_pods
from services.trainer.policy_trainer import TorchPolicyTrainer, load_policy_trainer
from services.trainer.probe import probe_tokens
from services.trainer.prompts import heldout_problems, training_problems
from services.trainer.records import RunFiles, StepRecord
from services.trainer.reporting import RunReport
from services.trainer.resume.continuation import Continuation, reserve
from services.trainer.resume.lineage_file import note_training_began, write_lineage
from services.trainer.resume.start import Start, evaluates_first, find_start
from services.trainer.resume.writer import CheckpointWriter, WrittenCheckpoint, link_export
from services.trainer.scaling import ReplicaAdvice
from services.trainer.sequence_traces import SequenceTraces
from services.trainer.server import StepFeed, TrainerService
from services.trainer.token_pieces import TokenPieces
from services.trainer.trackers.run_trackers import RunTrackers, run_trackers
from services.trainer.updater import WeightUpdater
from services.trainer.upkeep import StreamUpkeep

log = logging.getLogger(__name__)

SERVICE = "pipelinerl.v1.TrainerService"
LOAD_EVERY_S = 5.0
DISMISS_S = 1.5
"""How long the last order to the other ranks may wait for a computation of theirs."""


async def serve(settings: TrainerSettings, ranks: RankSettings, stop: asyncio.Event, context: LogContext) -> None:
    """Rank 0: runs a whole training run, or until `stop` is set. Raises what ended it otherwise."""
    with suppress(StartStopped):
        await _serve(settings, ranks, stop, context)


async def _serve(settings: TrainerSettings, ranks: RankSettings, stop: asyncio.Event, context: LogContext) -> None:
    recipe = load_recipe(settings.recipe)
    registry, readiness = RunRegistry(settings.run), Readiness("the model is loading")
    metrics = TrainerMetrics(registry)
    async with AsyncExitStack() as stack:
        loop_watch = await stack.enter_async_context(watch_loop())
        app = health_app(readiness, registry, loop_watch=loop_watch)
        http_port = await stack.enter_async_context(
            serve_http(
                guarded(app, settings),
                settings.http_host,
                settings.http_port,
                own_thread=True,
                names=page_hosts(settings),
            )
        )
        board = PageBoard() if settings.page else None
        if board is not None:
            add_page(app, board)
            stack.callback(board.close)
        events = await stack.enter_async_context(run_events(settings))
        start = await asyncio.to_thread(find_start, settings.run_dir, settings.run, recipe)
        policy = await asyncio.to_thread(load_policy_trainer, recipe, settings, ranks, start)
        readiness.set_not_ready("waiting for NATS")

        def connected() -> Awaitable[Bus]:
            return stack.enter_async_context(
                connect(
                    settings.nats_url,
                    settings.run,
                    limits=stream_limits(settings),
                    name=settings.instance,
                    credentials=settings.nats_credentials,
                    tls_dir=settings.nats_tls_dir,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                )
            )

        bus = await unless_stopped(until_taken(connected, "connect"), stop)
        made = until_taken(lambda: bus.create_streams(fresh=not start.again), "make the run's streams")
        await unless_stopped(made, stop)
        write_lineage(settings.run_dir, settings.run, start.lineage, recipe)
        verifier = await stack.enter_async_context(VerifierClient(settings.verifier, tls_dir=settings.tls_dir))
        files = stack.enter_context(RunFiles(settings.run_dir, start.version if start.again else None))
        journal = stack.enter_context(Journal(settings.run_dir / JOURNAL))
        trackers = await stack.enter_async_context(run_trackers(recipe, settings, start))
        run = TrainingRun(
            settings, recipe, policy, bus, verifier, files, journal, start, metrics, context, events, trackers, board
        )
        server = await stack.enter_async_context(
            serve_grpc(
                run.add_to_server,
                [SERVICE],
                settings.grpc_host,
                settings.grpc_port,
                credentials=server_credentials(settings.tls_dir),
            )
        )
        await server.set_serving(True)
        readiness.set_ready()
        if settings.address_file:
            host = settings.advertise_host
            address = ServiceAddress(host_port(host, server.port), host_port(host, http_port), os.getpid())
            write_address(settings.address_file, address)
        await run.run(stop)


def stream_limits(settings: TrainerSettings) -> StreamLimits:
    """Of the streams that the trainer makes. Other services need to know nothing of these."""
    sequences_max_bytes = round(settings.sequences_max_gib * 1024**3)
    return StreamLimits(sequences_max_bytes=sequences_max_bytes, replicas=settings.stream_replicas)


def feeder_bound(recipe: Recipe, num_actors: int) -> FeederBound:
    """The staleness bound of a recipe. Without max_lag, enough groups in flight to keep `num_actors` busy. Pure."""
    groups_per_step = recipe.trainer.batch_size // recipe.sampling.group_size
    in_progress = recipe.actor.sequences_in_progress * max(1, num_actors)
    return FeederBound(
        groups_per_step=groups_per_step,
        mode=recipe.mode,
        max_lag=recipe.algorithm.max_lag,
        conventional_g=recipe.algorithm.conventional_g,
        backlog_groups=default_backlog(groups_per_step, in_progress, recipe.sampling.group_size),
        total_steps=recipe.trainer.steps,
    )


class TrainingRun:
    """The running parts and their wiring."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        policy: TorchPolicyTrainer,
        bus: Bus,
        verifier: VerifierClient,
        files: RunFiles,
        journal: Journal,
        start: Start,
        metrics: TrainerMetrics,
        context: LogContext,
        events: RunEvents,
        trackers: RunTrackers,
        board: PageBoard | None = None,
    ) -> None:
        """`board`: of the live page, None = it is off."""
        self._trackers = trackers
        self._settings, self._recipe, self._bus, self._events = settings, recipe, bus, events
        self._journal, self._start, self._context = journal, start, context
        context.policy_version = start.version
        self._incarnation = start.lineage.incarnation
        self._metrics = metrics
        self._replicas = ReplicaAdvice(recipe, metrics.registry)
        self._page = RunPage(board, self._page_state)
        self._page.begin(settings.run, recipe, settings.run_dir, files.kept)
        self._report = RunReport(recipe, files, self._metrics, TokenPieces(policy.tokenizer), self._page.sample)
        self._feed = StepFeed(files.kept)
        self._actor_client = functools.partial(ActorClient, tls_dir=settings.tls_dir, tls_name=settings.actor_tls_name)
        self._publishing = asyncio.Lock()
        self._phase = trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        self._ended = ""
        traces = SequenceTraces()
        self._books = Books(traces.recording(journal.write))
        bound = feeder_bound(recipe, settings.expected_actors)
        self._updater = WeightUpdater(
            bus,
            policy.port,
            incarnation=self._incarnation,
            deadline_s=recipe.weights.deadline_s,
            join_timeout_s=recipe.weights.join_timeout_s,
            on_served=self._version_served,
            on_joined=self._joined,
            on_member=self._member_changed,
            on_aborted=self._update_aborted,
            on_regroup=lambda epoch: metrics.membership.regrouped(),
            on_evicted=metrics.membership.evicted,
        )
        self._feeder = Feeder(
            bus,
            recipe,
            training_problems(recipe, policy.tokenizer),
            self._books,
            lambda: feeder_bound(recipe, self._updater.num_present),
            lambda: self._loop.feeder_version,
            functools.partial(reserve, journal),
            traces,
        )
        self._intake = Intake(
            bus,
            recipe,
            self._books,
            bound,
            vocab_size=policy.vocab_size,
            on_loss=self._feeder.look_again,
            lineage=start.lineage,
            traces=traces,
        )
        self._continuation = Continuation(
            settings.run_dir,
            recipe,
            bus,
            journal,
            start,
            self._books,
            self._feeder,
            self._intake,
            self._report,
            lambda: self._loop,
        )
        self._upkeep = StreamUpkeep(
            bus,
            self._books,
            self._intake,
            self._continuation.readable_from,
            lambda: self._loop.checkpoint_anew(),
            on_look=metrics.queues.saw,
        )
        evaluator = HeldoutEvaluator(
            heldout_problems(recipe, policy.tokenizer),
            self._serving_addresses,
            verifier,
            SamplingParams(temperature=recipe.evaluation.temperature, max_tokens=recipe.sampling.max_tokens),
            incarnation=self._incarnation,
            correct_reward=recipe.reward.correct,
            seed=recipe.seed + 1,
            timeout_s=recipe.evaluation.timeout_s,
            client=self._actor_client,
        )
        num_probe_tokens = min(recipe.weights.probe_tokens, recipe.model.max_context - 1)
        self._loop = OptimizerLoop(
            recipe,
            policy,
            self._intake,
            self._feeder,
            self._books,
            bound,
            self._updater,
            evaluator,
            incarnation=self._incarnation,
            version=start.version,
            evaluate_first=evaluates_first(start, recipe),
            probe=probe_tokens(policy.vocab_size, num_probe_tokens, recipe.seed),
            writer=CheckpointWriter(settings.run_dir, recipe.checkpoint.keep, journal.sync),
            capture=self._continuation.capture,
            on_checkpoint=self._checkpoint_written,
            on_step=self._step_done,
            on_heldout=self._heldout_done,
            on_parity=self._report.parity,
            actor_client=self._actor_client,
            traces=traces,
        )
        self._watch(metrics)

    def _watch(self, metrics: TrainerMetrics) -> None:
        """Tells the metrics where to read what is asked for at a scrape."""
        checkpoint = self._start.version if self._start.state else None
        metrics.progress.begin(self._recipe.trainer.steps, checkpoint, self._start.saved_at_s)
        metrics.progress.watch(self._current_phase, lambda: self._loop.version, lambda: self._updater.served_version)
        metrics.token_lag.bound(self._recipe.algorithm.max_lag)
        metrics.queues.watch(self._intake, lambda: self._feeder.allowance)
        metrics.membership.watch(self._updater)
        metrics.outcomes.watch(
            self._books,
            lambda: self._intake.tokens_arrived_here,
            lambda: self._intake.bad_messages + self._updater.bad_messages,
        )

    def add_to_server(self, server: aio.Server) -> None:
        initial = initial_files(self._recipe, model_source(self._recipe, self._settings))
        service = TrainerService(self._feed, self._status, self._loop.request_checkpoint, initial)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)

    async def run(self, stop: asyncio.Event) -> None:
        """To the end of the run, or until `stop`."""
        finished = False
        try:
            finished = await self._train(stop)
            self._events.ended(self._loop.version, self._recipe.trainer.steps, finished=finished)
        finally:
            self._phase = trainer_pb2.TRAINER_PHASE_FINISHED
            self._ended = "finished" if finished else "stopped"
            summary = self._write_summary(finished)
            self._page.publish()
            self._trackers.end(summary, finished=finished)
            self._continuation.end(finished=finished)
            if finished:
                self._replicas.finish()
            self._feed.end()
            try:
                await self._say_end(finished)
                if finished and self._settings.linger:
                    await self._linger(stop)
                await self._loop.dismiss(DISMISS_S)
            finally:
                self._loop.close()

    async def _linger(self, stop: asyncio.Event) -> None:
        """Stays as it is until `stop`: it answers, and the other ranks stay as well. Raises `RuntimeError` when one is gone."""
        log.info("the run is finished: this trainer answers, and does nothing else, until it is told to stop")
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._loop.beat())
            await stop.wait()
            beating.cancel()

    def _write_summary(self, finished: bool) -> RunSummary:
        ledger = self._books.ledger
        reasons = {outcome.value: ledger.reasons(outcome) for outcome in Outcome}
        summary = self._report.write_summary(
            ledger.counts.as_dict(),
            reasons,
            self._loop.version,
            interrupted=not finished,
            evictions=self._updater.evictions,
        )
        log.info("run ended", extra={"steps": summary["steps"], "heldout": summary["heldout_accuracy_last"]})
        return summary

    async def _checkpoint_on_stop(self) -> None:
        """Of after the step under way. One that is not on disk in time is left out: the one before stays."""
        if self._loop.version == self._start.version and self._loop.waiting_for:
            return  # nothing was trained since the checkpoint that this trainer started from
        self._write_summary(finished=False)  # whoever stops this process may not wait for the rest
        within_s = self._settings.stop_checkpoint_s
        try:
            async with asyncio.timeout(within_s):
                await self._publish_last()
        except TimeoutError:
            log.warning("no checkpoint of version %d yet after %.1f s", self._loop.version, within_s)
        except ServiceError as error:
            log.error("the run ends without a checkpoint of version %d: %s", self._loop.version, error)

    async def _publish_last(self) -> None:
        """Writes the last checkpoint and makes it the run's result. Raises `ServiceError`."""
        async with self._publishing:  # a run that is stopped as it ends would do it twice at once
            written = await self._loop.last_checkpoint()
            await asyncio.to_thread(link_export, written.folder, self._settings.run_dir / "checkpoint")

    async def _train(self, stop: asyncio.Event) -> bool:
        """True when the run came to its own end."""
        if not await self._has_gone_on(stop):
            return False
        self._events.started(self._loop.version, self._recipe.trainer.steps, self._incarnation)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(part)
                for part in (
                    self._updater.run(),
                    self._intake.run(),
                    self._upkeep.run(),
                    self._poll_actors(),
                    watch_actor_pods(self._settings, self._updater),
                    self._loop.beat(),
                    self._page.run(),
                )
            ]
            stopping = tasks.create_task(stop.wait())
            training = tasks.create_task(self._train_when_actors_are_there(tasks, background))
            await asyncio.wait((stopping, training), return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await self._checkpoint_on_stop()
            finished = training.done()
            for task in (stopping, training, *background):
                task.cancel()
        return finished

    async def _has_gone_on(self, stop: asyncio.Event) -> bool:
        """False when it was told to stop before that was possible: NATS may be away."""
        try:
            await unless_stopped(self._continuation.begin(), stop)
        except StartStopped:
            return False
        return True

    async def _train_when_actors_are_there(
        self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]
    ) -> None:
        if self._loop.version < self._recipe.trainer.steps or evaluates_first(self._start, self._recipe):
            await self._wait_for_actors()
            background.append(tasks.create_task(self._feeder.run()))
            self._phase = trainer_pb2.TRAINER_PHASE_TRAINING
            self._metrics.progress.training_begins()
            await asyncio.to_thread(note_training_began, self._settings.run_dir, time.time())
            await self._loop.run()
        await self._publish_last()

    async def _wait_for_actors(self) -> None:
        """Raises `ServiceError` when too few register in time; a trainer that lingers says so and goes on waiting."""
        expected = 1 if self._start.again else max(1, self._settings.expected_actors)
        while True:
            try:
                async with asyncio.timeout(self._recipe.weights.join_timeout_s):
                    return await self._updater.wait_for_members(expected)
            except TimeoutError as error:
                if not self._settings.linger:
                    raise ServiceError(f"{self._too_few(expected)}. Look at the actors' logs, or raise it") from error
            log.warning("%s; still waiting", self._too_few(expected))

    def _too_few(self, expected: int) -> str:
        return (
            f"{self._updater.num_present} of {expected} actors registered within weights.join_timeout_s = "
            f"{self._recipe.weights.join_timeout_s:.0f} s; last heard: {self._updater.reasons or 'nothing'}"
        )

    async def _poll_actors(self) -> None:
        while True:
            loads: dict[str, ActorLoad] = {}
            for name, address in self._member_addresses().items():
                try:
                    async with self._actor_client(name, address) as client:
                        loads[name] = await client.load(timeout_s=LOAD_EVERY_S)
                except ServiceError as error:
                    log.debug("no load of %s: %s", name, error)
            self._report.actor_loads(loads)
            self._replicas.actors(loads, measuring=self._loop.measuring)
            await asyncio.sleep(LOAD_EVERY_S)

    async def _say_end(self, finished: bool) -> None:
        end = RunEnd(self._incarnation, self._loop.version, finished, "" if finished else "stopped early")
        try:
            await self._bus.publish_control("end", encode_control(end))
        except BusError as error:
            log.warning("the end of the run could not be announced: %s", error)

    def _serving_addresses(self) -> dict[str, str]:
        return {name: member.grpc_address for name, member in self._updater.serving.items()}

    def _member_addresses(self) -> dict[str, str]:
        return {name: member.grpc_address for name, member in self._updater.members.items()}

    def _joined(self, actor: str, update: UpdateRecord) -> None:
        self._report.joined(actor, update)
        self._feeder.look_again()  # where nothing else bounds what is in flight, more actors may have more

    def _version_served(self, update: UpdateRecord) -> None:
        self._report.update_served(update)
        self._feeder.look_again()

    def _update_aborted(self, version: int, epoch: int, actor: str, reason: str) -> None:
        self._metrics.membership.aborted()
        self._events.update_failed(version, epoch, actor, reason)

    def _member_changed(self, change: MemberChange) -> None:
        self._metrics.membership.changed(change)
        others = self._updater.serving.keys() - {change.member.actor}
        self._events.member(change, len(others) + (change.kind == "joined"))

    def _checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._continuation.checkpoint_written(written)
        self._metrics.progress.checkpoint_written(written)
        self._events.checkpoint_written(written)

    def _heldout_done(self, result: HeldoutResult) -> None:
        self._report.heldout(result)
        self._trackers.heldout(result)

    def _step_done(self, figures: StepRecord, batch: list[TrainingGroup]) -> None:
        record = self._report.step(figures, batch, self._intake.tokens_arrived)
        self._replicas.step(record)
        self._journal.flush()
        self._feed.add(record)
        self._trackers.step(record)
        self._page.step(record)
        self._context.policy_version = self._loop.version
        log.info(
            "step %d",
            record["step"],
            extra={key: record.get(key) for key in ("reward_mean", "heldout_accuracy", "ess", "loss")},
        )

    def _current_phase(self) -> trainer_pb2.TrainerPhase:
        if self._phase == trainer_pb2.TRAINER_PHASE_TRAINING and self._loop.waiting_for:
            return trainer_pb2.TRAINER_PHASE_WAITING_FOR_SEQUENCES
        return self._phase

    def _status(self) -> trainer_pb2.TrainerStatus:
        phase = self._current_phase()
        waiting_for = "" if phase == trainer_pb2.TRAINER_PHASE_FINISHED else self._loop.waiting_for
        return trainer_pb2.TrainerStatus(
            run=self._settings.run,
            phase=phase,
            policy_version=self._loop.version,
            incarnation=self._incarnation,
            total_steps=self._recipe.trainer.steps,
            sequences=trainer_pb2.SequenceCounts(**self._books.ledger.counts.as_dict()),
            members=len(self._updater.members),
            epoch=self._updater.epoch,
            message=f"waiting for {waiting_for}" if waiting_for else "",
        )

    def _page_state(self) -> dict[str, Any]:
        """What the live page shows of this moment."""
        status, ledger, updater = self._status(), self._books.ledger, self._updater
        served = updater.served_version
        return {
            "phase": trainer_pb2.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower(),
            "message": status.message,
            "ended": self._ended,
            "version": status.policy_version,
            "served_version": served if served >= 0 else None,
            "incarnation": self._incarnation,
            "epoch": updater.epoch,
            "members": member_rows(updater.states, served, self._report.loads),
            "sequences": ledger.counts.as_dict(),
            "reasons": {outcome.value: bounded(ledger.reasons(outcome)) for outcome in Outcome},
        }
