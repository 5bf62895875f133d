"""The API server that pods of the mini cluster talk to: that of tests/kube with the ServiceAccounts and roles of the render."""

from __future__ import annotations

import copy
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from pipelinerl.kube.client import Permission
from tests.cluster.objects import Object, Objects, name_of
from tests.cluster.rbac import Access, allowed, denial
from tests.kube import api_server
from tests.support.certificates import Authority


class ApiServer(api_server.ApiServer):
    """`pods` is filled by the kubelet; `denied`: what a role did not permit."""

    def __init__(self, objects: Objects, namespace: str) -> None:
        super().__init__(namespace=namespace)
        self.objects = objects
        self.ca = b""
        """PEM, once it serves."""
        self.denied: list[str] = []
        self._accounts: dict[str, str] = {}

    def token_of(self, account: str) -> bytes:
        """A new token of a ServiceAccount."""
        token = secrets.token_urlsafe(24)
        self._accounts[token] = account
        return token.encode()

    def put(self, pod: Object) -> None:
        """A pod as it is now. Annotations that were patched stay; nothing happens where nothing changed."""
        before = self.pods.get(name_of(pod))
        pod = copy.deepcopy(pod)
        if before is not None:
            pod["metadata"]["annotations"] = before["metadata"].get("annotations") or {}
            if _content(before) == _content(pod):
                return
        self._change("MODIFIED" if before else "ADDED", pod)

    def events_of(self, reason: str) -> list[Object]:
        return [event for event in self.events.values() if event.get("reason") == reason]

    @asynccontextmanager
    async def serve(self, address: str, port: int, folder: Path) -> AsyncIterator[None]:
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", address)
        pair = Authority("cluster CA").issue(folder, *names)
        self.ca = (pair / "ca.crt").read_bytes()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
        await self.start(address, port)
        try:
            yield
        finally:
            await self.stop()

    async def _allowed(self, request: web.Request, permission: Permission) -> web.Response | None:
        token = request.headers.get("Authorization", "").partition(" ")[2]
        account = self._accounts.get(token)
        if account is None:
            return self._refuse(401, "Unauthorized", "Unauthorized")
        access = Access(permission.verb, "", permission.resource, request.match_info.get("name", ""))
        here = request.match_info["namespace"] == self.namespace
        if here and allowed(self.objects, self.namespace, account, access):
            return None
        message = denial(self.namespace, account, access)
        self.denied.append(message)
        return self._refuse(403, "Forbidden", f"{access.resource} is forbidden: {message}")


def _content(pod: Object) -> dict[str, Any]:
    return {**pod, "metadata": {key: value for key, value in pod["metadata"].items() if key != "resourceVersion"}}
