"""Traces: how one goes from process to process in headers, when spans leave a process, and what becomes of them when nobody
takes them; whole traces are the tour's."""

import logging
import threading
from collections.abc import Iterator

import pytest

from pipelinerl.bus.protocol import LogEntry
from pipelinerl.errors import UserError
from pipelinerl.rl.ledger import Outcome, SequenceTracker
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import read_settings
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.tracing import TracingSettings, child, headers_of, root, trace_in, trace_of, tracing
from services.trainer.data.traces import SequenceTraces
from tests.support.collector import Collector, collecting
from tests.support.spans import recorded
from tests.unit.builders import make_group, make_sequence

CONTEXT = LogContext("run-1", "verifier", "verifier-0")
COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def test_a_trace_goes_through_headers_also_without_a_tracer_where_none_begins() -> None:
    with recorded() as spans:
        with root("here") as here:
            headers = headers_of(trace_of(here))
        with child(trace_in(headers), "there"):
            pass
    assert spans.way(spans.named("there")[0]) == ["here", "there"]
    with root("never") as span:
        assert headers_of(trace_of(span)) == {}
    with child(trace_in({"traceparent": SAMPLED}), "never") as span:
        assert headers_of(trace_of(span)) == {"traceparent": SAMPLED}


@pytest.mark.parametrize("parent", ["", "garbage", SAMPLED[:-1], SAMPLED.replace("a", "0"), "x" * 10_000, SAMPLED[:-2] + "00"])
def test_what_names_no_sampled_trace_is_followed_by_nothing(parent: str) -> None:
    with recorded() as spans, child(trace_in({"traceparent": parent}), "never") as span:
        assert headers_of(trace_of(span)) == {}
    assert spans.all == ()


def test_a_sequence_ends_in_its_trace_with_its_outcome_and_the_step_that_trained_it() -> None:
    group, traces = make_group(num_samples=3), SequenceTraces()
    books = SequenceTracker(traces.tracked)
    with recorded() as spans:
        books.issue(group)
        with traces.issue(group, group.group_id) as issued:
            headers = headers_of(trace_of(issued))
        sequences = [make_sequence(group, index) for index in range(3)]
        for sequence in sequences[:2]:
            traces.received(LogEntry(1, b"payload", sequence.sequence_id, headers), sequence)
        with traces.step(8, [sequence.sequence_id for sequence in sequences[:2]]):
            books.close(sequences[:1], Outcome.TRAINED, version=8)
        books.close(sequences[1:], Outcome.DROPPED_STALE, "too old")
    (trained,), (step,) = spans.named("sequence.train"), spans.named("step.train")
    assert spans.way(trained) == ["group.issue", "sequence.receive", "sequence.train"]
    assert [link.context.span_id for link in trained.links] == [step.context.span_id]
    stale = spans.named("sequence.end")
    assert [spans.way(span)[:-1] for span in stale] == [["group.issue", "sequence.receive"], ["group.issue"]]
    assert {(span.attributes or {})[a.REASON] for span in stale} == {"too old"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Threads that still export when a test is over would log into the tests that follow."""
    before = set(threading.enumerate())
    with collecting() as collector:
        yield collector
    for thread in set(threading.enumerate()) - before:
        if "process_request_thread" in thread.name:
            continue  # of the collector here, which reads until its client's connection is gone
        thread.join(60)
        assert not thread.is_alive(), thread


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "no such sampler"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "None", **COLLECTOR}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (COLLECTOR, True),
        ({"OTEL_SDK_DISABLED": "TRUE", **COLLECTOR}, False),
    ],
)
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on: bool) -> None:
    given(monkeypatch, variables)
    assert (read_settings(TracingSettings).traces_exporter != "none") is on


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER = 'zipkin': Input should be 'otlp', 'console' or 'none'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT = 'collector:4318': .*give an http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", **COLLECTOR}, "OTEL_EXPORTER_OTLP_PROTOCOL = 'http/json': .*'grpc'"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "10", **COLLECTOR}, r"queue of spans \(OTEL_BSP_…\) cannot be made"),
    ],
)
def test_what_cannot_be_used_is_said_by_name(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    given(monkeypatch, variables)
    with pytest.raises(UserError, match=message), tracing(CONTEXT):
        raise AssertionError("it began all the same")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_password_in_the_endpoint_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    url = "http://user:secret@127.0.0.1:9/path-secret?token=secret"
    given(monkeypatch, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    with caplog.at_level(logging.INFO), tracing(CONTEXT):
        pass
    assert f"traces are sent to http://127.0.0.1:9 by {protocol}" in caplog.text
    assert "secret" not in caplog.text


def test_a_collector_that_hangs_holds_up_neither_work_nor_end(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the connection and does not answer until this process has ended all its work."""
    collector.answering.clear()
    short = {"OTEL_BSP_SCHEDULE_DELAY": "1", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    given(monkeypatch, {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **short})
    with tracing(CONTEXT):
        with root("first"):
            pass
        assert collector.asked.wait(60)
        for _ in range(5000):  # more than the queue holds
            with root("more"):
                pass
    assert "the last spans in time; they are lost" in caplog.text
    assert collector.spans == []
