"""The trainer's Prometheus metrics. Figures of an optimizer step are set when its record is complete. Events are counted when
they happen. States are read at each scrape, on the HTTP thread."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.figures import FIGURES, Figure, plain
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.autoscaling import ReplicasWanted
from pipelinerl.rl.groups import StaleReason, issue_limit
from pipelinerl.rl.ledger import STATES, Ledger, Outcome
from pipelinerl.rl.memory import GIB
from pipelinerl.run_summary import StepRecord
from pipelinerl.telemetry.metrics import MOST_REASONS, OTHER, BoundedLabels, Labels, MetricSet, Reading, Values
from pipelinerl.v1 import trainer_pb2
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.checkpoint.store import Uploads
from services.trainer.data.feeder import Feeder
from services.trainer.data.intake import Intake
from services.trainer.learn.step import TRAIN
from services.trainer.weight_sync.coordinator import EvictionCause
from services.trainer.weight_sync.membership import MEMBER_STATES, UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater
from services.trainer.world import ADAPTER, HEARTBEAT, SAVE, SCORE, VALUE_HEAD, WEIGHTS

PREFIX = "pipelinerl_trainer"
ORDERS = (TRAIN, SCORE, WEIGHTS, ADAPTER, VALUE_HEAD, SAVE, HEARTBEAT)


def rank_orders(registry: CollectorRegistry) -> Counter:
    """Return a counter of the orders from rank 0 that another rank executes. Only the first rank of a node exports it."""
    return MetricSet(PREFIX, registry).counter(
        "rank_orders_total", "Orders from rank 0 that the first rank of another node executed.", {"kind": ORDERS}, unit="orders"
    )


OF_TASK = ("reward_mean", "completion_tokens_mean", "truncated_fraction")
"""Figures of a step that are also computed for each task."""
STEP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
PHASE_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
CHECKPOINT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
STEP_PHASES = ("wait", "compute", "snapshot", "send", "checkpoint")
COMPUTE_PHASES = ("plan", "build", "to_device", "forward_backward", "totals", "optimizer")


class TaskMetrics:
    """Step figures by task, and evaluation figures by problem set."""

    def __init__(self, metrics: MetricSet) -> None:
        task, sets = {"task": "one of the recipe's tasks"}, {"set": "the name of a task, or of one of evaluation.sets"}
        reported = {"figure": f"one of the first {MOST_REASONS} names of reward terms or environment metrics, or `turns`"}
        text = "Sequences of the step. One series per task, if there are several."
        self._of_task = {"sequences": metrics.reading("task_sequences", text, task)}
        for figure in (figure for figure in FIGURES if figure.key in OF_TASK):
            text = f"{plain(figure.text)} One series per task, if there are several."
            self._of_task[figure.key] = metrics.reading(f"task_{figure.metric}", text, task, unit=figure.unit)
        text = "Mean of a number that rewards or environments report, over the step's sequences of a task."
        self._reported = metrics.reading("task_reported_mean", text, {**task, **reported}, unit="as reported")
        text = "Held-out accuracy of one set of problems in the last evaluation."
        self._accuracy = metrics.reading("heldout_set_accuracy_ratio", text, sets)
        text = "pass@k of one set of problems in the last evaluation, for k = evaluation.samples, if that is above 1."
        self._passed = metrics.reading("heldout_set_pass_ratio", text, sets)
        text = "Mean of a reported number over the answers to one set of problems in the last evaluation."
        self._heldout_reported = metrics.reading("heldout_set_reported_mean", text, {**sets, **reported}, unit="as reported")
        self._names = BoundedLabels()

    def observe(self, record: StepRecord) -> None:
        for key, reading in self._of_task.items():
            reading.set({name: figures[key] for name, figures in record.get("tasks", {}).items()})
        self._reported.set(self._named(record.get("reported", {})))
        if sets := record.get("heldout_sets"):
            self._heldout_reported.set(self._named({name: one["reported"] for name, one in sets.items()}))
            self._accuracy.set({name: one["accuracy"]["value"] for name, one in sets.items()})
            largest_k = {name: [*one["pass_at"].values()][-1] for name, one in sets.items() if one["pass_at"]}
            self._passed.set({name: passed["value"] for name, passed in largest_k.items()})

    def _named(self, reported: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, ...], float]:
        each = {(of, self._names.of(name)): value for of, own in reported.items() for name, value in own.items()}
        return {labels: value for labels, value in each.items() if OTHER not in labels}


class StepMetrics:
    def __init__(self, metrics: MetricSet) -> None:
        self._readings, self._counters = list[tuple[Figure, Reading]](), list[tuple[Figure, Counter]]()
        for figure in FIGURES:
            text = plain(figure.help or figure.text)
            if figure.metric.endswith("_total"):
                self._counters.append((figure, metrics.counter(figure.metric, text, unit=figure.unit)))
            elif figure.metric:
                reading = metrics.reading(figure.metric, text, figure.labels, unit=figure.unit)
                self._readings.append((figure, reading))
        self._tasks = TaskMetrics(metrics)
        self._lags = metrics.histogram_of("token_lag_steps", LAG_TEXT, LAG_EDGES, TokenLagHistogram)
        self._lag_max = metrics.reading("token_lag_max_steps", "Largest token lag of the last step.")
        text = "algorithm.max_lag; no series if it is null, or if it bounds the mean lag of a sequence."
        self.lag_bound = metrics.reading("token_lag_bound_steps", text)
        self.planned = metrics.reading("planned_steps", "Optimizer steps of the whole run (trainer.steps).")
        self._step = metrics.histogram("step_seconds", "Duration of an optimizer step, including waits.", STEP_SECONDS)
        text = "Duration of each phase of a step; phases do not overlap."
        self._phases = metrics.histogram("step_phase_seconds", text, PHASE_SECONDS, {"phase": STEP_PHASES})
        text = "Duration of each phase of a step's computation; plan and build run during the previous step."
        self._compute = metrics.histogram("compute_phase_seconds", text, PHASE_SECONDS, {"phase": COMPUTE_PHASES})
        text = "Time in a step for which the weight update kept the trainer from computing."
        self._idle = metrics.histogram("update_idle_seconds", text, PHASE_SECONDS)
        text = "Peak memory. On a GPU: of tensors, since the previous step. On a CPU: of the process, since its start."
        self._memory = metrics.reading("memory_peak_bytes", text)

    def observe(self, record: StepRecord) -> None:
        for figure, reading in self._readings:
            value = record.get(figure.key)
            if value is not None or not figure.stays:
                reading.set(value)
        for figure, counter in self._counters:
            value = record[figure.key]
            counter.inc(bool(value) if isinstance(value, str) else value or 0)
        self._tasks.observe(record)
        self._lags.tokens = self._lags.tokens + Counts({int(lag): tokens for lag, tokens in record["lag_histogram"].items()})
        self._lag_max.set(record.get("lag", {}).get("max"))
        for phase, spent_s in record["step_s"].items():
            (self._step if phase == "total" else self._phases.labels(phase)).observe(spent_s)
        for phase, spent_s in record.get("compute_s", {}).items():
            self._compute.labels(phase).observe(spent_s)
        if "idle_s" in record:
            self._idle.observe(record["idle_s"])
        gib = record.get("memory_peak_gib")
        self._memory.set(None if gib is None else gib * GIB)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bucket edges for weight updates and joins."""


