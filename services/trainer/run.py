"""A training run: its parts, how they are connected, and the order from start to end."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Coroutine
from typing import Any

from grpc import aio

from pipelinerl.audit.journal import Journal
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError, NotPermitted, PipelineRLError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.kube.client import PodWatch, in_cluster
from pipelinerl.kube.completion import complete, publish_progress, run_goes_on
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.ledger import SequenceTracker
from pipelinerl.service.lifecycle import GpuTurn, StartStopped, unless_stopped
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.v1 import trainer_pb2_grpc
from pipelinerl.v1.actor_pb2 import ActorState, GetStateRequest
from pipelinerl.v1.control_pb2 import RunEnd
from services.trainer.checkpoint.files import link_export
from services.trainer.checkpoint.run_state import Start, evaluates_first, note_training_began
from services.trainer.checkpoint.store import Uploads
from services.trainer.data.evaluation import Evaluator, calls_to
from services.trainer.data.feeder import Feeder, heldout_problems, training_problems
from services.trainer.data.intake import Intake
from services.trainer.data.traces import SequenceTraces
from services.trainer.loop import OptimizerLoop, PolicyTrainer
from services.trainer.reporting.metrics import RunView
from services.trainer.reporting.recorder import Recorder
from services.trainer.server import TrainerService
from services.trainer.stream_upkeep import StreamUpkeep
from services.trainer.weight_sync.sender import LogWriter
from services.trainer.weight_sync.updater import WeightUpdater

log = logging.getLogger(__name__)

LOAD_EVERY_S = 5.0
ANSWER_WITHIN_S = 5.0
DISMISS_S = 1.5
"""Maximum seconds for ordering the other ranks to end, including the wait for a running computation."""
LAST_ANNOUNCEMENT_S = 120.0
"""Maximum seconds to wait at the run's end until the weight log has the last version."""
LAST_UPLOAD_S = 1800.0
"""Maximum seconds to wait for the last upload before the process exits (only without `settings.linger`)."""
HEARTBEATS_ALONE = "departed actors are noticed only by their own message or by a missing heartbeat"


