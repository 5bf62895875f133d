"""A container's environment, command and arguments as the kubelet makes them of a Pod. Pure.

Nothing is inherited from whoever runs the test: what a container sees is listed here (`IMAGE` variables come from images.py).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.objects import ClusterError, Object, Objects, name_of

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True)
class PodFacts:
    """What the downward API knows of a pod."""

    pod: Object
    namespace: str
    uid: str
    ip: str
    node: str = "node"

    def field(self, path: str) -> str:
        """Value of a fieldRef. Raises `ClusterError` for a path that the downward API has not."""
        keyed = _KEYED.fullmatch(path)
        if keyed:
            return (self.pod["metadata"].get(keyed[1]) or {}).get(keyed[2], "")
        known = {
            "metadata.name": name_of(self.pod),
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.pod["spec"].get("serviceAccountName", "default"),
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": self.ip.rpartition(".")[0] + ".1",
        }
        if path not in known:
            raise ClusterError(f"field path {path!r} is not supported by the downward API")
        return known[path]


def resolved_environment(
    container: Mapping[str, Any], facts: PodFacts, objects: Objects, image: Mapping[str, str]
) -> dict[str, str]:
    """`image`: what the image sets; the container's `env` wins over it.

    Raises `ClusterError` where a Secret or key is missing, and for what is not modelled.
    """
    if container.get("envFrom"):
        raise ClusterError(f"container {container['name']}: envFrom is not modelled")
    own: dict[str, str] = {}
    for entry in container.get("env") or []:
        own[entry["name"]] = _value(entry, facts, objects, own)
    return dict(image) | {"HOSTNAME": name_of(facts.pod)} | own


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the value, `$$` a dollar; a name that is not there stays as it is written."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def data_of(found: Object) -> dict[str, bytes]:
    """Entries of a ConfigMap or Secret."""
    data = found.get("data") or {}
    if found["kind"] == "Secret":
        return {key: base64.b64decode(value, validate=True) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}


def _value(entry: Mapping[str, Any], facts: PodFacts, objects: Objects, earlier: Mapping[str, str]) -> str:
    source = entry.get("valueFrom")
    if not source:
        return expanded(str(entry.get("value") or ""), earlier)
    if "fieldRef" in source:
        return facts.field(source["fieldRef"]["fieldPath"])
    if "secretKeyRef" not in source:
        raise ClusterError(f"variable {entry['name']}: {sorted(source)} is not modelled")
    reference = source["secretKeyRef"]
    data = data_of(objects.one("Secret", reference["name"]))
    if reference["key"] not in data:
        raise ClusterError(f"couldn't find key {reference['key']} in Secret {reference['name']}")
    return data[reference["key"]].decode()
