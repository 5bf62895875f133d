"""What was issued and where it ended: the ledger and the groups that are still open, kept in step; and the spans of both.

`SequenceTracker` is stepped by issue, arrival and close; pure state, no stream and no clock. Each step is also an event for
the journal (`pipelinerl/audit/journal.py`). The feeder may issue `lost` groups again, of which nothing is trained.

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
from typing import Any

import numpy as np
from opentelemetry.trace import Span, SpanKind

from pipelinerl.bus.protocol import LogEntry, Subjects
from pipelinerl.messages.sequences import PromptGroup, Sequence
from pipelinerl.rl.grouping import CompletedGroup, GroupAssembler
from pipelinerl.rl.ledger import Ledger, LedgerCounts, Outcome
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.spans import (
    Trace,
    child,
    is_on,
    root,
    trace_in,
    trace_of,
)


class SequenceTracker:
    """`issued_groups` counts replacements of lost ones too; `record` takes the events.

    `counts` and `tokens` are for readers on other threads: the ledger's numbers after the last event, of one moment, and the
    completion tokens that ended here by outcome, since this process began.
    """

    def __init__(self, record: Callable[[Mapping[str, Any]], None] = lambda event: None) -> None:
        self._record = record
        self.ledger = Ledger()
        self.counts = LedgerCounts()
        self.tokens = {outcome.value: 0 for outcome in Outcome}
        self.groups = GroupAssembler()
        self.issued_groups = 0
        self.lost_groups = 0
        self._queue_positions: dict[str, int] = {}  # of open groups whose prompt is, or was, on the stream

    def issue(self, group: PromptGroup) -> None:
        self.ledger.issue(group.sequence_id(index) for index in range(group.num_samples))
        self.groups.expect(group.group_id, group.num_samples)
        self.issued_groups += 1
        self.counts = self.ledger.counts
        samples, version = group.num_samples, group.issued_version
        self._record({"event": "issue", "group": group.group_id, "samples": samples, "version": version})

    def published(self, group_id: str, position: int) -> None:
        """The group is on PROMPTS, at `position`. It may be complete already."""
        if self.groups.is_open(group_id):
            self._queue_positions[group_id] = position

    def refuse(self, group: PromptGroup, reason: str) -> None:
        """A group that was issued and cannot be sent out ends here, and another may take its place."""
        self._close([group.sequence_id(index) for index in range(group.num_samples)], Outcome.FAILED, reason)
        self.groups.discard(group.group_id)
        self.lost_groups += 1

    def arrive(self, sequence: Sequence) -> CompletedGroup | None:
        """The group that this sequence completes. Its failed samples are closed. Raises `MessageError`."""
        group = self.groups.add(sequence)
        if group is not None:
            self._queue_positions.pop(group.group_id, None)
            for failed in group.failed:
                self.close([failed], Outcome.FAILED, short_reason(failed.failure))
        return group

    def lose(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str) -> None:
        """Nothing of this group is trained: what is left of it ends here, and it may be issued again."""
        self.close(sequences, outcome, reason)
        self.lost_groups += 1

    def missing(self, group_id: str, run: str, failure: str) -> tuple[Sequence, ...]:
        """A failed sequence for each sample of an open group that has not arrived; nothing for other groups."""
        size = self.groups.open_groups().get(group_id, 0)
        return tuple(failed_sample(run, group_id, index, size, failure) for index in self.groups.missing(group_id))

    def missing_sample(self, sequence_id: str, run: str, failure: str) -> Sequence | None:
        """The same for one sample, by its id; None when the id names none that is still to come."""
        every = self.missing(sequence_id.rpartition(".")[0], run, failure)
        return next((sequence for sequence in every if sequence.sequence_id == sequence_id), None)

    def gone_from_queue(self, first_position: int) -> tuple[str, ...]:
        """Open groups whose prompt is no longer on PROMPTS, where `first_position` is the oldest one left."""
        return tuple(group_id for group_id, position in self._queue_positions.items() if position < first_position)

    def train(self, sequences: Iterable[Sequence], version: int) -> None:
        """They were trained on, and `version` came of it. Raises `LedgerViolation`."""
        self.close(sequences, Outcome.TRAINED, version=version)

    def end_step(self, version: int) -> None:
        """All of the step that made `version` is in. Raises `LedgerViolation` when the equation does not hold."""
        self.ledger.check()
        self._record({"event": "step", "version": version, "counts": self.ledger.counts.as_dict()})

    def close(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "", **more: int) -> None:
        """They end here; `more` goes into the event. Raises `LedgerViolation`."""
        ended = tuple(sequences)
        self._close([sequence.sequence_id for sequence in ended], outcome, reason, **more)
        self.tokens[outcome.value] += sum(sequence.num_completion_tokens for sequence in ended)

    def _close(self, ids: list[str], outcome: Outcome, reason: str = "", **more: int) -> None:
        for sequence_id in ids:
            self.ledger.close(sequence_id, outcome, reason)
        self.counts = self.ledger.counts
        if ids:
            because = {"reason": reason} if reason else {}
            self._record({"event": "close", "outcome": outcome.value, **because, **more, "ids": ids})

    def to_state(self) -> dict[str, Any]:
        """JSON-able. What had arrived of open groups is not in it (`groups.held`)."""
        return {
            "ledger": self.ledger.to_state(),
            "groups": {
                "issued": self.issued_groups,
                "lost": self.lost_groups,
                "open": self.groups.open_groups(),
                "queue_positions": dict(self._queue_positions),
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over `to_state` of another tracker, without an event. Raises `LedgerViolation`."""
        groups = state["groups"]
        self.ledger, self.groups = Ledger.from_state(state["ledger"]), GroupAssembler()
        self.counts = self.ledger.counts
        self.issued_groups, self.lost_groups = groups["issued"], groups["lost"]
        for group_id, num_samples in groups["open"].items():
            self.groups.expect(group_id, num_samples)
        self._queue_positions = dict(groups["queue_positions"])


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


Record = Callable[[Mapping[str, Any]], None]

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

    def recording(self, record: Record) -> Record:
        """`record`, for events of the tracker, with the end of each sequence in its trace."""

        def both(event: Mapping[str, Any]) -> None:
            record(event)
            if self._open and event["event"] == "close":
                self._closed(event)

        return both

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

    def _closed(self, event: Mapping[str, Any]) -> None:
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
