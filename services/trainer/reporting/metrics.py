"""The trainer's Prometheus metrics. Sums and rates are left to the server.

Figures of an optimizer step come with its record, and others when they happen; states are read at each scrape, on the HTTP
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.autoscaling import ReplicasWanted
from pipelinerl.rl.groups import LAG_BUCKETS, StaleReason
from pipelinerl.rl.ledger import LedgerCounts, Outcome
from pipelinerl.run_summary import StepRecord
from pipelinerl.telemetry.metrics import MOST_REASONS, OTHER, BoundedLabels, Labels, MetricSet
from pipelinerl.v1 import trainer_pb2
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.distributed.world import ADAPTER, HEARTBEAT, SAVE, SCORE, VALUE_HEAD, WEIGHTS
from services.trainer.learn.step import TRAIN
from services.trainer.weight_sync.coordinator import EvictionCause
from services.trainer.weight_sync.updater import MEMBER_STATES, UpdateRecord

if TYPE_CHECKING:
    from services.trainer.run import TrainingRun

PREFIX = "pipelinerl_trainer"
ORDERS = (TRAIN, SCORE, WEIGHTS, ADAPTER, VALUE_HEAD, SAVE, HEARTBEAT)


def rank_orders(registry: CollectorRegistry) -> Counter:
    """Return the metric that the first rank of a further node exports for its pod. The thread that carries the orders out
    counts."""
    return MetricSet(PREFIX, registry).counter(
        "rank_orders_total", "Orders of rank 0 to the first rank of a further node.", {"kind": ORDERS}, unit="orders"
    )


OF_STEP: dict[str, tuple[str, ...]] = {
    "reward_mean": ("reward_mean", "Mean reward of the batch.", "reward"),
    "reward_std": ("reward_std", "Standard deviation of the batch's rewards.", "reward"),
    "group_reward_std": ("group_reward_std", "Standard deviation of rewards inside a group, mean over groups.", "reward"),
    "equal_reward_groups": ("equal_reward_groups_ratio", "Share of the batch's groups whose rewards are all equal."),
    "ess": ("ess_ratio", "Effective sample size of the tokens, from unclamped weights."),
    "clip_fraction": ("clip_ratio", "Share of tokens whose weight the loss bounded."),
    "mask_fraction": ("mask_ratio", "Share of tokens that algorithm.mask left out of the loss."),
    "entropy": ("entropy_nats", "Mean entropy of the policy at the sampled positions."),
    "reference_kl": ("reference_kl_nats", "KL estimate to the initial policy; with algorithm.kl_coefficient only."),
    "grad_norm": ("gradient_norm", "L2 norm of the gradient before clipping.", "none"),
    "loss": ("loss", "Loss of the batch.", "none"),
    "value_loss": ("value_loss", "Loss of the learned baseline, before its coefficient; with a baseline only.", "none"),
    "learning_rate": ("learning_rate", "Learning rate of the step.", "none"),
    "completion_tokens_mean": ("completion_length_tokens", "Mean sampled tokens of the batch's sequences."),
    "turns_mean": ("episode_turns", "Mean turns of the batch's episodes; with episodes only.", "turns"),
    "branches_mean": ("episode_branches", "Mean branches of the batch's episodes; with episodes only.", "branches"),
    "observed_fraction": (
        "observed_ratio",
        "Share of the tokens after the prompts that environments added, without training on them; with episodes only.",
    ),
    "multi_version_fraction": ("multi_version_ratio", "Share of the batch's sequences that more than one version sampled."),
    "truncated_fraction": ("truncated_ratio", "Share of the batch's sequences that were cut at their length limit."),
    "packing_fill": ("packing_fill_ratio", "Tokens over token budget of the step's micro-batches."),
    "mfu": ("mfu_ratio", "Model FLOPs utilization of the step; only on known devices."),
    "imbalance": ("imbalance_ratio", "Share of the ranks' compute time spent waiting for each other."),
    "actor_busy_fraction": (
        "actor_busy_ratio",
        "Share of all actors' time, since their engines were up, in which they generated.",
    ),
    "trainer_busy_fraction": ("trainer_busy_ratio", "Share of the trainer's time spent on steps."),
}
"""Key of a step's record: the metric's name, its text, and its unit unless the name ends with it. A figure that the step lacks
has no series."""
OF_TASK: dict[str, tuple[str, ...]] = {
    "sequences": ("task_sequences", "Sequences of the batch"),
    "reward_mean": ("task_reward_mean", "Mean reward of the sequences", "reward"),
    "completion_tokens_mean": ("task_completion_length_tokens", "Mean sampled tokens of the sequences"),
    "truncated_fraction": ("task_truncated_ratio", "Share of cut sequences among those"),
}
"""The same for one task, with `tasks` in the recipe."""
NOW_AND_THEN: dict[str, tuple[str, ...]] = {
    "heldout_accuracy": ("heldout_accuracy_ratio", "Held-out accuracy, last evaluation."),
    "heldout_accuracy_lower_bound": (
        "heldout_accuracy_lower_bound_ratio",
        "Held-out accuracy if problems without a verdict count as wrong, last evaluation.",
    ),
    "heldout_unanswered": ("heldout_unanswered_problems", "Held-out problems without a verdict, last evaluation.", "problems"),
    "mismatch_kl": (
        "mismatch_kl_nats",
        "KL estimate between actor and trainer over tokens of lag 0, last step with such tokens.",
    ),
    "logprob_mismatch": (
        "logprob_mismatch_nats",
        "Largest log-probability difference of the last probe that could be compared.",
    ),
    "explained_variance": (
        "explained_variance_ratio",
        "1 - Var(R - v) / Var(R) over tokens, of a learned baseline v; last step with unequal returns.",
    ),
}
"""Figures that not every step has; the newest value stays."""
BY_LAG = {"lag": LAG_BUCKETS}
GIB = 1024**3
STEP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
"""Bucket edges, from a model of a million parameters on a CPU to an hour."""
PHASE_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
"""Bucket edges for a part of a step, from short copies to long waits."""
STEP_PHASES = ("wait", "compute", "snapshot", "send", "checkpoint")
COMPUTE_PHASES = ("plan", "build", "to_device", "forward_backward", "totals", "optimizer")


class StepMetrics:
    """Figures of an optimizer step: learning progress, token lag, and time by phase."""

    def __init__(self, metrics: MetricSet) -> None:
        self._of_step, self._now_and_then = (
            {key: metrics.reading(name, text, unit="".join(unit)) for key, (name, text, *unit) in table.items()}
            for table in (OF_STEP, NOW_AND_THEN)
        )
        self._each = {
            "ess_by_lag": metrics.reading(
                "ess_by_lag_ratio", "Effective sample size of tokens with this lag; for lags in the step.", BY_LAG
            ),
            "clip_fraction_by_lag": metrics.reading(
                "clip_by_lag_ratio", "Share of tokens with this lag that the loss bounded; for lags in the step.", BY_LAG
            ),
            "tokens_per_s": metrics.reading(
                "tokens_per_second",
                "Tokens over compute time of the last step: sampled ones that were trained, or all that were computed.",
                {"tokens": ("trained", "computed")},
            ),
        }
        task = {"task": "one of the recipe's tasks"}
        of_tasks = "of this task; with several tasks, for those in the step."
        self._of_task = {
            key: metrics.reading(name, f"{text} {of_tasks}", task, unit="".join(unit))
            for key, (name, text, *unit) in OF_TASK.items()
        }
        sets = {"set": "the name of a task, or of one of evaluation.sets"}
        self._accuracy = metrics.reading(
            "heldout_set_accuracy_ratio", "Held-out accuracy of one set of problems, last evaluation.", sets
        )
        self._passed = metrics.reading(
            "heldout_set_pass_ratio", "pass@k of one set, k = evaluation.samples > 1, last evaluation.", sets
        )
        reported = {"figure": f"a term of a reward, a metric of an environment, or turns; the first {MOST_REASONS} of them"}
        self._reported = metrics.reading(
            "task_reported_mean",
            "Mean of a number that rewards and environments report of a task's sequences; of tasks in the step.",
            {**task, **reported},
            unit="as reported",
        )
        self._heldout_reported = metrics.reading(
            "heldout_set_reported_mean",
            "The same for the answers to one set of problems, last evaluation.",
            {**sets, **reported},
            unit="as reported",
        )
        self._names = BoundedLabels()
        self._parity_failures = metrics.counter(
            "parity_failures_total",
            "Probe answers that differ too much from the trainer's, or could not be compared.",
            unit="answers",
        )
        self._heldout_tokens = metrics.counter(
            "heldout_tokens_total", "Completion tokens of held-out evaluations.", unit="tokens"
        )
        self._commits_held = metrics.counter(
            "commits_held_seconds_total", "Time of evaluations and probes, during which no later version was committed."
        )
        self._skipped = metrics.counter("steps_skipped_total", "Optimizer steps that changed no weight.", unit="steps")
        self._clipped = metrics.counter(
            "steps_clipped_total", "Optimizer steps whose gradient was clipped to the bound of its norm.", unit="steps"
        )
        name, text = TokenLagHistogram.NAME, TokenLagHistogram.TEXT
        self._lags = metrics.histogram_of(name, text, LAG_EDGES, TokenLagHistogram)
        self._lag_max = metrics.reading("token_lag_max_steps", "Largest token lag of the last step.")
        self.lag_bound = metrics.reading(
            "token_lag_bound_steps", "algorithm.max_lag; no series without one, or where it bounds a mean."
        )
        self._step = metrics.histogram("step_seconds", "One optimizer step, waiting included.", STEP_SECONDS)
        self._phases = metrics.histogram(
            "step_phase_seconds", "Parts of a step, one after the other.", PHASE_SECONDS, {"phase": STEP_PHASES}
        )
        self._compute = metrics.histogram(
            "compute_phase_seconds",
            "Parts of a step's compute; plan and build run during the previous step.",
            PHASE_SECONDS,
            {"phase": COMPUTE_PHASES},
        )
        self._idle = metrics.histogram(
            "update_idle_seconds", "Time of a step in which compute waited for sending weights.", PHASE_SECONDS
        )
        self._memory = metrics.reading(
            "memory_peak_bytes", "Peak memory of tensors on a GPU since the previous step, else of the process since its start."
        )

    def observe(self, record: StepRecord) -> None:
        """Record one step, as in metrics.jsonl."""
        for key, reading in self._of_step.items():
            reading.set(record.get(key))
        for key, reading in self._now_and_then.items():
            if record.get(key) is not None:
                reading.set(record[key])
        for key, reading in self._each.items():
            reading.set_each(record.get(key, {}))
        for key, reading in self._of_task.items():
            reading.set_each({name: figures[key] for name, figures in record.get("tasks", {}).items()})
        self._reported.set_each(self._named(record.get("reported", {})))
        if sets := record.get("heldout_sets"):
            self._heldout_reported.set_each(self._named({name: one["reported"] for name, one in sets.items()}))
            self._accuracy.set_each({name: one["accuracy"]["value"] for name, one in sets.items()})
            largest_k = {name: [*one["pass_at"].values()][-1] for name, one in sets.items() if one["pass_at"]}
            self._passed.set_each({name: passed["value"] for name, passed in largest_k.items()})
        self._parity_failures.inc(record["parity_failures"])
        self._heldout_tokens.inc(record["heldout_tokens"] or 0)
        self._commits_held.inc(record["commits_held_s"])
        self._skipped.inc(bool(record["skipped"]))
        self._clipped.inc(record["clipped"])
        self._lags.add({int(lag): tokens for lag, tokens in record["lag_histogram"].items()})
        self._lag_max.set(record.get("lag", {}).get("max"))
        for phase, spent_s in record["step_s"].items():
            (self._step if phase == "total" else self._phases.labels(phase)).observe(spent_s)
        for phase, spent_s in record.get("compute_s", {}).items():
            self._compute.labels(phase).observe(spent_s)
        if "idle_s" in record:
            self._idle.observe(record["idle_s"])
        gib = record.get("memory_peak_gib")
        self._memory.set(None if gib is None else gib * GIB)

    def _named(self, reported: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, ...], float]:
        each = {(of, self._names.of(name)): value for of, own in reported.items() for name, value in own.items()}
        return {labels: value for labels, value in each.items() if OTHER not in labels}


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bucket edges, from a toy model on one machine to minutes, after which `weights.deadline_s` ends an update."""


