"""The optimizer loop: take batches from `Intake`, compute steps, send versions through `WeightUpdater`, evaluate and record.

A version is sent when no earlier version is in transfer. While an evaluation or probe measures a version, actors only stage the
next one, and no further version is sent. Except in conventional mode, the next batch is computed while a version is sent. A
single compute thread makes all calls to the model, through `PolicyTrainer`. With `actor.colocate`, trainer and vLLM engine
take turns: the steps of a phase begin when the engine sleeps, and it wakes up for the version after these steps.

Before the first step, the loop takes over a checkpoint and the streams from the run's previous trainer. For the next trainer it
writes the journal, and the part of checkpoints that is not tensors.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipelinerl.audit.journal import JOURNAL, Journal, reserved_groups
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.messages.sequences import Logprobs, PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import starts_phase
from pipelinerl.rl.memory import sends_adapters
from pipelinerl.run_dir import NOTHING_THERE
from pipelinerl.run_summary import StepRecord
from pipelinerl.service.lifecycle import GpuTurn
from pipelinerl.service.retry import retry_forever
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.transfer.group import GroupStore, transfer_backend
from services.trainer.checkpoint.checkpointer import RUN_ENDED, Checkpointer, PolicyExport, WrittenCheckpoint
from services.trainer.checkpoint.run_state import RESUME, STATE, RunState, Start, evaluates_first, group_tokens
from services.trainer.checkpoint.state_files import StateSaver
from services.trainer.checkpoint.store import Uploads
from services.trainer.data.evaluation import Evaluator
from services.trainer.data.feeder import Feeder, scan_in_flight
from services.trainer.data.intake import Intake
from services.trainer.data.recording import RecordedStep, software, write_step
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import LAG_0_TOKENS, measured
from services.trainer.learn.model import DTYPES
from services.trainer.learn.step import Learner, PreparedStep
from services.trainer.loading import load_learner, load_tokenizer, weight_sender
from services.trainer.reporting.recorder import Recorder
from services.trainer.weight_sync.sender import Snapshot, WeightSender, as_in_files, converted_parameters
from services.trainer.weight_sync.updater import WeightUpdater
from services.trainer.world import ADAPTER, END, HEARTBEAT, WEIGHTS

log = logging.getLogger(__name__)

HEARTBEAT_S, SLEEP_AGAIN_S = 30.0, 1.0
"""Seconds between heartbeats from rank 0 to the other ranks, and between sleep orders while the vLLM engine is still awake."""
FIRST_PROBES = 3
"""Maximum number of attempts to probe the first version when no actor answers."""
SHOWN_IN_SPAN = ("sequences_trained", "tokens_trained", "loss", "ess", "skipped")


class PolicyTrainer:
    """Trains the policy, and makes its snapshots and checkpoints. All methods block. Call all on the same thread."""

    def __init__(self, learner: Learner, tokenizer: PreTrainedTokenizerBase, sender: WeightSender, recipe: Recipe) -> None:
        self.learner, self._recipe = learner, recipe
        self.tokenizer, self.sender, self.vocab_size = tokenizer, sender, learner.policy.vocab_size
        self.num_ranks = learner.world.layout.size
        self._converted = frozenset() if sends_adapters(recipe) else converted_parameters(learner.policy.model)
        self._version: int | None = None
        """Version of the weights; None before this process's first step."""
        self._snapshot: Snapshot | None = None
        """Copy of the current weights; None if none has been made yet."""
        self._state = StateSaver(learner)
        self._export = PolicyExport(learner.policy.model, tokenizer, DTYPES[recipe.model.dtype])

    def step(self, prepared: PreparedStep) -> dict[str, Any]:
        self._snapshot = None
        figures = self.learner.step(prepared)
        self._version = prepared.version + 1  # a skipped step counts, too
        if figures["skipped"]:
            ids = ",".join(prepared.sequence_ids)
            log.error("step skipped: the loss or a gradient is not finite", extra={"sequences": ids})
        return figures

    def end(self) -> None:
        """Order the other ranks to end, and wait for a checkpoint that is being written."""
        self.learner.order(END)
        self._state.end()

    def snapshot(self, version: PolicyVersion) -> Snapshot:
        """Copy the current weights, which must be of `version`, in the form that actors receive."""
        if self._snapshot is None:
            if sends_adapters(self._recipe):
                sent = self.learner.gather(ADAPTER)
            else:
                weights = self.learner.gather(WEIGHTS, self.sender.manifest.wire_dtype)
                sent = as_in_files(self.learner.policy.model, weights, self._converted)
            self._snapshot = self.sender.snapshot(version, sent)
        return self._snapshot

    def leave_gpu(self) -> None:
        """Release GPU memory that torch only caches, for example for activations. Weights and moments stay on the GPU."""
        torch.cuda.empty_cache()

    def begin_checkpoint(self, version: int) -> Callable[[Path], None]:
        """Copy the training state on all ranks, and gather the weights to export on rank 0. The weights must be of `version`.

        Return a function that writes the export into an existing folder, and the state into `resume/state` below it. Call it at
        most once, on another thread, before the next checkpoint begins, and then sync the export; the state is already durable.
        It raises `OSError`, and `ServiceError` if a rank cannot write.
        """
        assert self._version in (None, version), f"the weights are of version {self._version}, not {version}"
        self._state.stage()
        self._export.stage(self.learner)
        about = {"recipe": self._recipe.name, "policy_version": version, "seed": self._recipe.seed}

        def write(folder: Path) -> None:
            try:
                self._export.write(folder, about)
            except BaseException:
                self._state.abandon()  # otherwise the other ranks would wait for the folder's name
                raise
            self._state.write(folder / RESUME / STATE)

        return write


