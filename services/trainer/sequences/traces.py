"""The trainer's spans of sequences: issued, received, and how each ended; and one span for each optimizer step.

A group's trace begins where it is issued; whatever is done with its sequences, here or elsewhere, follows. Until a sequence has
ended, what its next span follows is kept here, of sampled traces only. It changes nothing of what is traced; a trace whose
trainer starts again has no end unless the sequence is received once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, SpanKind

from pipelinerl.algorithms.ledger import Outcome
from pipelinerl.bus.protocol import LogEntry
from pipelinerl.bus.subjects import Subjects
from pipelinerl.tracing import attributes as a
from pipelinerl.tracing.spans import Trace, child, is_on, now_ns, root, trace_in, trace_of
from pipelinerl.types import PromptGroup, Sequence

Record = Callable[[Mapping[str, Any]], None]

MOST_OPEN = 100_000
"""Sequences under way whose traces are remembered; beyond it the oldest is forgotten, and its trace has no end."""


@dataclass(frozen=True)
class _Step:
    trace: Trace
    began_at: int
    """Unix ns."""


class SequenceTraces:
    """See the module. Costs a dictionary's look-up for each sequence where nothing is sampled."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Trace] = OrderedDict()
        """By sequence id: what its next span follows."""
        self._step: _Step | None = None

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
        """`record`, for events of the books, with the end of each sequence in its trace."""

        def both(event: Mapping[str, Any]) -> None:
            record(event)
            if self._open and event["event"] == "close":
                self._closed(event)

        return both

    @contextmanager
    def step(self, version: int, sequence_ids: Iterable[str]) -> Iterator[Span]:
        """Around an optimizer step and its entry into the books: sequences that end inside were trained by it.

        `version`: that the step makes.
        """
        following = [trace for sequence_id in sequence_ids if (trace := self._open.get(sequence_id)) is not None]
        with root("step.train", links=following, attributes={a.VERSION: version}) as span:
            self._step = _Step(trace_of(span), now_ns())
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
                links=[step.trace] if step else (),
                began_at=step.began_at if step else None,
            ).end()

    def _remember(self, sequence_id: str, trace: Trace) -> None:
        self._open[sequence_id] = trace
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
