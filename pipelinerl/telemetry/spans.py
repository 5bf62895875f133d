"""Begins and continues traces, and carries them from one process to the next in the headers of a message.

Where a trace begins, the sampler decides; everything that follows asks whether there is a sampled trace to follow, and costs
nothing where there is none. Until `pipelinerl.telemetry.tracing` says otherwise no trace begins. Nothing here is attached to
OpenTelemetry's global provider or current span: libraries that trace by themselves (vLLM) see neither.
It configures nothing, exports nothing and names no span.

The traces of the items of one call, in its gRPC metadata: one call may carry items of many traces.

`traceparent` names the first of them, for whatever on the way knows that header; ours names all, by the item's position.
What does not parse is left out.

Spans of the work on sequences and on weight updates (docs/traces.md).

Reaches only OpenTelemetry's API; `pipelinerl.telemetry.tracing` decides whether spans are exported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

_NS = 1_000_000_000
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


def root(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Iterable[Trace] = (),
    attributes: Attributes = None,
) -> Span:
    """Begins a trace, if the sampler wants it. Use it in a `with`, which ends it. `links`: the first `MOST_LINKS` are kept."""
    linked = [Link(trace) for trace in links if trace is not None][:MOST_LINKS]
    return _TRACER.get().start_span(name, Context(), kind, attributes, linked)


def child(
    parent: Trace,
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes = None,
    links: Iterable[Trace] = (),
    began_at: int | None = None,
) -> Span:
    """Continues a trace; a span without effect where there is none. `began_at`: see `now_ns`; None = now."""
    if parent is None:
        return INVALID_SPAN
    context = set_span_in_context(NonRecordingSpan(parent), Context())
    linked = [Link(trace) for trace in links if trace is not None][:MOST_LINKS]
    return _TRACER.get().start_span(name, context, kind, attributes, linked, began_at)


def trace_of(span: Span) -> Trace:
    """What follows this span; None where it is not sampled."""
    context = span.get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def headers_of(trace: Trace) -> Headers:
    """W3C trace context of messages about this trace; none where nothing is to follow."""
    if trace is None:
        return NO_HEADERS
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, set_span_in_context(NonRecordingSpan(trace), Context()))
    return headers


def trace_in(headers: Mapping[str, str]) -> Trace:
    """The trace that a message belongs to; None where it names none, none that is sampled, or is malformed."""
    if _TRACEPARENT not in headers:
        return None
    return trace_of(get_current_span(_PROPAGATOR.extract(headers, Context())))


def traceparent_of(trace: Trace) -> str:
    """Empty where there is nothing to follow."""
    return headers_of(trace).get(_TRACEPARENT, "")


def trace_from(traceparent: str) -> Trace:
    """As `trace_in`, of a header's value."""
    return trace_in({_TRACEPARENT: traceparent}) if traceparent else None


def now_ns() -> int:
    """Unix time, ns: the clock of spans."""
    return time.time_ns()


def before_ns(seconds: float) -> int:
    """`now_ns` so many seconds ago."""
    return time.time_ns() - int(seconds * _NS)


KEY = "pipelinerl-traces"
MOST_ITEMS = 64
"""Of one call: about 60 bytes each, where gRPC takes 8 KiB of metadata. The others' traces end before the call."""
LONGEST_POSITION = 9
"""Digits: more items than any message holds. A number without bound is an error of `int`, not of the caller."""

Metadata = tuple[tuple[str, str], ...]


def metadata_of(traceparents: Sequence[str]) -> Metadata:
    """`traceparents`: of each item, empty where it has none. Nothing where no item has one."""
    traced = [(position, value) for position, value in enumerate(traceparents) if value][:MOST_ITEMS]
    if not traced:
        return ()
    return (("traceparent", traced[0][1]), (KEY, ",".join(f"{position}={value}" for position, value in traced)))


def traces_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[int, Trace]:
    """Traces by position of the item, the sampled ones."""
    values = [value for key, value in metadata or () if key == KEY and isinstance(value, str)]
    pairs = (part.partition("=") for value in values for part in value.split(",")[:MOST_ITEMS])
    found = {int(position): trace_from(value) for position, _, value in pairs if _is_position(position)}
    return {position: trace for position, trace in found.items() if trace is not None}


def _is_position(text: str) -> bool:
    return len(text) <= LONGEST_POSITION and text.isdecimal()
