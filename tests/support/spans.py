"""Spans that code under test makes, kept in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from pipelinerl.telemetry.tracing import use_tracer


class Recorded(InMemorySpanExporter):
    all = property(InMemorySpanExporter.get_finished_spans)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def way(self, span: ReadableSpan) -> list[str]:
        by_id = {other.context.span_id: other for other in self.all if other.context}
        way = [span]
        while (parent := way[-1].parent) is not None:
            assert parent.trace_id == way[-1].context.trace_id
            way.append(by_id[parent.span_id])
        return [one.name for one in reversed(way)]


@contextmanager
def recorded() -> Iterator[Recorded]:
    spans, provider = Recorded(), TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with use_tracer(provider.get_tracer("test")):
        yield spans
    provider.shutdown()
