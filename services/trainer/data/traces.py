"""The trainer's trace spans: issue, receipt and end of each sequence, and one span per optimizer step.

A group's trace begins when the group is issued. A sequence that arrived before a restart of the trainer gets no end span.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Span, SpanKind

from pipelinerl.bus.protocol import LogEntry, Subjects
from pipelinerl.messages.sequences import PromptGroup, Sequence
from pipelinerl.rl.ledger import Outcome
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.tracing import Trace, child, root, trace_in, trace_of

MOST_OPEN = 100_000
"""Maximum number of sequences in progress whose traces are kept. If there are more, the oldest trace gets no end span."""


class SequenceTraces:
    def __init__(self) -> None:
        self._open: OrderedDict[str, Trace] = OrderedDict()
        """By sequence id: the span that becomes the parent of the sequence's next span."""
        self._step: tuple[Trace, int] | None = None
        """Trace of the running optimizer step, and the step's start (Unix ns)."""

    def issue(self, group: PromptGroup, message_id: str) -> Span:
        """Return the span that begins a group's trace. Publish the message inside `with span:`."""
        about: a.Attributes = {a.GROUP_ID: group.group_id, a.TASK: group.task, a.VERSION: group.issued_version}
        sizes: a.Attributes = {a.INPUT_TOKENS: len(group.prompt_token_ids), a.CHOICES: group.num_samples}
        sent = a.messaging("send", Subjects(group.run).prompts, message_id)
        span = root("group.issue", kind=SpanKind.PRODUCER, attributes={**about, **sizes, **sent})
        if (trace := trace_of(span)) is not None:
            for index in set(range(group.num_samples)) - set(group.done_samples):
                self._remember(group.sequence_id(index), trace)
        return span

    def received(self, entry: LogEntry, sequence: Sequence) -> None:
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
        """Open a span around the step that produces `version`. The `sequence.train` spans of its sequences link to it."""
        following = [trace for sequence_id in sequence_ids if (trace := self._open.get(sequence_id)) is not None]
        with root("step.train", links=following, attributes={a.VERSION: version}) as span:
            self._step = trace_of(span), time.time_ns()
            try:
                yield span
            finally:
                self._step = None

    def tracked(self, event: Mapping[str, Any]) -> None:
        """End the trace of each sequence that an event of the tracker closes."""
        if not self._open or event["event"] != "close":
            return
        trained = event["outcome"] == Outcome.TRAINED.value
        names = {"outcome": a.OUTCOME, "reason": a.REASON, "version": a.VERSION}
        about = {attribute: event[name] for name, attribute in names.items() if name in event}
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
