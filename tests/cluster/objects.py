"""Rendered Kubernetes objects, found by kind, name and labels. Pure: reads no cluster and judges no schema."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Object = dict[str, Any]
HOOK = "helm.sh/hook"


class ClusterError(Exception):
    """What a real cluster would refuse, or show as a pod that does not start."""


@dataclass
class Objects:
    """What `helm template` printed. Objects with a hook annotation are kept apart, as helm does."""

    installed: list[Object] = field(default_factory=list)
    hooks: list[Object] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Objects:
        objects = cls()
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader):
            if document:
                annotations = document["metadata"].get("annotations") or {}
                (objects.hooks if HOOK in annotations else objects.installed).append(document)
        return objects

    def of(self, *kinds: str) -> list[Object]:
        return [found for found in self.installed if found["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        return next((found for found in self.of(kind) if name_of(found) == name), None)

    def one(self, kind: str, name: str) -> Object:
        """Raises `ClusterError` where the render has no such object."""
        found = self.find(kind, name)
        if found is None:
            raise ClusterError(f'{kind.lower()} "{name}" not found')
        return found

    def component(self, kind: str, component: str) -> Object:
        """The object of `kind` with this app.kubernetes.io/component label."""
        wanted = {"app.kubernetes.io/component": component}
        found = [one for one in self.of(kind) if matches(wanted, labels_of(one))]
        if len(found) != 1:
            raise ClusterError(f"{len(found)} objects of kind {kind} are of component {component}, not one")
        return found[0]

    def hook(self, event: str, kind: str = "Pod") -> list[Object]:
        """Objects that helm makes at `event`: test, pre-install, …"""
        return [
            hook
            for hook in self.hooks
            if hook["kind"] == kind and event in hook["metadata"]["annotations"][HOOK].split(",")
        ]


def name_of(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])


def labels_of(found: Mapping[str, Any]) -> dict[str, str]:
    return found["metadata"].get("labels") or {}


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """An equality selector, such as a Service's."""
    return all(labels.get(key) == value for key, value in selector.items())


def label_selector_matches(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector: an empty one matches all, none matches nothing."""
    if selector is None:
        return False
    if selector.get("matchExpressions"):
        raise ClusterError("matchExpressions of a label selector are not modelled")
    return matches(selector.get("matchLabels") or {}, labels)


def pod_manifest(template: Mapping[str, Any], name: str, extra_labels: Mapping[str, str] | None = None) -> Object:
    """A Pod of a workload's template."""
    metadata = copy.deepcopy(template.get("metadata") or {})
    metadata["name"] = name
    metadata["labels"] = {**(metadata.get("labels") or {}), **(extra_labels or {})}
    metadata.setdefault("annotations", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template["spec"])}


def container_port(pod: Mapping[str, Any], port: int | str) -> int:
    """Number of a port that is given by number or by a container's port name. Raises `ClusterError`."""
    if isinstance(port, int):
        return port
    return int(_declared(pod, port)["containerPort"])


def _declared(pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    spec = pod["spec"]
    containers: Iterable[Mapping[str, Any]] = (*spec["containers"], *spec.get("initContainers", []))
    for container in containers:
        for port in container.get("ports") or []:
            if port.get("name") == name:
                return port
    raise ClusterError(f"pod {name_of(pod)} has no container port named {name!r}")
