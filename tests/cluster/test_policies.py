"""NetworkPolicies are judged as Kubernetes documents them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import Rendered
from tests.cluster.policies import Peer, why_not


def peer(app: str, namespace: str = "n") -> Peer:
    ports = [{"ports": [{"name": "web", "containerPort": 8080}]}]
    pod = {"metadata": {"name": app, "labels": {"app": app}}, "spec": {"containers": ports}}
    return Peer(app, "10.0.0.9", namespace, pod)


A, B, OUTSIDE = peer("a"), peer("b"), Peer("outside", "192.0.2.7")
TO_B = {"podSelector": {"matchLabels": {"app": "b"}}}


def policy(app: str, **spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"app": app}} if app else {}
    return {"kind": "NetworkPolicy", "metadata": {"name": app}, "spec": {"podSelector": selector, **spec}}


def egress(*rules: Any) -> dict[str, Any]:
    return policy("a", policyTypes=["Egress"], egress=list(rules))


def ingress(*rules: Any) -> dict[str, Any]:
    return policy("b", policyTypes=["Ingress"], ingress=list(rules))


@pytest.mark.parametrize(
    ("policies", "target", "port", "passes"),
    [
        ([], B, 8080, True),
        ([policy("", policyTypes=["Ingress", "Egress"])], B, 8080, False),
        ([policy("b", policyTypes=["Egress"])], B, 8080, True),
        ([policy("b", policyTypes=["Ingress"], ingress=[])], B, 8080, False),
        ([egress({"to": [TO_B]})], B, 8080, True),
        ([egress({"to": [TO_B]})], peer("c"), 8080, False),
        ([egress({"to": [TO_B]})], peer("b", "other"), 8080, False),
        ([egress({"to": [{"namespaceSelector": {}, **TO_B}]})], peer("b", "other"), 8080, True),
        ([egress({"to": [TO_B], "ports": [{"port": 8081}]})], B, 8080, False),
        ([egress({"to": [TO_B], "ports": [{"port": "web"}]})], B, 8080, True),
        ([egress({"to": [TO_B], "ports": [{"port": "wbe"}]})], B, 8080, False),
        ([egress({"to": [TO_B], "ports": [{"port": 8000, "endPort": 9000}]})], B, 8080, True),
        ([egress({"to": [TO_B], "ports": [{"port": 8080, "protocol": "UDP"}]})], B, 8080, False),
        ([egress({"to": [TO_B]}), ingress({"from": [{"podSelector": {}}]})], B, 8080, True),
        ([egress({"to": [TO_B]}), ingress({"from": [TO_B]})], B, 8080, False),
        ([egress({"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]})], OUTSIDE, 443, True),
        ([egress({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})], B, 8080, False),
    ],
)
def test_a_connection_passes_or_not(policies: list[Any], target: Peer, port: int, passes: bool) -> None:
    assert (why_not(Rendered(policies), A, target, port) == "") == passes
