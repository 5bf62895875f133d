"""An API server of each test's own, and clients that come to it as a pod's would."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pipelinerl.kube.client import KubeClient
from tests.kube.api_server import NAMESPACE, ApiServer, api_server, service_account
from tests.kube.certificates import make_certificates


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    folder = tmp_path_factory.mktemp("tls")
    return folder / "ca.crt", make_certificates(folder)


@pytest.fixture
async def api(tls: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    async with api_server(tls[1]) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        yield server


@pytest.fixture
def account(tmp_path: Path, tls: tuple[Path, ssl.SSLContext]) -> Callable[[str], Path]:
    return lambda token: service_account(tmp_path, tls[0], token)


@pytest.fixture
def trainer(api: ApiServer, account: Callable[[str], Path]) -> KubeClient:
    return KubeClient(NAMESPACE, account("trainer-token"), request_s=2.0)


@pytest.fixture
def actor(api: ApiServer, account: Callable[[str], Path]) -> KubeClient:
    return KubeClient(NAMESPACE, account("actor-token"), request_s=2.0)
