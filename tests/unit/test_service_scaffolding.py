"""Logs, health over HTTP and gRPC, the address file, settings and signals: what every service's process relies on."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi import FastAPI
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry, Counter
from pydantic import Field

from pipelinerl.errors import FieldError, NotPermitted, ServiceError, UserError
from pipelinerl.run_dir import write_json
from pipelinerl.service import http, logs
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, exit_code, stop_event, watch_loop
from pipelinerl.service.logs import AGGREGATED, ContextFormatter, LogContext, RepetitionFilter
from pipelinerl.service.settings import ServiceAddress, ServiceSettings, host_port, read_address, read_settings, split_host_port
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from tests.support.exposition import get

HOST = "127.0.0.1"

# --- logs


def record(message: str = "swapped", **extra: Any) -> logging.LogRecord:
    return logging.getLogger("actor.swap").makeRecord("actor.swap", logging.INFO, __file__, 1, message, (), None, extra=extra)


def test_json_line_says_who_and_what_and_a_traceback_is_one_line() -> None:
    context = LogContext("arithmetic", "actor", "actor-0")
    formatter = ContextFormatter(context, "json")
    line = json.loads(formatter.format(record(ess=float("nan"), path=Path("a"), run="another")))
    assert line.pop("time").endswith("+00:00")
    who = {"run": "arithmetic", "service": "actor", "instance": "actor-0"}
    assert line == {"level": "info", "logger": "actor.swap", "message": "swapped", **who, "ess": "nan", "path": "a"}
    context.policy_version = 0
    assert json.loads(formatter.format(record()))["policy_version"] == 0
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        failed = record()
        failed.exc_info = sys.exc_info()
    text = formatter.format(failed)
    assert "\n" not in text
    assert "ValueError: first\nsecond" in json.loads(text)["exception"]
    text = ContextFormatter(context, "text").format(record("a\tb\x1b[2J\x9b1m", stall_s=0.25))
    assert text.endswith(" INFO arithmetic actor/actor-0 v0 actor.swap: a\tb\\x1b[2J\\x9b1m stall_s=0.25")


# --- HTTP


async def fetch(port: int, path: str, **headers: str) -> tuple[int, str]:
    return await asyncio.to_thread(get, port, path, **headers)


async def test_health_readiness_and_metrics() -> None:
    registry, readiness = CollectorRegistry(), Readiness("loading the model")
    Counter("pipelinerl_test_steps", "Steps.", registry=registry).inc(3)
    async with serve_http(health_app(readiness, registry), HOST, 0) as port:
        assert await fetch(port, "/healthz") == (200, "ok\n")
        assert await fetch(port, "/readyz") == (503, "loading the model\n")
        readiness.reason = ""
        assert await fetch(port, "/readyz") == (200, "ready\n")
        workers, _ = readiness.part("no worker"), readiness.part("no template")
        assert await fetch(port, "/readyz") == (503, "no worker; no template\n")
        workers.reason = ""
        assert await fetch(port, "/readyz") == (503, "no template\n"), "which the workers do not hide"
        status, text = await fetch(port, "/metrics")
        assert status == 200
        assert "pipelinerl_test_steps_total 3.0" in text
        assert "process_" not in text  # nothing of the global registry
        asked = await fetch(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0, text/plain; q=0.5")
        assert asked == (200, text)
    with socket.create_server((HOST, port)):
        pass  # given back
    async with serve_http(health_app(readiness, registry), "::", 0) as port:
        assert await fetch(port, "/healthz") == (200, "ok\n"), "IPv4 too"


async def test_blocked_loop_is_visible_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watch_loop() as watch:
        app = health_app(Readiness(), CollectorRegistry(), loop_watch=watch)
        async with serve_http(app, HOST, 0) as port:
            assert (await fetch(port, "/healthz"))[0] == 200
            monkeypatch.setattr(http, "BLOCKED_AFTER_S", 0.4)
            answers: list[tuple[int, str]] = []
            asked = threading.Timer(0.7, lambda: answers.append(get(port, "/healthz")))
            asked.start()
            asked.join()  # blocks this loop: that is what the test is about
            assert answers[0][0] == 503
            assert answers[0][1].startswith("event loop blocked for ")


async def test_a_port_that_cannot_be_had_is_named_for_http_and_grpc_and_leaves_no_socket_open() -> None:
    with socket.create_server((HOST, 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(ServiceError, match=rf"http_port = {port}: cannot listen on 127\.0\.0\.1:{port}"):
                async with serve_http(FastAPI(), HOST, port):
                    pass  # a socket that is left open is a ResourceWarning, which is an error here
    async with serve_grpc(register, [NAME], HOST, 0) as taken:
        with pytest.raises(ServiceError, match=f"grpc_port = {taken}: cannot listen"):
            async with serve_grpc(register, [NAME], HOST, taken):
                pass


# --- gRPC


class Scripted(verifier_pb2_grpc.VerifierServiceServicer):
    """Does to each call what its first item's sequence_id says."""

    async def Verify(self, request: verifier_pb2.VerifyRequest, context: aio.ServicerContext) -> verifier_pb2.VerifyResponse:
        match request.items[0].sequence_id:
            case "bug":
                raise ZeroDivisionError("the secret of the bug")
            case "user":
                raise FieldError("items.0.task", "x", "use y")
            case "abort":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        results = [verifier_pb2.VerifyResult(reward=len(item.completion_text)) for item in request.items]
        return verifier_pb2.VerifyResponse(results=results)


