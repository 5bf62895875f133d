"""Begin and continue traces, and carry them from one process to the next in headers and messages (docs/traces.md).

The sampler decides when a trace begins. Later spans only follow a sampled trace and otherwise cost nothing. A trace is passed
as data with its sequence or message, since the next span is made in another task or process. No trace begins unless
`pipelinerl.telemetry.tracing` sets a tracer. OpenTelemetry's global provider and current span are not used, so that libraries
with traces of their own (vLLM) are not affected. This module configures and exports nothing.
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
"""A span of a sampled trace, which others may continue; None without a sampled trace."""

MOST_LINKS = 128
"""Maximum number of links of a span, equal to the SDK's limit, above which it drops links silently."""
_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_OFF = NoOpTracer()
_TRACER: ContextVar[Tracer] = ContextVar("pipelinerl_tracer", default=_OFF)


@contextmanager
def use_tracer(tracer: Tracer) -> Iterator[None]:
    """Use a tracer for all spans that begin inside, also in tasks started inside."""
    token = _TRACER.set(tracer)
    try:
        yield
    finally:
        _TRACER.reset(token)


def is_on() -> bool:
    """Return whether a trace may begin here."""
    return _TRACER.get() is not _OFF


def root(name: str, *, kind: SpanKind = SpanKind.INTERNAL, links: Iterable[Trace] = (), attributes: Attributes = None) -> Span:
    """Begin a trace if the sampler selects it; use it in a `with` statement, which ends it. Keeps `MOST_LINKS` links."""
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
    """Continue a trace; without a parent, return a span without effect. `began_at`: Unix time, ns; None = now."""
    if parent is None:
        return INVALID_SPAN
    return _TRACER.get().start_span(name, _context_of(parent), kind, attributes, _linked(links), began_at)


def _linked(traces: Iterable[Trace]) -> list[Link]:
    return [Link(trace) for trace in traces if trace is not None][:MOST_LINKS]


def _context_of(trace: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(trace), Context())


def trace_of(span: Span) -> Trace:
    """Return the trace that continues this span, or None if it is not sampled."""
    context = span.get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def headers_of(trace: Trace) -> Headers:
    """Return the W3C trace context for messages about this trace; empty without a trace."""
    if trace is None:
        return NO_HEADERS
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, _context_of(trace))
    return headers


def trace_in(headers: Mapping[str, str]) -> Trace:
    """Return the trace in a message's headers; None if it is missing, malformed or not sampled."""
    if _TRACEPARENT not in headers:
        return None
    return trace_of(get_current_span(_PROPAGATOR.extract(headers, Context())))


def before_ns(seconds: float) -> int:
    """Return the Unix time in ns, the clock of spans, `seconds` ago."""
    return time.time_ns() - int(seconds * 1e9)
