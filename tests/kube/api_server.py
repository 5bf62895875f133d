"""A Kubernetes API server as far as the services use one: the pods of one namespace, over TLS, with tokens and rights.

It keeps resource versions as the real one does: a watch begins after a version and sees every change since, or is told that the
version is no longer kept. It can be away, drop connections, end watches, refuse tokens and rights, and be slow.
"""

import asyncio
import functools
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from aiohttp import web

from pipelinerl.kube.client import TRAINER, Permission
from tests.support.machine import free_port

NAMESPACE = "train"
LABELS = {"app.kubernetes.io/component": "actor"}
SELECTOR = "app.kubernetes.io/component=actor"
SOON_S = 60.0
_MOST_BODY_BYTES = 3 * 1024**2
REFUSALS = {
    401: web.HTTPUnauthorized,
    403: web.HTTPForbidden,
    404: web.HTTPNotFound,
    409: web.HTTPConflict,
    422: web.HTTPUnprocessableEntity,
}


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "status": "Failure", "reason": reason, "message": message}


@dataclass(eq=False)
class _Watcher:
    selector: str
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """None: the end."""
    kind: str = "Pod"
    request: web.Request | None = None


class ApiServer:
    """See the module. `rights`: by token; `calls`: what was asked, by which verb, in order."""

    def __init__(self, context: ssl.SSLContext | None = None, namespace: str = NAMESPACE) -> None:
        self.context, self.namespace = context, namespace
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.rights: dict[str, frozenset[Permission]] = {"actor-token": frozenset(), "trainer-token": TRAINER}
        self.calls: list[Permission] = []
        self.refused: list[int] = []
        self.pods: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.scales: dict[str, dict[str, Any]] = {}
        """Data of ConfigMaps and Secrets, and replicas, by the objects' names."""
        self.silent = False
        """Takes calls and does not answer."""
        self._version = 100
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._watchers: list[_Watcher] = []
        self._changed = asyncio.Event()

    # --- what a test does ----------------------------------------------------------------------------------------

    async def start(self, address: str = "127.0.0.1", port: int = 0) -> None:
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        self._add_routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        self.port = self.port or port or free_port()
        site = web.TCPSite(self._runner, address, self.port, ssl_context=self.context)
        await site.start()

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review_access)
        namespace = "/api/v1/namespaces/{namespace}"
        app.router.add_get(namespace + "/pods", self._get_pods)
        app.router.add_patch(namespace + "/configmaps/{name}", self._patch_config)
        app.router.add_patch(namespace + "/secrets/{name}", self._patch_secret)
        for kind in ("deployments", "statefulsets"):
            apps = namespace.replace("/api/v1", "/apis/apps/v1")
            app.router.add_patch(f"{apps}/{kind}/{{name}}/scale", functools.partial(self._patch_scale, kind))
            app.router.add_get(f"{apps}/{kind}/{{name}}/scale", functools.partial(self._get_scale, kind))

    async def stop(self) -> None:
        self.drop_watches()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def watched(self, count: int = 1) -> None:
        await self.until(lambda: len(self._watchers) == count)

    def add_pod(self, name: str, uid: str = "", labels: Mapping[str, str] = LABELS) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, "uid": uid or f"uid-{name}", "labels": dict(labels)}
        self._change("ADDED", {"metadata": metadata, "status": {"phase": "Running"}})

    def set_phase(self, name: str, phase: str, reason: str = "") -> None:
        pod = self.pods[name]
        self._change("MODIFIED", {**pod, "status": {"phase": phase, "reason": reason}})

    def terminate(self, name: str) -> None:
        pod = self.pods[name]
        ending = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
        self._change("MODIFIED", {**pod, "metadata": ending})

    def remove(self, name: str) -> None:
        self._change("DELETED", self.pods[name])

    def drop_watches(self) -> None:
        for watcher in self._watchers:
            if watcher.request is not None and watcher.request.transport is not None:
                watcher.request.transport.abort()
            watcher.lines.put_nowait(None)

    def end_watches(self) -> None:
        for watcher in self._watchers:
            watcher.lines.put_nowait(None)

    def say(self, raw: bytes) -> None:
        for watcher in self._watchers:
            watcher.lines.put_nowait(raw)

    def asked(self, permission: Permission) -> int:
        return self.calls.count(permission)

    # --- what a cluster does -------------------------------------------------------------------------------------

    def _change(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self._version)}}
        name = pod["metadata"]["name"]
        self.pods[name] = pod
        if kind == "DELETED":
            del self.pods[name]
        self._tell(kind, pod)

    def _tell(self, kind: str, raw: dict[str, Any]) -> None:
        """Keep a change of an object, whose version is `_version`, and send it to those who watch such objects."""
        self._history.append((self._version, kind, raw))
        self._send(kind, raw, lambda watcher: watches(watcher, raw))
        self._changed.set()

    def _send(self, kind: str, raw: dict[str, Any], to: Callable[[_Watcher], bool]) -> None:
        for watcher in filter(to, self._watchers):
            watcher.lines.put_nowait(line(kind, raw))

    async def _allowed(self, request: web.Request, permission: Permission) -> None:
        """Refuses, or returns. The permission is counted whether it is there or not."""
        self.calls.append(permission)
        self._changed.set()
        while self.silent:
            await asyncio.sleep(0.01)
        account, where = self._account(request), request.match_info
        if where["namespace"] != self.namespace or not self._grants(account, permission, where.get("name", "")):
            self._forbid(account, permission)

    def _account(self, request: web.Request) -> str:
        token = request.headers.get("Authorization", "").partition(" ")[2]
        if token not in self.rights:
            self._refuse(401, "Unauthorized", "Unauthorized")
        return token

    def _grants(self, account: str, permission: Permission, name: str) -> bool:
        """`name`: of the object that is asked for; empty = all, or one that is new."""
        return permission in self.rights[account]

    def _forbid(self, account: str, permission: Permission) -> NoReturn:
        self._refuse(403, "Forbidden", f"User cannot {permission.verb} resource {permission.resource!r}")

    async def _review_access(self, request: web.Request) -> web.Response:
        asked = (await request.json())["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked["subresource"])))
        permission = Permission(resource, asked["verb"], asked["group"])
        granted = self._grants(self._account(request), permission, asked["name"])
        return web.json_response({"status": {"allowed": granted and asked["namespace"] == self.namespace}}, status=201)

    def _refuse(self, code: int, reason: str, message: str) -> NoReturn:
        self.refused.append(code)
        raise REFUSALS[code](text=json.dumps(status(code, reason, message)), content_type="application/json")

    async def _get_pods(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "true"
        await self._allowed(request, Permission("pods", "watch" if watch else "list"))
        selector = request.query.get("labelSelector", "")
        if watch:
            return await self._watch(request, selector)
        items = [pod for pod in self.pods.values() if selects(selector, pod)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, selector: str, kind: str = "Pod") -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        assert int(request.query["timeoutSeconds"]) > 0
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
        except ConnectionError:  # the client has gone
            return response
        watcher = _Watcher(selector, request=request, kind=kind)
        for version, change, raw in self._history:
            if version > since and watches(watcher, raw):
                watcher.lines.put_nowait(line(change, raw))
        self._watchers.append(watcher)
        self._changed.set()
        try:
            while (text := await watcher.lines.get()) is not None:
                await response.write(text)
        except ConnectionError:
            pass
        finally:
            self._watchers.remove(watcher)
            self._changed.set()
        return response

    async def _patch_config(self, request: web.Request) -> web.Response:
        await self._allowed(request, Permission("configmaps", "patch"))
        return await self._merge(request, self.configs, "data")

    async def _patch_secret(self, request: web.Request) -> web.Response:
        await self._allowed(request, Permission("secrets", "patch"))
        return await self._merge(request, self.secrets, "data")

    async def _get_scale(self, kind: str, request: web.Request) -> web.Response:
        await self._allowed(request, Permission(f"{kind}/scale", "get", "apps"))
        name = request.match_info["name"]
        if name not in self.scales:
            self._refuse(404, "NotFound", f'"{name}" not found')
        replicas = self.scales[name].get("replicas", 1)
        return web.json_response({"spec": {"replicas": replicas} if replicas else {}})

    async def _patch_scale(self, kind: str, request: web.Request) -> web.Response:
        await self._allowed(request, Permission(f"{kind}/scale", "patch", "apps"))
        return await self._merge(request, self.scales, "spec")

    async def _merge(self, request: web.Request, objects: dict[str, dict[str, Any]], part: str) -> web.Response:
        name, patch = request.match_info["name"], await request.json()
        assert request.content_type == "application/merge-patch+json"
        if name not in objects:
            self._refuse(404, "NotFound", f'"{name}" not found')
        objects[name].update(patch[part])
        for key in [key for key, value in objects[name].items() if value is None]:
            del objects[name][key]
        self._changed.set()
        return web.json_response({"metadata": {"name": name}, part: objects[name]})


def line(kind: str, raw: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": raw}).encode() + b"\n"


def watches(watcher: _Watcher, raw: dict[str, Any]) -> bool:
    return raw.get("kind", "Pod") == watcher.kind and selects(watcher.selector, raw)


def selects(selector: str, pod: dict[str, Any]) -> bool:
    labels = pod["metadata"].get("labels") or {}
    fields = {**labels, "metadata.name": pod["metadata"]["name"]}
    sets = re.findall(r"([^, ]+) in \(([^)]*)\)", selector)
    equal = [term.split("=", 1) for term in re.sub(r"[^, ]+ in \([^)]*\)", "", selector).split(",") if term]
    return all(fields.get(name) == value for name, value in equal) and all(
        fields.get(name) in values.split(",") for name, values in sets
    )
