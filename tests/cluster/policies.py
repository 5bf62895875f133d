"""Whether the rendered NetworkPolicies would let a connection pass. Pure.

Nothing is blocked here: connections that were seen (network.py) are judged. An ipBlock means addresses outside the cluster, as
most network plugins have it; what the node itself opens (probes) always passes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chart.rendering import Rendered
from tests.cluster.objects import Object, label_selector_matches, labels_of, named_ports

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


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
            _has_peer(rule.get(side), other, subject.namespace) and _has_port(rule.get("ports"), target, port, protocol)
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


def _has_peer(peers: list[Mapping[str, Any]] | None, other: Peer, own_namespace: str) -> bool:
    return not peers or any(_is_peer(peer, other, own_namespace) for peer in peers)


def _is_peer(peer: Mapping[str, Any], other: Peer, own_namespace: str) -> bool:
    if "ipBlock" in peer:
        return other.pod is None and ipaddress.ip_address(other.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if other.pod is None:
        return False
    if "namespaceSelector" in peer:
        if not label_selector_matches(peer["namespaceSelector"], {NAMESPACE_LABEL: other.namespace}):
            return False
    elif other.namespace != own_namespace:
        return False
    return label_selector_matches(peer.get("podSelector", {}), labels_of(other.pod))


def _has_port(ports: list[Mapping[str, Any]] | None, target: Peer, number: int, protocol: str) -> bool:
    names = dict(named_ports(target.pod)) if target.pod else {}
    firsts = [(port, names.get(port["port"], port["port"])) for port in ports or []]
    return not ports or any(
        isinstance(first, int) and first <= number <= port.get("endPort", first) and port.get("protocol", "TCP") == protocol
        for port, first in firsts
    )