class MembershipMetrics:
    """Joins and departures of members, and the weight updates that reach them."""

    def __init__(self, metrics: MetricSet) -> None:
        self.regroups = metrics.counter(
            "regroups_total", "Regroupings: the group of all members was formed again.", unit="groups of members"
        )
        self.evictions = metrics.counter(
            "evictions_total",
            "Actors that the trainer removed from an epoch although they did not leave.",
            {"reason": tuple(cause.value for cause in EvictionCause)},
            unit="actors",
        )
        self.joins = metrics.counter(
            "joins_total", "Arrivals: an actor began to serve, in an epoch or on a side group.", unit="actors"
        )
        self.join_seconds = metrics.histogram(
            "join_seconds", "Bringing one actor to the served version on a side group.", SECONDS
        )
        self.updates = metrics.counter(
            "weight_updates_total",
            "Versions that all members serve, and transfers that were started again.",
            {"outcome": ("served", "aborted")},
            unit="updates",
        )
        self._transfer = metrics.histogram(
            "weight_update_transfer_seconds", "First to last byte of a version, at the trainer.", SECONDS
        )
        self._round_trip = metrics.histogram(
            "weight_update_round_trip_seconds", "From the offer of a version until the last member serves it.", SECONDS
        )
        self._bytes = metrics.counter("weight_update_bytes_total", "Bytes of the versions that all members serve.")

    def served(self, update: UpdateRecord) -> None:
        self.updates.labels("served").inc()
        self._transfer.observe(update.transfer_s)
        self._round_trip.observe(update.round_trip_s)
        self._bytes.inc(update.num_bytes)


