"""TLS between the services, and between them and NATS: renewed certificates, and refusals that say why."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.nats_server import NatsServer
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError, FieldError, ServiceError
from pipelinerl.messages import verification
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.service.retry import Backoff
from pipelinerl.service.tls import read_certificates, server_credentials
from pipelinerl.v1 import verifier_pb2
from pipelinerl.v1.actor_pb2 import GetStateRequest
from services.trainer.data.evaluation import calls_to
from tests.support.certificates import Authority, serial_of
from tests.support.guarded_nats import LIMITS, reload
from tests.support.machine import free_port, until_logged
from tests.support.verifier import ITEM, ScriptedVerifier

RUN, HOST = "demo", "127.0.0.1"
LONG_S = 60.0
"""To connect: longer than a test may take."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> Callable[..., Path]:
    """`files("client", "name", days=1)`: a folder with a certificate of the authority."""
    return lambda folder, *names, days=1, by=authority: by.issue(tmp_path / folder, *names, days=days)


def serving(tls_dir: Path | None) -> AbstractAsyncContextManager[int]:
    return ScriptedVerifier().serving(credentials=server_credentials(tls_dir))


async def health_of(channel: aio.Channel) -> int:
    async with channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        return int(answer.status)


async def refusal(port: int, tls_dir: Path | None, name: str = "") -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await health_of(open_channel(f"{HOST}:{port}", tls_dir, name))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return explained(caught.value, tls_dir)


async def test_who_is_reached_by_address_may_be_expected_under_a_name(files: Callable[..., Path]) -> None:
    async with serving(files("server", "pipelinerl-actor")) as port:
        client_files, target = files("client", "caller"), f"{HOST}:{port}"
        assert await health_of(open_channel(target, client_files, "pipelinerl-actor")) == 1
        assert "certificate is for other names" in await refusal(port, client_files)
        with pytest.raises(ServiceError, match="UNIMPLEMENTED"):  # reached: this server has no such service
            async with calls_to("a", target, tls_dir=client_files, tls_name="pipelinerl-actor") as actor:
                await actor.GetState(GetStateRequest(), timeout=60)
        with pytest.raises(ServiceError, match=r"actor a at .* other names"):
            async with calls_to("a", target, tls_dir=client_files, tls_name="another") as actor:
                await actor.GetState(GetStateRequest(), timeout=60)
        (client_files / "tls.crt").write_text("half renewed")
        with pytest.raises(ServiceError, match=r"actor a at .*tls\.crt"):  # no user's mistake: the trainer goes on
            async with calls_to("a", target, tls_dir=client_files):
                pass


async def test_refusals_say_why(files: Callable[..., Path]) -> None:
    client_files, server_files = files("client", "caller"), files("server", HOST)
    async with serving(server_files) as port, serving(None) as plain_port:
        assert "if the server requires TLS, set tls_dir" in await refusal(port, None)
        assert "uses no TLS" in await refusal(plain_port, client_files)
        foreign = await refusal(port, files("foreign", "caller", by=Authority("another")))
        assert "unable to get local issuer certificate" in foreign
        assert f"not valid under {client_files.parent / 'foreign' / 'ca.crt'}" in foreign
        files("server", HOST, days=-1)  # which is not taken: the last good ones are shown
        assert await health_of(open_channel(f"{HOST}:{port}", client_files)) == 1


async def test_a_caller_of_another_ca_is_refused(files: Callable[..., Path]) -> None:
    """It trusts the server, which does not trust it. The server closes the connection without a reason."""
    async with serving(files("server", HOST)) as port:
        stranger = Authority("another").issue(files("stranger", "x"), "caller")
        certificates = read_certificates(stranger, "client")
        root = (files("client", "caller") / "ca.crt").read_bytes()
        credentials = grpc.ssl_channel_credentials(root, certificates.key, certificates.certificate)
        with pytest.raises(aio.AioRpcError) as caught:
            await health_of(aio.secure_channel(f"{HOST}:{port}", credentials))
        assert "the server may refuse" in explained(caught.value, stranger)
        no_certificate = grpc.ssl_channel_credentials(root)
        with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
            await health_of(aio.secure_channel(f"{HOST}:{port}", no_certificate))


