"""A member's spans of one weight update: receiving beside the live weights, preparing them, and the swap with its stall."""

from __future__ import annotations

from opentelemetry.trace import Span

from pipelinerl.control import Announce, Commit
from pipelinerl.tracing import attributes as a
from pipelinerl.tracing.spans import Trace, before_ns, child, trace_of
from services.actor.weights.staged import StagedWeights


def receiving(trace: Trace, announce: Announce) -> Span:
    """Around all that is done until the version is staged. `trace`: of the announcement."""
    return child(trace, "weight_update.receive", attributes={a.VERSION: announce.version, a.EPOCH: announce.epoch})


def show_received(span: Span, staged: StagedWeights) -> None:
    """Right after it: a span of its own for bringing the weights into the engine's layout, which goes on beside receiving. Its
    length is what that took in all, and it ends now."""
    if span.is_recording():
        span.set_attributes({a.BYTES: staged.num_bytes, a.RECEIVE_S: staged.receive_s})
        child(trace_of(span), "weight_update.stage", began_at=before_ns(staged.prepare_s)).end()


def committing(trace: Trace, commit: Commit) -> Span:
    """Around the swap, with the wait for whoever needs the version that is served until then. `trace`: of the order."""
    return child(trace, "weight_update.commit", attributes={a.VERSION: commit.version, a.EPOCH: commit.epoch})


def show_stall(span: Span, stall_s: float) -> None:
    """Right after it: a span of its own for the time in which nothing was generated."""
    if span.is_recording():
        span.set_attribute(a.STALL_S, stall_s)
        child(trace_of(span), "weight_update.load", began_at=before_ns(stall_s)).end()