class MembershipMetrics:
    def __init__(self, metrics: MetricSet) -> None:
        text, causes = "Actors that the trainer removed from an epoch although they had not left.", tuple(EvictionCause)
        self.evictions = metrics.counter("evictions_total", text, {"reason": causes}, unit="actors")
        text = "How often a joining actor began to serve, in an epoch or after a side group."
        self.joins = metrics.counter("joins_total", text, unit="actors")
        text = "Time that a side group took to bring an actor to the served version."
        self.join_seconds = metrics.histogram("join_seconds", text, SECONDS)
        text = "Time from the first to the last byte of a version, measured at the trainer."
        self._transfer = metrics.histogram("weight_update_transfer_seconds", text, SECONDS)
        text = "Time from the offer of a version until the last member serves it."
        self._round_trip = metrics.histogram("weight_update_round_trip_seconds", text, SECONDS)
        self._bytes = metrics.counter("weight_update_bytes_total", "Bytes sent for versions that all members came to serve.")

    def served(self, update: UpdateRecord) -> None:
        self._transfer.observe(update.transfer_s)
        self._round_trip.observe(update.round_trip_s)
        self._bytes.inc(update.num_bytes)


def bounded(counts: Mapping[str, int], most: int = MOST_REASONS) -> dict[str, float]:
    """Return the `most` largest counts, and the sum of the others as `OTHER`. Pure."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[most:])
    return {**{reason: float(count) for reason, count in ordered[:most]}, **({OTHER: float(rest)} if rest else {})}


def phase_name(phase: int) -> str:
    """Return the name of a `TrainerPhase` in lower case without its prefix. Pure."""
    return trainer_pb2.TrainerPhase.Name(phase).removeprefix("TRAINER_PHASE_").lower()


PHASES = tuple(phase_name(phase) for phase in trainer_pb2.TrainerPhase.values() if phase)


LAG_TEXT = "Lag of trained tokens in optimizer steps; each token counts once."
LAG_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Upper bucket edges in optimizer steps, inclusive: those of `LAG_BUCKETS`, and larger ones for runs without a lag bound."""


