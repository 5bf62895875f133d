"""The part of a Kubernetes API server that pods of a run talk to: pods and events, with TLS, tokens and the rendered RBAC.

List, get, watch and patch of pods, creation of events; everything else is answered with 404. Watches start where they are
told to and never expire.
"""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
from aiohttp import web

from tests.cluster.objects import Object, Objects, labels_of, name_of
from tests.cluster.rbac import Access, allowed, denial
from tests.support.certificates import Authority

SCHEMA = "1.31"
EVENT_GROUPS = ("", "events.k8s.io")


@dataclass
class ApiServer:
    """`pods` is filled by the kubelet; `events`, `patches` and `denied` by those who call."""

    objects: Objects
    namespace: str
    ca: bytes = b""
    """PEM, once it serves."""
    pods: dict[str, Object] = field(default_factory=dict)
    events: list[Object] = field(default_factory=list)
    patches: list[tuple[str, Object]] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    _accounts: dict[str, str] = field(default_factory=dict)
    _history: list[tuple[int, str, Object]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _version: int = 1

    def token_of(self, account: str) -> bytes:
        """A new token of a ServiceAccount."""
        token = secrets.token_urlsafe(24)
        self._accounts[token] = account
        return token.encode()

    def put(self, pod: Object) -> None:
        """A pod as it is now. Annotations that were patched stay; nothing happens where nothing changed."""
        name, before = name_of(pod), self.pods.get(name_of(pod))
        pod = copy.deepcopy(pod)
        if before is not None:
            pod["metadata"]["annotations"] = before["metadata"].get("annotations") or {}
            if _content(before) == _content(pod):
                return
        self._record("MODIFIED" if before else "ADDED", pod)
        self.pods[name] = pod

    def remove(self, name: str) -> None:
        pod = self.pods.pop(name, None)
        if pod is not None:
            self._record("DELETED", copy.deepcopy(pod))

    def events_of(self, reason: str) -> list[Object]:
        return [event for event in self.events if event.get("reason") == reason]

    @asynccontextmanager
    async def serve(self, address: str, port: int, folder: Path) -> AsyncIterator[None]:
        app = web.Application(middlewares=[self._authorised])
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch_pod)
        app.router.add_post("/api/v1/namespaces/{namespace}/events", self._create_event)
        app.router.add_post("/apis/events.k8s.io/v1/namespaces/{namespace}/events", self._create_event)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        pair = Authority("cluster CA").issue(
            folder, "kubernetes", "kubernetes.default", "kubernetes.default.svc", address
        )
        self.ca = (pair / "ca.crt").read_bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
        try:
            await web.TCPSite(runner, address, port, ssl_context=context).start()
            yield
        finally:
            await runner.cleanup()

    def _record(self, kind: str, pod: Object) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, copy.deepcopy(pod)))
        self._news.set()
        self._news = asyncio.Event()

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        account = self._accounts.get(token)
        if scheme.lower() != "bearer" or account is None:
            return _status(401, "Unauthorized", "Unauthorized")
        access = _access(request)
        if access is not None and request.match_info.get("namespace") != self.namespace:
            return self._refusal(account, access)
        if access is not None and not allowed(self.objects, self.namespace, account, access):
            return self._refusal(account, access)
        return await handler(request)

    def _refusal(self, account: str, access: Access) -> web.Response:
        message = denial(self.namespace, account, access)
        self.denied.append(message)
        return _status(403, "Forbidden", f"{access.resource} is forbidden: {message}")

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        selector = _equalities(request.query.get("labelSelector", ""))
        names = _equalities(request.query.get("fieldSelector", ""))
        if request.query.get("watch") in ("true", "1", "True"):
            return await self._watch(request, selector, names)
        items = [pod for pod in self.pods.values() if _selected(pod, selector, names)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, selector: dict[str, str], names: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or self._version)
        timeout_s = float(request.query.get("timeoutSeconds") or 3600)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    news = self._news
                    for version, kind, pod in [entry for entry in self._history if entry[0] > since]:
                        since = version
                        if _selected(pod, selector, names):
                            await response.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
                    await news.wait()
        except TimeoutError:
            await response.write_eof()
        except ConnectionError:  # whoever watched is gone
            pass
        return response

    async def _get_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod) if pod else _not_found("pods", request.match_info["name"])

    async def _patch_pod(self, request: web.Request) -> web.Response:
        """Merge patches, of which a strategic one is a special case as far as annotations go."""
        name, kind = request.match_info["name"], request.content_type
        if kind not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
            return _status(415, "UnsupportedMediaType", f"this server takes merge patches, not {kind}")
        if name not in self.pods:
            return _not_found("pods", name)
        patch = await request.json()
        metadata = self.pods[name]["metadata"]
        if (patch.get("metadata") or {}).get("uid", metadata["uid"]) != metadata["uid"]:
            return _status(409, "Conflict", f"Precondition failed: UID in precondition is not that of {name}")
        errors = [
            f"annotation {key}: {value!r} is not a string"
            for key, value in _annotations(patch).items()
            if not isinstance(value, str | None)
        ]
        if errors:
            return _status(400, "BadRequest", "; ".join(errors))
        patched = _merged(self.pods[name], patch)
        if _content(patched) != _content(self.pods[name]):
            self._record("MODIFIED", patched)
            self.pods[name] = patched
        self.patches.append((name, patch))
        return web.json_response(self.pods[name])

    async def _create_event(self, request: web.Request) -> web.Response:
        version = "v1" if request.path.startswith("/api/") else "events.k8s.io/v1"
        event = {"apiVersion": version, "kind": "Event"} | await request.json()  # as the server completes it
        problem = _event_problem(event, self.namespace)
        if problem:
            return _status(422, "Invalid", problem)
        event["metadata"].setdefault("name", event["metadata"].get("generateName", "event-") + secrets.token_hex(4))
        self.events.append(event)
        return web.json_response(event, status=201)


