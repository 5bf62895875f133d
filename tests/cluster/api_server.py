"""The API server that pods of the mini cluster talk to: that of tests/kube with the ServiceAccounts and roles of the render."""

from __future__ import annotations

import copy
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from pipelinerl.kube.client import Permission
from tests.chart.rendering import Rendered
from tests.cluster.objects import ClusterError, Object, name_of
from tests.kube import api_server
from tests.support.certificates import Authority


class ApiServer(api_server.ApiServer):
    """`pods` is filled by the cluster; `denied`: what a role did not permit. Only namespaced roles are looked at."""

    def __init__(self, rendered: Rendered, namespace: str) -> None:
        super().__init__(namespace=namespace)
        self._rendered = rendered
        self.ca = b""
        """PEM, once it serves."""
        self.denied: list[str] = []
        self._accounts: dict[str, str] = {}

    def token_of(self, account: str) -> bytes:
        """A new token of a ServiceAccount. Raises `ClusterError` where there is none of this name."""
        if account != "default" and self._rendered.find("ServiceAccount", account) is None:
            raise ClusterError(f'error looking up service account: serviceaccount "{account}" not found')
        token = secrets.token_urlsafe(24)
        self._accounts[token] = account
        return token.encode()

    def put(self, pod: Object) -> None:
        """Store a pod as it is now. An unchanged pod makes no event of a watch."""
        before, pod = self.pods.get(name_of(pod)), copy.deepcopy(pod)
        if before is not None:
            pod["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if pod != before:
            self._change("MODIFIED" if before else "ADDED", pod)

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

    def _account(self, request: web.Request) -> str:
        account = self._accounts.get(request.headers.get("Authorization", "").partition(" ")[2])
        if account is None:
            self._refuse(401, "Unauthorized", "Unauthorized")
        return account

    def _forbid(self, account: str, permission: Permission) -> NoReturn:
        message = (
            f'User "system:serviceaccount:{self.namespace}:{account}" cannot {permission.verb} resource '
            f'"{permission.resource}" in API group "{permission.group}" in the namespace "{self.namespace}"'
        )
        self.denied.append(message)
        self._refuse(403, "Forbidden", f"{permission.resource} is forbidden: {message}")

    def _grants(self, account: str, permission: Permission, name: str) -> bool:
        subject = {"kind": "ServiceAccount", "name": account, "namespace": self.namespace}
        bindings = [binding for binding in self._rendered.of_kind("RoleBinding") if subject in binding["subjects"]]
        roles = [self._rendered.one("Role", binding["roleRef"]["name"]) for binding in bindings]
        return any(
            permission.verb in rule["verbs"]
            and permission.group in rule["apiGroups"]
            and permission.resource in rule["resources"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for role in roles
            for rule in role["rules"]
        )