STATES = tuple(field.name for field in fields(LedgerCounts))
OUTCOMES = tuple(outcome.value for outcome in Outcome)
_NONE_STALE = {reason.value: 0 for reason in StaleReason}


def bounded(counts: Mapping[str, int], most: int = MOST_REASONS) -> dict[str, float]:
    """Return the `most` frequent ones, and the sum of the others as `OTHER`. Pure."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[most:])
    return {**{reason: float(count) for reason, count in ordered[:most]}, **({OTHER: float(rest)} if rest else {})}


CHECKPOINT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
"""Bucket edges, from megabytes to a large model on a slow disk."""


def phase_name(phase: int) -> str:
    """Return the name of a `TrainerPhase` in lower case without its prefix. Pure."""
    return trainer_pb2.TrainerPhase.Name(phase).removeprefix("TRAINER_PHASE_").lower()


PHASES = tuple(phase_name(phase) for phase in trainer_pb2.TrainerPhase.values() if phase)


class CheckpointMetrics:
    """The newest checkpoint, which tells how much work could be lost."""

    def __init__(self, metrics: MetricSet, clock_s: Callable[[], float]) -> None:
        self._clock_s, self._has_begun = clock_s, False
        self._planned = metrics.reading("planned_steps", "Optimizer steps of the whole run: trainer.steps.")
        self._version = metrics.reading("checkpoint_version", "Version of the newest checkpoint; none before the first.")
        self._at = metrics.reading(
            "checkpoint_timestamp_seconds",
            "When the newest checkpoint was written, by this trainer or one before it; before the first, when training began.",
        )
        self._seconds = metrics.histogram("checkpoint_seconds", "Time to write one checkpoint.", CHECKPOINT_SECONDS)

    def begin(self, planned_steps: int, checkpoint: int | None, since_s: float | None = None) -> None:
        """`checkpoint`: version of the one that this trainer resumes from. `since_s`: when that was written, or when a run that
        has none yet first started; None: this trainer is the first, and its work begins with `training_begins`."""
        self._planned.set(planned_steps)
        self._version.set(checkpoint)
        self._at.set(since_s)
        self._has_begun = since_s is not None

    def training_begins(self) -> None:
        """Record that from now on there is work to lose."""
        if not self._has_begun:
            self._at.set(self._clock_s())
            self._has_begun = True

    def written(self, written: WrittenCheckpoint) -> None:
        self._has_begun = True
        self._version.set(written.version)
        self._at.set(self._clock_s())
        self._seconds.observe(written.seconds)


class UploadMetrics:
    """Uploads of checkpoints' models to the store that `checkpoint.upload` names."""

    def __init__(self, metrics: MetricSet, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._tries = metrics.counter(
            "checkpoint_uploads_total", "Attempts to upload a checkpoint.", {"outcome": ("uploaded", "failed")}, unit="tries"
        )
        self._version = metrics.reading("checkpoint_upload_version", "Version of the last upload; none before the first.")
        self._at = metrics.reading("checkpoint_upload_timestamp_seconds", "When the last upload ended; none before the first.")
        self._seconds = metrics.histogram(
            "checkpoint_upload_seconds", "Time to upload and verify one checkpoint.", CHECKPOINT_SECONDS
        )

    def took_over(self, version: int, at_s: float) -> None:
        """Restore the last upload of an earlier trainer of the run."""
        self._version.set(version)
        self._at.set(at_s)

    def uploaded(self, version: int, seconds: float) -> None:
        self.took_over(version, self._clock_s())
        self._tries.labels("uploaded").inc()
        self._seconds.observe(seconds)

    def failed(self) -> None:
        self._tries.labels("failed").inc()


STREAMS = ("prompts", "sequences")
BY_STREAM = {"stream": STREAMS}


class StreamMetrics:
    """The streams when they were last checked."""

    def __init__(self, metrics: MetricSet, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self.seen: dict[str, StreamInfo] = {}
        self._messages = metrics.reading("stream_messages", "Messages that the stream holds.", BY_STREAM)
        self._bytes = metrics.reading("stream_bytes", "Bytes that the stream holds.", BY_STREAM)
        self._oldest = metrics.reading(
            "stream_oldest_seconds", "Age of the stream's oldest message; 0 when it is empty.", BY_STREAM
        )

    def saw(self, stream: str, info: StreamInfo) -> None:
        """Record the present state of one of `STREAMS`."""
        self.seen = seen = {**self.seen, stream: info}
        now_s = self._clock_s()
        self._messages.set_each({name: one.messages for name, one in seen.items()})
        self._bytes.set_each({name: one.bytes for name, one in seen.items()})
        ages_s = {name: now_s - one.first_at_s for name, one in seen.items() if one.messages and one.first_at_s}
        self._oldest.set_each({name: max(0.0, ages_s.get(name, 0.0)) for name in seen})  # clocks may disagree


LAG_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Optimizer steps, inclusive: the edges of the lag buckets, and further ones for the paper's setting without a bound."""


class TokenLagHistogram(Collector):
    """Tokens by lag since the start. One thread adds, any thread reads: the state is replaced as a whole.

    The client library's histogram takes one observation at a time, but a step brings hundreds of thousands of tokens that are
    already counted by lag.
    """

    NAME, TEXT = "token_lag_steps", "Token lag at use, optimizer steps; each trained token counts once."

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: tuple[tuple[int, ...], int] = ((0,) * (len(LAG_EDGES) + 1), 0)
        """Tokens of each bucket, and the sum of their lags."""

    def add(self, tokens_by_lag: Mapping[int, int]) -> None:
        counts, total = list(self._state[0]), self._state[1]
        for lag, tokens in tokens_by_lag.items():
            counts[sum(edge < lag for edge in LAG_EDGES)] += tokens
            total += lag * tokens
        self._state = (tuple(counts), total)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts, total = self._state
        edges = [*(f"{float(edge)}" for edge in LAG_EDGES), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(counts)), strict=True))
        yield HistogramMetricFamily(self._name, self.TEXT, buckets=buckets, sum_value=float(total))


