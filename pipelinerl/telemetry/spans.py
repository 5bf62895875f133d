"""Begins and continues traces, and carries them from one process to the next in headers and messages (docs/traces.md).

Where a trace begins, the sampler decides; everything that follows asks whether there is a sampled trace to follow, and costs
nothing where there is none. A trace is handed from task to task as data, with the sequence or message it is about, since what
follows runs in another task or process. Until `pipelinerl.telemetry.tracing` says otherwise no trace begins. Nothing here is
attached to OpenTelemetry's global provider or current span: libraries that trace by themselves (vLLM) see neither.
It configures nothing, exports nothing and names no span.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from pipelinerl.bus.protocol import NO_HEADERS, Headers

Trace = SpanContext | None
"""A span of a sampled trace that others may follow; None where there is nothing to follow."""

MOST_LINKS = 128
"""Of one span; the SDK's own limit, so that none is dropped unseen."""
_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_OFF = NoOpTracer()
_TRACER: ContextVar[Tracer] = ContextVar("pipelinerl_tracer", default=_OFF)


@contextmanager
def use_tracer(tracer: Tracer) -> Iterator[None]:
    """Spans that begin inside, in tasks that are started inside too, are this tracer's."""
    token = _TRACER.set(tracer)
    try:
        yield
    finally:
        _TRACER.reset(token)


def is_on() -> bool:
    """Whether a trace may begin here."""
    return _TRACER.get() is not _OFF


def root(name: str, *, kind: SpanKind = SpanKind.INTERNAL, links: Iterable[Trace] = (), attributes: Attributes = None) -> Span:
    """Begins a trace, if the sampler wants it. Use it in a `with`, which ends it. `links`: the first `MOST_LINKS` are kept."""
    return _TRACER.get().start_span(name, Context(), kind, attributes, _linked(links))


def child(
    parent: Trace,
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes = None,
    links: Iterable[Trace] = (),
    began_at: int | None = None,
) -> Span:
    """Continues a trace; a span without effect where there is none. `began_at`: Unix time, ns; None = now."""
    if parent is None:
        return INVALID_SPAN
    return _TRACER.get().start_span(name, _context_of(parent), kind, attributes, _linked(links), began_at)


def _linked(traces: Iterable[Trace]) -> list[Link]:
    return [Link(trace) for trace in traces if trace is not None][:MOST_LINKS]


def _context_of(trace: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(trace), Context())


def trace_of(span: Span) -> Trace:
    """What follows this span; None where it is not sampled."""
    context = span.get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def headers_of(trace: Trace) -> Headers:
    """W3C trace context of messages about this trace; none where nothing is to follow."""
    if trace is None:
        return NO_HEADERS
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, _context_of(trace))
    return headers


def trace_in(headers: Mapping[str, str]) -> Trace:
    """The trace that a message belongs to; None where it names none, none that is sampled, or is malformed."""
    if _TRACEPARENT not in headers:
        return None
    return trace_of(get_current_span(_PROPAGATOR.extract(headers, Context())))


def before_ns(seconds: float) -> int:
    """Unix time, ns, the clock of spans, so many seconds ago."""
    return time.time_ns() - int(seconds * 1e9)
