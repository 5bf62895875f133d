"""Service processes of a local run, with real children: readiness, early death, stubborn children, grandchildren."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import (
    Launch,
    ServiceDied,
    ServiceNotReady,
    ServiceProcess,
    log_tail,
    session_ended,
    session_pids,
)
from tests.support.local_run import until

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

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""

PARENT_OF_ANOTHER_GROUP = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], process_group=0)
print("has a child", flush=True)
time.sleep(60)
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


async def printed(process: ServiceProcess, text: str) -> None:
    await until(lambda: text in log_tail(process.launch.log))


async def test_ready_waits_for_the_address_and_for_readyz(start: Start) -> None:
    process = await start(SERVICE, "0.3")
    address = await process.address(timeout_s=10)
    assert address.pid == process.pid
    ready = await process.ready(timeout_s=10)
    assert ready == address
    assert await process.terminate(grace_s=5) == -signal.SIGTERM


async def test_a_service_that_never_gets_ready_is_named_with_its_log(start: Start) -> None:
    process = await start("print('booting...')\n" + SERVICE)
    with pytest.raises(
        ServiceNotReady, match=r"(?s)service is not ready .* after 0.5 s; end of .*booting\.\.\."
    ) as info:
        await process.ready(timeout_s=0.5)
    assert info.value.name == "service"
    assert process.returncode is None


async def test_an_early_death_is_noticed_at_once_with_the_end_of_the_log(start: Start) -> None:
    process = await start("import sys; print('line before'); sys.exit('no such model: /nowhere')")
    async with asyncio.timeout(10):
        with pytest.raises(ServiceDied, match=r"(?s)exited with code 1; .*line before\nno such model") as info:
            await process.ready(timeout_s=3600)
    assert (info.value.name, info.value.returncode) == ("service", 1)


async def test_a_killed_service_is_reported_by_its_signal(start: Start) -> None:
    process = await start(SERVICE)
    await process.address(timeout_s=10)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ServiceDied, match="was killed by SIGKILL"):
        await process.ready(timeout_s=3600)


async def test_a_command_that_does_not_exist_ends_with_its_name_in_the_log(tmp_path: Path) -> None:
    launch = Launch("ghost", ("/no/such/program",), os.environ, tmp_path / "ghost.log", tmp_path / "ghost.json")
    process = await ServiceProcess.start(launch)
    with pytest.raises(ServiceDied, match=r"/no/such/program|FileNotFoundError"):
        await process.address(timeout_s=3600)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    process = await start(STUBBORN)
    await printed(process, "deaf")
    assert await process.terminate(grace_s=0.3) == -signal.SIGKILL
    assert session_pids(process.pid) == []


async def test_grandchildren_in_a_group_of_their_own_are_gone_after_terminate(start: Start) -> None:
    process = await start(PARENT_OF_ANOTHER_GROUP)
    await printed(process, "has a child")
    assert len(session_pids(process.pid)) == 2
    assert await process.terminate(grace_s=0.5) == -signal.SIGTERM
    assert session_pids(process.pid) == []


async def test_kill_ends_everything_without_waiting(start: Start) -> None:
    process = await start(PARENT_OF_ANOTHER_GROUP)
    await printed(process, "has a child")
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await session_ended(process.pid, timeout_s=5)


async def test_terminating_a_process_that_has_ended_returns_its_code(start: Start) -> None:
    process = await start("import sys; sys.exit(3)")
    assert await process.wait() == 3
    assert await process.terminate(grace_s=1) == 3


async def test_a_stale_address_file_is_not_believed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "service.json").write_text('{"grpc": "127.0.0.1:9", "http": "127.0.0.1:9", "pid": 1}')
    process = await start(SERVICE)
    assert (await process.address(timeout_s=10)).pid == process.pid


async def test_the_log_is_appended_to_across_restarts(start: Start) -> None:
    first = await start("print('first life')")
    await first.wait()
    second = await start("print('second life')")
    await second.wait()
    assert log_tail(second.launch.log) == "first life\nsecond life"


PARENT = """
import asyncio, os, sys
from pathlib import Path
from pipelinerl.local.processes import Launch, ServiceProcess

async def main() -> None:
    folder = Path(sys.argv[1])
    command = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    process = await ServiceProcess.start(Launch("child", command, os.environ, folder / "child.log", folder / "child.json"))
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
async def test_services_die_with_a_killed_runner(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    try:
        command = Path(f"/proc/{child}/cmdline")  # past the guard's exec: the signal is armed by then
        await until(lambda: command.read_bytes().split(b"\0")[1:3] == [b"-S", b"-c"])
        parent.kill()
        await parent.wait()
        assert await session_ended(child, timeout_s=10)
    finally:
        if session_pids(child):
            os.kill(child, signal.SIGKILL)


async def test_an_environment_that_cannot_be_passed_is_a_service_error(tmp_path: Path) -> None:
    launch = Launch("odd", ("x" * 300_000,), os.environ, tmp_path / "odd.log", tmp_path / "odd.json")
    with pytest.raises(ServiceError, match="odd cannot be started"):
        await ServiceProcess.start(launch)


async def test_a_kernel_that_takes_its_time_with_the_dead_does_not_fail_a_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(SERVICE)
    await process.address(timeout_s=10)

    async def not_yet(session: int, timeout_s: float) -> bool:
        return False

    with monkeypatch.context() as patched:
        patched.setattr("pipelinerl.local.processes.session_ended", not_yet)
        assert await process.terminate(grace_s=5) == -signal.SIGTERM
        with pytest.raises(ServiceError, match="survive SIGKILL"):
            await process.kill_and_wait()