@pytest.mark.parametrize("role", ["client", "server"])
def test_files_that_cannot_be_used_are_named_at_the_start(files: Callable[..., Path], role: str) -> None:
    def refused(folder: Path, said: str) -> None:
        with pytest.raises(FieldError, match=said):
            read_certificates(folder, role)

    folder = files("mine", HOST)
    read_certificates(folder, role)
    (folder / "tls.key").write_bytes((files("other", HOST) / "tls.key").read_bytes())
    refused(folder, r"tls_dir = .*tls\.crt.* cannot be used with tls\.key")
    refused(files("mine", HOST, days=-1), r"tls\.crt.* is not valid under ca\.crt: certificate has expired")
    Authority("another").write_ca(files("mine", HOST))
    refused(folder, r"is not valid under ca\.crt: .*issuer")
    (folder / "ca.crt").write_text("no certificate")
    refused(folder, r"ca\.crt.* holds no certificate")
    (folder / "tls.key").unlink()
    refused(folder, r"tls\.key.* cannot be read: No such file")


async def test_renewed_certificates_are_used_by_a_client_and_a_server_that_live_on(
    files: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole new CA on both sides: the old certificates are of no use to a new connection. What is wrong is in the log; once
    the files are right, the call goes through."""
    server_files, client_files = files("server", HOST), files("client", "caller")
    monkeypatch.setattr(verification, "BACKOFF", Backoff(0.01, 0.05))
    first, servicer, renewed = serial_of(client_files / "tls.crt"), ScriptedVerifier(), asyncio.Event()
    async with (
        servicer.serving(credentials=server_credentials(server_files), connection_age_s=0.2) as port,
        VerifierClient(f"{HOST}:{port}", tls_dir=client_files) as client,
    ):

        async def keep_asking() -> None:
            while not renewed.is_set():
                await client.verify([ITEM])

        await client.verify([ITEM])
        late = asyncio.create_task(client.verify([verifier_pb2.VerifyItem(sequence_id="late")]))
        replacing = Authority("the next")
        replacing.issue(server_files, HOST)
        (client_files / "tls.key").write_text("half a renewal")
        asking = asyncio.create_task(keep_asking())
        await until_logged(caplog, "cannot use the renewed certificates")
        await until_logged(caplog, "not valid under")
        async with asyncio.timeout(60):
            replacing.issue(client_files, "caller")
            renewed.set()
            await asking
            servicer.late.set()
            assert [result.reward for result in await late] == [1.0], "a call on the old channel ends there"
    assert list(dict.fromkeys(servicer.callers)) == [first, serial_of(client_files / "tls.crt")]


# NATS


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


async def nats_refusal(server: NatsServer, tls_dir: Path | None, scheme: str = "tls", text: str = "") -> str:
    """With `text`: the first that has it; a server does not announce that it has read its files again."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with connected(server.url, tls_dir, scheme):
                    assert text, "not refused"
            except BusError as error:
                if text in str(error):
                    return str(error)


async def test_a_server_that_asks_for_a_certificate_gets_one(tmp_path: Path, authority: Authority) -> None:
    extra, client = tls(authority.issue(tmp_path / "server", HOST), verify=True), tmp_path / "client"
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        assert "TLS" in await nats_refusal(server, authority.write_ca(client))
        async with connected(server.url, authority.issue(client, "caller")) as bus:
            assert await bus.publish_sequence(b"a", "s1") == 1
        (client / "tls.key").write_text("no key")
        with pytest.raises(FieldError, match=r"nats_tls_dir = .*tls\.crt': cannot be used with tls\.key"):
            async with connected(server.url, client):
                pass


async def test_what_is_wrong_with_the_servers_certificate_is_said_at_once(tmp_path: Path, authority: Authority) -> None:
    trusting, folder = authority.write_ca(tmp_path / "client"), tmp_path / "server"
    with NatsServer(tmp_path / "nats", extra=tls(authority.issue(folder, HOST))) as server:
        for scheme in ("tls", "nats"):
            async with connected(server.url, trusting, scheme):  # a folder with the CA is enough
                pass
        other = await nats_refusal(server, Authority("another").write_ca(tmp_path / "other"))
        assert "unable to get local issuer certificate" in other
        assert f"trusted: {tmp_path / 'other' / 'ca.crt'}" in other
        assert "is nats_tls_dir missing?" in await nats_refusal(server, None)
        assert "is nats_tls_dir missing?" in await nats_refusal(server, None, "nats")
        authority.issue(folder, "pipelinerl-nats")
        reload(server)
        assert "IP address mismatch" in await nats_refusal(server, trusting, text="mismatch")
        authority.issue(folder, HOST, days=-1)
        reload(server)
        assert "certificate has expired" in await nats_refusal(server, trusting, text="expired")


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
