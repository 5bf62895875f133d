"""The actor's metrics, on an injected Prometheus registry, and the totals that its gRPC call GetState reports."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from pipelinerl.episodes import POLICY_FAULTS
from pipelinerl.messages.sequences import FinishReason
from pipelinerl.messages.verification import FAILURE_CODES
from pipelinerl.telemetry.metrics import MetricSet

CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
RECEIVE_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
STALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15)
DECODE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
COMPLETION_TOKENS = tuple(2**power for power in range(2, 18))
STAGING_STATES = ("idle", "receiving", "staged", "committing")
CARRIED_STATES = ("unfinished", "finished")
REFUSALS = (
    *(*POLICY_FAULTS, "episode_not_found", "invalid_request", "request_timeout", "not_found", "failed", "interrupted"),
    *("internal_error", "hung_up"),
)
"""Error codes with which the actor refuses requests of an episode's environment."""
IGNORED_FIELDS = (
    *("chat_template_kwargs", "frequency_penalty", "logit_bias", "logprobs", "min_p", "min_tokens", "presence_penalty"),
    *("reasoning_effort", "repetition_penalty", "response_format", "seed", "temperature", "tool_choice", "top_k", "top_p"),
)
"""Fields that the actor ignores in environments' requests. They would change how turns are sampled, or the answer's form."""


class BusyClock:
    """Counts the seconds in which at least one of its `with` blocks runs. Blocks run on one event loop; any thread may read."""

    def __init__(self) -> None:
        self._state = (0, 0.0, 0.0)
        """Number of running blocks, start of the current busy time, seconds of earlier ones; one tuple for consistent reads."""

    def __enter__(self) -> None:
        running, since, total_s = self._state
        self._state = (running + 1, since if running else time.monotonic(), total_s)

    def __exit__(self, *exc: object) -> None:
        running, since, total_s = self._state
        ended_s = time.monotonic() - since if running == 1 else 0.0
        self._state = (running - 1, since, total_s + ended_s)

    @property
    def running(self) -> int:
        return self._state[0]

    @property
    def total_s(self) -> float:
        running, since, total_s = self._state
        return total_s + (time.monotonic() - since if running else 0.0)


