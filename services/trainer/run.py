"""A training run: its parts, how they are joined, and its order from start to end.

Order of start: what an earlier trainer left is taken over (`resume.py`), then the actors are waited for; the first version is
sent to them before any prompt is issued. Order of end: last evaluation, checkpoint, summary, `end` on the control channel.
Stopped early, it ends the step under way and writes a checkpoint, if both can be done soon enough; the summary is written
before that and after it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpc import aio

from pipelinerl.audit.journal import Journal
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.kube.client import in_cluster
from pipelinerl.kube.pods import PodWatch
from pipelinerl.messages.control import RunEnd
from pipelinerl.messages.sequences import SamplingParams
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import StartStopped, unless_stopped
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.v1 import trainer_pb2_grpc
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.checkpoint.checkpointer import CheckpointWriter, WrittenCheckpoint, link_export
from services.trainer.checkpoint.run_state import Start, evaluates_first, note_training_began
from services.trainer.data.actor_client import ActorClient
from services.trainer.data.evaluation import HeldoutEvaluator, probe_tokens
from services.trainer.data.feeder import Feeder, feeder_bound, heldout_problems, training_problems
from services.trainer.data.intake import Intake, StreamUpkeep
from services.trainer.data.tracker import SequenceTraces, SequenceTracker
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loop import OptimizerLoop
from services.trainer.records import StepRecord
from services.trainer.reporting.recorder import Recorder
from services.trainer.resume import Resume
from services.trainer.server import TrainerService, initial_files
from services.trainer.weight_sync.coordinator import Member
from services.trainer.weight_sync.membership import MemberChange
from services.trainer.weight_sync.updater import UpdateRecord, WeightUpdater

if TYPE_CHECKING:
    from services.trainer.policy_trainer import PolicyTrainer

log = logging.getLogger(__name__)

LOAD_EVERY_S = 5.0
DISMISS_S = 1.5
"""How long the last order to the other ranks may wait for a computation of theirs."""
HEARTBEATS_ALONE = "an actor's departure is noticed by its own word or by its heartbeat"


class TrainingRun:
    """The running parts and their wiring. Each part is made after those that it uses."""

    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        policy: PolicyTrainer,
        bus: Bus,
        verifier: VerifierClient,
        journal: Journal,
        start: Start,
        recorder: Recorder,
    ) -> None:
        self._settings, self._recipe, self._bus, self._journal = settings, recipe, bus, journal
        self._start, self._recorder = start, recorder
        self._incarnation = start.lineage.incarnation
        self._publishing = asyncio.Lock()
        self._actor_client = functools.partial(ActorClient, tls_dir=settings.tls_dir, tls_name=settings.actor_tls_name)
        bound, traces = feeder_bound(recipe, settings.expected_actors), SequenceTraces()
        self._tracker = SequenceTracker(traces.recording(journal.write))
        self._updater = WeightUpdater(
            bus,
            policy.port,
            incarnation=self._incarnation,
            deadline_s=recipe.weights.deadline_s,
            join_timeout_s=recipe.weights.join_timeout_s,
            on_served=self._version_served,
            on_joined=self._joined,
            on_member=self._member_changed,
            on_aborted=recorder.update_aborted,
            on_regroup=recorder.regrouped,
        )
        self._feeder = Feeder(
            bus,
            recipe,
            training_problems(recipe, policy.tokenizer),
            self._tracker,
            lambda: feeder_bound(recipe, self._updater.num_present),
            lambda: self._updater.served_version,
            self._reserve,
            traces,
        )
        self._intake = Intake(
            bus,
            recipe,
            self._tracker,
            bound,
            vocab_size=policy.vocab_size,
            on_loss=self._feeder.look_again,
            lineage=start.lineage,
            traces=traces,
        )
        self._resume = Resume(
            settings.run_dir,
            recipe,
            bus,
            journal,
            start,
            self._tracker,
            self._feeder,
            self._intake,
            recorder,
        )
        evaluator = HeldoutEvaluator(
            heldout_problems(recipe, policy.tokenizer),
            lambda: _addresses(self._updater.serving),
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
            self._tracker,
            bound,
            self._updater,
            evaluator,
            incarnation=self._incarnation,
            version=start.version,
            skipped_in_a_row=start.state.figures["skipped_in_a_row"] if start.state else 0,
            evaluate_first=evaluates_first(start, recipe),
            probe=probe_tokens(policy.vocab_size, num_probe_tokens, recipe.seed),
            writer=CheckpointWriter(settings.run_dir, recipe.checkpoint.keep, journal.sync),
            capture=self._resume.capture,
            on_checkpoint=self._checkpoint_written,
            on_step=self._step_done,
            on_heldout=recorder.heldout,
            on_parity=recorder.parity,
            actor_client=self._actor_client,
            traces=traces,
        )
        self._upkeep = StreamUpkeep(
            bus,
            self._tracker,
            self._intake,
            self._resume.readable_from,
            self._loop.checkpoint_anew,
            on_look=recorder.metrics.queues.saw,
        )
        recorder.watch(self._loop, self._updater, self._feeder, self._intake, self._tracker)

    def add_to_server(self, server: aio.Server) -> None:
        initial = initial_files(self._recipe, model_source(self._recipe, self._settings))
        service = TrainerService(self._recorder.feed, self._recorder.status, self._loop.request_checkpoint, initial)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)

    # --- from start to end -------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """To the end of the run, or until `stop`."""
        finished = False
        try:
            finished = await self._train(stop)
            self._recorder.in_order(self._loop.version, finished=finished)
        finally:
            summary = self._write_summary(finished)
            self._resume.end(self._loop.version, finished=finished)
            self._recorder.end(summary, finished=finished)
            try:
                await self._say_end(finished)
                if finished and self._settings.linger:
                    await self._linger(stop)
                await self._loop.dismiss(DISMISS_S)
            finally:
                self._loop.close()

    async def _train(self, stop: asyncio.Event) -> bool:
        """True when the run came to its own end."""
        try:
            await unless_stopped(self._resume.begin(), stop)
        except StartStopped:  # before that was possible: NATS may be away
            return False
        self._recorder.started()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(part)
                for part in (
                    self._updater.run(),
                    self._intake.run(),
                    self._upkeep.run(),
                    self._poll_actors(),
                    watch_actor_pods(self._settings, self._updater),
                    self._loop.heartbeat(),
                    self._recorder.publish_state(),
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

    async def _train_when_actors_are_there(
        self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]
    ) -> None:
        if self._loop.version < self._recipe.trainer.steps or evaluates_first(self._start, self._recipe):
            await self._wait_for_actors()
            background.append(tasks.create_task(self._feeder.run()))
            self._recorder.training_begins()
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

    async def _linger(self, stop: asyncio.Event) -> None:
        """Stays as it is until `stop`: it answers, and the other ranks stay as well. Raises `RuntimeError` when one is gone."""
        log.info("the run is finished: this trainer answers, and does nothing else, until it is told to stop")
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(self._loop.heartbeat())
            await stop.wait()
            heartbeat.cancel()

    def _write_summary(self, finished: bool) -> dict[str, Any]:
        return self._recorder.write_summary(
            self._tracker.ledger, self._loop.version, self._updater.evictions, finished=finished
        )

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

    async def _poll_actors(self) -> None:
        while True:
            loads: dict[str, ActorState] = {}
            for name, address in _addresses(self._updater.members).items():
                try:
                    async with self._actor_client(name, address) as client:
                        loads[name] = await client.state(timeout_s=LOAD_EVERY_S)
                except ServiceError as error:
                    log.debug("no load of %s: %s", name, error)
            self._recorder.actor_loads(loads, measuring=self._loop.measuring)
            await asyncio.sleep(LOAD_EVERY_S)

    async def _say_end(self, finished: bool) -> None:
        end = RunEnd(
            incarnation=self._incarnation,
            version=self._loop.version,
            ok=finished,
            reason="" if finished else "stopped early",
        )
        try:
            await self._bus.publish_control("end", end.SerializeToString())
        except BusError as error:
            log.warning("the end of the run could not be announced: %s", error)

    async def _reserve(self, groups: int) -> None:
        """Returns when it is on disk that groups numbered below `groups` may be published."""
        self._journal.write({"event": "reserve", "groups": groups})
        await asyncio.to_thread(self._journal.sync)

    # --- what its parts tell ------------------------------------------------------------------------------------------

    def _joined(self, actor: str, update: UpdateRecord) -> None:
        self._recorder.joined(actor, update)
        self._feeder.look_again()  # where nothing else bounds what is in flight, more actors may have more

    def _version_served(self, update: UpdateRecord) -> None:
        self._recorder.served(update)
        self._feeder.look_again()

    def _member_changed(self, change: MemberChange) -> None:
        self._recorder.member_changed(change, self._updater.serving.keys())

    def _checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._resume.checkpoint_written(written)
        self._recorder.checkpoint_written(written)

    def _step_done(self, figures: StepRecord, batch: list[TrainingGroup]) -> None:
        self._journal.flush()  # who hears of the step may audit it
        self._recorder.step(figures, batch, self._intake.tokens_arrived)


def _addresses(members: Mapping[str, Member]) -> dict[str, str]:
    return {name: member.grpc_address for name, member in members.items()}


async def watch_actor_pods(settings: TrainerSettings, updater: WeightUpdater) -> None:
    """So that an actor whose pod is deleted has left at once, and not when its heartbeat has expired.

    The heartbeat stays what membership rests on: without the API, or the right to use it, a line says so and it is all there
    is. Runs until cancelled; returns at once if there is nothing to watch.
    """
    client = in_cluster(settings)
    if client is None:
        return
    if not settings.actor_selector:
        log.warning("PIPELINERL_ACTOR_SELECTOR is empty: no pods are watched, %s", HEARTBEATS_ALONE)
        return
    try:
        await PodWatch(client, settings.actor_selector, updater.pod_ends, without=HEARTBEATS_ALONE).run()
    finally:
        await client.close()
