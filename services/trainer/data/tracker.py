"""What was issued and where it ended: the ledger and the groups that are still open, kept in step; and the spans of both.

`SequenceTracker` is stepped by issue, arrival and close; pure state, no stream and no clock. Sequences may arrive in any order
and repeatedly, and have passed `decode_sequence`; those of groups that are not open are ignored, so that memory is bounded by
the open groups. Each step is also an event for the journal (`pipelinerl/audit/journal.py`). The feeder may issue `lost` groups
again, of which nothing is trained.

`SequenceTraces` has the trainer's spans: issued, received, and how each sequence ended; and one for each optimizer step. A
group's trace begins where it is issued; whatever is done with its sequences, here or elsewhere, follows. It remembers what the
next span of a sequence follows until the sequence has ended, of sampled traces only. A trace whose trainer starts again has no
end unless the sequence is received once more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from opentelemetry.trace import Span, SpanKind

from pipelinerl.bus.protocol import LogEntry, Subjects
from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import PromptGroup, Sequence
from pipelinerl.rl.ledger import Ledger, Outcome
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.spans import Trace, child, is_on, root, trace_in, trace_of


@dataclass
class OpenGroup:
    """One of which samples are still to come. `members`: those that came, by index."""

    num_samples: int
    queue_position: int | None = None
    """Of its newest message on PROMPTS, which may have left it; None before there is one."""
    members: dict[int, Sequence] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.num_samples) if index not in self.members]


class SequenceTracker:
    """`issued_groups` counts replacements of lost ones too; `record` takes the events.

    `tokens`: completion tokens that ended here by outcome, since this process began.
    """

    def __init__(self, record: Callable[[Mapping[str, Any]], None] = lambda event: None) -> None:
        self._record = record
        self.ledger = Ledger()
        self.traces = SequenceTraces()
        self.tokens = {outcome.value: 0 for outcome in Outcome}
        self.open_groups: dict[str, OpenGroup] = {}
        """In order of issue."""
        self.issued_groups = 0
        self.lost_groups = 0

    def issue(self, group: PromptGroup) -> None:
        """Raises `LedgerViolation` for a group that was issued before."""
        self.ledger.issue(group.sequence_id(index) for index in range(group.num_samples))
        self.open_groups[group.group_id] = OpenGroup(group.num_samples)
        self.issued_groups += 1
        samples, version = group.num_samples, group.issued_version
        self._record({"event": "issue", "group": group.group_id, "samples": samples, "version": version})

    def published(self, group_id: str, position: int) -> None:
        """The group is on PROMPTS, at `position`. It may be complete already."""
        if group_id in self.open_groups:
            self.open_groups[group_id].queue_position = position

    def refuse(self, group: PromptGroup, reason: str) -> None:
        """A group that was issued and cannot be sent out ends here, and another may take its place."""
        self._close([group.sequence_id(index) for index in range(group.num_samples)], Outcome.FAILED, reason)
        del self.open_groups[group.group_id]
        self.lost_groups += 1

    def arrive(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """All samples of the group that this one completes, in order of their index; empty while more are to come.

        Failed samples are closed then. Raises `MessageError` when the sequence contradicts its group's size; nothing is
        changed then.
        """
        group = self.open_groups.get(sequence.group_id)
        if group is None:
            return ()
        if sequence.group_size != group.num_samples:
            raise MessageError("Sequence", "group_size", f"{sequence.group_size}, issued with {group.num_samples}")
        group.members.setdefault(sequence.sample_index, sequence)
        if len(group.members) < group.num_samples:
            return ()
        del self.open_groups[sequence.group_id]
        samples = tuple(group.members[index] for index in range(group.num_samples))
        for sample in samples:
            if sample.failure:
                self.close([sample], Outcome.FAILED, short_reason(sample.failure))
        return samples

    def lose(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str) -> None:
        """Nothing of this group is trained: what is left of it ends here, and it may be issued again."""
        self.close(sequences, outcome, reason)
        self.lost_groups += 1

    def missing(self, group_id: str, run: str, failure: str) -> list[Sequence]:
        """A failed sequence for each sample of an open group that has not arrived; nothing for other groups."""
        group = self.open_groups.get(group_id, OpenGroup(0))
        return [failed_sample(run, group_id, index, group.num_samples, failure) for index in group.missing]

    def held(self) -> tuple[Sequence, ...]:
        """What has arrived of groups that are still open: with `to_state`, all that a checkpoint needs of them."""
        return tuple(sequence for group in self.open_groups.values() for sequence in group.members.values())

    def gone_from_queue(self, first_position: int) -> list[str]:
        """Open groups whose prompt is no longer on PROMPTS, where `first_position` is the oldest one left."""
        return [
            group_id
            for group_id, group in self.open_groups.items()
            if group.queue_position is not None and group.queue_position < first_position
        ]

    def train(self, sequences: Iterable[Sequence], version: int) -> None:
        """They were trained on, and `version` came of it. Raises `LedgerViolation`."""
        self.close(sequences, Outcome.TRAINED, version=version)

    def end_step(self, version: int) -> None:
        """All of the step that made `version` is in."""
        self._record({"event": "step", "version": version, "counts": self.ledger.counts.as_dict()})

    def close(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "", **more: int) -> None:
        """They end here; `more` goes into the event. Raises `LedgerViolation`."""
        ended = tuple(sequences)
        self._close([sequence.sequence_id for sequence in ended], outcome, reason, **more)
        self.tokens[outcome.value] += sum(sequence.num_completion_tokens for sequence in ended)

    def _close(self, ids: list[str], outcome: Outcome, reason: str = "", **more: int) -> None:
        for sequence_id in ids:
            self.ledger.close(sequence_id, outcome, reason)
        if ids:
            because = {"reason": reason} if reason else {}
            event: dict[str, Any] = {"event": "close", "outcome": outcome.value, **because, **more, "ids": ids}
            self._record(event)
            self.traces.closed(event)

    def to_state(self) -> dict[str, Any]:
        """JSON-able. What had arrived of open groups is not in it (`held`)."""
        groups = self.open_groups.items()
        positions = {group_id: group.queue_position for group_id, group in groups}
        return {
            "ledger": self.ledger.to_state(),
            "groups": {
                "issued": self.issued_groups,
                "lost": self.lost_groups,
                "open": {group_id: group.num_samples for group_id, group in groups},
                "queue_positions": {name: position for name, position in positions.items() if position is not None},
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over `to_state` of another tracker, without an event. Raises `LedgerViolation`."""
        groups = state["groups"]
        self.ledger = Ledger.from_state(state["ledger"])
        self.issued_groups, self.lost_groups = groups["issued"], groups["lost"]
        positions = groups["queue_positions"]
        self.open_groups = {name: OpenGroup(size, positions.get(name)) for name, size in groups["open"].items()}


