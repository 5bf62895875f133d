"""When spans leave a process, where to, and what becomes of them when nobody takes them."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from pipelinerl.errors import UserError
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import read_settings
from pipelinerl.telemetry.tracing import TracingSettings, root, tracing
from tests.support.collector import Collector, collecting

CONTEXT = LogContext("run-1", "verifier", "verifier-0")
COLLECTOR = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def exporters_end() -> Iterator[None]:
    """Threads that still export when a test is over would log into the tests that follow."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if "process_request_thread" in thread.name:
            continue  # of the collector here, which reads until its client's connection is gone
        thread.join(60)
        assert not thread.is_alive(), thread


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


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


def test_a_password_in_the_endpoint_is_not_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    url = "http://user:secret@127.0.0.1:9/path-secret?token=secret"
    given(monkeypatch, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
    with caplog.at_level(logging.INFO), tracing(CONTEXT):
        pass
    assert "traces are sent to http://127.0.0.1:9 by" in caplog.text
    assert "secret" not in caplog.text


def test_a_process_that_does_not_trace_loads_nothing_of_the_sdk() -> None:
    code = """
import sys
from pipelinerl.service.logs import LogContext
from pipelinerl.telemetry.tracing import tracing
with tracing(LogContext("r", "s", "i")):
    loaded = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_spans_leave_by_grpc_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            collector.take(request.SerializeToString())
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    given(monkeypatch, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": url})
    monkeypatch.setattr("pipelinerl.telemetry.tracing.END_WITHIN_S", 60.0)
    with tracing(CONTEXT), root("one"):
        pass
    server.stop(None)
    assert [span.name for span in collector.spans] == ["one"]
    assert f"traces are sent to {url} by grpc" in caplog.text


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
