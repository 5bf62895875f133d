"""As much of a Kubernetes API server as helm and kubectl need of one: discovery, objects, who manages their fields, `scale`."""

import base64
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

from tests.chart.fields import Manager, Refusal, Stored, merge_patch, schema_of, strategic_merge
from tests.chart.rendering import NAMESPACE, Object

KINDS = {
    "v1": ("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod", "Namespace"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
    "batch/v1": ("Job",),
}
VERBS = ["create", "delete", "get", "list", "patch", "update"]
OF_THE_SERVER = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation")


class Objects:
    """All objects of one namespace, by resource and name. Raises `Refusal` where a server would."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.stored = {(_plural(item["kind"]), item["metadata"]["name"]): Stored(item) for item in objects}
        self.version = 1
        self.versions = dict.fromkeys(self.stored, 1)

    def get(self, resource: str, name: str) -> Object:
        if (resource, name) not in self.stored:
            raise Refusal(404, "NotFound", f'{resource} "{name}" not found')
        content = self.stored[resource, name].content
        kept = {"namespace": NAMESPACE, "uid": f"{resource}-{name}", "resourceVersion": str(self.versions[resource, name])}
        return content | {"metadata": kept | content["metadata"]}

    def list(self, resource: str, selector: str) -> Object:
        wanted = dict(term.replace("==", "=").split("=", 1) for term in selector.split(",") if "=" in term)
        items = [self.get(*key) for key in self.stored if key[0] == resource]
        found = [item for item in items if wanted.items() <= (item["metadata"].get("labels") or {}).items()]
        head = next(
            ({"kind": f"{kind}List", "apiVersion": of} for of in KINDS for kind in KINDS[of] if _plural(kind) == resource), {}
        )
        return head | {"metadata": {"resourceVersion": str(self.version)}, "items": found}

    def write(self, resource: str, name: str, stored: Stored) -> Object:
        self.version += 1
        self.stored[resource, name], self.versions[resource, name] = stored, self.version
        return self.get(resource, name)

    def create(self, resource: str, content: Object, manager: str) -> Object:
        name = content["metadata"]["name"]
        if (resource, name) in self.stored:
            raise Refusal(409, "AlreadyExists", f'{resource} "{name}" already exists')
        return self.write(resource, name, Stored().update(Manager(manager, "Update"), _own(content)))

    def update(self, resource: str, name: str, content: Object, manager: str, subresource: str = "") -> Object:
        self.get(resource, name)
        after = self.stored[resource, name].update(Manager(manager, "Update", subresource), _own(content))
        return self.write(resource, name, after)

    def apply(self, resource: str, name: str, config: Object, manager: str, force: bool) -> Object:
        return self.write(resource, name, self.stored.get((resource, name), Stored()).apply(manager, _own(config), force))

    def patch(self, resource: str, name: str, patch: Any, kind: str, manager: str) -> Object:
        live = _own(self.get(resource, name))
        if kind == "application/strategic-merge-patch+json":
            return self.update(resource, name, strategic_merge(live, patch, schema_of(live)), manager)
        if kind == "application/merge-patch+json":
            return self.update(resource, name, merge_patch(live, patch), manager)
        raise Refusal(415, "UnsupportedMediaType", f"{kind} is not modelled")

    def scale(self, resource: str, name: str, patch: Object | None, manager: str) -> Object:
        """The subresource, after the patch where there is one."""
        live = self.get(resource, name)
        if patch and "replicas" in patch.get("spec", {}):
            content = live | {"spec": live["spec"] | {"replicas": patch["spec"]["replicas"]}}
            live = self.update(resource, name, content, manager, "scale")
            if not patch["spec"]["replicas"]:  # autoscaling/v1 Scale omits a zero, and what is not there has no manager
                for paths in self.stored[resource, name].managers.values():
                    paths.discard(("spec", "replicas"))
        replicas = live["spec"]["replicas"]
        head = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": name, "namespace": NAMESPACE}}
        return head | {"spec": {"replicas": replicas}, "status": {"replicas": replicas}}

    def delete(self, resource: str, name: str) -> Object:
        gone = self.get(resource, name)
        del self.stored[resource, name]
        return gone


@contextmanager
def api_server(objects: Iterable[Object] = ()) -> Iterator[str]:
    """Serves these on a free port of loopback meanwhile. Yields its URL."""
    kept, lock = Objects(objects), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet: two would wait for each other's acknowledgement

        def _answer(self) -> None:
            url = urlparse(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                with lock:
                    code, content = 200, discovery(url.path) or self._object(url.path, query, raw)
            except Refusal as error:
                code = error.code
                content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
                content |= {"reason": error.reason, "message": str(error)}
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _object(self, path: str, query: dict[str, str], raw: bytes) -> Object:
            resource, _, name = path.rpartition("/namespaces/")[2].partition("/")[2].partition("/")
            name, _, subresource = name.partition("/")
            if path.startswith("/api/v1/namespaces") and not resource:  # the namespace itself is always there
                return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": NAMESPACE}}
            if not resource:
                raise Refusal(404, "NotFound", "the server could not find the requested resource")
            kind = self.headers.get("Content-Type", "").partition(";")[0]
            parse = secret_of_protobuf if "protobuf" in kind else yaml.safe_load  # JSON is YAML
            content = parse(raw) if raw and self.command != "DELETE" else {}
            manager = query.get("fieldManager") or self.headers.get("User-Agent", "").partition("/")[0]
            if subresource == "scale":
                return kept.scale(resource, name, content, manager)
            if self.command == "GET":
                return kept.get(resource, name) if name else kept.list(resource, query.get("labelSelector", ""))
            if self.command == "POST":
                return kept.create(resource, content, manager)
            if self.command == "PUT":
                return kept.update(resource, name, content, manager)
            if self.command == "DELETE":
                return kept.delete(resource, name)
            if kind == "application/apply-patch+yaml":
                return kept.apply(resource, name, content, manager, query.get("force") == "true")
            return kept.patch(resource, name, content, kind, manager)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _own(content: Object) -> Object:
    """Without what the server keeps itself."""
    metadata = {name: value for name, value in content["metadata"].items() if name not in (*OF_THE_SERVER, "namespace")}
    return {name: value for name, value in content.items() if name != "status"} | {"metadata": metadata}


def secret_of_protobuf(raw: bytes) -> Object:
    """A Secret as helm writes its releases: in the wire format, with numbers of fields from k8s.io/api/core/v1."""
    secret = _message(dict(_message(raw.removeprefix(b"k8s\0")))[2])
    metadata = _message(dict(secret)[1])
    pairs = [(number, dict(_message(value))) for number, value in (*metadata, *secret) if number in (2, 11) and value]
    labels = {pair[1].decode(): pair[2].decode() for number, pair in pairs if number == 11}
    data = {pair[1].decode(): base64.b64encode(pair[2]).decode() for number, pair in pairs if number == 2}
    head = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": dict(metadata)[1].decode(), "labels": labels}}
    return head | {"type": dict(secret)[3].decode(), "data": data}


def _message(raw: bytes) -> list[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message; a value of length 0 and numbers are as they come."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value, shift, at = value | (raw[at] & 127) << shift, shift + 7, at + 1
            if raw[at - 1] < 128:
                return value, at

    fields, at = [], 0
    while at < len(raw):
        tag, at = varint(at)
        number, at = varint(at)
        if tag & 7 == 2:
            fields.append((tag >> 3, raw[at : at + number]))
            at += number
        else:
            fields.append((tag >> 3, number))
    return fields


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
            {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one} for one in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    group_version = path.removeprefix("/apis/").removeprefix("/api/")
    resources: list[Object] = [
        {"name": _plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": kind != "Namespace", "verbs": VERBS}
        for kind in KINDS.get(group_version, ())
    ]
    if group_version == "apps/v1":
        scale = {
            "kind": "Scale",
            "group": "autoscaling",
            "version": "v1",
            "namespaced": True,
            "verbs": ["get", "patch", "update"],
        }
        resources += [scale | {"name": f"{one['name']}/scale"} for one in list(resources)]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources} if resources else None
