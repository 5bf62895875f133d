"""A collector of OpenTelemetry traces for tests: takes OTLP over HTTP on the loopback interface and keeps the spans."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from tests.support.http_server import Answer, Request, http_server


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
    _indexed: tuple[int, int] = (0, 0)
    """Identity and length of the indexed list."""
    _by_id: dict[str, ReceivedSpan] = field(default_factory=dict)
    _by_parent: dict[str, list[ReceivedSpan]] = field(default_factory=dict)

    def _index(self) -> None:
        """Index the spans by id and by parent, because a long run has 100,000 spans."""
        if self._indexed == (given := (id(self.spans), len(self.spans))):
            return
        self._indexed, self._by_id, self._by_parent = given, {one.id: one for one in self.spans}, {}
        for one in self.spans:
            self._by_parent.setdefault(one.parent, []).append(one)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        self._index()
        return [other for other in self._by_parent.get(span.id, ()) if other.trace == span.trace]

    def below(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span]
        for one in found:
            found.extend(self.children(one))
        return found

    def way_of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        self._index()
        way = [span]
        while way[0].parent:
            way.insert(0, self._by_id[way[0].parent])
        return way

    def take(self, body: bytes) -> None:
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(part.resource.attributes)
            for span in (span for scope in part.scope_spans for span in scope.spans):
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                links, events = (link.span_id.hex() for link in span.links), (event.name for event in span.events)
                end_s, values = span.end_time_unix_nano / 1e9, _values(span.attributes)
                self.spans.append(ReceivedSpan(span.name, *ids, values, resource, tuple(links), tuple(events), end_s))


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.answering.set()

    def answer(request: Request) -> Answer:
        collector.asked.set()
        collector.answering.wait()
        assert request.path == "/v1/traces", request.path
        headers = {name.lower(): value for name, value in request.headers.items()}
        collector.headers.append(headers)
        collector.take(gzip.decompress(request.body) if headers.get("content-encoding") == "gzip" else request.body)
        sent = ExportTraceServiceResponse().SerializeToString()
        return Answer(sent, headers={"Content-Type": "application/x-protobuf"})

    with http_server(answer) as collector.url:
        try:
            yield collector
        finally:
            collector.answering.set()


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")
