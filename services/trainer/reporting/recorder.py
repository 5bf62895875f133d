"""The recorder of a run. It passes the run's events to every sink: files, metrics, page, trackers, gRPC step feed and logs.

It makes one record per optimizer step, adds up the run's totals, and writes the summary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelinerl.doctor.runs import examine_run
from pipelinerl.errors import FieldError
from pipelinerl.figures import no_events
from pipelinerl.messages.sequences import FinishReason, Sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.accuracy import means_of
from pipelinerl.rl.groups import CUT_STEPS, CUTTING, MOST_CUT, WAIT_SHARE, answer_reward, narrow_clip_range
from pipelinerl.rl.ledger import Outcome
from pipelinerl.rl.throughput import MOST_STALE, too_small_max_lag
from pipelinerl.run_summary import METRICS, SAMPLES, RunFiles, RunTotals, StepRecord, jsonl_ends
from pipelinerl.service.logs import LogContext
from pipelinerl.tasks.final_answer import FOUND_NONE, occurs
from pipelinerl.v1 import trainer_pb2
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.checkpoint.run_state import Start
from services.trainer.data.evaluation import HeldoutResult, Parity
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import LAG_0_TOKENS, SAMPLED_WEIGHTS, sampled_sequences
from services.trainer.reporting.metrics import RunView, TrainerMetrics, bounded, phase_name, replica_advice
from services.trainer.reporting.page import PageBoard, about, member_rows
from services.trainer.reporting.samples import Sample, has_tokens, reference_answer, sample_of, without_tokens
from services.trainer.reporting.trackers import RunTrackers
from services.trainer.server import StepFeed
from services.trainer.weight_sync.membership import MemberChange, UpdateRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PAGE_STATE_EVERY_S = 1.0
MOST_SPREADS = 24
SAMPLES_READ = 256
"""Number of first samples, and of last samples, that a resumed run reads for the page."""


class Recorder:
    """Records the events of a run. Call `watch` before the first event."""

    def __init__(
        self,
        recipe: Recipe,
        files: RunFiles,
        metrics: TrainerMetrics,
        *,
        board: PageBoard | None = None,
        trackers: RunTrackers | None = None,
        context: LogContext | None = None,
        start: Start | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """If `board` or `trackers` is None, the run has none. The caller opens and closes `files` and `trackers`."""
        self._recipe, self._start = recipe, start or Start()
        self._files, self.metrics, self._board = files, metrics, board
        self._trackers = trackers or RunTrackers()
        self._context = context or LogContext("", "trainer", "")
        self._context.policy_version = self._start.version
        self._tokenizer = tokenizer
        self._replicas = replica_advice(recipe, metrics.registry)
        self._used_up: int | None = None
        self._warned: set[str] = set()
        self._cut: deque[float] = deque(maxlen=CUT_STEPS)
        """Fraction of tokens that the loss clipped in each recent step. Empty if the loss does not clip."""
        self._phase = trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        self._ended = ""
        self._started_at = self._last_step_at = time.monotonic()
        self._arrived = no_events()
        self._loads: dict[str, ActorState] = {}
        """Newest state of each actor by name, including actors that have left."""
        self.totals = RunTotals()
        self._findings: list[dict[str, Any]] = []
        self._examined_at = 3
        """Number of steps after which the run is examined next. It grows geometrically, as an examination reads all records."""
        self.progress = {"steps": str(recipe.trainer.steps)}
        """Figures of the newest step and evaluation, as text, for the run's ConfigMap."""
        self.feed = StepFeed(files.kept)
        self._tell_page(
            lambda board: board.begin(
                about(self._context.run, recipe, files.run_dir), files.kept, jsonl_ends(files.run_dir / SAMPLES, SAMPLES_READ)
            )
        )

    def watch(self, view: Callable[[], RunView]) -> None:
        """Set `view`, which returns the run's current state on demand."""
        self._view = view
        self.metrics.steps.planned.set(self._recipe.trainer.steps)
        algorithm = self._recipe.algorithm
        self.metrics.steps.lag_bound.set(algorithm.max_lag if algorithm.max_lag_of == "oldest_token" else None)
        self.metrics.watch(view, lambda: self._phase_of(view()))

    def to_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON-compatible values."""
        return {"time_s": time.monotonic() - self._started_at, "totals": asdict(self.totals)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from an earlier trainer's `to_state`. The time between the two trainers does not count."""
        self._last_step_at = time.monotonic()
        self._started_at = self._last_step_at - state["time_s"]
        self.totals = RunTotals.from_state(state["totals"])

    def training_begins(self) -> None:
        log.info("run %s trains from version %d to %d", self._context.run, self._start.version, self._recipe.trainer.steps)
        self._phase = trainer_pb2.TRAINER_PHASE_TRAINING

    def step(self, figures: StepRecord, batch: list[TrainingGroup], tokens_arrived: int) -> StepRecord:
        """Complete the record of one optimizer step on `batch`, pass it to every sink and return it."""
        record = self._complete(figures, batch, tokens_arrived)
        self._arrived = no_events()
        self.totals.add_step(record)
        record["max_lag_too_small"] = self._max_lag_too_small(record)
        record["clip_range_cut"] = self._clip_range_cut(record)
        self._files.append(METRICS, record)
        self.metrics.steps.observe(record)
        self._advise(record)
        weights = figures.get(SAMPLED_WEIGHTS, {})
        for sequence in sampled_sequences(batch):
            known = weights.get(sequence.sequence_id)
            self._sample(sample_of(sequence, self._tokenizer, known, step=record["step"], version=record["step"] - 1))
        self.feed.add(record)
        self._trackers.step(record)
        self._tell_page(lambda board: board.step(record))
        self._context.policy_version = record["policy_version"]
        lag = (record.get("lag") or {}).get("mean")
        self.progress |= {"step": str(record["step"])} | ({} if lag is None else {"lag": f"{lag:.2f}"})
        shown = {key: record.get(key) for key in ("reward_mean", "heldout_accuracy", "ess", "loss")}
        log.info("step %d", record["step"], extra=shown)
        return record

    def heldout(self, result: HeldoutResult) -> None:
        figures = {
            "heldout_accuracy": result.overall.accuracy.value,
            "heldout_accuracy_lower_bound": result.overall.lower_bound,
            "heldout_version": result.version,
            "heldout_unanswered": result.overall.unanswered,
            "heldout_tokens": result.num_tokens,
            "heldout_sets": {name: asdict(accuracy) for name, accuracy in result.sets.items()},
        }
        self._arrived |= figures
        self.progress["heldoutAccuracy"] = f"{result.overall.accuracy.value:.4f}"
        self.totals.add_events(figures)
        for sample in result.samples:
            self._sample(sample_of(sample, self._tokenizer, step=result.version, version=result.version, heldout=True))
        self._trackers.heldout(figures)

    def parity(self, parity: Parity) -> None:
        self._arrived["parity_failures"] += len(parity.problems)
        if parity.mismatch is not None:
            self._arrived["logprob_mismatch"] = max(self._arrived["logprob_mismatch"] or 0.0, parity.mismatch)
        self.totals.add_events({"parity_failures": len(parity.problems), "logprob_mismatch": parity.mismatch})

    def commits_held(self, seconds: float) -> None:
        """Record that an evaluation or probe took `seconds`, in which no later version could be committed."""
        self._arrived["commits_held_s"] += seconds
        self.totals.add_events({"commits_held_s": seconds})

    def end(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Tell the page, the trackers and the step feed that the run has ended. Call this last."""
        shown = {"finished": finished, "steps": summary["steps"], "heldout": summary["heldout_accuracy_last"]}
        log.info("run ended", extra=shown)
        self._phase = trainer_pb2.TRAINER_PHASE_FINISHED
        self._ended = "finished" if finished else "stopped"
        self._tell_page(lambda board: board.state(self._page_state()))
        self._trackers.end(summary, finished=finished)
        if finished:
            self._replicas.finish()
        self.feed.add(None)

    def actor_loads(self, loads: Mapping[str, ActorState], *, measuring: bool) -> None:
        self._loads.update(loads)
        self._replicas.actors(loads, measuring=measuring)

    def served(self, update: UpdateRecord) -> None:
        """Record that all members serve a version. The next step's record gets the longest time of each kind among actors."""
        figures = {
            "version": update.version,
            "bytes": update.num_bytes,
            "transfer_s": update.transfer_s,
            "round_trip_s": update.round_trip_s,
            "receive_s": max(update.receive_s.values(), default=None),
            "prepare_s": max(update.prepare_s.values(), default=None),
            "stall_s": max(update.stall_s.values(), default=None),
            "members": len(update.stall_s),
        }
        self._arrived |= {"weight_update": figures, "stall_s": figures["stall_s"]}
        self.totals.add_update(update.num_bytes, update.transfer_s, update.stall_s.values())
        self.metrics.membership.served(update)

    def joined(self, actor: str, update: UpdateRecord) -> None:
        """Record that `actor` received the served version on a side group."""
        self._arrived["joins"].append({"actor": actor, "version": update.version, "join_s": update.round_trip_s})
        self.totals.join_s.append(update.round_trip_s)
        self.metrics.membership.join_seconds.observe(update.round_trip_s)

    def member_changed(self, change: MemberChange) -> None:
        if change.kind == "joined":
            self.metrics.membership.joins.inc()
        if change.cause is not None:
            self.metrics.membership.evictions.labels(change.cause.value).inc()
        others = set(self._view().updater.serving) - {change.member.actor}
        what = {
            "joined": f"joined and serves version {change.version}",
            "left": f"left: {change.reason}",
            "evicted": f"was evicted from epoch {change.epoch}: {change.reason}",
        }[change.kind]
        level = logging.WARNING if change.kind == "evicted" else logging.INFO
        num_serving = len(others) + (change.kind == "joined")
        log.log(level, "actor %s %s; actors that serve the newest version: %d", change.member.actor, what, num_serving)

    def _phase_of(self, run: RunView) -> trainer_pb2.TrainerPhase:
        """Return the phase. Sending weights to actors counts as training, because alerts rely on that."""
        if self._phase == trainer_pb2.TRAINER_PHASE_TRAINING and run.waiting_for.startswith("sequences"):
            return trainer_pb2.TRAINER_PHASE_WAITING_FOR_SEQUENCES
        return self._phase

    def status(self) -> trainer_pb2.TrainerStatus:
        run = self._view()
        phase = self._phase_of(run)
        waiting_for = "" if phase == trainer_pb2.TRAINER_PHASE_FINISHED else run.waiting_for
        return trainer_pb2.TrainerStatus(
            run=self._context.run,
            phase=phase,
            policy_version=run.version,
            incarnation=self._start.lineage.incarnation,
            total_steps=self._recipe.trainer.steps,
            sequences=trainer_pb2.SequenceCounts(**run.ledger.counts),
            members=len(run.updater.members),
            epoch=run.updater.epoch,
            message=f"waiting for {waiting_for}" if waiting_for else "",
            failures={**run.intake.failures, **run.feeder.refused},
        )

    async def publish_state(self) -> None:
        """Update the page's state about once a second until cancelled. Return at once if there is no page."""
        while self._board is not None:
            if self.totals.steps >= self._examined_at:
                self._examined_at = max(self.totals.steps + 3, self.totals.steps * 5 // 4)
                await self._examine()
            self._tell_page(lambda board: board.state(self._page_state()))
            await asyncio.sleep(PAGE_STATE_EVERY_S)

    async def _examine(self) -> None:
        """Update the doctor's findings from the run's files, except the journal, which is by far the longest."""
        try:
            reasons = {outcome.value: dict(self._view().ledger.reasons(outcome)) for outcome in Outcome}
            found = await asyncio.to_thread(examine_run, self._files.run_dir, self._recipe, reasons, is_running=True)
        except Exception:  # must not end the run
            log.exception("the run could not be examined; training goes on")
        else:
            self._findings = [one.to_json() for one in found]

    def _page_state(self) -> dict[str, Any]:
        status, run = self.status(), self._view()
        return {
            "phase": phase_name(status.phase),
            "message": status.message,
            "ended": self._ended,
            "findings": self._findings,
            "version": status.policy_version,
            "served_version": run.served_version,
            "incarnation": status.incarnation,
            "epoch": status.epoch,
            "members": member_rows(run.updater.states, run.updater.versions, self._loads),
            "sequences": run.ledger.counts,
            "actors_held_back": run.feeder.bounds.holds_actors_back,
            "reasons": {outcome.value: bounded(run.ledger.reasons(outcome)) for outcome in Outcome},
        }

    def _tell_page(self, tell: Callable[[PageBoard], None]) -> None:
        """Call `tell` with the page, if any. Errors are only logged, so that the page cannot end the run."""
        if self._board is not None:
            try:
                tell(self._board)
            except Exception:
                log.exception("the live page could not be updated; training goes on")

    def _complete(self, figures: StepRecord, batch: list[TrainingGroup], tokens_arrived: int) -> StepRecord:
        now = time.monotonic()
        since_last_s, self._last_step_at = now - self._last_step_at, now
        sequences = [sequence for group in batch for sequence in group.sequences]
        return {
            **{key: value for key, value in figures.items() if key not in (SAMPLED_WEIGHTS, LAG_0_TOKENS)},
            "time_s": now - self._started_at,
            **sequence_figures(sequences),
            "reward_std": float(np.std([sequence.reward for sequence in sequences])),
            **group_figures(batch),
            **answer_figures(batch, self._recipe),
            **episode_figures(sequences),
            **({"tasks": task_figures(sequences)} if self._recipe.tasks else {}),
            "reported": {name: means_of(one.reported for one in own) for name, own in _by_task(sequences).items()},
            "tokens_generated": tokens_arrived,
            "tokens_generated_per_s": (tokens_arrived - self.totals.tokens_generated) / since_last_s,
            "tokens_trained_per_s": figures["tokens_trained"] / since_last_s,
            "multi_version_fraction": float(np.mean([s.num_versions > 1 for s in sequences])),
            **self._arrived,
            "actor_busy_fraction": self._actor_busy_fraction(),
            "trainer_busy_fraction": (self.totals.compute_s + figures["step_s"]["compute"]) / (now - self._started_at),
        }

    def _advise(self, record: StepRecord) -> None:
        """Update the replica advice. The first step after a start counts 0 consumed sequences, as the number is unknown."""
        before, self._used_up = self._used_up, sum(record["sequences"][outcome] for outcome in Outcome)
        seconds = record["step_s"]
        self._replicas.step(0 if before is None else self._used_up - before, seconds["total"] - seconds.get("wait", 0.0))

    def _max_lag_too_small(self, record: StepRecord) -> bool:
        """Warn once and return True if a low `max_lag` makes the trainer wait, or makes too many sequences stale."""
        problem, seconds = too_small_max_lag(self._recipe, record["largest_lag"]), record["step_s"]
        if problem is None or record["step"] <= record["largest_lag"]:  # at first, only short sequences have ended
            return False
        ended = [sum(counts) for counts in zip(*self.totals.ended_by_length.values(), strict=True)]
        waits = seconds.get("wait", 0.0) > WAIT_SHARE * seconds["total"]
        if not (record.get("held_by_max_lag") and waits) and not (ended and ended[1] > MOST_STALE * sum(ended)):
            return False
        self._warn_once(problem)
        return True

    def _clip_range_cut(self, record: StepRecord) -> float | None:
        """Return the clipped fraction of recent steps' tokens; None if it is unknown or at most `MOST_CUT`. Warn once."""
        if self._recipe.algorithm.loss in CUTTING and not record["skipped"]:
            self._cut.append(record["clip_fraction"])
        share = sum(self._cut) / CUT_STEPS
        if len(self._cut) < CUT_STEPS or share <= MOST_CUT:
            return None
        self._warn_once(narrow_clip_range(self._recipe.algorithm, share))
        return share

    def _warn_once(self, problem: FieldError) -> None:
        if problem.field not in self._warned:
            log.warning("%s", problem)
        self._warned.add(problem.field)

    def _sample(self, sample: Sample) -> None:
        """Pass a sample to the page, the trackers and the file. The file gets tokens only at some steps, to stay small."""
        due = has_tokens(sample["step"], self._recipe.trainer.steps)
        self._files.append(SAMPLES, sample if due else without_tokens(sample))
        self._tell_page(lambda board: board.sample(sample))
        if self._recipe.tracker_samples:
            self._trackers.sample(sample)

    def _actor_busy_fraction(self) -> float | None:
        uptime_s = sum(load.uptime_s for load in self._loads.values())
        return sum(load.busy_s for load in self._loads.values()) / uptime_s if uptime_s else None

    def write_summary(self, *, finished: bool) -> dict[str, Any]:
        run, wall_s = self._view(), time.monotonic() - self._started_at
        summary = self.totals.summary(self._recipe, run.ledger.counts)
        summary["membership"]["evictions"] = run.updater.evictions
        summary |= {
            "policy_version": run.version,
            "interrupted": not finished,
            "wall_s": wall_s,
            "sequence_reasons": {outcome.value: counts for outcome in Outcome if (counts := run.ledger.reasons(outcome))},
            "actor_busy_fraction": self._actor_busy_fraction(),
            "trainer_busy_fraction": self.totals.compute_s / wall_s,
        }
        self._files.write_summary(summary)
        return summary


def episode_figures(sequences: list[Sequence]) -> dict[str, float]:
    """Return episode statistics, named as in metrics.jsonl; empty without episodes. Pure."""
    episodes = [sequence for sequence in sequences if sequence.turns]
    branches = [branch for episode in episodes for branch in episode.all_branches]
    if not episodes:
        return {}
    sampled = sum(branch.num_sampled_tokens for branch in branches)
    return {
        "turns_mean": sum(episode.num_turns for episode in episodes) / len(episodes),
        "branches_mean": len(branches) / len(episodes),
        "observed_fraction": 1 - sampled / sum(branch.num_completion_tokens for branch in branches),
    }


def sequence_figures(sequences: list[Sequence]) -> dict[str, float]:
    """Return the figures in `OF_TASK`, computed over `sequences`: all of a step, or those of one task. Pure."""
    return {
        "reward_mean": float(np.mean([one.reward for one in sequences])),
        "completion_tokens_mean": float(np.mean([one.num_episode_tokens for one in sequences])),
        "truncated_fraction": float(np.mean([one.finish_reason is FinishReason.LENGTH for one in sequences])),
    }


def task_figures(sequences: list[Sequence]) -> dict[str, dict[str, float]]:
    """Return a step's figures by task, named as in metrics.jsonl. Tasks without sequences are left out. Pure."""
    return {name: {"sequences": len(own), **sequence_figures(own)} for name, own in _by_task(sequences).items()}


def _by_task(sequences: list[Sequence]) -> dict[str, list[Sequence]]:
    tasks = sorted({sequence.task for sequence in sequences})
    return {task: [sequence for sequence in sequences if sequence.task == task] for task in tasks}


def group_figures(batch: list[TrainingGroup]) -> dict[str, float]:
    """Return how rewards differ within the groups of a step, by key in metrics.jsonl. Pure."""
    groups = [np.array([sequence.reward for sequence in group.sequences]) for group in batch]
    return {
        "group_reward_std": float(np.mean([rewards.std() for rewards in groups])),
        "equal_reward_groups": float(np.mean([len(set(rewards)) == 1 for rewards in groups])),
    }


def answer_figures(batch: list[TrainingGroup], recipe: Recipe) -> dict[str, Any]:
    """Return figures about a step's answers, named as in metrics.jsonl. Figures that do not apply are left out. Pure."""
    groups = [group.sequences for group in batch]
    full = {name: share.reward.correct for name, share in recipe.mixture.items()}
    earned = [(full.get(group[0].task, 1.0), [answer_reward(one.reward_components) for one in group]) for group in groups]
    scored = [(correct, known) for correct, of in earned if (known := [one for one in of if one is not None])]
    figures: dict[str, Any] = {}
    if scored:
        figures["groups_all_right"] = float(np.mean([min(known) >= correct for correct, known in scored]))
        figures["groups_all_wrong"] = float(np.mean([max(known) <= 0 for _, known in scored]))
    spread: dict[str, list[float]] = {}
    for group in groups:
        for name in group[0].reward_components if len(group[0].reward_components) > 1 else ():
            spread.setdefault(name, []).append(float(np.std([one.reward_components.get(name, 0.0) for one in group])))
    if spread:
        figures["term_spread"] = {name: float(np.mean(of)) for name, of in list(spread.items())[:MOST_SPREADS]}
    sequences = [one for group in groups for one in group if not one.turns]
    if sequences:
        missing = [one for one in sequences if one.reason.startswith(FOUND_NONE)]
        figures["identical_groups"] = float(np.mean([len({one.completion_text for one in group}) == 1 for group in groups]))
        figures["answers_absent"] = len(missing) / len(sequences)
        texts = [(str(reference_answer(one.reference_json) or "").strip(), one.completion_text) for one in missing]
        figures["answers_missed"] = sum(occurs(reference, completion) for reference, completion in texts) / len(sequences)
    return figures
