"""The trainer's spans of one weight update, from its offer until every member serves the version, or it is given up.

Whoever performs the update says what happens; nothing is decided here.
"""

from __future__ import annotations

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from pipelinerl.bus.protocol import ControlMessage, Headers
from pipelinerl.control import Serving, Staged
from pipelinerl.tracing import attributes as a
from pipelinerl.tracing.spans import child, headers_of, root, trace_in, trace_of


class UpdateTrace:
    """See the module. Members' spans follow the announcement or the commit that they answer."""

    def __init__(self, span: Span = INVALID_SPAN) -> None:
        """Of no update, unless `span` is given: see `begin`."""
        self._span = span
        self._commit: Span = INVALID_SPAN

    @classmethod
    def begin(cls, version: int, joiner: str) -> UpdateTrace:
        """`joiner`: the one actor that is brought to the version; empty: all of them."""
        attributes: a.Attributes = {a.VERSION: version}
        if joiner:
            attributes[a.ACTOR] = joiner
        return cls(root("weight_update", attributes=attributes))

    def order(self, kind: str, epoch: int) -> Span:
        """Around saying `kind` to the members."""
        attributes = {a.EPOCH: epoch, **a.messaging("send", f"control.{kind}")}
        return child(trace_of(self._span), f"weight_update.{kind}", kind=SpanKind.PRODUCER, attributes=attributes)

    def transfer(self, epoch: int) -> Span:
        """Around the broadcast of the bytes."""
        return child(trace_of(self._span), "weight_update.transfer", attributes={a.EPOCH: epoch})

    def commit(self, epoch: int) -> Headers:
        """Of the order to serve what is staged; its span lasts until all do."""
        self._commit = self.order("commit", epoch)
        return headers_of(trace_of(self._commit))

    def answered(self, answer: Staged | Serving) -> None:
        """What a member measured."""
        match answer:
            case Staged():
                self._span.add_event("staged", {a.ACTOR: answer.actor, a.BYTES: answer.bytes})
            case Serving():
                self._span.add_event("serving", {a.ACTOR: answer.actor, a.STALL_S: answer.stall_s})

    def aborted(self, reason: str) -> None:
        """It begins again with another group."""
        self._span.add_event("aborted", {a.REASON: reason})
        self._commit.set_status(Status(StatusCode.ERROR, reason))
        self._commit.end()
        self._commit = INVALID_SPAN

    def evicted(self, actor: str, reason: str) -> None:
        """The others go on."""
        self._span.add_event("evicted", {a.ACTOR: actor, a.REASON: reason})

    def end(self, failure: str = "") -> None:
        """Served by all, or given up for a reason. Only the first call counts."""
        for span in (self._commit, self._span):
            if failure:
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end()
        self._commit = self._span = INVALID_SPAN


def heard(message: ControlMessage) -> None:
    """Of a member's answer that arrived: the last span on its side follows into the trainer."""
    about = {a.ACTOR: message.actor, **a.messaging("process", f"control.{message.kind}")}
    child(trace_in(message.headers), "weight_update.answer", kind=SpanKind.CONSUMER, attributes=about).end()