class TrainingRun:
    def __init__(
        self,
        settings: TrainerSettings,
        recipe: Recipe,
        policy: PolicyTrainer,
        bus: Bus,
        journal: Journal,
        start: Start,
        recorder: Recorder,
        log: LogWriter | None = None,
    ) -> None:
        self._settings, self._recipe, self._bus, self._journal, self._start = settings, recipe, bus, journal, start
        self._incarnation = start.lineage.incarnation
        self._publishing = asyncio.Lock()
        self._calls_to = functools.partial(calls_to, tls_dir=settings.tls_dir, tls_name=settings.actor_tls_name)
        self.recorder = recorder
        traces = SequenceTraces()
        self.tracker = SequenceTracker(journal.write, traces.tracked)
        self.updater = WeightUpdater(
            bus,
            policy.sender,
            recorder,
            incarnation=self._incarnation,
            deadline_s=recipe.weights.deadline_s,
            join_timeout_s=recipe.weights.join_timeout_s,
            log=log,
        )
        problems, heldout = training_problems(recipe, policy.tokenizer), heldout_problems(recipe, policy.tokenizer)
        vocab_size, lineage, tracker = policy.vocab_size, start.lineage, self.tracker
        self.feeder = Feeder(bus, recipe, problems, tracker, traces, self.updater, journal)
        self.intake = Intake(bus, recipe, tracker, traces, self.feeder, vocab_size=vocab_size, lineage=lineage)
        run_dir, updater = settings.run_dir, self.updater
        self.uploads = Uploads(recipe.checkpoint.upload, run_dir, settings.run, recorder.metrics.uploads)
        self.evaluator = Evaluator(recipe, heldout, vocab_size, updater, settings.run, self._incarnation, self._calls_to)
        parts = (self.intake, self.feeder, updater, self.evaluator, recorder, self.uploads)
        self.loop = OptimizerLoop(recipe, run_dir, start, journal, bus, policy, *parts, GpuTurn.of(recipe, settings))
        self.upkeep = StreamUpkeep(bus, tracker, self.intake, self.loop.checkpoints)
        recorder.watch(self.view)

    def add_to_server(self, server: aio.Server) -> None:
        source = model_source(self._recipe, self._settings)
        service = TrainerService(self.recorder.feed, self.recorder.status, self.loop.request_checkpoint, self._recipe, source)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)

    def view(self) -> RunView:
        loop, parts = self.loop, (self.updater, self.feeder, self.intake, self.uploads)
        return RunView(loop.version, loop.waiting_for, *parts, loop.checkpoints, self.upkeep.streams)

    async def run(self, stop: asyncio.Event) -> None:
        """Execute the run until it is finished or `stop` is set. Checkpoints are uploaded in the background."""
        finished = False
        async with self.uploads.running():
            try:
                finished = await self._train(stop)
            finally:
                summary = self.recorder.write_summary(finished=finished)
                self._journal.write({"event": "end", "version": self.loop.version, "finished": finished})
                self._journal.flush()
                self.recorder.end(summary, finished=finished)
                try:
                    await self._say_end(finished)
                    if finished and self._settings.linger:
                        await self._linger(stop)
                    elif finished:
                        unfinished = "its last checkpoint is not uploaded yet; pipelinerl run --resume uploads it"
                        await _wait_at_end(unless_stopped(self.uploads.all_done(), stop), LAST_UPLOAD_S, unfinished)
                    await self.loop.dismiss(DISMISS_S)
                finally:
                    self.loop.close()

    async def _train(self, stop: asyncio.Event) -> bool:
        """Train, and return whether the run finished."""
        try:
            await unless_stopped(self.loop.take_over(), stop)
        except StartStopped:  # stopped early, perhaps while NATS was unreachable
            return False
        async with asyncio.TaskGroup() as tasks:
            background: list[asyncio.Task[Any]] = [
                tasks.create_task(_fails_unless(stop, part))
                for part in (
                    self.updater.run(),
                    self.intake.run(),
                    self.upkeep.run(),
                    self._poll_actors(),
                    watch_actor_pods(self._settings, self.updater),
                    self.loop.heartbeat(),
                    self.recorder.publish_state(),
                    publish_progress(self._settings, lambda: self.recorder.progress),
                )
            ]
            stopping = tasks.create_task(stop.wait())
            training = tasks.create_task(_fails_unless(stop, self._train_when_actors_are_there(tasks, background)))
            await asyncio.wait((stopping, training), return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                self.loop.stopping = True
                await self._checkpoint_on_stop()
            finished = training.done() and training.result()
            for task in (stopping, training, *background):
                task.cancel()
        return finished

    async def _train_when_actors_are_there(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[Any]]) -> None:
        if self.loop.version < self._recipe.trainer.steps or evaluates_first(self._start, self._recipe):
            # The release may still be marked as finished, by another run or by this one when it had fewer steps.
            background.append(tasks.create_task(run_goes_on(self._settings, self.loop.version)))
            await self._wait_for_actors()
            background.append(tasks.create_task(self.feeder.run()))
            self.recorder.training_begins()
            began_s, checkpoints = time.time(), self.loop.checkpoints
            checkpoints.saved_at_s = began_s if checkpoints.saved_at_s is None else checkpoints.saved_at_s
            await asyncio.to_thread(note_training_began, self._settings.run_dir, began_s)
            await self.loop.run()
            if self.updater.log is not None:  # wait, so that a later run can start from the last version
                unfinished = "weights.log lacks the last version: its store did not accept that version in time"
                await _wait_at_end(self.updater.log.all_announced(), LAST_ANNOUNCEMENT_S, unfinished)
        await self._publish_last()

    async def _wait_for_actors(self) -> None:
        """Wait for the actors. Raises `ServiceError` on timeout, unless `linger` is set or an actor is starting."""
        expected = 1 if self._start.again else max(1, self._settings.expected_actors)
        while True:
            try:
                async with asyncio.timeout(self._recipe.weights.join_timeout_s):
                    return await self.updater.wait_for_members(expected)
            except TimeoutError as error:
                if not self._settings.linger and not self.updater.starting:
                    fix = "Look at the actors' logs, or raise weights.join_timeout_s"
                    raise ServiceError(f"{self._too_few(expected)}. {fix}") from error
            log.warning("%s; still waiting", self._too_few(expected))

    def _too_few(self, expected: int) -> str:
        return (
            f"only {self.updater.num_present} of {expected} actors registered in {self._recipe.weights.join_timeout_s:.0f} s "
            f"(weights.join_timeout_s). Actors that cannot join: {self.updater.reasons or 'none'}. "
            f"Still starting: {', '.join(sorted(self.updater.starting)) or 'none'}"
        )

    async def _linger(self, stop: asyncio.Event) -> None:
        """Answer requests until `stop` is set; on a cluster, also mark the Helm release as finished and free its resources."""
        log.info("the run is finished; this trainer only answers requests until it is stopped")
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(self.loop.heartbeat())
            completion = complete(self._settings, self.loop.version, self.uploads.all_done, self.recorder.progress)
            completing = tasks.create_task(completion)
            await stop.wait()
            heartbeat.cancel()
            completing.cancel()

    async def _checkpoint_on_stop(self) -> None:
        """Write a checkpoint after the current step. If that takes too long, keep the previous one."""
        if self.loop.version == self._start.version and self.loop.waiting_for:
            return  # no step has been computed since this trainer started
        self.recorder.write_summary(finished=False)  # this process may be killed before the rest is done
        within_s = self._settings.stop_checkpoint_s
        log.info("stopping: finishing the current step and writing a checkpoint first, within %g s", within_s)
        try:
            async with asyncio.timeout(within_s):
                await self._publish_last()
        except TimeoutError:
            log.warning("the checkpoint of version %d was not written within %.1f s", self.loop.version, within_s)
        except ServiceError as error:
            log.error("the run ends without a checkpoint of version %d: %s", self.loop.version, error)

    async def _publish_last(self) -> None:
        """Write the last checkpoint, and link its policy as `<run dir>/checkpoint`."""
        async with self._publishing:  # otherwise a run that is stopped at its very end would do this twice at the same time
            written = await self.loop.checkpoints.write(last=True)
            await asyncio.to_thread(link_export, written.folder, self._settings.run_dir / "checkpoint")

    async def _poll_actors(self) -> None:
        """Pass the members' load to the recorder, with a task per actor so that a slow actor does not delay the others."""
        loads: dict[str, ActorState] = {}
        asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                members = {(name, member.grpc_address) for name, member in self.updater.members.items()}
                for gone in asking.keys() - members:
                    asking.pop(gone).cancel()
                    loads.pop(gone[0], None)
                for new in members - asking.keys():
                    asking[new] = tasks.create_task(self._ask_load(*new, loads))
                self.recorder.actor_loads(loads, measuring=self.loop.measuring)
                await asyncio.sleep(LOAD_EVERY_S)

    async def _ask_load(self, name: str, address: str, loads: dict[str, ActorState]) -> None:
        """Keep the actor's entry in `loads` up to date, and remove it while the actor does not answer."""
        while True:
            try:
                async with self._calls_to(name, address) as stub:
                    while True:
                        loads[name] = await stub.GetState(GetStateRequest(), timeout=ANSWER_WITHIN_S)
                        self.updater.readers.unreachable.discard(name)
                        await asyncio.sleep(LOAD_EVERY_S)
            except ServiceError as error:
                log.debug("%s reports no load: %s", name, error)
                loads.pop(name, None)
                self.updater.readers.unreachable.add(name)
                await asyncio.sleep(LOAD_EVERY_S)

    async def _say_end(self, finished: bool) -> None:
        end = RunEnd(
            incarnation=self._incarnation, version=self.loop.version, ok=finished, reason="" if finished else "stopped early"
        )
        try:
            await self._bus.publish_control("end", end.SerializeToString())
        except (BusError, NotPermitted) as error:
            log.warning("the end of the run could not be announced: %s", error)


