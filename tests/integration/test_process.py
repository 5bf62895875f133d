"""Service processes of a local run, with real children: readiness, early death, stubborn children, grandchildren."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import Launch, ServiceDied, ServiceProcess, bound_log, log_tail

Start = Callable[..., "asyncio.Future[ServiceProcess]"]

SERVICE = """
import http.server, json, os, sys, threading
ready = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" and ready.is_set() else 503)
        self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
address = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:%d" % server.server_port, "pid": os.getpid()}
with open(sys.argv[1] + ".part", "w") as file: json.dump(address, file)
os.replace(sys.argv[1] + ".part", sys.argv[1])
if len(sys.argv) > 2: threading.Timer(float(sys.argv[2]), ready.set).start()
server.serve_forever()
"""


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `python -c CODE ADDRESS_FILE ARGS...` as a service; what a test leaves running is killed."""
    started: list[ServiceProcess] = []

    async def _start(code: str, *args: str, name: str = "service") -> ServiceProcess:
        address = tmp_path / f"{name}.json"
        command = (sys.executable, "-S", "-u", "-c", code, str(address), *args)
        process = await ServiceProcess.start(Launch(name, command, os.environ, tmp_path / f"{name}.log", address))
        started.append(process)
        return process

    yield _start  # type: ignore[misc]
    for process in started:
        await process.kill_and_wait()


async def test_ready_waits_for_the_address_and_for_readyz(start: Start) -> None:
    process = await start(SERVICE, "0.3")
    address = await process.address(timeout_s=60)
    assert address.pid == process.pid
    assert await process.ready(timeout_s=60) == address
    await process.terminate(grace_s=60)
    assert process.returncode == -signal.SIGTERM


async def test_a_service_that_never_gets_ready_is_named_with_its_log(start: Start) -> None:
    process = await start("print('booting...')\n" + SERVICE)
    await process.address(timeout_s=60)
    with pytest.raises(ServiceError, match=r"(?s)service is not ready .* after 0.5 s; end of .*booting\.\.\."):
        await process.ready(timeout_s=0.5)
    assert process.returncode is None


async def test_a_log_that_grows_too_long_keeps_its_end_beside_it_and_goes_on(start: Start) -> None:
    process = await start("import sys\nfor line in map(str, range(2000)): print(line)\nprint('\\x1b[2J\\x07')\n" + SERVICE)
    await process.address(timeout_s=60)
    log = process.launch.log
    bound_log(log, most_bytes=10**6)
    assert log_tail(log, lines=2) == "1999\n\\x1b[2J\\x07"
    bound_log(log, most_bytes=1000)
    assert (log.read_bytes(), log.with_suffix(".log.1").stat().st_size) == (b"", 1000)
    assert log_tail(log.with_suffix(".log.1"), lines=2) == "1999\n\\x1b[2J\\x07"
    with log.open("ab") as file:
        file.write(b"next\n")
    assert log.read_bytes() == b"next\n", "whoever has it open writes at its end"


async def test_a_command_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    def launch(command: str) -> Launch:
        return Launch("ghost", (command,), os.environ, tmp_path / "ghost.log", tmp_path / "ghost.json")

    process = await ServiceProcess.start(launch("/no/such/program"))
    with pytest.raises(ServiceDied, match="/no/such/program cannot be run"):
        await process.address(timeout_s=3600)
    with pytest.raises(ServiceError, match="ghost cannot be started"):
        await ServiceProcess.start(launch("x" * 300_000))


async def test_a_slow_kernel_does_not_fail_a_stop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await start(SERVICE)
    await process.address(timeout_s=60)

    async def not_yet(session: int, timeout_s: float) -> bool:
        return False

    with monkeypatch.context() as patched:
        patched.setattr("pipelinerl.local.processes.session_ended", not_yet)
        await process.terminate(grace_s=60)
        assert process.returncode == -signal.SIGTERM
        with pytest.raises(ServiceError, match="survive SIGKILL"):
            await process.kill_and_wait()
