"""The verifier's spans of one call: one for each item that has a trace, and in it one for its reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from pipelinerl.tracing import attributes as a
from pipelinerl.tracing.batch import traces_in
from pipelinerl.tracing.spans import before_ns, child, trace_of
from pipelinerl.v1 import verifier_pb2

METHOD = "pipelinerl.v1.VerifierService/Verify"


class CallSpans:
    """From the call's arrival to `end`. `metadata`: the call's; `items`: its items, in order."""

    def __init__(
        self, metadata: Iterable[tuple[str, str | bytes]] | None, items: Sequence[verifier_pb2.VerifyItem]
    ) -> None:
        self._spans: dict[str, Span] = {}
        for position, trace in traces_in(metadata).items():
            if position < len(items):
                item = items[position]
                about = {a.SEQUENCE_ID: item.sequence_id, a.TASK: item.task, **a.rpc(METHOD)}
                span = child(trace, "sequence.verify", kind=SpanKind.SERVER, attributes=about)
                self._spans[item.sequence_id] = span

    def scored(self, result: verifier_pb2.VerifyResult) -> None:
        """As soon as it is: the reward's span ends now. What was before it is the wait for a worker."""
        span = self._spans.get(result.sequence_id)
        if span is not None:
            status = verifier_pb2.VerifyStatus.Name(result.status).removeprefix("VERIFY_STATUS_").lower()
            about = {a.STATUS: status, a.REWARD: result.reward}
            reward = child(trace_of(span), "reward.score", attributes=about, began_at=before_ns(result.seconds))
            if result.status != verifier_pb2.VERIFY_STATUS_OK:
                reward.set_status(Status(StatusCode.ERROR, status))
            reward.end()

    def end(self, code: str) -> None:
        """The call is answered with this status, by name."""
        for span in self._spans.values():
            span.set_attribute(a.RPC_STATUS, code)
            if code != "OK":
                span.set_status(Status(StatusCode.ERROR, code))
            span.end()
