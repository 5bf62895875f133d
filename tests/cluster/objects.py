"""What the mini cluster reads in Kubernetes objects. Pure: judges no schema."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

Object = dict[str, Any]


class ClusterError(Exception):
    """What a real cluster would refuse, or show as a pod that does not start; and what is not modelled."""


def name_of(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])


def labels_of(found: Mapping[str, Any]) -> dict[str, str]:
    return found["metadata"].get("labels") or {}


def label_selector_matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if selector.keys() - {"matchLabels"}:
        raise ClusterError(f"{sorted(selector)} of a label selector are not modelled")
    return selector.get("matchLabels", {}).items() <= labels.items()


def pod_manifest(template: Mapping[str, Any], name: str, extra_labels: Mapping[str, str]) -> Object:
    pod = copy.deepcopy(dict(template))
    metadata = {"annotations": {}, **pod["metadata"], "name": name}
    metadata["labels"] = {**metadata.get("labels", {}), **extra_labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def named_ports(pod: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    spec = pod["spec"]
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        for port in container.get("ports") or []:
            yield port.get("name", ""), int(port["containerPort"])


def container_port(pod: Mapping[str, Any], port: int | str) -> int:
    """Number of a port that is given by number or by a container's port name. Raises `ClusterError`."""
    if isinstance(port, int):
        return port
    found = dict(named_ports(pod)).get(port)
    if found is None:
        raise ClusterError(f"pod {name_of(pod)} has no container port named {port!r}")
    return found
