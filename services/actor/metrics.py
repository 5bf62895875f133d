"""What an actor counts, on an injected Prometheus registry, with the sums that its gRPC state reports."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class BusyClock:
    """Seconds in which at least one thing was in progress. Not thread-safe: one event loop."""

    def __init__(self) -> None:
        self._running = 0
        self._since = 0.0
        self._total_s = 0.0

    def enter(self) -> None:
        if self._running == 0:
            self._since = time.monotonic()
        self._running += 1

    def leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._total_s += time.monotonic() - self._since

    @property
    def total_s(self) -> float:
        return self._total_s + (time.monotonic() - self._since if self._running else 0.0)


class ActorMetrics:
    """Counters and gauges of one actor."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "pipelinerl_actor_"
        self.policy_version = Gauge(prefix + "policy_version", "Policy version served.", registry=registry)
        self.in_progress = Gauge(prefix + "sequences_in_progress", "Sequences being generated.", registry=registry)
        self.generated_tokens = Counter(prefix + "generated_tokens", "Completion tokens.", registry=registry)
        self.finished = Counter(
            prefix + "sequences_finished", "Sequences by finish reason.", ["reason"], registry=registry
        )
        self.failed = Counter(prefix + "sequences_failed", "Sequences that failed here.", ["reason"], registry=registry)
        self.handed_over = Counter(
            prefix + "sequences_handed_over",
            "Sequences given to another actor, begun (unfinished) or not yet stored (finished).",
            ["state"],
            registry=registry,
        )
        self.continued = Counter(
            prefix + "sequences_continued",
            "Sequences taken from an actor that left, to be generated further (unfinished) or only stored (finished).",
            ["state"],
            registry=registry,
        )
        self.carried_tokens = Counter(
            prefix + "carried_tokens",
            "Tokens of continued sequences that were not generated again.",
            registry=registry,
        )
        self.bad_messages = Counter(prefix + "bad_messages", "Messages set aside.", ["kind"], registry=registry)
        self.dead_letters = Counter(prefix + "dead_letters", "Prompt groups given up.", registry=registry)
        self.updates = Counter(prefix + "weight_updates", "Weight updates by outcome.", ["outcome"], registry=registry)
        self.received_bytes = Counter(prefix + "received_bytes", "Weight bytes received.", registry=registry)
        self.receive_seconds = Histogram(
            prefix + "receive_seconds",
            "First to last byte of one update.",
            registry=registry,
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60),
        )
        self.stall_seconds = Histogram(
            prefix + "stall_seconds",
            "Time without generation per update.",
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
        )
        self.weight_loader = Gauge(
            prefix + "weight_loader", "1 for the way in which weights are loaded.", ["mode"], registry=registry
        )
        self.deletion_cost = Gauge(
            prefix + "deletion_cost",
            "Tokens in hand that would be handed over if this actor were stopped: its pod's deletion cost.",
            registry=registry,
        )
        self.verify_seconds = Histogram(
            prefix + "verify_seconds", "Verifier call as the actor sees it.", registry=registry
        )
        self.publish_seconds = Histogram(
            prefix + "publish_seconds", "Publish until the stream's acknowledgement.", registry=registry
        )
        self.completion_tokens = Histogram(
            prefix + "completion_tokens",
            "Length of completions.",
            registry=registry,
            buckets=tuple(2**power for power in range(2, 18)),
        )
        self.busy = BusyClock()
        self.tokens_total = 0
        self.finished_total = 0

    def show_weight_loader(self, mode: str) -> None:
        """`shadow`, `in_place` or `paused`; one at a time."""
        self.weight_loader.clear()
        self.weight_loader.labels(mode).set(1)

    def count_generated(self, num_tokens: int) -> None:
        """Tokens sampled here, whether their sequence finished or not."""
        self.generated_tokens.inc(num_tokens)
        self.tokens_total += num_tokens

    def count_finished(self, reason: str, num_tokens: int) -> None:
        """`num_tokens`: of the whole completion, those of other actors included."""
        self.finished.labels(reason).inc()
        self.completion_tokens.observe(num_tokens)
        self.finished_total += 1

    def count_continued(self, state: str, num_tokens: int) -> None:
        self.continued.labels(state).inc()
        self.carried_tokens.inc(num_tokens)
