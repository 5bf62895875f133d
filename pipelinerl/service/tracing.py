"""Sends the spans of a process to a collector where the environment asks for it; loads nothing of the SDK where it does not.

Spans wait in a bounded queue and leave on a thread of their own: a collector that is away costs spans, never the work, and
`END_WITHIN_S` at the process's end. It makes no spans, and leaves OpenTelemetry's global provider alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from pipelinerl import __version__
from pipelinerl.config.tracing import TracingSettings, TracingSwitch
from pipelinerl.errors import UserError
from pipelinerl.service.environment import read_settings
from pipelinerl.service.logs import LogContext
from pipelinerl.tracing.spans import use_tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

END_WITHIN_S = 1.0
"""For the spans that wait when the process ends."""
SAME_AGAIN_S = 60.0
"""Between two log lines of the SDK that say the same."""


@contextmanager
def tracing(context: LogContext) -> Iterator[None]:
    """Spans made inside are sent, if OTEL_* variables say where to. Raises `UserError` for a variable that cannot be used."""
    if not TracingSwitch().is_on:
        yield
        return
    settings = read_settings(TracingSettings)
    with _seldom_said():
        exporter = Watched(_exporter(settings))
        provider = _provider(context, exporter)
        where = "the log" if settings.traces_exporter == "console" else f"{settings.endpoint} by {settings.protocol}"
        log.info(
            "traces go to %s; sampler %s", where, f"{settings.traces_sampler} {settings.traces_sampler_arg}".strip()
        )
        try:
            with use_tracer(provider.get_tracer("pipelinerl", __version__)):
                yield
        finally:
            _end(provider, exporter)


class Watched:
    """A `SpanExporter` that says once when spans begin to be lost, and once when that is over."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._lost_since_s = 0.0

    @property
    def is_losing(self) -> bool:
        """Whether the last export failed."""
        return self._lost > 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result.value == 0:
            if self._lost:
                lost_s = time.monotonic() - self._lost_since_s
                log.info("spans are sent again; %d were lost in %.0f s", self._lost, lost_s)
            self._lost = 0
        else:
            if not self._lost:
                self._lost_since_s = time.monotonic()
                log.warning("spans cannot be sent, and are lost until that changes; training goes on")
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

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


def _provider(context: LogContext, exporter: Watched) -> TracerProvider:
    """Its sampler and the bounds of its queue are those of the environment."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(context), shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", exporter)))
    except ValueError as error:
        raise UserError(f"the queue of spans (OTEL_BSP_…) cannot be made: {error}") from error
    return provider


def _resource(context: LogContext) -> Resource:
    """Who makes the spans. What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {
        "service.name": f"pipelinerl-{context.service}",
        "service.instance.id": context.instance,
        "service.version": __version__,
        "pipelinerl.run": context.run,
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _end(provider: TracerProvider, exporter: Watched) -> None:
    """Sends what waits, for `END_WITHIN_S` at most. An export that hangs is left to its daemon thread."""
    ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    ending.start()
    ending.join(0 if exporter.is_losing else END_WITHIN_S)
    if ending.is_alive():
        log.warning("the last spans are lost: the collector did not take them in time")


@contextmanager
def _seldom_said() -> Iterator[None]:
    """The SDK's own log lines, each once a minute at most: it repeats itself for as long as a collector is away."""
    logger, handler = logging.getLogger("opentelemetry"), _Seldom()
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


class _Seldom(logging.Handler):
    """Hands a record to the root logger unless one of the same text template was handed on `SAME_AGAIN_S` ago or less."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at_s: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key, now_s = (record.name, str(record.msg)), time.monotonic()
        said_at_s = self._said_at_s.get(key)
        root = logging.getLogger()
        if record.levelno >= root.level and (said_at_s is None or now_s - said_at_s >= SAME_AGAIN_S):
            self._said_at_s[key] = now_s
            root.handle(record)
