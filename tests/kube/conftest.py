"""An API server of each test's own, and clients that come to it as a pod's would."""

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipelinerl.kube.client import KubeClient
from tests.kube.api_server import NAMESPACE, ApiServer
from tests.support.certificates import Authority


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    folder = Authority().issue(tmp_path_factory.mktemp("tls"), "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return folder / "ca.crt", context


@pytest.fixture
async def api(tls: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer(tls[1])
    await server.start()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    yield server
    server.silent = False
    await server.stop()


@pytest.fixture
def account(tmp_path: Path, tls: tuple[Path, ssl.SSLContext]) -> Callable[[str], Path]:
    def make(token: str) -> Path:
        folder = tmp_path / f"account-{token}"
        folder.mkdir()
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes(tls[0].read_bytes())
        return folder

    return make


@pytest.fixture
async def trainer(api: ApiServer, account: Callable[[str], Path]) -> AsyncIterator[KubeClient]:
    async with KubeClient(NAMESPACE, account("trainer-token"), request_s=60) as client:
        yield client