class TokenLagHistogram(Collector):
    """Exports trained tokens by lag, since this process started. The client library's histogram takes one observation at a
    time, which is too slow for hundreds of thousands of tokens per step."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tokens = Counts[int]()
        """Number of tokens by lag. It is replaced as a whole, so that other threads can read it."""

    def collect(self) -> Iterator[HistogramMetricFamily]:
        tokens = self.tokens
        counts = {edge: sum(tokens[lag] for lag in tokens if lag <= edge) for edge in (*LAG_EDGES, inf)}
        buckets = [(floatToGoString(edge), float(count)) for edge, count in counts.items()]
        yield HistogramMetricFamily(self._name, LAG_TEXT, buckets, float(sum(lag * tokens[lag] for lag in tokens)))


@dataclass(frozen=True)
class RunView:
    """State of a run, for scrapes, the page and gRPC callers. Any thread may read it."""

    version: int
    waiting_for: str
    """Event or data that the trainer waits for; empty if it is not waiting."""
    updater: WeightUpdater
    feeder: Feeder
    intake: Intake
    uploads: Uploads
    checkpoints: Checkpointer
    streams: Mapping[str, StreamInfo]
    """State of PROMPTS (`prompts`) and SEQUENCES (`sequences`) at their last check; empty before the first check."""

    @property
    def ledger(self) -> Ledger:
        return self.feeder.tracker.ledger

    @property
    def served_version(self) -> int | None:
        """Return the newest version that every member serves; None before the first."""
        return self.updater.served_version if self.updater.served_version >= 0 else None


class StateMetric(NamedTuple):
    """A metric of the run's current state. With `labels`, `read` returns a mapping by label value."""

    name: str
    text: str
    read: Callable[[RunView], Values]
    unit: str = ""
    labels: Labels | None = None


STREAM = {"stream": ("prompts", "sequences")}
STATE_METRICS = (
    StateMetric("policy_version", "Optimizer steps taken.", lambda run: run.version),
    StateMetric("served_version", "Newest version that every member serves; no series before the first.",
                lambda run: run.served_version),
    StateMetric("members", "Registered actors by state.",
                lambda run: dict.fromkeys(MEMBER_STATES, 0) | Counts(list(run.updater.states.values())), "actors",
                {"state": MEMBER_STATES}),
    StateMetric("regroups_total", "How often the transfer group of all members was formed again.",
                lambda run: run.updater.regroups, "groups of members"),
    StateMetric("weight_updates_total", "Weight updates: versions that all members came to serve, and aborted transfers.",
                lambda run: run.updater.updates, "updates", {"outcome": ("served", "aborted")}),
    StateMetric("epoch", "Number of the current epoch. It changes with the members of the transfer group.",
                lambda run: run.updater.epoch, "epoch"),
    StateMetric("weight_log_version", "Newest version that the weight log announced; no series before the first, or without a "
                "log.", lambda run: log.published.version if (log := run.updater.log) and log.published else None),
    StateMetric("ledger_sequences", "Sequences of the whole run: all that were issued, by outcome, and those still in flight.",
                lambda run: run.ledger.counts, labels={"state": STATES}),
    StateMetric("ledger_discrepancy_sequences", "Issued sequences minus those in all other states. Any value except 0 shows a "
                "defect.", lambda run: run.ledger.discrepancy),
    StateMetric("failed_sequences", "Failed sequences by reason.", lambda run: bounded(run.ledger.reasons(Outcome.FAILED)),
                labels={"reason": "see docs/errors.md; (other) is the sum of the less frequent ones"}),
    StateMetric("dropped_stale_sequences", "Sequences dropped because they were too old for training, by reason.",
                lambda run: dict.fromkeys(map(str, StaleReason), 0) | run.ledger.reasons(Outcome.DROPPED_STALE),
                labels={"reason": tuple(StaleReason)}),
    StateMetric("tokens_total", "Completion tokens by the outcome of their sequence, since this trainer started.",
                lambda run: dict(run.feeder.tracker.tokens), labels={"outcome": tuple(Outcome)}),
    StateMetric("tokens_arrived_total", "Completion tokens that have reached the trainer since it started.",
                lambda run: run.intake.tokens_arrived_here, "tokens"),
    StateMetric("bad_messages", "Unusable messages: sequences of the run, and control messages since this trainer started.",
                lambda run: run.intake.bad_messages + run.updater.bad_messages),
    StateMetric("quarantined_actors", "Actors whose log-probabilities are not those of the policy version that "
                "they report (weights.verify_logprobs).", lambda run: len(run.intake.quarantine.actors), "actors"),
    StateMetric("checkpoint_version", "Version of the newest checkpoint; no series before the first.",
                lambda run: max(run.checkpoints.positions, default=None)),
    StateMetric("checkpoint_timestamp_seconds", "Unix time of the newest checkpoint, which an earlier trainer may have "
                "written; before the first one, the time when training began.", lambda run: run.checkpoints.saved_at_s),
    StateMetric("checkpoint_upload_version", "Version of the last upload; no series before the first.",
                lambda run: run.uploads.last.get("version")),
    StateMetric("checkpoint_upload_timestamp_seconds", "Unix time at which the last upload ended; no series before the first.",
                lambda run: run.uploads.last.get("at_s")),
    StateMetric("checkpoint_upload_waiting_seconds", "Time for which a checkpoint has been waiting to be uploaded; no series "
                "without uploads.", lambda run: run.uploads.waiting_s),
    StateMetric("ready_groups", "Complete groups that wait to be trained on.", lambda run: len(run.intake.ready)),
    StateMetric("feeder_allowance_groups", "Groups that the feeder could issue now if only the staleness bound limited it; "
                "without a bound, all groups until the run's end.", lambda run: run.feeder.room.by_version),
    StateMetric("in_flight_sequences", "Sequences in progress, or in complete groups whose step has not begun.",
                lambda run: run.feeder.room.in_flight),
    StateMetric("in_flight_limit_sequences", "Current freshness limit on in_flight_sequences; no series in conventional "
                "mode.", lambda run: run.feeder.room.limit),
    StateMetric("stream_messages", "Messages that the stream holds.",
                lambda run: {name: one.messages for name, one in run.streams.items()}, labels=STREAM),
    StateMetric("stream_bytes", "Bytes that the stream holds.",
                lambda run: {name: one.bytes for name, one in run.streams.items()}, labels=STREAM),
    StateMetric("stream_oldest_seconds", "Age of the stream's oldest message; 0 when it is empty.",  # clocks may disagree
                lambda run: {name: max(0.0, time.time() - (one.first_at_s or inf)) for name, one in run.streams.items()},
                labels=STREAM),
    StateMetric("unread_sequences", "Messages in SEQUENCES that the trainer has not read.", lambda run:
                max(0, log.last_position - run.intake.position) if (log := run.streams.get("sequences")) else None),
)  # fmt: skip