async def _fails_unless(stop: asyncio.Event, part: Coroutine[Any, Any, None]) -> bool:
    """Return whether `part` succeeds. After `stop`, only log its error, so that the last checkpoint can still be written."""
    try:
        await part
    except PipelineRLError as error:
        if not stop.is_set():
            raise
        log.warning("error while the run stops: %s", error)
        return False
    return True


async def _wait_at_end(work: Coroutine[Any, Any, None], most_s: float, unfinished: str) -> None:
    """Wait for `work`; if it takes over `most_s` seconds or is stopped, log the error `unfinished`."""
    try:
        async with asyncio.timeout(most_s):
            await work
    except (StartStopped, TimeoutError):
        log.error("the run ends, but %s", unfinished)


async def watch_actor_pods(settings: TrainerSettings, updater: WeightUpdater) -> None:
    """Until cancelled, remove an actor as soon as its pod ends or is deleted. Return at once outside Kubernetes or if
    `actor_selector` is empty. If the API cannot be used, warn, keep trying, and rely on heartbeats meanwhile."""
    client = in_cluster(settings)
    if client is None:
        return
    if not settings.actor_selector:
        log.warning("PIPELINERL_ACTOR_SELECTOR is empty, so no pods are watched; %s", HEARTBEATS_ALONE)
        return
    async with client:
        await PodWatch(client, settings.actor_selector, updater.pod_ends, without=HEARTBEATS_ALONE).run()
