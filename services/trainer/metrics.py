"""What the trainer exports to Prometheus, on an injected registry. Sums and rates are the server's business."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipelinerl.algorithms.lag_buckets import LAG_BUCKETS, lag_bucket
from services.trainer.records import StepRecord
from services.trainer.resume.writer import WrittenCheckpoint


class TrainerMetrics:
    """Gauges of the last optimizer step, counters since start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "pipelinerl_trainer_"
        gauges = {
            "reward_mean": "Mean reward of the last batch.",
            "heldout_accuracy": "Held-out accuracy, last evaluation.",
            "heldout_unanswered": "Held-out problems without a verdict, last evaluation.",
            "loss": "Loss of the last step.",
            "grad_norm": "Gradient norm before clipping.",
            "entropy": "Mean token entropy, nats.",
            "ess": "Effective sample size ratio, unclamped weights.",
            "clip_fraction": "Share of tokens whose weight the loss bounded.",
            "mask_fraction": "Share of tokens that the mask left out of the policy loss.",
            "value_loss": "Loss of the learned baseline, before its coefficient.",
            "explained_variance": "1 - Var(R - v) / Var(R) over tokens; 1 for a perfect learned baseline.",
            "mismatch_kl": "KL estimate over tokens of lag 0, nats.",
            "logprob_mismatch": "Largest probe difference between actor and trainer, nats; finite ones only.",
            "packing_fill": "Tokens over token budget of all micro-batches.",
            "mfu": "Model FLOPs utilization of the last step; of known devices only.",
            "imbalance": "Share of the ranks' compute time spent waiting for each other, last step.",
            "memory_peak_gib": "Most memory: tensors on a GPU since the step before, else the process since its start.",
        }
        self._gauges = {key: Gauge(prefix + key, text, registry=registry) for key, text in gauges.items()}
        self.tokens_per_second = Gauge(
            prefix + "tokens_per_second", "Tokens over compute time of the last step.", ["tokens"], registry=registry
        )
        self.policy_version = Gauge(prefix + "policy_version", "Optimizer steps taken.", registry=registry)
        self.members = Gauge(prefix + "members", "Actors in the weight-transfer group.", registry=registry)
        self.epoch = Gauge(prefix + "epoch", "Number of the group's membership.", registry=registry)
        self.sequences = Gauge(prefix + "sequences", "Ledger, by state.", ["state"], registry=registry)
        self.tokens_trained = Counter(prefix + "tokens_trained", "Completion tokens trained on.", registry=registry)
        self.bad_messages = Gauge(
            prefix + "bad_messages",
            "Messages set aside: sequences since the run began, others since this start.",
            registry=registry,
        )
        self.evictions = Gauge(prefix + "evictions", "Actors evicted since start.", registry=registry)
        self.checkpoint_version = Gauge(prefix + "checkpoint_version", "Of the newest checkpoint.", registry=registry)
        self.checkpoint_seconds = Histogram(
            prefix + "checkpoint_seconds", "Writing one checkpoint, beside training.", registry=registry
        )
        self.join_seconds = Histogram(
            prefix + "join_seconds", "Bringing one actor to the served version on a side group.", registry=registry
        )
        self.phase_seconds = Histogram(
            prefix + "step_phase_seconds", "Time of one optimizer step by phase.", ["phase"], registry=registry
        )
        self.compute_seconds = Histogram(
            prefix + "compute_phase_seconds",
            "Compute time of one optimizer step by phase.",
            ["phase"],
            registry=registry,
        )
        self.idle_seconds = Histogram(
            prefix + "update_idle_seconds", "Time of one step without compute because of sending.", registry=registry
        )
        self.parity_failures = Counter(
            prefix + "parity_failures", "Probe answers that could not be compared.", registry=registry
        )
        self.steps_skipped = Counter(
            prefix + "steps_skipped", "Optimizer steps that changed no weight.", registry=registry
        )
        self.tokens_by_lag = Counter(
            prefix + "tokens_by_lag", "Tokens trained on, by token lag in optimizer steps.", ["lag"], registry=registry
        )

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self.checkpoint_version.set(written.version)
        self.checkpoint_seconds.observe(written.seconds)

    def observe(self, record: StepRecord) -> None:
        """Takes one step's record, as it goes to metrics.jsonl."""
        for key, gauge in self._gauges.items():
            value = record.get(key)
            if value is not None:
                gauge.set(value)
        self._observe_compute(record)
        self.policy_version.set(record["policy_version"])
        self.tokens_trained.inc(record["tokens_trained"])
        self.parity_failures.inc(record["parity_failures"])
        self.steps_skipped.inc(bool(record["skipped"]))
        for state, count in record["sequences"].items():
            self.sequences.labels(state).set(count)
        for phase, seconds in record["step_s"].items():
            self.phase_seconds.labels(phase).observe(seconds)
        for lag, tokens in record["lag_histogram"].items():
            self.tokens_by_lag.labels(LAG_BUCKETS[int(lag_bucket(np.array([int(lag)]))[0])]).inc(tokens)

    def _observe_compute(self, record: StepRecord) -> None:
        for tokens, rate in record.get("tokens_per_s", {}).items():
            if rate is not None:
                self.tokens_per_second.labels(tokens).set(rate)
        for phase, seconds in record.get("compute_s", {}).items():
            self.compute_seconds.labels(phase).observe(seconds)
        if "idle_s" in record:
            self.idle_seconds.observe(record["idle_s"])
