"""Sends the spans of a process to a collector where OpenTelemetry's own environment variables ask for it.

Where they do not, nothing of the SDK is loaded. What decides on the exporter is read here. The SDK reads the rest by itself
(sampler, queue, time limits, headers, certificates, compression) and logs a value that it cannot use. Spans wait in a bounded
queue and leave on a thread of their own: a collector that is away costs spans, never the work, and `END_WITHIN_S` at the
process's end. Nothing here makes spans, and OpenTelemetry's global provider is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipelinerl import __version__
from pipelinerl.errors import UserError
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import read_settings
from pipelinerl.telemetry.spans import use_tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


log = logging.getLogger(__name__)
_SDK_LOG = logging.getLogger("opentelemetry")

END_WITHIN_S = 1.0
"""For the spans that wait when the process ends."""


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("give a URL of a collector such as http://collector:4318")
    return value


Endpoint = Annotated[str, AfterValidator(_is_url)]
Protocol = Annotated[Literal["", "http/protobuf", "grpc"], BeforeValidator(_lower)]


class TracingSettings(BaseSettings):
    """OpenTelemetry's variables that decide on the exporter. Where they switch traces off, no other one is looked at."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", frozen=True, extra="ignore", env_ignore_empty=True)

    sdk_disabled: str = Field("", description="true = no traces, whatever else is set.")
    traces_exporter: Annotated[Literal["otlp", "console", "none"], BeforeValidator(_lower)] = Field(
        "otlp", description="Unset = otlp where an endpoint is set, else none."
    )
    exporter_otlp_endpoint: Endpoint = Field("", description="Base URL of a collector.")
    exporter_otlp_traces_endpoint: Endpoint = Field("", description="Whole URL for traces; wins over the base.")
    exporter_otlp_protocol: Protocol = ""
    exporter_otlp_traces_protocol: Protocol = ""

    @model_validator(mode="before")
    @classmethod
    def _alone_where_off(cls, given: dict[str, Any]) -> dict[str, Any]:
        exporter, disabled = (_lower(given.get(name, "")) for name in ("traces_exporter", "sdk_disabled"))
        endpoint = given.get("exporter_otlp_traces_endpoint") or given.get("exporter_otlp_endpoint")
        is_off = disabled == "true" or exporter == "none" or not (exporter or endpoint)
        return {"traces_exporter": "none"} if is_off else given

    @property
    def protocol(self) -> str:
        return self.exporter_otlp_traces_protocol or self.exporter_otlp_protocol or "http/protobuf"

    @property
    def endpoint(self) -> str:
        """For people: where the exporter sends to, by scheme, host and port. The rest of a URL may hold a password."""
        default = "http://localhost:4317" if self.protocol == "grpc" else "http://localhost:4318"
        parts = urlsplit(self.exporter_otlp_traces_endpoint or self.exporter_otlp_endpoint or default)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


@contextmanager
def tracing(context: LogContext) -> Iterator[None]:
    """Spans made inside are sent, if OTEL_* variables say where to. Raises `UserError` for a variable that cannot be used."""
    settings = read_settings(TracingSettings)
    if settings.traces_exporter == "none":
        yield
        return
    exporter = OutageLogger(_exporter(settings))
    provider = _provider(context, exporter)
    where = "the log" if settings.traces_exporter == "console" else f"{settings.endpoint} by {settings.protocol}"
    log.info("traces go to %s", where)
    try:
        with use_tracer(provider.get_tracer("pipelinerl", __version__)):
            yield
    finally:
        _end(provider, exporter)


class OutageLogger:
    """A `SpanExporter` that says once when spans begin to be lost, and once when that is over. In between the SDK's own lines,
    which would tell of every try, are left out: its first ones have said why."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost_since_s = 0.0
        self.lost = 0
        """Spans since the last export that did not fail."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result.value == 0:
            if self.lost:
                lost_s = time.monotonic() - self._lost_since_s
                log.info("spans are sent again; %d were lost in %.0f s", self.lost, lost_s)
            self.lost = 0
            _SDK_LOG.setLevel(logging.NOTSET)
        else:
            if not self.lost:
                self._lost_since_s = time.monotonic()
                log.warning("spans cannot be sent, and are lost until that changes; training goes on")
                _SDK_LOG.setLevel(logging.CRITICAL)
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        _SDK_LOG.setLevel(logging.NOTSET)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _exporter(settings: TracingSettings) -> SpanExporter:
    """Which reads headers, certificates and the rest of its variables by itself."""
    try:
        if settings.traces_exporter == "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter()
        if settings.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"traces cannot be sent to {settings.endpoint} (OTEL_EXPORTER_OTLP_…): {error}") from error


def _provider(context: LogContext, exporter: OutageLogger) -> TracerProvider:
    """Its sampler and the bounds of its queue are those of the environment, and OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    win over our words for who makes the spans."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {
        "service.name": f"pipelinerl-{context.service}",
        "service.instance.id": context.instance,
        "service.version": __version__,
        "pipelinerl.run": context.run,
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", exporter)))
    except ValueError as error:
        raise UserError(f"the queue of spans (OTEL_BSP_…) cannot be made: {error}") from error
    return provider


def _end(provider: TracerProvider, exporter: OutageLogger) -> None:
    """Sends what waits, for `END_WITHIN_S` at most. An export that hangs is left to its daemon thread."""
    ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    ending.start()
    ending.join(0 if exporter.lost else END_WITHIN_S)
    if ending.is_alive():
        log.warning("the last spans are lost: the collector did not take them in time")
