"""NATS over TLS: real servers with certificates of the moment, the ones that are refused, and renewals while connected."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError, FieldError
from tests.support.certificates import Authority
from tests.support.guarded_nats import LIMITS, reload
from tests.support.machine import free_port, until_logged

RUN, HOST = "demo", "127.0.0.1"
LONG_S = 60.0
"""To connect: longer than a test may take."""


def tls(folder: Path, **more: Any) -> dict[str, Any]:
    """nats-server's configuration."""
    files = {"cert_file": folder / "tls.crt", "key_file": folder / "tls.key", "ca_file": folder / "ca.crt"}
    return {"tls": {name: str(path) for name, path in files.items()} | more}


@asynccontextmanager
async def connected(url: str, tls_dir: Path | None, scheme: str = "tls") -> AsyncIterator[Bus]:
    async with (
        asyncio.timeout(60),
        jetstream.connect(
            url.replace("nats:", f"{scheme}:"), RUN, limits=LIMITS, tls_dir=tls_dir, connect_timeout_s=LONG_S
        ) as bus,
    ):
        await bus.create_streams()
        yield bus


async def refusal(server: NatsServer, tls_dir: Path | None, scheme: str = "tls", text: str = "") -> str:
    """With `text`: the first that has it; a server does not announce that it has read its files again."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with connected(server.url, tls_dir, scheme):
                    assert text, "not refused"
            except BusError as error:
                if text in str(error):
                    return str(error)


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_folder_with_the_ca_is_enough(tmp_path: Path, authority: Authority, scheme: str) -> None:
    extra, trusting = tls(authority.issue(tmp_path / "server", HOST)), authority.write_ca(tmp_path / "client")
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        async with connected(server.url, trusting, scheme) as bus:
            assert await bus.publish_sequence(b"a", "s1") == 1


async def test_a_server_that_asks_for_a_certificate_gets_one(tmp_path: Path, authority: Authority) -> None:
    extra, client = tls(authority.issue(tmp_path / "server", HOST), verify=True), tmp_path / "client"
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        assert "TLS" in await refusal(server, authority.write_ca(client))
        async with connected(server.url, authority.issue(client, "caller")) as bus:
            assert await bus.publish_sequence(b"a", "s1") == 1


async def test_what_is_wrong_with_the_servers_certificate_is_said_at_once(tmp_path: Path, authority: Authority) -> None:
    trusting, folder = authority.write_ca(tmp_path / "client"), tmp_path / "server"
    with NatsServer(tmp_path / "nats", extra=tls(authority.issue(folder, HOST))) as server:
        other = await refusal(server, Authority("another").write_ca(tmp_path / "other"))
        assert "unable to get local issuer certificate" in other
        assert f"trusted: {tmp_path / 'other' / 'ca.crt'}" in other
        assert "is nats_tls_dir missing?" in await refusal(server, None)
        assert "is nats_tls_dir missing?" in await refusal(server, None, "nats")
        authority.issue(folder, "pipelinerl-nats")
        reload(server)
        assert "IP address mismatch" in await refusal(server, trusting, text="mismatch")
        authority.issue(folder, HOST, days=-1)
        reload(server)
        assert "certificate has expired" in await refusal(server, trusting, text="expired")


async def test_a_server_with_a_bad_certificate_is_passed_over(tmp_path: Path, authority: Authority) -> None:
    """As one of a cluster whose certificate was not renewed."""
    trusting = authority.write_ca(tmp_path / "client")
    expired, good = authority.issue(tmp_path / "expired", HOST, days=-1), authority.issue(tmp_path / "good", HOST)
    with NatsServer(tmp_path / "a", extra=tls(expired)) as first, NatsServer(tmp_path / "b", extra=tls(good)) as second:
        for urls in (f"{first.url},{second.url}", f"{second.url},{first.url}"):
            async with connected(urls, trusting, "nats"):
                pass


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_no_password_is_sent_to_a_server_without_tls(tmp_path: Path, authority: Authority, scheme: str) -> None:
    """Someone in between may have taken TLS out of the server's greeting."""
    credentials, received = tmp_path / "credentials", bytearray()
    credentials.write_text("actor:secret")

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","headers":true,"max_payload":1000,"auth_required":true}\r\n')
        received.extend(await reader.read())
        writer.close()

    trusting = authority.write_ca(tmp_path / "client")
    async with await asyncio.start_server(pretend, HOST, 0) as listener:
        url = f"{scheme}://{HOST}:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(BusError, match="the server offers no TLS, which this connection requires"):
            async with jetstream.connect(url, RUN, credentials=credentials, tls_dir=trusting, connect_timeout_s=LONG_S):
                pass
    assert received == b""


async def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    """What else may be wrong with them: see test_grpc_tls."""
    (authority.issue(tmp_path / "client", "caller") / "tls.key").write_text("no key")
    with pytest.raises(FieldError, match=r"nats_tls_dir = .*tls\.crt': cannot be used with tls\.key"):
        async with jetstream.connect("tls://127.0.0.1:1", RUN, tls_dir=tmp_path / "client"):
            pass


async def test_a_reconnection_reads_new_files(tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """The server gets a certificate of another CA, and asks for one of that CA. Half-renewed files and a stranger's greetings
    on its port do no harm meanwhile."""
    caplog.set_level(logging.INFO)
    greetings = itertools.cycle((b'{"tls_required": true, "max_payload": 1, "connect_urls": ["127.0.0.1:1"]}', b"5"))

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO %s\r\n" % next(greetings))
        await reader.readline()
        writer.close()

    server_files, client_files = authority.issue(tmp_path / "server", HOST), authority.issue(tmp_path / "client", "c")
    extra = tls(server_files, verify=True)
    with NatsServer(tmp_path / "nats", free_port(), extra) as server:
        async with connected(server.url, client_files) as bus:
            assert await bus.publish_sequence(b"1", "s1") == 1
            replacing = Authority("the next")
            replacing.issue(server_files, HOST)
            (client_files / "ca.crt").unlink()
            server.stop()
            async with await asyncio.start_server(greet, HOST, server.port):
                await until_logged(caplog, "does not speak NATS")
                assert bus.max_payload_bytes > 1
            server.start()
            await until_logged(caplog, "cannot read the certificates for NATS; connecting with the previous ones")
            await until_logged(caplog, "its certificate is refused")
            replacing.issue(client_files, "c")
            await until_logged(caplog, "reconnected")
            assert await bus.publish_sequence(b"2", "s2") == 2
    assert "('127.0.0.1', 1)" not in caplog.text
