"""As much of a Kubernetes API server as helm asks for: discovery, and objects that can be read, written and deleted.

It stores what it is given and checks nothing: no schemas, no rights, no field managers, no controllers.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

Object = dict[str, Any]
KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod", "Namespace"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
PROTOBUF = b"k8s\x00"
"""How an object begins that is not JSON or YAML."""


@dataclass
class ApiServer:
    """`objects`: by path, /apis/apps/v1/namespaces/NAMESPACE/deployments/NAME."""

    url: str = ""
    objects: dict[str, Object] = field(default_factory=dict)

    def find(self, resource: str, name: str) -> Object:
        return next(stored for path, stored in self.objects.items() if path.endswith(f"/{resource}/{name}"))


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Listens on a free port of loopback."""
    server = ApiServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _plural(kind: str) -> str:
    return "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"


def discovery(path: str) -> Object | None:
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": name, "version": name.partition("/")[2]} for name in KINDS if "/" in name]
        groups = [
            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
            for one in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group_version = _group_version(path)
    if group_version not in KINDS:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": _plural(kind), "kind": kind, "namespaced": kind != "Namespace", "verbs": verbs}
        for kind in KINDS[group_version]
    ]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources}


def _group_version(path: str) -> str:
    return path.removeprefix("/apis/").removeprefix("/api/")


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet: two would wait for each other's acknowledgement

        def do_GET(self) -> None:
            url = urlparse(self.path)
            found = discovery(url.path) or server.objects.get(url.path)
            kinds = {_plural(kind): kind for kinds in KINDS.values() for kind in kinds}
            kind = kinds.get(url.path.rpartition("/")[2])
            if found is None and kind:
                version = _group_version(url.path.partition("/namespaces/")[0])
                found = {"kind": f"{kind}List", "apiVersion": version, "items": self._listed(url.path, url.query)}
            self._answer(found)

        def do_POST(self) -> None:
            stored = self._body()
            path = f"{urlparse(self.path).path}/{stored['metadata']['name']}"
            if path in server.objects:
                self._answer(_status("AlreadyExists", 409), 409)
            else:
                self._store(path, stored)

        def do_PUT(self) -> None:
            self._store(urlparse(self.path).path, self._body())

        def do_PATCH(self) -> None:
            """An applied configuration takes the object's place; any other patch is merged into it."""
            path, patch = urlparse(self.path).path, self._body()
            if "apply-patch" not in self.headers["Content-Type"]:
                patch = _merged(server.objects[path], patch)
            self._store(path, patch)

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(server.objects.pop(urlparse(self.path).path, None))

        def _listed(self, path: str, query: str) -> list[Object]:
            selector = parse_qs(query).get("labelSelector", [""])[0]
            wanted = dict(pair.split("=") for pair in selector.split(",") if "=" in pair)
            items = [stored for at, stored in server.objects.items() if at.rpartition("/")[0] == path]
            return [item for item in items if wanted.items() <= item["metadata"].get("labels", {}).items()]

        def _store(self, path: str, stored: Object) -> None:
            stored["metadata"].setdefault("namespace", path.split("/namespaces/")[1].split("/")[0])
            server.objects[path] = stored
            self._answer(stored)

        def _body(self) -> Object:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            return read_secret(body) if body.startswith(PROTOBUF) else yaml.safe_load(body)

        def _answer(self, content: Object | None, code: int = 200) -> None:
            body = json.dumps(content or _status("NotFound", 404)).encode()
            self.send_response(code if content else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def _status(reason: str, code: int) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


def _merged(stored: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict) or not isinstance(stored, dict):
        return patch
    merged = {key: value for key, value in stored.items() if key not in patch}
    return merged | {key: _merged(stored.get(key), value) for key, value in patch.items() if value is not None}


def read_secret(body: bytes) -> Object:
    """A Secret as client-go sends it where helm stores a release: an envelope `Unknown` (field 2: the object) around it."""
    secret = _fields(dict(_fields(body.removeprefix(PROTOBUF)))[2])
    metadata = _fields(dict(secret)[1])
    labels, data = _map(metadata, 11), _map(secret, 2)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": dict(secret)[3].decode(),
        "metadata": {
            "name": dict(metadata)[1].decode(),
            "labels": {key: value.decode() for key, value in labels.items()},
        },
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Number and content, of a message whose type is not known here."""
    return [(one.field_number, one.data) for one in UnknownFieldSet(Empty.FromString(message))]


def _map(fields: list[tuple[int, Any]], number: int) -> dict[str, bytes]:
    pairs = [dict(_fields(content)) for found, content in fields if found == number]
    return {pair[1].decode(): pair[2] for pair in pairs}
