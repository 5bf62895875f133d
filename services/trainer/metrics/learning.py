"""Whether it learns: rewards, importance weights, entropy, divergences, gradient of the last optimizer step."""

from __future__ import annotations

from pipelinerl.algorithms.lag_buckets import LAG_BUCKETS
from pipelinerl.service.metric_set import MetricSet
from services.trainer.report.records import StepRecord

BY_LAG = {"lag": LAG_BUCKETS}


class LearningMetrics:
    """Gauges of the last step. A figure that the step does not have is no series; one that is measured now and then stays."""

    def __init__(self, metrics: MetricSet) -> None:
        self._of_step = {
            "reward_mean": metrics.reading("reward_mean", "Mean reward of the batch.", unit="reward"),
            "reward_std": metrics.reading("reward_std", "Standard deviation of the batch's rewards.", unit="reward"),
            "group_reward_std": metrics.reading(
                "group_reward_std", "Standard deviation of rewards inside a group, mean over groups.", unit="reward"
            ),
            "equal_reward_groups": metrics.reading(
                "equal_reward_groups_ratio", "Share of the batch's groups whose rewards are all equal: no signal."
            ),
            "ess": metrics.reading("ess_ratio", "Effective sample size of the tokens, from unclamped weights."),
            "clip_fraction": metrics.reading("clip_ratio", "Share of tokens whose weight the loss bounded."),
            "mask_fraction": metrics.reading("mask_ratio", "Share of tokens that algorithm.mask left out of the loss."),
            "entropy": metrics.reading("entropy_nats", "Mean entropy of the policy at the sampled positions."),
            "reference_kl": metrics.reading(
                "reference_kl_nats", "KL estimate to the initial policy; with algorithm.kl_coefficient only."
            ),
            "grad_norm": metrics.reading("gradient_norm", "L2 norm of the gradient before clipping.", unit="none"),
            "loss": metrics.reading("loss", "Loss of the batch.", unit="none"),
            "value_loss": metrics.reading(
                "value_loss", "Loss of the learned baseline, before its coefficient; with one only.", unit="none"
            ),
            "learning_rate": metrics.reading("learning_rate", "Learning rate of the step.", unit="none"),
            "completion_tokens_mean": metrics.reading(
                "completion_length_tokens", "Mean length of the batch's completions."
            ),
            "multi_version_fraction": metrics.reading(
                "multi_version_ratio", "Share of the batch's sequences that more than one version sampled."
            ),
        }
        self._now_and_then = {
            "heldout_accuracy": metrics.reading("heldout_accuracy_ratio", "Held-out accuracy, last evaluation."),
            "heldout_unanswered": metrics.reading(
                "heldout_unanswered_problems",
                "Held-out problems without a verdict, last evaluation.",
                unit="problems",
            ),
            "mismatch_kl": metrics.reading(
                "mismatch_kl_nats",
                "KL estimate between actor and trainer over tokens of lag 0, last step with such tokens.",
            ),
            "logprob_mismatch": metrics.reading(
                "logprob_mismatch_nats", "Largest log-probability difference of the last probe that could be compared."
            ),
            "explained_variance": metrics.reading(
                "explained_variance_ratio",
                "1 - Var(R - v) / Var(R) over tokens, of a learned baseline v; last step with unequal returns.",
            ),
        }
        self._ess_by_lag = metrics.reading(
            "ess_by_lag_ratio", "Effective sample size of the tokens of one lag; of lags in the step.", BY_LAG
        )
        self._clip_by_lag = metrics.reading(
            "clip_by_lag_ratio", "Share of tokens of one lag that the loss bounded; of lags in the step.", BY_LAG
        )
        self._parity_failures = metrics.counter(
            "parity_failures_total", "Probe answers that could not be compared.", unit="answers"
        )
        self._skipped = metrics.counter("steps_skipped_total", "Optimizer steps that changed no weight.", unit="steps")

    def observe(self, record: StepRecord) -> None:
        """Takes one step's record."""
        for key, reading in self._of_step.items():
            reading.set(record.get(key))
        for key, reading in self._now_and_then.items():
            if record.get(key) is not None:
                reading.set(record[key])
        self._ess_by_lag.set_each(record.get("ess_by_lag", {}))
        self._clip_by_lag.set_each(record.get("clip_fraction_by_lag", {}))
        self._parity_failures.inc(record["parity_failures"])
        self._skipped.inc(bool(record["skipped"]))