def _access(request: web.Request) -> Access | None:
    """None for what is no resource, such as /version."""
    route = request.match_info
    if "namespace" not in route:
        return None
    parts = request.path.strip("/").split("/")
    group = "" if parts[0] == "api" else parts[1]
    resource, name = parts[parts.index("namespaces") + 2], route.get("name", "")
    if request.method == "GET":
        verb = "get" if name else "watch" if request.query.get("watch") else "list"
    else:
        verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}[request.method]
    return Access(verb, group, resource, name)


def _event_problem(event: Object, namespace: str) -> str:
    """What the API server would say of an event, empty where it takes it."""
    try:
        kubernetes_validate.validate(event, SCHEMA, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    regarding = event.get("involvedObject") or event.get("regarding") or {}
    if regarding.get("namespace") != namespace:
        return (
            f"involvedObject.namespace: Invalid value: {regarding.get('namespace')!r}: does not match event.namespace"
        )
    if not (event["metadata"].get("name") or event["metadata"].get("generateName")):
        return "metadata.name: Required value: name or generateName is required"
    return ""


def _annotations(patch: Object) -> dict[str, Any]:
    return (patch.get("metadata") or {}).get("annotations") or {}


def _content(pod: Object) -> Object:
    return {**pod, "metadata": {key: value for key, value in pod["metadata"].items() if key != "resourceVersion"}}


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = copy.deepcopy(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), change)
    return merged


def _equalities(selector: str) -> dict[str, str]:
    pairs = (part.replace("==", "=").split("=", 1) for part in selector.split(",") if part)
    return {key.strip(): value.strip() for key, value in pairs}


def _selected(pod: Object, selector: dict[str, str], names: dict[str, str]) -> bool:
    wanted = names.get("metadata.name", name_of(pod))
    return wanted == name_of(pod) and all(labels_of(pod).get(key) == value for key, value in selector.items())


def _not_found(resource: str, name: str) -> web.Response:
    return _status(404, "NotFound", f'{resource} "{name}" not found')


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
    return web.json_response(body, status=code)
