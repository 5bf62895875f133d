"""What the verifier counts, on an injected Prometheus registry. It starts no server and reads no clock."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipelinerl.v1 import verifier_pb2

UNKNOWN_TASK = "(unknown)"
"""Label of items of another run's task: callers do not choose how many label values there are."""

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REWARDS = (-2, -1, -0.75, -0.5, -0.25, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 5)


class VerifierMetrics:
    """Counters, gauges and histograms of one verifier process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "pipelinerl_verifier_"
        self.calls = Counter(prefix + "calls", "Verify calls by gRPC status.", ["code"], registry=registry)
        self.call_seconds = Histogram(
            prefix + "call_seconds", "Verify calls, arrival to answer.", buckets=_SECONDS, registry=registry
        )
        self.requests = Counter(
            prefix + "requests", "Items by task and outcome.", ["task", "status"], registry=registry
        )
        self.reward_seconds = Histogram(
            prefix + "reward_seconds", "Time in the reward of one item.", ["task"], buckets=_SECONDS, registry=registry
        )
        self.reward = Histogram(
            prefix + "reward", "Rewards of scored items.", ["task"], buckets=_REWARDS, registry=registry
        )
        self.queue_items = Gauge(prefix + "queue_items", "Items waiting for a worker.", registry=registry)
        self.workers = Gauge(prefix + "workers", "Worker processes that are up.", registry=registry)
        self.worker_restarts = Counter(
            prefix + "worker_restarts", "Workers replaced, by what ended them.", ["reason"], registry=registry
        )
        self.timeouts = Counter(prefix + "timeouts", "Rewards killed at their deadline.", registry=registry)

    def count(self, task: str, result: verifier_pb2.VerifyResult) -> None:
        """One item's outcome."""
        status = verifier_pb2.VerifyStatus.Name(result.status).removeprefix("VERIFY_STATUS_").lower()
        self.requests.labels(task, status).inc()
        self.reward_seconds.labels(task).observe(result.seconds)
        if result.status == verifier_pb2.VERIFY_STATUS_OK:
            self.reward.labels(task).observe(result.reward)
