"""Account for every sequence: `issued = trained + dropped_stale + dropped_filtered + failed + in_flight`.

`Ledger` has two events, issue and close, each O(1) per sequence. If the equation breaks, PipelineRL has a defect and the run
ends. `SequenceTracker` keeps the ledger and the open groups consistent. Checkpoints store the result of its `to_state`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import PromptGroup, Sequence
from pipelinerl.rl.groups import StaleReason, length_bucket
from pipelinerl.telemetry.metrics import short_reason


class Outcome(StrEnum):
    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_FILTERED = "dropped_filtered"
    FAILED = "failed"


SKIPPED = "step skipped"
"""Failure reason of sequences whose step changed no weight. Their groups are not lost, because the step has used them."""


class LedgerViolation(AssertionError):
    """A sequence was issued twice, closed without being in flight or failed without a reason, or the counts do not add up."""


STATES = ("issued", *(outcome.value for outcome in Outcome), "in_flight")
"""Names of a ledger's counts, which are also the fields of `SequenceCounts` in trainer.proto."""


def ledger_counts(**known: int) -> dict[str, int]:
    """Return the numbers of sequences by state, in the order of `STATES`; 0 for those not given."""
    return dict.fromkeys(STATES, 0) | known


class Ledger:
    """Outcomes of all sequences of one run. `counts` is replaced at each event, so any thread reads consistent numbers."""

    def __init__(self) -> None:
        self.counts = ledger_counts()
        self._in_flight: dict[str, None] = {}  # in order of issue
        self._reasons = {outcome: Counter[str]() for outcome in Outcome}

    def issue(self, sequence_ids: Iterable[str]) -> None:
        """Count sequences as issued and in flight. Raises `LedgerViolation` if one is already in flight."""
        ids = list(sequence_ids)
        for sequence_id in ids:
            if sequence_id in self._in_flight:
                raise LedgerViolation(f"sequence {sequence_id} was issued twice")
            self._in_flight[sequence_id] = None
        self._count("issued", len(ids))

    def close(self, sequence_ids: Iterable[str], outcome: Outcome, reason: str = "") -> None:
        """Close sequences with an outcome. Raises `LedgerViolation` if one is not in flight, or fails without a `reason`."""
        ids = list(sequence_ids)
        for sequence_id in ids:
            if sequence_id not in self._in_flight:
                raise LedgerViolation(f"sequence {sequence_id} ends as {outcome}, but it is not in flight")
            if outcome is Outcome.FAILED and not reason:
                raise LedgerViolation(f"sequence {sequence_id} failed without a reason")
            del self._in_flight[sequence_id]
        if reason and ids:
            self._reasons[outcome][reason] += len(ids)
        self._count(outcome.value, len(ids))

    def is_open(self, sequence_id: str) -> bool:
        """Return whether the sequence is in flight. Only then may it be trained on."""
        return sequence_id in self._in_flight

    def in_flight(self) -> tuple[str, ...]:
        return tuple(self._in_flight)

    def reasons(self, outcome: Outcome) -> dict[str, int]:
        """Return how many sequences ended with this outcome, by reason. Sequences without a reason are not counted."""
        return dict(self._reasons[outcome])

    @property
    def discrepancy(self) -> int:
        """The number of issued sequences minus all other counts. Anything but 0 is a defect."""
        counts = self.counts  # read once, since another thread may change it
        return 2 * counts["issued"] - sum(counts.values())

    def check(self) -> None:
        """Raise `LedgerViolation` with all counts if `discrepancy` is not 0."""
        if self.discrepancy:
            numbers = ", ".join(f"{name} {count}" for name, count in self.counts.items())
            raise LedgerViolation(f"issued != trained + dropped + failed + in_flight: {numbers}")

    def _count(self, name: str, more: int) -> None:
        self.counts = self.counts | {name: self.counts[name] + more, "in_flight": len(self._in_flight)}
        self.check()

    def to_state(self) -> dict[str, Any]:
        return {
            "issued": self.counts["issued"],
            "closed": {outcome.value: self.counts[outcome] for outcome in Outcome},
            "reasons": {outcome.value: dict(counts) for outcome, counts in self._reasons.items()},
            "in_flight": list(self._in_flight),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Restore what `to_state` returned. Raises `LedgerViolation` if the numbers do not add up."""
        ledger = cls()
        ledger._reasons = {outcome: Counter(state["reasons"][outcome.value]) for outcome in Outcome}
        ledger._in_flight = dict.fromkeys(state["in_flight"])
        ledger.counts = ledger_counts(issued=state["issued"], in_flight=len(ledger._in_flight), **state["closed"])
        ledger.check()
        return ledger


@dataclass
class OpenGroup:
    """A group of which some samples have not arrived. `members`: the samples that have arrived, by index."""

    num_samples: int
    queue_position: int | None = None
    """Position of the group's newest message in the queue PROMPTS; None before the group is published."""
    members: dict[int, Sequence] = field(default_factory=dict)


class SequenceTracker:
    """The ledger, the open groups and figures about ended sequences. Each of `listeners` is called with each event.

    Callers check sequences with `decode_sequence` first. Sequences may arrive in any order and repeatedly; those of groups that
    are not open are ignored. A group is lost if none of its samples is trained on."""

    def __init__(self, *listeners: Callable[[Mapping[str, Any]], None]) -> None:
        self._listeners = listeners
        self.ledger = Ledger()
        self.tokens = {outcome.value: 0 for outcome in Outcome}  # sampled tokens since this process began
        self._lengths = {outcome: Counter[int]() for outcome in (Outcome.TRAINED, Outcome.DROPPED_STALE)}
        """For each of the two outcomes, number of sequences by `length_bucket` since the last `take_ended_by_length`."""
        self.longest_tokens, self._num_ended = 1, 0
        """Tokens of the longest sequence trained on or dropped as stale since process start, and number of such sequences."""
        self.open_groups: dict[str, OpenGroup] = {}  # by id, in order of issue
        self.issued_groups = 0  # including those that replace lost ones
        self.lost_groups = 0
        self.num_waiting = 0
        """Number of samples that have arrived while others of their group have not."""

    def issue(self, group: PromptGroup) -> None:
        """Count a group as issued. Raises `LedgerViolation` if one of its sequences is still in flight."""
        self.ledger.issue(group.sequence_id(index) for index in range(group.num_samples))
        self.open_groups[group.group_id] = OpenGroup(group.num_samples)
        self.issued_groups += 1
        samples, version = group.num_samples, group.issued_version
        self._tell({"event": "issue", "group": group.group_id, "samples": samples, "version": version})

    def published(self, group_id: str, position: int) -> None:
        """Record the position of the group's message in PROMPTS. Do nothing if the group is already complete."""
        if group_id in self.open_groups:
            self.open_groups[group_id].queue_position = position

    def refuse(self, group: PromptGroup, reason: str) -> None:
        """Close an issued group that cannot be published, and count it as lost."""
        self._close([group.sequence_id(index) for index in range(group.num_samples)], Outcome.FAILED, reason)
        self.num_waiting -= len(self.open_groups.pop(group.group_id).members)
        self.lost_groups += 1

    def arrive(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Add a sequence. If it completes its group, close the group's failed samples and return all samples in order; else
        return (). Raises `MessageError`, and changes nothing, if the sequence states another group size."""
        group = self.open_groups.get(sequence.group_id)
        if group is None:
            return ()
        if sequence.group_size != group.num_samples:
            raise MessageError("Sequence", "group_size", f"{sequence.group_size}, but its group has {group.num_samples}")
        if sequence.sample_index in group.members:
            return ()
        group.members[sequence.sample_index] = sequence
        self.num_waiting += 1
        if len(group.members) < group.num_samples:
            return ()
        del self.open_groups[sequence.group_id]
        self.num_waiting -= group.num_samples
        samples = tuple(group.members[index] for index in range(group.num_samples))
        for sample in samples:
            if sample.failure and self.ledger.is_open(sample.sequence_id):
                self.close([sample], Outcome.FAILED, short_reason(sample.failure))
        return samples

    def lose(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str) -> None:
        """Count a group as lost, because none of its samples is trained on, and close its open `sequences`."""
        self.close(sequences, outcome, reason)
        self.lost_groups += 1

    def missing(self, group_id: str, run: str, failure: str) -> list[Sequence]:
        """Return a sequence with this `failure` for each sample of an open group that has not arrived; [] for other groups."""
        group = self.open_groups.get(group_id, OpenGroup(0))
        missing = [index for index in range(group.num_samples) if index not in group.members]
        return [failed_sample(run, group_id, index, group.num_samples, failure) for index in missing]

    def held(self) -> tuple[Sequence, ...]:
        """Return the samples that have arrived in open groups and are still in flight. The result of `to_state` lacks them."""
        arrived = (sequence for group in self.open_groups.values() for sequence in group.members.values())
        return tuple(sequence for sequence in arrived if self.ledger.is_open(sequence.sequence_id))

    def gone_from_queue(self, first_position: int, last_position: int) -> list[str]:
        """Return the ids of published open groups whose messages are not in the queue PROMPTS, which has the positions from
        `first_position` to `last_position`. A group with a higher position was in an earlier queue that was lost."""
        published = {name: group.queue_position for name, group in self.open_groups.items() if group.queue_position is not None}
        return [name for name, position in published.items() if not first_position <= position <= last_position]

    @property
    def mean_tokens(self) -> float:
        """Mean number of sampled tokens per sequence trained on or dropped as stale since this process began; at least 1."""
        return max(1.0, sum(self.tokens[outcome.value] for outcome in self._lengths) / max(1, self._num_ended))

    def take_ended_by_length(self) -> dict[str, list[int]]:
        """Return the numbers of sequences [trained, dropped as stale] since the last call, by `length_bucket`."""
        trained, stale = self._lengths[Outcome.TRAINED], self._lengths[Outcome.DROPPED_STALE]
        ended = {str(longest): [trained[longest], stale[longest]] for longest in sorted(trained | stale)}
        trained.clear()
        stale.clear()
        return ended

    def end_step(self, version: int) -> None:
        """Record that all sequences of the step that made `version` are closed."""
        self._tell({"event": "step", "version": version, "counts": self.ledger.counts})

    def close(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "", **more: int) -> None:
        """Close sequences. `more`: further fields of the event, such as `version`. Raises what `Ledger.close` raises."""
        ended = tuple(sequences)
        lengths = [sequence.num_episode_tokens for sequence in ended]
        if outcome is Outcome.TRAINED:
            more |= {"branches": sum(len(sequence.all_branches) for sequence in ended), "tokens": sum(lengths)}
        self._close([sequence.sequence_id for sequence in ended], outcome, reason, **more)
        self.tokens[outcome.value] += sum(lengths)
        if outcome in self._lengths:
            self._lengths[outcome].update(map(length_bucket, lengths))
            self.longest_tokens = max(self.longest_tokens, *lengths, 0)
            self._num_ended += len(lengths)

    def _close(self, ids: list[str], outcome: Outcome, reason: str = "", **more: int) -> None:
        self.ledger.close(ids, outcome, reason)
        if ids:
            because = {"reason": reason} if reason else {}
            self._tell({"event": "close", "outcome": outcome.value, **because, **more, "ids": ids})

    def _tell(self, event: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener(event)

    def to_state(self) -> dict[str, Any]:
        """Return the state as JSON values, without the arrived samples of open groups (see `held`)."""
        groups = self.open_groups.items()
        state = {
            "issued": self.issued_groups,
            "lost": self.lost_groups,
            "open": {name: group.num_samples for name, group in groups},
            "queue_positions": {name: group.queue_position for name, group in groups if group.queue_position is not None},
        }
        return {"ledger": self.ledger.to_state(), "groups": state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `to_state` returned, without recording an event. In an open group, a sample that is not in
        flight has ended, and counts as arrived. Raises `LedgerViolation` if the numbers do not add up."""
        groups = state["groups"]
        self.ledger = Ledger.from_state(state["ledger"])
        self.issued_groups, self.lost_groups = groups["issued"], groups["lost"]
        positions = groups["queue_positions"]
        self.open_groups = {name: OpenGroup(size, positions.get(name)) for name, size in groups["open"].items()}
        self.num_waiting = 0
        for name, group in self.open_groups.items():
            ended = [index for index in range(group.num_samples) if not self.ledger.is_open(f"{name}.{index}")]
            group.members = {index: failed_sample("", name, index, group.num_samples, "ended") for index in ended}
            self.num_waiting += len(ended)


def failed_sample(run: str, group_id: str, sample_index: int, group_size: int, failure: str) -> Sequence:
    """Return an empty, failed sequence that accounts for a sample without a usable result."""
    return Sequence(
        run=run,
        sequence_id=f"{group_id}.{sample_index}",
        group_id=group_id,
        sample_index=sample_index,
        group_size=group_size,
        task="",
        prompt_token_ids=np.empty(0, dtype=np.int32),
        reward=0.0,
        failure=failure,
    )


MEANINGS = {
    "reward_timeout": "the reward took longer than reward.timeout_s; its worker was killed",
    "reward_crashed": "the reward raised an exception, or its process died twice on this item",
    "reward_out_of_memory": "the reward needed more than reward.memory_mib",
    "reward_bad_reward": "the reward is not a finite number within reward.max_abs",
    "reward_bad_reference": "a value that the scorer needs is missing or invalid in the problem's reference",
    "reward_unknown_task": "the verifier's recipe does not have this task",
    "episode_timeout": "the episode took longer than task.episode_timeout_s, or its environment than task.answer_timeout_s",
    "episode_crashed": "the environment or agent raised an exception or failed in another way, and the policy was not at fault",
    "episode_out_of_memory": "the episode needed more than reward.memory_mib",
    "episode_bad_reward": "the episode's reward or a metric is not a finite number, or the reward exceeds reward.max_abs",
    "episode_bad_reference": "a value that the episode needs is missing or invalid in the problem's reference",
    "episode_unknown_task": "the verifier's recipe does not have this task",
    "turn_timeout": "a turn took longer than task.turn_timeout_s",
    "unknown_task": "the actor's recipe does not have the episode's task: give the actor the trainer's recipe",
    "no_turns": "the environment or agent ended without requesting a turn",
    "verifier_refused": "the verifier refused the call, or died five times while the episode's environment was running",
    "empty_completion": "the completion has no token",
    "non_finite_logprobs": "vLLM reported a log-probability that is not finite",
    "version_spans": "vLLM did not report a policy version for each token",
    "prompt_too_long": "the prompt leaves no room in the context",
    "engine": "vLLM refused or failed this request",
    "invalid": "the finished sequence is not a valid message",
    "too_large": "the sequence is larger than NATS's max_payload",
    "redelivered_too_often": "the group was delivered more than five times, and is kept as a dead letter",
    "unreadable_group": "the actor cannot read the prompt group; only the ids of its samples are known",
    "forged": "a message without its group's token used the id of this sequence",
    "actor_quarantined": "the actor's log-probabilities are not those of the policy that it names (weights.verify_logprobs)",
    "prompt too long": "the prompt leaves no room in the context; it was never published",
    "prompt group too large": "the prompt group is larger than NATS's max_payload; it was never published",
    "prompt group invalid": "the prompt group is invalid, for example because its prompt is empty; it was never published",
    "prompt group lost": "the group left the queue, but this sample never arrived",
    "unreadable": "the message does not parse or contradicts itself; only the id of its sequence is known",
    "contradicts its group": "the sequence states another group size than its prompt group had",
    "longer than the context": "prompt and completion exceed model.max_context",
    "token outside the vocabulary": "the prompt or completion has a token that the model does not have",
    SKIPPED: "the loss or gradient of the sequence's batch was not finite; the step changed no weight",
    "group incomplete": "this sample is valid, but its group has too few valid samples for the baseline",
    StaleReason.LAG.value: "the lag of the oldest token, or the mean lag, exceeds algorithm.max_lag",
    StaleReason.UNDONE.value: "a restart of the trainer undid a version that sampled some of the tokens",
    StaleReason.UNKNOWN.value: "some tokens name a version that this run has not made yet",
    "equal rewards": "all answers of the group earned the same, so the group teaches nothing",
}
"""Explanations, for users, of the reasons why a sequence was not trained on. docs/errors.md has the same words."""
