"""The verifier's metrics, on an injected Prometheus registry."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import CollectorRegistry

from pipelinerl.messages.verification import status_name
from pipelinerl.telemetry.metrics import MetricSet
from pipelinerl.v1 import verifier_pb2

UNKNOWN_TASK = "(unknown)"
"""Value of the label `task` for all items of unknown tasks, since callers must not be able to create new label values."""

CODES = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "INTERNAL")
"""gRPC statuses by which the server counts calls."""
CODE = ("programs", "rewards", "episodes")
"""Kinds of code: programs that a model wrote; users' reward functions; environments, tools and agents of episodes."""
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EPISODE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_REWARDS = (-2, -1, -0.75, -0.5, -0.25, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.25, 1.5, 2, 5)

STATUSES = tuple(status_name(status) for status in verifier_pb2.VerifyStatus.values() if status)


class VerifierMetrics:
    """The metrics of one verifier process. The counters of requests exist for all `tasks` from the start."""

    def __init__(self, registry: CollectorRegistry, tasks: Iterable[str]) -> None:
        metrics, self._tasks = MetricSet("pipelinerl_verifier", registry), tuple(tasks)
        label = {"task": f"a task of the recipe, or {UNKNOWN_TASK} for items of other tasks"}
        self.calls = metrics.counter("calls_total", "Calls to the verifier, by gRPC status.", {"code": CODES}, unit="calls")
        self.call_seconds = metrics.histogram("call_seconds", "Duration of a call of Verify.", _SECONDS)
        text = "Items and episodes, by task and outcome."
        self.requests = metrics.counter("requests_total", text, {**label, "status": STATUSES}, unit="items")
        for task, status in product(self._tasks, STATUSES):
            self.requests.labels(task, status)
        self.reward_seconds = metrics.histogram("reward_seconds", "Time to compute one reward.", _SECONDS, label)
        self.reward = metrics.histogram("reward", "Rewards of scored items and episodes.", _REWARDS, label, unit="reward")
        outcomes = {"outcome": ("answered", "cached", "retried", "failed")}
        text = "Judgements, by outcome; `retried` counts attempts after the first."
        self.judge_calls = metrics.counter("judge_calls_total", text, outcomes, unit="calls")
        self.queue_items = metrics.gauge("queue_items", "Items waiting for a worker.")
        self.queue_capacity = metrics.gauge("queue_capacity_items", "Maximum number of items that may wait.")
        self.workers = metrics.gauge("workers", "Worker processes that are up.", unit="processes")
        causes = {"reason": ("timeout", "death", "retirement")}
        text = "Replaced workers, by the cause of their end."
        self.worker_restarts = metrics.counter("worker_restarts_total", text, causes, unit="processes")
        kept = {"code": CODE, "means": ("bubblewrap", "landlock", "none")}
        self.sandbox = metrics.gauge("sandbox", "1 if `means` confines all code of this kind.", kept, unit="boolean")
        self.timeouts = metrics.counter("timeouts_total", "Rewards and episodes killed at a deadline.", unit="items")
        self.episodes = metrics.gauge("episodes", "Running episodes.", unit="episodes")
        self.episode_capacity = metrics.gauge("episode_capacity", "Maximum number of running episodes.", unit="episodes")
        self.episode_seconds = metrics.histogram("episode_seconds", "Duration of an episode.", _EPISODE_SECONDS, label)

    def count(self, task: str, result: verifier_pb2.VerifyResult, *, is_episode: bool = False) -> None:
        task = task if task in self._tasks else UNKNOWN_TASK
        self.requests.labels(task, status_name(result.status)).inc()
        (self.episode_seconds if is_episode else self.reward_seconds).labels(task).observe(result.seconds)
        if result.status == verifier_pb2.VERIFY_STATUS_OK:
            self.reward.labels(task).observe(result.reward)
