"""What the mini cluster reads in Kubernetes objects, and whether the NetworkPolicies would let a connection pass. Pure.

Nothing is blocked here: connections that were seen (network.py) are judged. An ipBlock means addresses outside the cluster, as
most network plugins have it; what the node itself opens (probes) always passes.
"""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chart.rendering import Rendered

Object = dict[str, Any]
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


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


def named_ports(pod: Mapping[str, Any]) -> dict[str, int]:
    containers = (*pod["spec"]["containers"], *pod["spec"].get("initContainers", []))
    return {port.get("name", ""): port["containerPort"] for one in containers for port in one.get("ports") or []}


@dataclass(frozen=True)
class Peer:
    """One end of a connection. `pod`: None outside the cluster."""

    name: str
    address: str
    namespace: str = ""
    pod: Object | None = field(default=None, compare=False)


def dns_server(address: str) -> Peer:
    pod = {"metadata": {"name": "coredns", "labels": {"k8s-app": "kube-dns"}}, "spec": {"containers": []}}
    return Peer("coredns", address, "kube-system", pod)


def why_not(rendered: Rendered, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> str:
    """Empty where a connection may pass, else whose policies forbid it."""

    def passes(direction: str, side: str, subject: Peer, other: Peer) -> bool:
        """A pod that no policy of a direction selects is open in it; any rule that matches is enough."""
        specs = [policy["spec"] for policy in rendered.of_kind("NetworkPolicy")]
        own = [spec for spec in specs if direction in spec["policyTypes"] and _selects(spec["podSelector"], subject)]
        rules = [rule for spec in own for rule in spec.get(direction.lower()) or []]
        return not own or any(
            (not (peers := rule.get(side)) or any(_is_peer(one, other, subject.namespace) for one in peers))
            and (not (ports := rule.get("ports")) or any(_has_port(one, target, port, protocol) for one in ports))
            for rule in rules
        )

    if not passes("Egress", "to", source, target):
        return f"no policy lets {source.name} out to {target.name}:{port}/{protocol}"
    if not passes("Ingress", "from", target, source):
        return f"no policy lets {source.name} in to {target.name}:{port}/{protocol}"
    return ""


def _selects(selector: Mapping[str, Any], peer: Peer) -> bool:
    """Policies are of the release's namespace, which that of the DNS server is not."""
    own = peer.pod is not None and peer.namespace != "kube-system"
    return own and label_selector_matches(selector, labels_of(peer.pod or {}))


def _is_peer(peer: Mapping[str, Any], other: Peer, own_namespace: str) -> bool:
    if "ipBlock" in peer:
        return other.pod is None and ipaddress.ip_address(other.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if other.pod is None:
        return False
    namespaces = peer.get("namespaceSelector", {"matchLabels": {NAMESPACE_LABEL: own_namespace}})
    in_namespace = label_selector_matches(namespaces, {NAMESPACE_LABEL: other.namespace})
    return in_namespace and label_selector_matches(peer.get("podSelector", {}), labels_of(other.pod))


def _has_port(port: Mapping[str, Any], target: Peer, number: int, protocol: str) -> bool:
    first = named_ports(target.pod).get(port["port"], port["port"]) if target.pod else port["port"]
    in_range = isinstance(first, int) and first <= number <= port.get("endPort", first)
    return in_range and port.get("protocol", "TCP") == protocol
