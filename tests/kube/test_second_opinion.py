"""The same calls against a mock server that others wrote (kmock): paths, verbs and bodies are Kubernetes', not only ours.

It knows no resource versions, tokens or rights; `api_server.py` does.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp.test_utils
import kmock
import pytest

from pipelinerl.kube.client import KubeError
from pipelinerl.kube.events import PodRef, event_body
from tests.kube.api_server import NAMESPACE, SELECTOR, kube_client
from tests.kube.test_events import AT


@pytest.fixture
async def server(
    tls: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[kmock.KubernetesEmulator]:
    class TlsServer(aiohttp.test_utils.RawTestServer):
        async def start_server(self, **options: Any) -> None:
            await super().start_server(**options | {"ssl": tls[1], "shutdown_timeout": 0.1})

    async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator, server_cls=TlsServer) as running:
        emulator.resources["v1/pods"] = emulator.resources["v1/events"] = {}
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(running.port))
        yield emulator


async def test_pods_are_listed_watched_and_annotated(
    server: kmock.KubernetesEmulator, account: Callable[[str], Path]
) -> None:
    pod = {"metadata": {"name": "a", "namespace": NAMESPACE, "uid": "u1"}, "status": {"phase": "Running"}}
    server.objects["v1/pods", NAMESPACE, "a"] = pod
    async with kube_client(account("any")) as client:
        (listed,), _ = await client.list_pods(SELECTOR)
        async with client.watch_pods(SELECTOR, "1") as changes:
            assert (await anext(changes)).kind == "ADDED"
            await client.annotate_pod("a", "u1", {"cost": "7"})
            assert (await anext(changes)).kind == "MODIFIED"
        with pytest.raises(KubeError) as raised:
            await client.annotate_pod("b", "", {"cost": "7"})
    assert raised.value.status == 404
    assert (listed.name, listed.uid, listed.phase, listed.terminating) == ("a", "u1", "Running", False)
    assert server.objects["v1/pods", NAMESPACE, "a"]["metadata"]["annotations"] == {"cost": "7"}


async def test_an_event_is_stored_once(server: kmock.KubernetesEmulator, account: Callable[[str], Path]) -> None:
    body = event_body(PodRef(NAMESPACE, "a"), "RunStarted", "text", "Normal", component="c", instance="i", now=AT)
    async with kube_client(account("any")) as client:
        await client.create_event(body)
        await client.create_event(body)
    stored = server.objects["v1/events", NAMESPACE, body["metadata"]["name"]]
    assert (stored["reason"], stored["lastTimestamp"]) == ("RunStarted", "2026-01-02T03:04:05+00:00")
