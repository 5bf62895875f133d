"""A collector of OpenTelemetry traces for tests: takes OTLP over HTTP on the loopback interface and keeps the spans."""

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """`resource` and `attributes` by name; ids in hex, `parent` empty for the first span of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: tuple[str, ...]
    """Ids of the linked spans."""
    events: tuple[str, ...]
    end_s: float = 0.0

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def instance(self) -> str:
        return str(self.resource["service.instance.id"])


@dataclass
class Collector:
    """What came, in the order of arrival. `answering`: while it is not set, exports wait for it."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answering: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first export."""

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        return [other for other in self.spans if other.trace == span.trace and other.parent == span.id]

    def below(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        by_parent = defaultdict(list)
        for other in self.spans:
            if other.trace == span.trace:
                by_parent[other.parent].append(other)
        found = [span]
        for one in found:
            found.extend(by_parent[one.id])
        return found

    def way_of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        by_id = {one.id: one for one in self.spans}
        way = [span]
        while way[0].parent:
            way.insert(0, by_id[way[0].parent])
        return way

    def take(self, body: bytes) -> None:
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(part.resource.attributes)
            for scope in part.scope_spans:
                self.spans.extend(
                    ReceivedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        _values(span.attributes),
                        resource,
                        tuple(link.span_id.hex() for link in span.links),
                        tuple(event.name for event in span.events),
                        span.end_time_unix_nano / 1e9,
                    )
                    for span in scope.spans
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.asked.set()
            collector.answering.wait()
            assert self.path == "/v1/traces", self.path
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.answering.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")
