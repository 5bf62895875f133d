"""Mutual TLS between the services: real servers and clients, renewed certificates, and refusals that say why."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.messages import verification
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.service.retry import Backoff
from pipelinerl.service.tls import read_certificates, server_credentials
from pipelinerl.v1 import verifier_pb2
from pipelinerl.v1.actor_pb2 import GetStateRequest
from services.trainer.data.evaluation import calls_to
from tests.integration.test_balancing import name_server
from tests.support.certificates import Authority, serial_of
from tests.support.machine import until_logged
from tests.support.verifier import ITEM, ScriptedVerifier

HOST = "127.0.0.1"


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


@pytest.mark.parametrize(("name", "reached"), [("t-0.t", True), ("*.t", False), ("*.t.namespace", False)])
async def test_a_pods_full_name_is_in_the_certificate(files: Callable[..., Path], name: str, reached: bool) -> None:
    """gRPC takes a wildcard over a name without a dot for none."""
    async with serving(files("server", name)) as port, name_server(HOST) as (_, dns_port):
        target, client_files = f"dns://{HOST}:{dns_port}/t-0.t:{port}", files("client", "caller")
        if reached:
            assert await health_of(open_channel(target, client_files)) == 1
            return
        with pytest.raises(aio.AioRpcError) as caught:
            await health_of(open_channel(target, client_files))
        assert "certificate is for other names" in explained(caught.value, client_files)


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


async def test_an_actor_client_with_unusable_files_is_no_users_mistake(tmp_path: Path) -> None:
    """A trainer that reads half-renewed files leaves this call out, and does not end."""
    with pytest.raises(ServiceError, match=r"actor a at .*tls\.crt"):
        async with calls_to("a", f"{HOST}:1", tls_dir=tmp_path):
            pass


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
