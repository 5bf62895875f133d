"""Who watches a run: files and summary, metrics, live page, trackers, Events, the gRPC feed of steps, log lines.

The run says once what has happened, and each of them hears it from here. None of them changes what the run does. On the
trainer's event loop; nothing waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.ledger import Ledger, Outcome
from pipelinerl.run_summary import RunSummary
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.run_state import Start
from services.trainer.checkpoint.writer import WrittenCheckpoint
from services.trainer.data.actor_client import ActorLoad
from services.trainer.data.evaluation import HeldoutResult
from services.trainer.data.feeder import Feeder
from services.trainer.data.intake import Intake
from services.trainer.data.tracker import SequenceTracker
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loop import OptimizerLoop
from services.trainer.records import RunFiles, StepRecord
from services.trainer.reporting.board import PageBoard
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.page import RunPage
from services.trainer.reporting.report import RunReport
from services.trainer.reporting.scaling import ReplicaAdvice
from services.trainer.reporting.status import RunStatus
from services.trainer.reporting.token_pieces import TokenPieces
from services.trainer.reporting.trackers import RunTrackers
from services.trainer.server import StepFeed
from services.trainer.weight_sync.coordinator import EvictionCause
from services.trainer.weight_sync.membership import MemberChange
from services.trainer.weight_sync.session import UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sinks:
    """Where a run is told of; opened and closed by whoever serves it."""

    metrics: TrainerMetrics
    files: RunFiles
    events: RunEvents
    trackers: RunTrackers
    context: LogContext
    board: PageBoard | None = None
    """Of the live page; None: it is off."""


class RunObservers:
    """See the module. `watch` comes once the parts of the run are there, before anything happens."""

    def __init__(
        self, settings: TrainerSettings, recipe: Recipe, start: Start, tokenizer: PreTrainedTokenizerBase, to: Sinks
    ) -> None:
        self._total_steps, self._max_lag, self._start = recipe.trainer.steps, recipe.algorithm.max_lag, start
        self._metrics, self._events, self._trackers, self._context = to.metrics, to.events, to.trackers, to.context
        self._context.policy_version = start.version
        self._replicas = ReplicaAdvice(recipe, to.metrics.registry)
        self._status: RunStatus | None = None
        self.page = RunPage(to.board, lambda: self._status.for_page() if self._status else {})
        self.page.begin(settings.run, recipe, settings.run_dir, to.files.kept)
        self.report = RunReport(recipe, to.files, to.metrics, TokenPieces(tokenizer), self.page.sample)
        self.feed = StepFeed(to.files.kept)

    def watch(
        self,
        status: RunStatus,
        loop: OptimizerLoop,
        updater: WeightUpdater,
        feeder: Feeder,
        intake: Intake,
        books: SequenceTracker,
    ) -> None:
        """Where the page and a scrape read what is true when they ask."""
        self._status = status
        metrics, start = self._metrics, self._start
        metrics.progress.begin(self._total_steps, start.version if start.state else None, start.saved_at_s)
        metrics.progress.watch(lambda: status.phase, lambda: loop.version, lambda: updater.served_version)
        metrics.token_lag.bound(self._max_lag)
        metrics.queues.watch(intake, lambda: feeder.allowance)
        metrics.membership.watch(updater)
        metrics.outcomes.watch(
            books, lambda: intake.tokens_arrived_here, lambda: intake.bad_messages + updater.bad_messages
        )

    # --- the run -----------------------------------------------------------------------------------------------------

    def started(self) -> None:
        self._events.started(self._start.version, self._total_steps, self._start.lineage.incarnation)

    def training_begins(self) -> None:
        self._metrics.progress.training_begins()

    def step(self, figures: StepRecord, batch: list[TrainingGroup], tokens_arrived: int, version: int) -> None:
        """One optimizer step, after which the trainer is at `version`."""
        record = self.report.step(figures, batch, tokens_arrived)
        self._replicas.step(record)
        self.feed.add(record)
        self._trackers.step(record)
        self.page.step(record)
        self._context.policy_version = version
        shown = {key: record.get(key) for key in ("reward_mean", "heldout_accuracy", "ess", "loss")}
        log.info("step %d", record["step"], extra=shown)

    def heldout(self, result: HeldoutResult) -> None:
        self.report.heldout(result)
        self._trackers.heldout(result)

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._metrics.progress.checkpoint_written(written)
        self._events.checkpoint_written(written)

    def summary(self, ledger: Ledger, version: int, evictions: int, *, finished: bool) -> RunSummary:
        """Writes what is known of the run so far."""
        return self.report.write_summary(
            ledger.counts.as_dict(),
            {outcome.value: ledger.reasons(outcome) for outcome in Outcome},
            version,
            interrupted=not finished,
            evictions=evictions,
        )

    def in_order(self, version: int, *, finished: bool) -> None:
        """The run came to its last step, or was stopped before; it did not fail."""
        self._events.ended(version, self._total_steps, finished=finished)

    def end(self, summary: RunSummary, *, finished: bool) -> None:
        """However it ended: nobody hears of it after this."""
        log.info("run ended", extra={"steps": summary["steps"], "heldout": summary["heldout_accuracy_last"]})
        self.page.publish()
        self._trackers.end(summary, finished=finished)
        if finished:
            self._replicas.finish()
        self.feed.end()

    def streams_seen(self, stream: str, info: StreamInfo) -> None:
        """`prompts` or `sequences`, as it is now."""
        self._metrics.queues.saw(stream, info)

    # --- its members and weight updates ------------------------------------------------------------------------------

    def loads(self, loads: Mapping[str, ActorLoad], *, measuring: bool) -> None:
        """What the actors answered when they were asked; `measuring`: they are being evaluated."""
        self.report.actor_loads(loads)
        self._replicas.actors(loads, measuring=measuring)

    def served(self, update: UpdateRecord) -> None:
        self.report.update_served(update)

    def joined(self, actor: str, update: UpdateRecord) -> None:
        self.report.joined(actor, update)

    def update_aborted(self, version: int, epoch: int, actor: str, reason: str) -> None:
        self._metrics.membership.aborted()
        self._events.update_failed(version, epoch, actor, reason)

    def member_changed(self, change: MemberChange, serving: AbstractSet[str]) -> None:
        """`serving`: actors at the served version when it changed, that of the change counted or not."""
        self._metrics.membership.changed(change)
        others = serving - {change.member.actor}
        self._events.member(change, len(others) + (change.kind == "joined"))

    def regrouped(self, epoch: int) -> None:
        self._metrics.membership.regrouped()

    def evicted(self, cause: EvictionCause) -> None:
        self._metrics.membership.evicted(cause)