def failed_sample(run: str, group_id: str, sample_index: int, group_size: int, failure: str) -> Sequence:
    """Accounts for a sample of which nothing usable came."""
    nothing = np.empty(0, dtype=np.int32)
    return Sequence(
        run=run,
        sequence_id=f"{group_id}.{sample_index}",
        group_id=group_id,
        sample_index=sample_index,
        group_size=group_size,
        task="",
        prompt_token_ids=nothing,
        completion_token_ids=nothing,
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        reward=0.0,
        failure=failure,
    )


MOST_OPEN = 100_000
"""Sequences under way whose traces are remembered; beyond it the oldest is forgotten, and its trace has no end."""


class SequenceTraces:
    """Costs a dictionary look-up for each sequence where nothing is sampled."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Trace] = OrderedDict()
        """By sequence id: what its next span follows."""
        self._step: tuple[Trace, int] | None = None
        """The optimizer step under way, and when it began (Unix ns)."""

    def issue(self, group: PromptGroup, message_id: str) -> Span:
        """Of sending a group out, which begins its trace. To be used in a `with`, and followed by the message."""
        if not is_on():
            return root("group.issue")
        about: a.Attributes = {a.GROUP_ID: group.group_id, a.TASK: group.task, a.VERSION: group.issued_version}
        sizes: a.Attributes = {a.INPUT_TOKENS: len(group.prompt_token_ids), a.CHOICES: group.num_samples}
        sent = a.messaging("send", Subjects(group.run).prompts, message_id)
        span = root("group.issue", kind=SpanKind.PRODUCER, attributes={**about, **sizes, **sent})
        if (trace := trace_of(span)) is not None:
            for index in set(range(group.num_samples)) - set(group.done_samples):
                self._remember(group.sequence_id(index), trace)
        return span

    def received(self, entry: LogEntry, sequence: Sequence) -> None:
        """A sequence that is under way came out of the log."""
        if (trace := trace_in(entry.headers)) is None:
            return
        about: a.Attributes = {a.SEQUENCE_ID: sequence.sequence_id, a.REWARD: sequence.reward}
        received = a.messaging("process", Subjects(sequence.run).sequences, entry.msg_id, len(entry.payload))
        with child(
            trace, "sequence.receive", kind=SpanKind.CONSUMER, attributes={**about, **a.generated(sequence), **received}
        ) as span:
            self._remember(sequence.sequence_id, trace_of(span) or trace)

    @contextmanager
    def step(self, version: int, sequence_ids: Iterable[str]) -> Iterator[Span]:
        """Around an optimizer step and its entry into the tracker: sequences that end inside were trained by it.

        `version`: that the step makes.
        """
        following = [trace for sequence_id in sequence_ids if (trace := self._open.get(sequence_id)) is not None]
        with root("step.train", links=following, attributes={a.VERSION: version}) as span:
            self._step = trace_of(span), time.time_ns()
            try:
                yield span
            finally:
                self._step = None

    def closed(self, event: Mapping[str, Any]) -> None:
        """The end of each sequence of a `close` event."""
        if not self._open:
            return
        trained = event["outcome"] == Outcome.TRAINED.value
        about = {a.OUTCOME: event["outcome"]}
        if "reason" in event:
            about[a.REASON] = event["reason"]
        if "version" in event:
            about[a.VERSION] = event["version"]
        step = self._step if trained else None
        for sequence_id in event["ids"]:
            child(
                self._open.pop(sequence_id, None),
                "sequence.train" if trained else "sequence.end",
                attributes={a.SEQUENCE_ID: sequence_id, **about},
                links=[step[0]] if step else (),
                began_at=step[1] if step else None,
            ).end()

    def _remember(self, sequence_id: str, trace: Trace) -> None:
        self._open[sequence_id] = trace
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