def load_policy_trainer(
    recipe: Recipe, settings: TrainerSettings, ranks: RankSettings, start: Start | None = None
) -> PolicyTrainer:
    """Rank 0: load the model, the tokenizer and the checkpoint's state. Raises the errors of `load_learner`, and `OSError` if
    this process cannot listen on `transfer_port`."""
    backend = transfer_backend(recipe.weights.backend, torch.cuda.is_available())
    source = model_source(recipe, settings)
    tokenizer = load_tokenizer(source, recipe)
    tensors = start.folder / STATE if start and start.folder else None
    learner = load_learner(recipe, source, ranks, tensors, settings.revision)
    layout, policy = learner.world.layout, learner.policy
    facts = {
        "ranks": layout.size,
        "shard_ranks": layout.shard_ranks,
        "context_parallel": layout.sequence_ranks,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "trained": sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad),
        "value_head": policy.value_head is not None,
        "attention": learner.policy.attention,
    }
    log.info("policy ready", extra=facts)
    store = GroupStore(settings.transfer_host, settings.transfer_port, settings.advertise_host)
    sender = weight_sender(learner, recipe, backend, store, settings.advertise_host)
    return PolicyTrainer(learner, tokenizer, sender, recipe)


class OptimizerLoop:
    """The training loop. It owns the policy version, which begins at the version of `start`."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        start: Start,
        journal: Journal,
        bus: Bus,
        policy: PolicyTrainer,
        intake: Intake,
        feeder: Feeder,
        updater: WeightUpdater,
        evaluator: Evaluator,
        recorder: Recorder,
        uploads: Uploads,
        turn: GpuTurn | None = None,
    ) -> None:
        self._turn = turn
        self._run_dir, self._start, self._bus, self._uploads = run_dir, start, bus, uploads
        self.journal = journal
        self._recipe, self._policy, self._intake, self._feeder = recipe, policy, intake, feeder
        self._updater, self._evaluator, self._recorder = updater, evaluator, recorder
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._measuring: asyncio.Task[None] | None = None
        self._digesting: asyncio.Task[None] | None = None
        self._next: asyncio.Task[tuple[list[TrainingGroup], Any]] | None = None
        begin = functools.partial(self._in_compute, policy.begin_checkpoint)
        self.checkpoints = Checkpointer(
            run_dir, recipe.checkpoint, journal, start, begin, self._capture, self._checkpoint_written
        )
        self._unrecorded: Callable[[], None] = lambda: None
        """Writes the record of the last computed step, unless it is already written."""
        self._batch_at = time.monotonic()
        self._base: Logprobs | None = None
        """Log-probabilities of the probe when this trainer started (with adapters, of the initial model); None = no probe."""
        self._carried_s: dict[str, float] = {}
        """Seconds spent since the last step's record, by activity. The next step's record includes them."""
        self._passed_over = False
        """True if the current version was not sent, because a measurement delays the commit of an earlier version."""
        self.skipped_in_a_row = start.state.figures["skipped_in_a_row"] if start.state else 0
        self._closed = self.stopping = False
        self.version = start.version
        self.waiting_for = "actors"

    @property
    def measuring(self) -> bool:
        return self._measuring is not None and not self._measuring.done()

    async def take_over(self) -> int:
        """Take over the work of an earlier trainer, if any. Return how many groups were published again."""
        start, feeder, intake = self._start, self._feeder, self._intake
        valid_bytes = start.state.journal_bytes if start.state else 0
        said = {"incarnation": start.lineage.incarnation, "version": start.version, "keep": valid_bytes}
        self.journal.write({"event": "start", **said, **({"changes": start.changes} if start.changes else {})})
        await asyncio.to_thread(self.journal.sync)
        reserved = await asyncio.to_thread(reserved_groups, self._run_dir / JOURNAL)
        feeder.tokens = await asyncio.to_thread(group_tokens, self._run_dir, reserved)
        feeder.bounds.steps_begun = start.version
        if (state := start.state) is not None:
            feeder.tracker.restore(state.tracker)
            feeder.next_group = state.next_group
            intake.restore(state.held, state.position)
            intake.tokens_arrived, intake.bad_messages = state.figures["tokens_arrived"], state.figures["bad_messages"]
            self._recorder.restore(state.figures["report"])
        return await self._adopt(reserved) if start.again else 0

    async def _adopt(self, reserved: int) -> int:
        """Take over the previous incarnation's groups from the streams. Return how many were published again."""
        intake, incarnation = self._intake, self._start.lineage.incarnation
        if is_emptied := intake.position == NOTHING_THERE:
            await retry_forever(self._bus.empty, "empty the streams after a rollback")
            intake.position = (await self._bus.sequences_info()).last_position
        position, prompts, arrived = await retry_forever(lambda: scan_in_flight(self._bus, intake.position), "read the streams")
        if position < intake.position or is_emptied:  # if NATS lost its data, positions may begin at 1 again
            self.journal.write({"event": "position", "position": position})
            self.checkpoints.positions = dict.fromkeys(self.checkpoints.positions, position)
        intake.position = position
        published = await self._feeder.adopt(reserved, prompts, arrived, f"i{incarnation}")
        log.info(
            "incarnation %d resumes from version %d and position %d of SEQUENCES; %d groups are open, %d were published again",
            incarnation,
            self.version,
            position,
            len(self._feeder.tracker.open_groups),
            published,
        )
        return published

    async def run(self) -> None:
        """Send the first version, train, and evaluate the last version. Raises `ServiceError` after too many consecutive
        skipped steps, and `FieldError` if the first parity probe fails, or a later one with `weights.stop_on_mismatch`."""
        try:
            await self._offer({})
            await self._updater.all_served()
            await self._check_policy()
            if evaluates_first(self._start, self._recipe):
                self._measure(None, evaluate=True)
            while self.version < self._recipe.trainer.steps:
                await self._step()
            self.waiting_for = "actors to serve the last version"
            await self._measured()
            await self._updater.all_served()
        finally:
            for task in (self._measuring, self._next):
                if task is not None:
                    task.cancel()
            if self._digesting is not None:
                await self._digesting

    async def heartbeat(self) -> None:
        """Send heartbeats to the other ranks, if any, until cancelled. Raises `RuntimeError` if a rank is gone."""
        while self._policy.num_ranks > 1:
            await self._in_compute(self._policy.learner.order, HEARTBEAT)
            await asyncio.sleep(HEARTBEAT_S)

    async def request_checkpoint(self) -> WrittenCheckpoint:
        """Write a checkpoint now, or after the running step. Raises `ServiceError` if that fails or the run has ended."""
        try:
            if self._closed:
                raise ServiceError(RUN_ENDED)
            return await self.checkpoints.write()
        except (RuntimeError, asyncio.CancelledError):
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):  # the compute thread takes no more work
                raise ServiceError(RUN_ENDED) from None
            raise

    async def dismiss(self, timeout_s: float) -> None:
        """Order the other ranks to end. If they still compute after `timeout_s`, they end when this process disconnects."""
        if self._policy.num_ranks > 1:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._in_compute(self._policy.end)
            except TimeoutError:
                log.warning("the other ranks still compute after %.0f s; they end when this process disconnects", timeout_s)
            except RuntimeError as error:  # from torch.distributed: the ranks are gone, and no longer needed
                log.warning("the other ranks could not be ordered to end: %s", error)

    def close(self) -> None:
        """Refuse further computations and checkpoints. Do not wait for those that are running."""
        self._closed = True
        self.checkpoints.close()
        self._compute.shutdown(wait=False, cancel_futures=True)

    async def _step(self) -> None:
        if not self.measuring:
            await self._measured()
        seconds, began_at = self._carried_s, time.monotonic()
        self._carried_s = {}
        self.waiting_for = f"sequences for step {self.version + 1}"
        held_by_max_lag = self._feeder.room.held_by_max_lag
        with measured(seconds, "wait"):
            batch, prepared = await (self._next or self._prepared(self.version))
            await self._take_gpu()
        self.waiting_for = ""
        last_at, self._batch_at = self._batch_at, time.monotonic()
        self._feeder.begin_step(seconds["wait"] / (self._batch_at - last_at), for_max_lag=held_by_max_lag)
        async with self.checkpoints.step():
            self._next = None
            if self.version + 1 < self._recipe.trainer.steps:  # take and plan the next batch during this step
                self._next = asyncio.create_task(self._prepared(self.version + 1))
            ids = (sequence.sequence_id for group in batch for sequence in group.sequences)
            with self._intake.traces.step(self.version + 1, ids) as span:
                with measured(seconds, "compute"):
                    async with self._recorded(batch):
                        figures = await self._in_compute(self._policy.step, prepared)
                if self._recipe.weights.verify_logprobs:
                    self._intake.quarantine.judge(figures[LAG_0_TOKENS])
                self._intake.close(batch, self.version + 1, skipped=bool(figures["skipped"]))
                self.version += 1
                self.skipped_in_a_row = self.skipped_in_a_row + 1 if figures["skipped"] else 0
                shown = (name for name in SHOWN_IN_SPAN if figures.get(name) is not None)
                span.set_attributes({f"pipelinerl.step.{name}": figures[name] for name in shown})
            self._unrecorded = functools.partial(self._record, figures, batch, seconds, began_at)
        self._feeder.look_again()
        evaluate = self._due(self._recipe.evaluation.every_steps) or self.version == self._recipe.trainer.steps
        measure = evaluate or (not self.measuring and self._due(self._recipe.weights.probe_every))
        # On a shared GPU, score the probe before the offer: afterwards, the engine needs the memory.
        probed = await self._probe_scores() if measure and self._turn is not None else None
        if starts_phase(self._recipe, self.version) or self.version == self._recipe.trainer.steps:
            await self._offer(seconds, measure=measure)
        seconds["total"] = time.monotonic() - began_at
        if measure:
            self._measure(probed if self._turn is not None else await self._probe_scores(), evaluate=evaluate)
        if self.version == self._recipe.trainer.steps:
            self.waiting_for = f"the evaluation of version {self.version}"
            await self._measured()  # the last record includes the evaluation of its version
        self._unrecorded()
        if self.skipped_in_a_row >= self._recipe.trainer.max_skipped_steps:
            raise ServiceError(
                f"the last {self.skipped_in_a_row} optimizer steps were skipped ({figures['skipped']}), which reaches "
                "trainer.max_skipped_steps: the policy is broken; try a lower "
                "trainer.learning_rate or trainer.max_grad_norm, more trainer.warmup_steps, or model.dtype float32"
            )
        if self.version < self._recipe.trainer.steps:
            with measured(self._carried_s, "checkpoint"):
                await self.checkpoints.if_due(self.version)
        if self._passed_over:
            await self._offer_when_measured()

    @asynccontextmanager
    async def _recorded(self, batch: list[TrainingGroup]) -> AsyncIterator[None]:
        """With `record: true`, write the batch while the block computes its step, and then begin to hash the new weights."""
        if not self._recipe.record:
            yield
            return
        if self.version == self._start.version:
            await self._begin_digest(self.version)
        recorded = RecordedStep(self.version + 1, batch, software(self._recipe, self._policy.num_ranks))
        writing = asyncio.create_task(asyncio.to_thread(write_step, self._run_dir, recorded))
        yield
        await writing
        await self._begin_digest(self.version + 1)

    async def _begin_digest(self, version: int) -> None:
        """Copy the current weights (`version`), wait until the previous hash is journaled, and begin to hash the copy."""
        snapshot = await self._in_compute(self._policy.snapshot, PolicyVersion(self._start.lineage.incarnation, version))
        if self._digesting is not None:
            await asyncio.shield(self._digesting)  # not cancelled with the run, which journals the hash at its end
        self._digesting = asyncio.create_task(self._journal_digest(version, snapshot))

    async def _journal_digest(self, version: int, snapshot: Snapshot) -> None:
        sha256 = await asyncio.to_thread(snapshot.sha256)
        self.journal.write({"event": "weights", "version": version, "sha256": sha256.hex()})

    def _capture(self) -> RunState:
        """Return all state of the run except tensors."""
        self._unrecorded()  # the figures must include the last step's record
        self.journal.flush()
        figures = {
            "tokens_arrived": self._intake.tokens_arrived,
            "bad_messages": self._intake.bad_messages,
            "skipped_in_a_row": self.skipped_in_a_row,
            "report": self._recorder.to_state(),
        }
        return RunState(
            run=self._bus.run,
            policy_version=self.version,
            recipe=self._recipe.model_dump(mode="json"),
            journal_bytes=self.journal.size,
            tracker=self._feeder.tracker.to_state(),
            next_group=self._feeder.next_group,
            position=self._intake.position,
            held=self._intake.held(),
            figures=figures,
        )

    async def _checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._recorder.metrics.checkpoint_seconds.observe(written.seconds)
        await self._uploads.take(written.folder, written.version)

    async def _prepared(self, version: int) -> tuple[list[TrainingGroup], Any]:
        batch = await self._intake.take_batch(version)
        return batch, await asyncio.to_thread(self._policy.learner.prepare, batch, version)

    async def _offer(self, seconds: dict[str, float], *, measure: bool = False) -> None:
        """Begin to send the current version, unless a measurement delays the commit of an earlier one. In conventional mode,
        wait until it is served. `measure`: first wait for a running measurement, as this version is measured next."""
        if measure:
            with measured(seconds, "send"):
                await self._measured()
        self._passed_over = self.measuring and self._updater.commit_held
        if self._passed_over:
            return
        version = PolicyVersion(self._start.lineage.incarnation, self.version)
        with measured(seconds, "snapshot"):
            snapshot = await self._in_compute(self._policy.snapshot, version)
            if self._turn is not None:
                await self._in_compute(self._policy.leave_gpu)
                self._turn.release()
        before, self.waiting_for = self.waiting_for, "actors to take new weights"
        with measured(seconds, "send"):
            await self._updater.offer(self.version, snapshot)
            if self._recipe.mode == "conventional":
                await self._updater.all_served()
        self.waiting_for = before
        self._feeder.look_again()

    async def _take_gpu(self) -> None:
        """With `actor.colocate`, wait until the vLLM engine sleeps. A running measurement must end first."""
        if self._turn is None or self._turn.is_held:
            return
        self.waiting_for = "the engine to sleep"
        await self._measured()
        while not self._turn.is_held:  # repeated, because an actor ignores the order while it cannot sleep
            await self._updater.order_sleep()
            with suppress(TimeoutError):
                async with asyncio.timeout(SLEEP_AGAIN_S):
                    await self._turn.take()

    async def _offer_when_measured(self) -> None:
        """Send the version that `_offer` left unsent, if the measurement ends before the next batch is ready."""
        assert self._next is not None, "the last version is measured, and always sent"
        assert self._measuring is not None, "a measurement kept the version from being sent"
        with measured(self._carried_s, "wait"):
            await asyncio.wait((self._next, self._measuring), return_when=asyncio.FIRST_COMPLETED)
        if not self.measuring:
            await self._offer(self._carried_s)

    def _due(self, every_steps: int) -> bool:
        """Return whether to measure now: every `every_steps` steps (0 = never), in conventional mode only between phases."""
        return every_steps > 0 and self.version % every_steps == 0 and starts_phase(self._recipe, self.version)

    async def _check_policy(self) -> None:
        """Compare the first version that the actors serve with the trainer's weights. Raises `FieldError` if they differ."""
        self._base = await self._probe_scores(adapters=False)
        if (trained := await self._probe_scores()) is None:
            return
        for _ in range(FIRST_PROBES):  # an actor may have died meanwhile
            if (parity := await self._evaluator.parity(self.version, trained, self._base)) is not None:
                break
            await self._updater.all_served()
        else:
            return
        self._recorder.parity(parity)
        if parity.problems:
            fix = (
                f"nothing is trained, since the actors' policy differs from the trainer's: {'; '.join(parity.problems)}. "
                "Check their model, revision and dtype, actor.engine.quantization, and whether the loader suits the model; "
                "raise the tolerance only for a difference that you expect"
            )
            raise FieldError("weights.probe_tolerance", self._evaluator.tolerance, fix)

    async def _probe_scores(self, *, adapters: bool = True) -> Logprobs | None:
        """Return the trainer's log-probabilities of the probe; None if probes are off."""
        if self._recipe.weights.probe_every == 0:
            return None
        score = functools.partial(self._policy.learner.score, self._evaluator.probe, adapters=adapters)
        scores: Logprobs = await self._in_compute(score)
        return scores

    def _measure(self, trained: Logprobs | None, *, evaluate: bool) -> None:
        """Start to measure the current version once actors serve it. No later version is committed before the measurement ends.
        `trained`: the trainer's scores of the probe; None = no probe."""
        self._measuring = asyncio.create_task(self._measure_version(self.version, trained, evaluate))

    async def _measured(self) -> None:
        task, self._measuring = self._measuring, None
        if task is not None:
            await task

    async def _measure_version(self, version: int, trained: Logprobs | None, evaluate: bool) -> None:
        async with self._updater.hold_when_served(version):
            began_at = time.monotonic()
            if trained is not None and (parity := await self._evaluator.parity(version, trained, self._base)) is not None:
                self._recorder.parity(parity)
                if parity.problems and self._recipe.weights.stop_on_mismatch:
                    raise FieldError("weights.stop_on_mismatch", True, "; ".join(parity.problems))
            if evaluate:
                try:
                    result = await self._evaluator.evaluate(version)
                    if not (self.stopping and result.overall.unanswered):  # a stop also ends actors, which then do not answer
                        self._recorder.heldout(result)
                except ServiceError as error:
                    log.error("the held-out evaluation is skipped: %s", error)
            self._recorder.commits_held(time.monotonic() - began_at)

    def _record(
        self, figures: Mapping[str, Any], batch: list[TrainingGroup], seconds: dict[str, float], began_at: float
    ) -> None:
        self._unrecorded = lambda: None
        record: StepRecord = {
            "step": self.version,
            "policy_version": self.version,
            "served_version": self._updater.served_version,
            **figures,
            **self._feeder.take_figures(),
        }
        record["step_s"] = {"total": time.monotonic() - began_at, **seconds}
        # No step is computed while the snapshot is made, or while the loop waits for actors to serve a version.
        record["idle_s"] = seconds.get("snapshot", 0.0) + seconds.get("send", 0.0)
        self.journal.flush()  # before the record, because its readers may audit the step
        self._recorder.step(record, batch, self._intake.tokens_arrived)

    async def _in_compute(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call, *arguments)