class ActorMetrics:
    """Counters, gauges and histograms of one actor. A metric made by `reading` has no series until it is set."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metrics = MetricSet("pipelinerl_actor", registry)
        self.busy = BusyClock()
        self.tokens_total = 0
        self.finished_total = 0
        self._generating(metrics)
        self._finishing(metrics)
        self._episodes(metrics)
        self._weights(metrics)

    def _generating(self, metrics: MetricSet) -> None:
        self.version = metrics.reading("policy_version", "Policy version that the actor serves; no series before the first.")
        self.ready = metrics.reading("ready", "1 while the actor takes prompts, 0 otherwise.", unit="1 or 0")
        self.ready.set(0)  # shows an engine that never starts
        self.held_groups = metrics.reading("prompts_held_groups", "Prompt groups that are taken but not acknowledged yet.")
        text = "Invalid messages. A control message is ignored; a prompt group becomes a dead letter."
        self.bad_messages = metrics.counter("bad_messages_total", text, {"kind": ("prompt_group", "control")})
        self.dead_letters = metrics.counter("dead_letters_total", "Prompt groups stored as dead letters.", unit="groups")
        in_progress = metrics.gauge("sequences_in_progress", "Sequences being generated for training.", unit="sequences")
        in_progress.set_function(lambda: self.busy.running)
        text = "Maximum number of sequences in progress, as the recipe says."
        self.most_in_progress = metrics.reading("sequences_in_progress_max", text, unit="sequences")
        text = "Completion tokens that this actor sampled for training, including those of unfinished sequences."
        self.generated_tokens = metrics.counter("generated_tokens_total", text)
        metrics.reading("busy_seconds_total", "Time with at least one sequence in progress.").read(lambda: self.busy.total_s)
        self.decode_step = metrics.histogram(
            "decode_step_seconds",
            "Duration of an engine step with sequences in progress, timed on the event loop; includes stalls by weight swaps.",
            DECODE_SECONDS,
        )
        self._kv_cache = metrics.reading("kv_cache_usage_ratio", "Share of the KV cache in use at the last decode step.")

    def _finishing(self, metrics: MetricSet) -> None:
        reasons = tuple(reason.value for reason in FinishReason)
        text = "Finished sequences, by finish reason."
        self.finished = metrics.counter("sequences_finished_total", text, {"reason": reasons}, unit="sequences")
        text = "Failed sequences, by reason."
        self.failed = metrics.counter("sequences_failed_total", text, {"reason": "see docs/errors.md"}, unit="sequences")
        text = "Sequences that this actor handed over when it stopped: unfinished ones, and finished ones not stored yet."
        self.handed_over = metrics.counter("sequences_handed_over_total", text, {"state": CARRIED_STATES}, unit="sequences")
        text = "Sequences that this actor took over from a stopped actor: unfinished ones, and finished ones not stored yet."
        self.continued = metrics.counter("sequences_continued_total", text, {"state": CARRIED_STATES}, unit="sequences")
        text = "Tokens that other actors had already generated in sequences taken over."
        self.carried_tokens = metrics.counter("carried_tokens_total", text)
        self.completion_tokens = metrics.histogram("completion_tokens", "Length of completions, tokens.", COMPLETION_TOKENS)
        text = "Duration of a verifier call for one batch, measured by the actor."
        self.verify_seconds = metrics.histogram("verify_seconds", text, CALL_SECONDS)
        text = "Failed attempts of verifier calls, by the gRPC status that the actor got; most are retried."
        self.verify_failed_tries = metrics.counter("verify_failed_tries_total", text, {"code": FAILURE_CODES}, unit="calls")
        text = "Time from publishing a sequence to the stream's acknowledgement."
        self.publish_seconds = metrics.histogram("publish_seconds", text, CALL_SECONDS)

    def _episodes(self, metrics: MetricSet) -> None:
        text = "Running episodes. Each decodes a turn, waits for its environment, or waits until it may decode."
        self.episodes = metrics.gauge("episodes_in_progress", text, unit="episodes")
        text = "Turns that environments requested: newly sampled, or replayed from the episode's record."
        self.episode_turns = metrics.counter("episode_turns_total", text, {"source": ("sampled", "replayed")}, unit="turns")
        text = "Branches of episodes beyond the first; one begins if a request's history does not extend the recorded tokens."
        self.episode_branches = metrics.counter("episode_branches_total", text, unit="branches")
        text = "Recorded turns that were dropped, because the last run of the environment did not receive them."
        self.episode_dropped_turns = metrics.counter("episode_dropped_turns_total", text, unit="turns")
        text = "Requests of environments that got no turn, by code."
        self.episode_refusals = metrics.counter("episode_refusals_total", text, {"code": REFUSALS}, unit="requests")
        self.episode_ignored_fields = metrics.counter(
            "episode_ignored_fields_total",
            "Requests of environments with a field that is ignored, such as a temperature.",
            {"field": IGNORED_FIELDS},
            unit="requests",
        )

    def _weights(self, metrics: MetricSet) -> None:
        self.updates = metrics.counter(
            "weight_updates_total",
            "Weight updates by outcome: committed, failed on this actor, discarded before the commit, or "
            "refused because this actor cannot load what the manifest describes.",
            {"outcome": ("committed", "failed", "discarded", "refused")},
            unit="updates",
        )
        self.received_bytes = metrics.counter("received_bytes_total", "Bytes of weights received.")
        self.receive_seconds = metrics.histogram("receive_seconds", "Time to receive one update.", RECEIVE_SECONDS)
        self.stall_seconds = metrics.histogram("stall_seconds", "Time for which one update stopped generation.", STALL_SECONDS)
        text = "1 for the state that the update to the next version is in, 0 for the others."
        self.staging = metrics.reading("staging_state", text, {"state": STAGING_STATES}, unit="1 or 0")
        text = "1 for the mode of the weight loader."
        self.weight_loader = metrics.reading("weight_loader", text, {"mode": "shadow, in_place, paused, adapter"}, unit="1")

    def engine_step(self, decode_s: float | None, kv_cache_usage: float) -> None:
        """Record an engine step: its seconds (None for the first step after idle time) and the KV cache's usage in [0, 1]."""
        if decode_s is not None:
            self.decode_step.observe(decode_s)
        self._kv_cache.set(kv_cache_usage)

    def count_generated(self, num_tokens: int) -> None:
        self.generated_tokens.inc(num_tokens)
        self.tokens_total += num_tokens

    def count_finished(self, reason: str, num_tokens: int) -> None:
        """Count a finished sequence. `num_tokens` includes tokens that other actors generated."""
        self.finished.labels(reason).inc()
        self.completion_tokens.observe(num_tokens)
        self.finished_total += 1
