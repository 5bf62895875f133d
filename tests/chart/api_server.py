"""As much of a Kubernetes API server as helm needs for an upgrade that it only renders: discovery, and objects to look up."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

from tests.chart.rendering import NAMESPACE, Object
from tests.support.http_server import Answer, Request, http_server

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


@contextmanager
def api_server(objects: Iterable[Object]) -> Iterator[str]:
    """Serves these on a free port of loopback meanwhile. Yields its URL."""
    stored = {(plural(item["kind"]), item["metadata"]["name"]): item for item in objects}

    def found(path: str) -> Object | None:
        resource, _, name = path.rpartition("/namespaces/")[2].partition("/")[2].partition("/")
        if path.startswith("/api/v1/namespaces") and not resource:  # the namespace itself is always there
            return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": NAMESPACE}}
        return stored.get((resource, name))

    def answer(request: Request) -> Answer:
        path = urlparse(request.path).path
        content = discovery(path) or found(path)
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
        body = json.dumps(content or missing).encode()
        return Answer(body, 200 if content else 404, {"Content-Type": "application/json"})

    with http_server(answer) as url:
        yield url


def plural(kind: str) -> str:
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