class TrainerMetrics:
    """All groups of metrics, on one registry."""

    def __init__(self, registry: CollectorRegistry, clock_s: Callable[[], float] = time.time) -> None:
        metrics = MetricSet(PREFIX, registry)
        self.registry = registry
        self._run: TrainingRun | None = None
        self._phase: Callable[[], int] = lambda: trainer_pb2.TRAINER_PHASE_LOADING
        self.checkpoints = CheckpointMetrics(metrics, clock_s)
        self.uploads = UploadMetrics(metrics, clock_s)
        self.steps = StepMetrics(metrics)
        self.streams = StreamMetrics(metrics, clock_s)
        self.membership = MembershipMetrics(metrics)
        self._read_states(metrics)

    def watch(self, run: TrainingRun, phase: Callable[[], int]) -> None:
        self._run, self._phase = run, phase

    def _read_states(self, metrics: MetricSet) -> None:
        """Register the values that are read at each scrape, on the HTTP thread. Until `watch`, only the phase `loading` is
        exported."""

        def read(name: str, text: str, value: Callable[[TrainingRun], float | None], unit: str = "") -> None:
            metrics.reading(name, text, unit=unit).read(lambda: value(self._run) if self._run else None)

        def read_each(
            name: str, text: str, labels: Labels, values: Callable[[TrainingRun], Mapping[str, float]], unit: str = ""
        ) -> None:
            reading = metrics.reading(name, text, labels, unit=unit)
            reading.read_each(lambda: values(self._run) if self._run else {})

        phase = metrics.reading("phase", "1 for the trainer's phase, 0 for the others.", {"phase": PHASES}, unit="1 or 0")
        phase.read_state(PHASES, lambda: phase_name(self._phase()))
        read("policy_version", "Optimizer steps taken.", lambda run: run.loop.version)
        read(
            "served_version",
            "Newest version that every member serves; none before the first.",
            lambda run: run.updater.served_version if run.updater.served_version >= 0 else None,
        )
        read_each(
            "members", "Registered actors by state.", {"state": MEMBER_STATES}, lambda run: run.updater.member_states, "actors"
        )
        read("epoch", "Epoch: number of the current membership of the transfer group.", lambda run: run.updater.epoch, "epoch")
        read_each(
            "ledger_sequences",
            "Sequences of the whole run: issued, and by outcome.",
            {"state": STATES},
            lambda run: run.tracker.ledger.counts.as_dict(),
        )
        read(
            "ledger_discrepancy_sequences",
            "Issued sequences less those of all other states: 0, or a defect.",
            lambda run: run.tracker.ledger.counts.discrepancy,
        )
        read_each(
            "failed_sequences",
            "Failed sequences by reason.",
            {"reason": "see docs/errors.md; (other) sums up the less frequent ones"},
            lambda run: bounded(run.tracker.ledger.reasons(Outcome.FAILED)),
        )
        read_each(
            "dropped_stale_sequences",
            "Sequences that were too old for training, by reason.",
            {"reason": tuple(_NONE_STALE)},
            lambda run: {**_NONE_STALE, **run.tracker.ledger.reasons(Outcome.DROPPED_STALE)},
        )
        read_each(
            "tokens_total",
            "Completion tokens by outcome of their sequence, since this start.",
            {"outcome": OUTCOMES},
            lambda run: dict(run.tracker.tokens),
        )
        read(
            "tokens_arrived_total",
            "Completion tokens that reached the trainer, since this start.",
            lambda run: run.intake.tokens_arrived_here,
            "tokens",
        )
        read(
            "bad_messages",
            "Messages set aside: sequences since the run began, others since this start.",
            lambda run: run.intake.bad_messages + run.updater.bad_messages,
            "messages",
        )
        read(
            "quarantined_actors",
            "Actors whose log-probabilities are not those of the policy that they name (weights.verify_logprobs).",
            lambda run: len(run.intake.quarantine.actors),
            "actors",
        )
        read(
            "checkpoint_upload_waiting_seconds",
            "Time that a checkpoint has been waiting for its upload; no series without uploads.",
            lambda run: run.uploads.waiting_s,
        )
        read("unread_sequences", "Messages in SEQUENCES that the trainer has not read.", self._unread)
        read("ready_groups", "Complete groups that wait to be trained on.", lambda run: run.intake.num_ready)
        read(
            "feeder_allowance_groups",
            "Groups that the staleness bound alone allows the feeder to issue now; without a bound, up to the run's end.",
            lambda run: run.feeder.allowance_by_version,
        )
        read(
            "in_flight_sequences",
            "Sequences in progress, and those in complete groups whose step has not begun.",
            lambda run: run.feeder.in_flight,
        )
        read(
            "in_flight_limit_sequences",
            "Maximum of in_flight_sequences by the freshness limit now; none in conventional mode.",
            lambda run: run.feeder.in_flight_limit,
        )

    def _unread(self, run: TrainingRun) -> int | None:
        """Return the unread messages as of the last check of the stream; messages read since then are subtracted."""
        log = self.streams.seen.get("sequences")
        return None if log is None else max(0, log.last_position - run.intake.position)


def replica_advice(recipe: Recipe, registry: CollectorRegistry) -> ReplicasWanted:
    """Export `pipelinerl_actor_replicas_wanted`, which an autoscaler of the actors follows. It has no value until it is known,
    so that an autoscaler keeps the present replicas."""
    advice = ReplicasWanted(
        slots=recipe.actor.sequences_in_progress, batch_size=recipe.trainer.batch_size, in_flight=most_in_flight(recipe)
    )
    text = "Actors that would keep the trainer busy within the lag bound; no value until it is measured."
    wanted = MetricSet("pipelinerl_actor", registry).reading("replicas_wanted", text, unit="actors")
    wanted.read(lambda: advice.wanted)
    return advice


def most_in_flight(recipe: Recipe) -> int | None:
    """Return M: sequences that may be issued and not consumed; None if only the number of actors bounds them. Pure."""
    if recipe.mode == "conventional":
        return recipe.algorithm.conventional_g * recipe.trainer.batch_size
    max_lag = recipe.algorithm.max_lag
    return None if max_lag is None else (1 + max_lag) * recipe.trainer.batch_size