class TrainerMetrics:
    """The trainer's metrics on one registry. Before `watch`, the phase is `loading`, and `STATE_METRICS` have no values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metrics = MetricSet(PREFIX, registry)
        self.registry = registry
        self._view: Callable[[], RunView] | None = None
        self._phase: Callable[[], int] = lambda: trainer_pb2.TRAINER_PHASE_LOADING
        self.checkpoint_seconds = metrics.histogram("checkpoint_seconds", "Time to write one checkpoint.", CHECKPOINT_SECONDS)
        text, outcomes = "Attempts to upload a checkpoint.", {"outcome": ("uploaded", "failed")}
        tries = metrics.counter("checkpoint_uploads_total", text, outcomes, unit="attempts")
        text = "Time to upload and verify one checkpoint."
        self.uploads = tries, metrics.histogram("checkpoint_upload_seconds", text, CHECKPOINT_SECONDS)
        self.steps = StepMetrics(metrics)
        self.membership = MembershipMetrics(metrics)
        phase = metrics.reading("phase", "1 for the trainer's phase, 0 for the others.", {"phase": PHASES}, unit="1 or 0")
        phase.read(lambda: dict.fromkeys(PHASES, 0) | {phase_name(self._phase()): 1})
        for state in STATE_METRICS:
            reading = metrics.reading(state.name, state.text, state.labels, unit=state.unit)
            reading.read(partial(self._read, state))

    def watch(self, view: Callable[[], RunView], phase: Callable[[], int]) -> None:
        self._view, self._phase = view, phase

    def _read(self, state: StateMetric) -> Values:
        return None if self._view is None else state.read(self._view())


def replica_advice(recipe: Recipe, registry: CollectorRegistry) -> ReplicasWanted:
    """Export `pipelinerl_actor_replicas_wanted` for an autoscaler, which keeps the current replicas until there is a value."""
    in_flight, batch_size = issue_limit(recipe, 0) * recipe.sampling.group_size, recipe.trainer.batch_size
    advice = ReplicasWanted(slots=recipe.actor.sequences_in_progress, batch_size=batch_size, in_flight=in_flight)
    text = "Number of actors that would keep the trainer busy within the lag bound; no series until it is measured."
    wanted = MetricSet("pipelinerl_actor", registry).reading("replicas_wanted", text, unit="actors")
    wanted.read(lambda: advice.wanted)
    return advice
