"""Make spans, carry traces from one process to the next, and send spans to a collector (docs/traces.md).

The sampler decides which traces are recorded; the others have no spans. A trace is passed on as data, with its sequence or
message, because its next span often belongs to another task or process. OpenTelemetry's global provider and current span are
not used, so libraries with their own traces (vLLM) do not see PipelineRL's.

The SDK is loaded only if OpenTelemetry's environment variables ask for traces. This module reads the variables that choose the
exporter, and the SDK reads the others. If the collector is down, spans are lost, and the work goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

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
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipelinerl import __version__
from pipelinerl.bus.protocol import NO_HEADERS, Headers
from pipelinerl.errors import UserError
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import read_settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

END_WITHIN_S = 1.0
"""Maximum seconds for sending the remaining spans when the process ends."""


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("give an http or https URL of a collector, such as http://collector:4318")
    return value


Endpoint = Annotated[str, AfterValidator(_is_url)]
Protocol = Annotated[Literal["", "http/protobuf", "grpc"], BeforeValidator(_lower)]


class TracingSettings(BaseSettings):
    """OpenTelemetry's variables that choose the exporter. If they switch traces off, none of them is validated."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore", env_ignore_empty=True)

    sdk_disabled: str = Field("", description="If true, no traces are sent, regardless of other settings.")
    traces_exporter: Annotated[Literal["otlp", "console", "none"], BeforeValidator(_lower)] = Field(
        "otlp", description="Unset = otlp if an endpoint is set, else none."
    )
    exporter_otlp_endpoint: Endpoint = Field("", description="Base URL of a collector.")
    exporter_otlp_traces_endpoint: Endpoint = Field("", description="Whole URL for traces; overrides the base URL.")
    exporter_otlp_protocol: Protocol = ""
    exporter_otlp_traces_protocol: Protocol = ""

    @model_validator(mode="before")
    @classmethod
    def _ignore_others_if_off(cls, given: dict[str, Any]) -> dict[str, Any]:
        exporter, disabled = (_lower(given.get(name, "")) for name in ("traces_exporter", "sdk_disabled"))
        endpoint = given.get("exporter_otlp_traces_endpoint") or given.get("exporter_otlp_endpoint")
        is_off = disabled == "true" or exporter == "none" or not (exporter or endpoint)
        return {"traces_exporter": "none"} if is_off else given

    @property
    def protocol(self) -> str:
        return self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol or "http/protobuf"

    @property
    def endpoint(self) -> str:
        """Scheme, host and port of the exporter's endpoint, for logs. The rest of a URL may hold a password."""
        default = "http://localhost:4317" if self.protocol == "grpc" else "http://localhost:4318"
        parts = urlsplit(self.exporter_otlp_traces_endpoint or self.exporter_otlp_endpoint or default)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


@contextmanager
def tracing(context: LogContext) -> Iterator[None]:
    """If OTEL_* variables ask for traces, send the spans made in the block. Raises `UserError` for an unusable variable."""
    settings = read_settings(TracingSettings)
    if settings.traces_exporter == "none":
        yield
        return
    provider = _provider(context, _exporter(settings))
    where = "the log" if settings.traces_exporter == "console" else f"{settings.endpoint} by {settings.protocol}"
    log.info("traces are sent to %s", where)
    try:
        with use_tracer(provider.get_tracer("pipelinerl", __version__)):
            yield
    finally:
        _end(provider)


def _exporter(settings: TracingSettings) -> SpanExporter:
    """Return the exporter, which reads its other settings, such as headers, from the environment."""
    try:
        if settings.traces_exporter == "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter()
        kind = "grpc" if settings.protocol == "grpc" else "http"
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        return module.OTLPSpanExporter()
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"traces cannot be sent to {settings.endpoint} (OTEL_EXPORTER_OTLP_…): {error}") from error


def _provider(context: LogContext, exporter: SpanExporter) -> TracerProvider:
    """Return a provider, which reads its sampler and the bounds of its queue from the environment."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {
        "service.name": f"pipelinerl-{context.service}",
        "service.instance.id": context.instance,
        "service.version": __version__,
        "pipelinerl.run": context.run,
    }
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise UserError(f"the queue of spans (OTEL_BSP_…) cannot be made: {error}") from error
    return provider


def _end(provider: TracerProvider) -> None:
    """Send the remaining spans within `END_WITHIN_S`, and leave an export that hangs to its daemon thread."""
    ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    ending.start()
    ending.join(END_WITHIN_S)
    if ending.is_alive():
        log.warning("the collector did not accept the last spans in time; they are lost")


Trace = SpanContext | None
"""Parent for child spans: a span of a sampled trace, or None if the trace is not sampled."""

_PROPAGATOR = TraceContextTextMapPropagator()
_OFF = NoOpTracer()
_TRACER: ContextVar[Tracer] = ContextVar("pipelinerl_tracer", default=_OFF)


@contextmanager
def use_tracer(tracer: Tracer) -> Iterator[None]:
    """Use a tracer for all spans that begin in the block, and in tasks that start there."""
    token = _TRACER.set(tracer)
    try:
        yield
    finally:
        _TRACER.reset(token)


def root(name: str, *, kind: SpanKind = SpanKind.INTERNAL, links: Iterable[Trace] = (), attributes: Attributes = None) -> Span:
    """Begin a trace and return its root span, which has no effect if the sampler rejects it. The SDK limits the links."""
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
    """Begin a child span; without a parent, return a span without effect. `began_at`: Unix time, ns; None = now."""
    if parent is None:
        return INVALID_SPAN
    return _TRACER.get().start_span(name, _context_of(parent), kind, attributes, _linked(links), began_at)


def _linked(traces: Iterable[Trace]) -> list[Link]:
    return [Link(trace) for trace in traces if trace is not None]


def _context_of(trace: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(trace), Context())


def trace_of(span: Span) -> Trace:
    """Return the trace for child spans of this span, or None if it is not sampled."""
    context = span.get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def headers_of(trace: Trace) -> Headers:
    """Return the W3C trace context as headers of a message. They are empty without a trace."""
    if trace is None:
        return NO_HEADERS
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, _context_of(trace))
    return headers


def trace_in(headers: Mapping[str, str]) -> Trace:
    """Return the trace in a message's headers, or None if it is missing, malformed or not sampled."""
    return trace_of(get_current_span(_PROPAGATOR.extract(headers, Context())))


def before_ns(seconds: float) -> int:
    """Return the Unix time `seconds` before now, in nanoseconds, the unit of spans."""
    return time.time_ns() - int(seconds * 1e9)
