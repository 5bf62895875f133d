"""The actor's spans of sequences: generated, verified, published. Each follows the one before, in the trace of its group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from opentelemetry.trace import Span, SpanKind

from pipelinerl.bus.subjects import Subjects
from pipelinerl.tracing import attributes as a
from pipelinerl.tracing.spans import Trace, child
from pipelinerl.types import PromptGroup
from pipelinerl.types import Sequence as Sampled
from services.actor.completions import start_of

VERIFY = "pipelinerl.v1.VerifierService/Verify"


def generating(trace: Trace, group: PromptGroup, sample_index: int) -> Span:
    """Around the generation of one sample. `trace`: of its group, as its message says."""
    if trace is None:
        return child(None, "")
    carried = len(start_of(group, sample_index).completion_token_ids)
    attributes: a.Attributes = {
        a.SEQUENCE_ID: group.sequence_id(sample_index),
        a.GROUP_ID: group.group_id,
        "gen_ai.operation.name": "text_completion",
    }
    if carried:
        attributes[a.CARRIED_TOKENS] = carried
    return child(trace, "sequence.generate", attributes=attributes)


def show_generated(span: Span, sequence: Sampled | None) -> None:
    """`sequence` None: interrupted, and handed over to another actor."""
    if not span.is_recording():
        return
    if sequence is None:
        span.add_event("interrupted")
    else:
        span.set_attributes(a.generated(sequence))


@contextmanager
def verifying(sequence_ids: Sequence[str], traces: Sequence[Trace]) -> Iterator[list[Span]]:
    """Around one call for these sequences: a span for each, without effect where it has no trace."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                child(
                    trace,
                    "sequence.verify",
                    kind=SpanKind.CLIENT,
                    attributes={a.SEQUENCE_ID: sequence_id, **a.rpc(VERIFY)} if trace else None,
                )
            )
            for sequence_id, trace in zip(sequence_ids, traces, strict=True)
        ]


def publishing(trace: Trace, sequence: Sampled) -> Span:
    """Around storing it in the log."""
    if trace is None:
        return child(None, "")
    sent = a.messaging("send", Subjects(sequence.run).sequences, sequence.sequence_id)
    attributes: a.Attributes = {a.SEQUENCE_ID: sequence.sequence_id, a.REWARD: sequence.reward, **sent}
    return child(trace, "sequence.publish", kind=SpanKind.PRODUCER, attributes=attributes)
