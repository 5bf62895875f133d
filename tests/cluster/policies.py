"""Whether the rendered NetworkPolicies would let a connection pass. Pure.

Nothing is blocked here: connections that were seen (traffic.py) are judged. An ipBlock means addresses outside the cluster, as
most network plugins have it; what the node itself opens (probes) always passes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.objects import ClusterError, Object, Objects, container_port, label_selector_matches, labels_of

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Peer:
    """One end of a connection. `pod`: None outside the cluster."""

    name: str
    address: str
    namespace: str = ""
    pod: Object | None = field(default=None, compare=False)


def dns_server(address: str) -> Peer:
    """Who answers names in most clusters."""
    pod = {"metadata": {"name": "coredns", "labels": {"k8s-app": "kube-dns"}}, "spec": {"containers": []}}
    return Peer("coredns", address, "kube-system", pod)


def why_not(objects: Objects, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> str:
    """Empty where a connection may pass, else whose policies forbid it."""
    if not _passes(objects, "Egress", source, target, target, port, protocol):
        return f"no policy lets {source.name} out to {target.name}:{port}/{protocol}"
    if not _passes(objects, "Ingress", target, source, target, port, protocol):
        return f"no policy lets {source.name} in to {target.name}:{port}/{protocol}"
    return ""


def _passes(
    objects: Objects, direction: str, subject: Peer, other: Peer, target: Peer, port: int, protocol: str
) -> bool:
    """A pod that no policy of a direction selects is open in it; any rule that matches is enough."""
    policies = [one for one in objects.of("NetworkPolicy") if _selects(one, subject) and direction in _types(one)]
    if not policies:
        return True
    rules = [rule for policy in policies for rule in policy["spec"].get(direction.lower()) or []]
    peers = "to" if direction == "Egress" else "from"
    return any(
        _has_peer(rule.get(peers), other, subject.namespace) and _has_port(rule.get("ports"), target, port, protocol)
        for rule in rules
    )


def _selects(policy: Object, peer: Peer) -> bool:
    here = peer.namespace and peer.namespace == policy["metadata"].get("namespace", peer.namespace)
    return (
        bool(here)
        and peer.pod is not None
        and label_selector_matches(policy["spec"]["podSelector"], labels_of(peer.pod))
    )


def _types(policy: Object) -> list[str]:
    default = ["Ingress", *(["Egress"] if "egress" in policy["spec"] else [])]
    return policy["spec"].get("policyTypes") or default


def _has_peer(peers: list[Mapping[str, Any]] | None, other: Peer, own_namespace: str) -> bool:
    return not peers or any(_is_peer(peer, other, own_namespace) for peer in peers)


def _is_peer(peer: Mapping[str, Any], other: Peer, own_namespace: str) -> bool:
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], ipaddress.ip_address(other.address)
        inside = [ipaddress.ip_network(part) for part in (block["cidr"], *(block.get("except") or []))]
        return other.pod is None and address in inside[0] and not any(address in part for part in inside[1:])
    if other.pod is None:
        return False
    if "namespaceSelector" in peer:
        if not label_selector_matches(peer["namespaceSelector"], {NAMESPACE_LABEL: other.namespace}):
            return False
    elif other.namespace != own_namespace:
        return False
    return "podSelector" not in peer or label_selector_matches(peer["podSelector"], labels_of(other.pod))


def _has_port(ports: list[Mapping[str, Any]] | None, target: Peer, number: int, protocol: str) -> bool:
    if not ports:
        return True
    return any(
        number in range(first, last + 1)
        for port in ports
        if port.get("protocol", "TCP") == protocol
        for first, last in _ranges(port, target)
    )


def _ranges(port: Mapping[str, Any], target: Peer) -> Iterator[tuple[int, int]]:
    """Nothing where the target has no port of that name."""
    wanted = port.get("port")
    if wanted is None:
        yield 1, 65535
    elif isinstance(wanted, int):
        yield wanted, port.get("endPort", wanted)
    elif target.pod is not None:
        try:
            number = container_port(target.pod, wanted)
        except ClusterError:
            return
        yield number, number
