"""The API server of the mini cluster, for its pods and for helm: that of tests/kube, whose objects are those of the render.

Helm finds what kinds there are, and creates, applies, reads, watches and deletes objects of the chart's kinds. An apply merges:
field managers, conflicts and the removal of fields are not modelled, nor are schemas, defaults, admission, quotas, propagation
and finalizers (but a volume stays while a pod uses it). Commands in pods and ports of pods are websockets.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import datetime
import json
import re
import secrets
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from aiohttp import web

from pipelinerl.kube.client import Permission
from tests.chart.rendering import WORKLOADS, Rendered
from tests.cluster.objects import ClusterError, Object, name_of
from tests.kube import api_server
from tests.support.certificates import Authority

KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod", "Namespace"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "batch/v1": ("Job",),
}
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def plural(kind: str) -> str:
    return "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"


KIND_OF = {(version, plural(kind)): kind for version, kinds in KINDS.items() for kind in kinds}
PLACE = re.compile(r"/apis?/(.+)/namespaces/[^/]+/([^/]+)(?:/([^/]+))?")
ADMIN = "admin"
PROTOCOL = "v4.channel.k8s.io"
STDOUT, STDERR, ERROR = b"\x01", b"\x02", b"\x03"
"""Channels of an exec: the first byte of each message."""
_DATA, _DATA_ERROR = b"\x00", b"\x01"
"""Channels of a port-forward of one port."""
PROTOBUF = b"k8s\0"
_CHUNK = 32 * 1024


class ApiServer(api_server.ApiServer):
    """`pods` is filled by the cluster; `denied`: what a role did not permit. Only namespaced roles are looked at. The account
    `ADMIN` may do everything. `appeared` and `vanished` are called with each object that is created or deleted over the API."""

    def __init__(self, rendered: Rendered, namespace: str) -> None:
        super().__init__(namespace=namespace)
        self._rendered = rendered
        self.appeared: Callable[[Object], None] = lambda item: None
        self.vanished: Callable[[Object], None] = lambda item: None
        self.execute: Callable[[str, str, list[str]], Any] = lambda pod, container, command: None
        """Starts a command in a container of a pod, with pipes for its output."""
        self.ca = b""
        """PEM, once it serves."""
        self.denied: list[str] = []
        self.withheld: set[Permission] = set()
        """What `ADMIN` may not do after all."""
        self.sockets: list[web.Request] = []
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

    def kubeconfig(self, file: Path, url: str) -> Path:
        """Write how a person reaches this server who may do everything."""
        token = secrets.token_urlsafe(24)
        self._accounts[token] = ADMIN
        cluster = {"server": url, "certificate-authority-data": base64.b64encode(self.ca).decode()}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "tests", "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        }
        file.write_text(json.dumps(content))
        return file

    # --- objects -------------------------------------------------------------------------------------------------

    def _add_routes(self, app: web.Application) -> None:
        pod = "/api/v1/namespaces/{namespace}/pods/{name}"
        app.router.add_get(pod + "/exec", self._exec)
        app.router.add_get(pod + "/portforward", self._forward)
        super()._add_routes(app)
        for version in ("/api/v1", "/apis/{group}/{version}"):
            for name in ("", "/{name}"):
                app.router.add_route("*", f"{version}/namespaces/{{namespace}}/{{resource}}{name}", self._answer)
        app.router.add_get("/{path:.*}", self._discover)

    async def _discover(self, request: web.Request) -> web.Response:
        if request.path == f"/api/v1/namespaces/{self.namespace}":
            return web.json_response({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": self.namespace}})
        if (found := discovery(request.path)) is None:
            self._refuse(404, "NotFound", f"{request.path} not found")
        return web.json_response(found)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Calls on objects of any kind but pods, which the cluster makes."""
        found_place = PLACE.fullmatch(request.path)
        assert found_place
        version, resource, name = found_place.groups()
        query, kind = request.query, KIND_OF.get((version, resource))
        if kind in (None, "Pod"):
            self._refuse(404, "NotFound", f"{request.method} {request.path} is not modelled")
        several = {"GET": "watch" if query.get("watch") == "true" else "list", "POST": "create", "DELETE": "deletecollection"}
        verb = ({"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"} if name else several)[request.method]
        await self._allowed(request, Permission(resource, verb, version.rpartition("/")[0]))
        found = self._rendered.find(kind, name or "")
        if verb in ("get", "update", "delete") and found is None:
            self._refuse(404, "NotFound", f'{resource} "{name}" not found')
        if verb == "watch" and query.get("sendInitialEvents"):  # as a server without WatchList answers; clients then list
            self._refuse(422, "Invalid", "sendInitialEvents is forbidden")
        if verb == "watch":
            return await self._watch(request, selector_of(query), kind)
        selected = [item for item in self._rendered.of_kind(kind) if api_server.selects(selector_of(query), item)]
        if verb == "list":
            metadata = {"resourceVersion": str(self._version)}
            listed = {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": selected}
            return web.json_response(listed)
        if verb in ("delete", "deletecollection"):
            for item in [found] if found else selected:
                self.delete(item)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        if verb in ("create", "patch", "update"):
            content = await request.read()
            body = secret_of(content) if content.startswith(PROTOBUF) else yaml.load(content, yaml.CSafeLoader)
            found = self._store(kind, version, verb, body, found)
        return web.json_response(found, status=201 if verb == "create" else 200)

    async def _merge(self, request: web.Request, objects: dict[str, Object], part: str) -> web.StreamResponse:
        """The trainer merges into a part of an object, helm applies whole ones."""
        if request.content_type != "application/merge-patch+json":
            return await self._answer(request)
        return await super()._merge(request, objects, part)

    def _store(self, kind: str, version: str, verb: str, body: Object, found: Object | None) -> Object:
        if verb == "create" and (existing := self._rendered.find(kind, name_of(body))):
            self._refuse(409, "AlreadyExists", f'{plural(kind)} "{name_of(existing)}" already exists')
        if found is None:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            given = {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now}
            found = {"kind": kind, "apiVersion": version, **body, "metadata": {**body["metadata"], **given}}
            self.keep(found)
            self._rendered.objects.append(found)
            self.notify("ADDED", found)
            self.appeared(found)
        else:
            merge(found, body)
            self.notify("MODIFIED", found)
        return found

    def keep(self, item: Object) -> None:
        """The part of an object that the trainer merges into."""
        if (store := self._store_of(item["kind"])) is not None:
            store[name_of(item)] = item.setdefault("spec" if store is self.scales else "data", {})

    def _store_of(self, kind: str) -> dict[str, Object] | None:
        return {"ConfigMap": self.configs, "Secret": self.secrets, **dict.fromkeys(WORKLOADS, self.scales)}.get(kind)

    def delete(self, item: Object) -> None:
        self._rendered.objects[:] = [other for other in self._rendered.objects if other is not item]
        if (store := self._store_of(item["kind"])) is not None:
            store.pop(name_of(item), None)
        self.notify("DELETED", item)
        self.vanished(item)

    def notify(self, change: str, item: Object) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._tell(change, copy.deepcopy(item))

    # --- connections into pods -----------------------------------------------------------------------------------

    async def _open(self, request: web.Request, resource: str) -> tuple[web.WebSocketResponse, Object]:
        await self._allowed(request, Permission(f"pods/{resource}", "get"))
        name = request.match_info["name"]
        if name not in self.pods:
            self._refuse(404, "NotFound", f'pods "{name}" not found')
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        self.sockets.append(request)
        return socket, self.pods[name]

    def drop_sockets(self) -> None:
        """End all connections into pods, as when a server or a network fails."""
        for request in self.sockets:
            if request.transport is not None:
                request.transport.abort()

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        socket, pod = await self._open(request, "exec")
        process = await self.execute(name_of(pod), request.query["container"], request.query.getall("command"))
        try:
            async with asyncio.TaskGroup() as group:
                for channel, stream in ((STDOUT, process.stdout), (STDERR, process.stderr)):
                    group.create_task(_copy(stream, socket, channel))
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        ended: Object = {"metadata": {}, "status": "Success"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            ended = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        await socket.send_bytes(ERROR + json.dumps(ended).encode())
        await socket.close()
        return socket

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        socket, pod = await self._open(request, "portforward")
        port = int(request.query["ports"])
        for channel in (_DATA, _DATA_ERROR):
            await socket.send_bytes(channel + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection(pod["status"]["podIP"], port)
        except OSError as error:
            await socket.send_bytes(_DATA_ERROR + f"error forwarding port {port}: {error}".encode())
            await socket.close()
            return socket
        back = asyncio.create_task(_copy(reader, socket, _DATA))
        back.add_done_callback(lambda _: asyncio.ensure_future(socket.close()))
        try:
            async for message in socket:
                writer.write(message.data[1:])
        finally:
            writer.close()
            await asyncio.wait({back})
        return socket

    # --- who may do what -----------------------------------------------------------------------------------------

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
        if account == ADMIN:
            return permission not in self.withheld
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


def selector_of(query: Mapping[str, str]) -> str:
    """Label and field selectors as one: `name` is the only field that is selected by."""
    return ",".join(filter(None, (query.get("labelSelector", ""), query.get("fieldSelector", ""))))


def merge(target: Object, patch: Object) -> None:
    """A merge patch, in place. Lists are replaced."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = value


def secret_of(content: bytes) -> Object:
    """A Secret in the protobuf of client-go, in which helm writes its releases: the fields by their numbers there."""
    (raw,) = fields_of(content.removeprefix(PROTOBUF))[2]
    secret = fields_of(raw)
    metadata = fields_of(secret[1][0])

    def entries(found: list[bytes]) -> dict[str, bytes]:
        return {one[1][0].decode(): one[2][0] for one in map(fields_of, found)}

    labels = {name: value.decode() for name, value in entries(metadata[11]).items()}
    data = {name: base64.b64encode(value).decode() for name, value in entries(secret[2]).items()}
    return {"metadata": {"name": metadata[1][0].decode(), "labels": labels}, "data": data, "type": secret[3][0].decode()}


def fields_of(message: bytes) -> dict[int, list[bytes]]:
    """The texts, bytes and messages in a protobuf message, by number; numbers are left out."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte, at = message[at], at + 1
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        length = varint()
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(message[at : at + length])
            at += length
    return found


async def _copy(stream: asyncio.StreamReader, socket: web.WebSocketResponse, channel: bytes) -> None:
    with suppress(ConnectionError):
        while data := await stream.read(_CHUNK):
            await socket.send_bytes(channel + data)


def discovery(path: str) -> Object | None:
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in KINDS if "/" in name]
        groups = [
            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one} for one in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path.startswith("/openapi/v3"):
        return _openapi(path.removeprefix("/openapi/v3"))
    group_version = path.removeprefix("/apis/").removeprefix("/api/")
    resources: list[Object] = [
        {"name": plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": kind != "Namespace", "verbs": VERBS}
        for kind in KINDS.get(group_version, ())
    ]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources} if resources else None


def _openapi(path: str) -> Object | None:
    """That the server checks the fields of every kind itself: helm then downloads no schemas to do so."""
    roots = {f"apis/{name}" if "/" in name else f"api/{name}": name for name in KINDS}
    if not path:
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    if (version := roots.get(path.lstrip("/"))) is None:
        return None
    group, _, number = version.rpartition("/")
    checks = [{"name": "fieldValidation", "in": "query"}]
    kinds = {kind: {"group": group, "version": number, "kind": kind} for kind in KINDS[version]}
    patches = {kind: {"patch": {"x-kubernetes-group-version-kind": of, "parameters": checks}} for kind, of in kinds.items()}
    return {"openapi": "3.0.0", "paths": {f"{path}/{kind}/{{name}}": patch for kind, patch in patches.items()}}