def register(server: aio.Server) -> None:
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(Scripted(), server)


NAME = "pipelinerl.v1.VerifierService"
LARGE = 64 * 1024**2


async def verify(port: int, sequence_id: str, text: str = "") -> verifier_pb2.VerifyResponse:
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with aio.insecure_channel(f"{HOST}:{port}", options=limits) as channel:
        item = verifier_pb2.VerifyItem(sequence_id=sequence_id, completion_text=text)
        return await verifier_pb2_grpc.VerifierServiceStub(channel).Verify(verifier_pb2.VerifyRequest(items=[item]))


@pytest.mark.parametrize(
    ("kind", "code", "details"),
    [
        ("bug", grpc.StatusCode.INTERNAL, "ZeroDivisionError: the secret of the bug"),
        ("user", grpc.StatusCode.INVALID_ARGUMENT, "items.0.task = 'x': use y"),
        ("abort", grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    ],
)
async def test_an_error_in_a_handler_becomes_a_status(
    kind: str, code: grpc.StatusCode, details: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_grpc(register, [NAME], HOST, 0) as port:
        with pytest.raises(aio.AioRpcError) as raised:
            await verify(port, kind)
        assert (raised.value.code(), raised.value.details()) == (code, details)
        (result,) = (await verify(port, "fine", "x" * LARGE)).results  # the server goes on
        assert result.reward == LARGE
    logged = [entry for entry in caplog.records if entry.name == "pipelinerl.service.grpc"]
    assert [bool(entry.exc_info) for entry in logged] == ([True] if kind == "bug" else [])


async def test_health_says_serving_until_the_end_and_reflection_lists_the_services() -> None:
    states, request = health_pb2.HealthCheckResponse, health_pb2.HealthCheckRequest(service=NAME)
    async with AsyncExitStack() as server:
        port = await server.enter_async_context(serve_grpc(register, [NAME], HOST, 0, stop_grace_s=60.0))
        async with aio.insecure_channel(f"{HOST}:{port}") as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await call.read()).list_services_response.service
            await call.done_writing()
            assert {NAME, "grpc.health.v1.Health"} <= {service.name for service in listed}
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
            watched = stub.Watch(request)
            assert (await watched.read()).status == states.SERVING
            closing = asyncio.create_task(server.aclose())
            assert (await watched.read()).status == states.NOT_SERVING
            watched.cancel()
            await closing


# --- addresses, certificates, settings


def test_an_address_as_text_and_back() -> None:
    for host, port, text in (("trainer-0.trainer", 1, "trainer-0.trainer:1"), ("fd00::7", 8, "[fd00::7]:8")):
        assert (host_port(host, port), split_host_port(text)) == (text, (host, port))


def test_an_address_file_is_written_whole_and_read_back_or_named(tmp_path: Path) -> None:
    address, path = ServiceAddress(grpc="127.0.0.1:1", http="127.0.0.1:2", pid=3), tmp_path / "verifier.json"
    with pytest.raises(ServiceError, match=r"verifier\.json"):
        read_address(path)
    write_json(path, address.model_dump())
    assert read_address(path) == address
    assert list(tmp_path.iterdir()) == [path]
    for text in ("", '{"grpc": "a", "http": "b"}'):
        path.write_text(text)
        with pytest.raises(ServiceError, match=r"verifier\.json"):
            read_address(path)


class SmallSettings(ServiceSettings):
    workers: int = Field(2, ge=1)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith("PIPELINERL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIPELINERL_RUN", "arithmetic")
    monkeypatch.setenv("PIPELINERL_INSTANCE", "verifier-0")
    return monkeypatch


def test_settings_come_from_the_environment_and_every_wrong_variable_is_named(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PIPELINERL_WORKERS", "0")
    with pytest.raises(UserError) as raised:
        read_settings(SmallSettings)
    assert "PIPELINERL_RECIPE is not set" in str(raised.value)
    assert "PIPELINERL_WORKERS = '0': Input should be greater than or equal to 1" in str(raised.value)
    environment.delenv("PIPELINERL_WORKERS")
    environment.setenv("PIPELINERL_RECIPE", "recipe.yaml")
    settings = read_settings(SmallSettings)
    assert (settings.run, settings.workers, settings.recipe) == ("arithmetic", 2, Path("recipe.yaml"))


# --- lifecycle


def raising(error: BaseException) -> int:
    def run() -> None:
        raise error

    return exit_code(run)


def test_exit_codes(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert exit_code(lambda: None) == 0
    assert raising(ExceptionGroup("tasks", [FieldError("a.b", 1, "use 2")])) == 2
    assert capsys.readouterr().err == "error: a.b = 1: use 2\n"
    refused = [NotPermitted("actor", "demo.sequences") for _ in range(2)]  # what waited at once is refused at once
    assert raising(ExceptionGroup("tasks", [refused[0], ExceptionGroup("more", refused)])) == 2
    assert "user 'actor' may not publish to demo.sequences" in capsys.readouterr().err
    assert not caplog.records
    assert raising(ServiceError("port 1 in use")) == 1
    assert raising(ExceptionGroup("tasks", [FieldError("a.b", 1, "use 2"), RuntimeError("defect")])) == 1
    assert [bool(entry.exc_info) for entry in caplog.records] == [False, True]


async def test_second_signal_cancels() -> None:
    async def stubborn() -> None:
        with stop_event() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(stubborn()), 60)


SERVICE = """
    import sys, time
    from pipelinerl.service.settings import ServiceSettings
    from pipelinerl.service.lifecycle import run_service

    async def main(settings, stop, context):
        print("up", flush=True)
        {body}

    sys.exit(run_service(ServiceSettings, "test", main, stop_within_s={stop_within_s}))
"""


def service(body: str, stop_within_s: float = 60.0, **environment: str) -> subprocess.Popen[str]:
    """A service process whose `main` is `body`, with its three required settings."""
    required = {"PIPELINERL_RUN": "r", "PIPELINERL_RECIPE": "recipe.yaml", "PIPELINERL_INSTANCE": "test-0"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVICE).format(body=body, stop_within_s=stop_within_s)],
        env={**os.environ, **required, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("await stop.wait()", 0, "stopping on SIGTERM"),
        ("await stop.wait(); time.sleep(60)", 1, "still running 0.3 s after the signal"),
    ],
)
def test_service_process_ends_with_its_code(body: str, code: int, said: str) -> None:
    with service(body, 0.3 if "sleep" in body else 60.0) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, said in errors, "Traceback" in errors) == (code, True, False), errors


def test_service_without_settings_is_the_users_mistake() -> None:
    with service("pass", PIPELINERL_GRPC_PORT="many") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: settings of this service are missing or wrong:\n  - PIPELINERL_GRPC_PORT = 'many'")


def test_lines_that_others_can_cause_are_told_once_a_minute_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passes = 100.0, RepetitionFilter().filter
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)

    def line(name: str, text: str, *values: object, **extra: object) -> logging.LogRecord:
        return logging.makeLogRecord({"name": name, "msg": text, "args": values, **extra})

    bad, unlike = "answer of %s is set aside: %s", "a prompt group is set aside: %s"
    assert [passes(line("uvicorn.error", "Invalid HTTP request received.")) for _ in range(3)] == [True, False, False]
    assert [passes(line("a", bad, number, "no", **AGGREGATED)) for number in range(5)] == [True, *[False] * 4]
    assert passes(line("a", unlike, "no", **AGGREGATED))
    assert all(passes(line("a", bad, number, "no")) for number in range(5)), "not marked"
    now += logs.AGGREGATE_S
    assert passes(last := line("a", bad, "actor-0", "100% wrong", **AGGREGATED))
    assert last.getMessage() == "answer of actor-0 is set aside: 100% wrong (4 lines of this kind were left out before)"
