"""NetworkPolicies let pass what docs/architecture.md draws, and nothing else, in a model of network plugins."""

import itertools

import pytest

from tests.chart.cases import rendered_case
from tests.chart.rendering import NAMESPACE, SERVICES, Object, Pod, Rendered, render
from tests.cluster.objects import Peer, label_selector_matches, why_not

ANY_PORT = 41234  # which the system chose, as for NCCL and Gloo


def _peer(pod: Pod) -> Peer:
    return Peer(pod.component, "10.0.0.1", NAMESPACE, {"metadata": pod.metadata, "spec": pod.spec})


def passes(rendered: Rendered, sender: str, receiver: str, port: int) -> bool:
    return why_not(rendered, _peer(rendered.pod(sender)), _peer(rendered.pod(receiver)), port) == ""


def _rules(rendered: Rendered, component: str, side: str) -> list[Object]:
    specs, labels = [policy["spec"] for policy in rendered.of_kind("NetworkPolicy")], rendered.pod(component).labels
    own = [one for one in specs if label_selector_matches(one["podSelector"], labels) and side in one["policyTypes"]]
    assert own
    return [rule for spec in own for rule in spec.get(side.lower(), [])]


PORTS = (50051, 8080, 8090, 4222, 6222, 8222, ANY_PORT)
DRAWN = {
    *((pod, "nats", 4222) for pod in ("actor", "trainer", "release-test")),
    *((pod, "verifier", 50051) for pod in ("actor", "release-test")),
    ("nats", "nats", 6222),
    *((pod, "trainer", 8080) for pod in ("release-test", "page")),
    ("release-test", "actor", 8080),
    *((a, b, port) for a in ("actor", "trainer") for b in ("actor", "trainer") for port in PORTS),
}
PODS = ("actor", "trainer", "verifier", "nats", "test", "release-test", "page")


OF_EPISODES = {("verifier", "actor", 8090), ("release-test", "actor", 8090)}  # environments ask the actors for turns


@pytest.mark.parametrize(
    ("case", "drawn"),
    [("nats-3", DRAWN), ("episodes", DRAWN - {("nats", "nats", 6222), ("page", "trainer", 8080)} | OF_EPISODES)],
)
def test_the_drawn_arrows_pass_and_no_others(case: str, drawn: set[tuple[str, str, int]]) -> None:
    rendered = rendered_case(case)
    there = [component for component in PODS if component != "page" or case == "nats-3"]
    assert {arrow for arrow in itertools.product(there, there, PORTS) if passes(rendered, *arrow)} == drawn


def test_what_the_values_take_away_does_not_pass() -> None:
    assert not passes(rendered_case("default"), "nats", "nats", 6222), "one server needs no cluster port"
    assert _rules(rendered_case("everything"), "verifier", "Egress") == []
    assert rendered_case("no-policies").of_kind("NetworkPolicy") == []
    judge = {"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], "ports": [{"port": 443}]}
    opened = render({"networkPolicy": {"verifierEgress": [judge]}})
    assert _outside(opened, "verifier") == [("203.0.113.7/32", [443])]
    assert any(_ports(rule) == [53, 53] for rule in _rules(opened, "verifier", "Egress")), "and its name can be looked up"
    assert passes(rendered_case("no-policies"), "verifier", "nats", 4222)


def test_the_pair_of_helm_test_reaches_itself_and_nothing_else() -> None:
    rendered = rendered_case("everything")
    pods = ("transfer-test", *(pod for pod in PODS if pod != "test"))
    reached = [(a, b) for a in pods for b in pods if "transfer-test" in (a, b) and passes(rendered, a, b, ANY_PORT)]
    assert reached == [("transfer-test", "transfer-test")]


def _ports(rule: Object) -> list[int]:
    return [entry["port"] for entry in rule.get("ports", [])]


def _outside(rendered: Rendered, component: str) -> list[tuple[str, list[int]]]:
    """Addresses and ports outside that a pod may call."""
    rules = _rules(rendered, component, "Egress")
    return [(peer["ipBlock"]["cidr"], _ports(rule)) for rule in rules for peer in rule["to"] if "ipBlock" in peer]


MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]


@pytest.mark.parametrize("component", ["actor", "trainer"])
def test_ways_out_are_values(component: str) -> None:
    is_trainer, ports = component == "trainer", [443, 6443]
    assert _outside(rendered_case("default"), component) == [("0.0.0.0/0", ports)] * is_trainer + [("0.0.0.0/0", [443])]
    api = [(cidr, ports) for cidr in PRIVATE] * is_trainer
    assert _outside(rendered_case("cpu"), component) == api
    assert _outside(rendered_case("no-kubernetes-api"), component) == []
    assert _outside(rendered_case("external-nats"), component) == [("0.0.0.0/0", [4222]), *api]
    assert ("10.0.0.0/8", []) in _outside(rendered_case("everything"), component)


def test_actors_alone_are_reached_by_nobody_and_reach_nats_the_hub_and_a_store() -> None:
    read = {"weights": {"backend": "log", "log": "s3://models/weights"}}
    nats = {"enabled": False, "url": "tls://nats.example.com:4222"}
    trainer, recipe = {"enabled": False}, {"set": read}
    rendered = render({"trainer": trainer, "nats": nats, "recipe": recipe, "storage": {"existingSecret": "s3"}})
    assert _rules(rendered, "actor", "Ingress") == [{"from": MONITORING, "ports": [{"protocol": "TCP", "port": "http"}]}]
    assert _outside(rendered, "actor") == [("0.0.0.0/0", [4222]), ("0.0.0.0/0", [443])]
    assert passes(rendered, "actor", "verifier", 50051)
    issuer = {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}
    external = {"host": "a.b", "cidrs": ["203.0.113.0/24"]}
    opened = render({"tls": {"nats": {"enabled": True}, "certManager": issuer}, "nats": {"external": external}})
    (rule,) = [rule for rule in _rules(opened, "nats", "Ingress") if "ipBlock" in rule["from"][0]]
    assert rule == {"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"protocol": "TCP", "port": "client"}]}
    assert "a.b" in opened.one("Certificate", "pipelinerl-nats")["spec"]["dnsNames"]
    assert opened.one("Service", "pipelinerl-nats-external")["spec"]["ports"][0]["port"] == 4222


def test_ways_out_can_be_narrowed() -> None:
    rendered = render({"networkPolicy": {"kubernetesApi": {"cidrs": ["10.1.0.5/32"]}, "hub": {"enabled": False}}})
    assert _outside(rendered, "trainer") == [("10.1.0.5/32", [443, 6443])]
    more = {"to": [{"ipBlock": {"cidr": "203.0.113.8/32"}}]}
    api = {"cidrs": ["0.0.0.0/0", "::/0", "203.0.113.9/32"]}
    closed = render({"networkPolicy": {"hub": {"enabled": False}, "kubernetesApi": api, "extraEgress": [more]}})
    assert _outside(closed, "actor") == [("203.0.113.8/32", [])]
    for component in ("trainer", "release-test"):
        cidrs = [cidr for cidr, _ in _outside(closed, component)]
        ways = [*PRIVATE, "fc00::/7", "203.0.113.9/32"]
        assert cidrs == [*ways, "203.0.113.8/32"], "as ways to the API, or the hub would be reached by it"
    to = [{"ipBlock": {"cidr": "203.0.113.7/32"}}]
    policy = {"tracing": {"to": to, "ports": [443]}}
    rendered = render({"tracing": {"endpoint": "https://otel.example.com"}, "networkPolicy": policy})
    assert all(("203.0.113.7/32", [443]) in _outside(rendered, component) for component in SERVICES)


def test_names_are_resolved_and_traces_sent() -> None:
    """The verifier looks up the collector's name and no other."""

    def of_other_namespaces(case: str, component: str) -> list[tuple[str, int]]:
        rules = _rules(rendered_case(case), component, "Egress")
        elsewhere = [rule for rule in rules if any(peer.get("namespaceSelector") == {} for peer in rule["to"])]
        return [(entry["protocol"], entry["port"]) for rule in elsewhere for entry in rule["ports"]]

    dns, collector = [("UDP", 53), ("TCP", 53)], [("TCP", 4317), ("TCP", 4318)]
    for component in SERVICES:
        assert of_other_namespaces("default", component) == ([] if component == "verifier" else dns)
        assert sorted(of_other_namespaces("traces", component)) == sorted(dns + collector)


def test_no_pod_is_open_to_all_and_prometheus_reaches_metrics_by_the_name_of_their_port(rendered: Rendered) -> None:
    assert all(rule.get("from") for one in rendered.of_kind("NetworkPolicy") for rule in one["spec"].get("ingress", []))
    for component in SERVICES if rendered.of_kind("NetworkPolicy") else ():
        scraped = [rule for rule in _rules(rendered, component, "Ingress") if "namespaceSelector" in rule["from"][0]]
        assert [rule["ports"] for rule in scraped] == [[{"protocol": "TCP", "port": "http"}]]


def test_browsers_reach_the_page_by_the_ingress_and_no_other_pod() -> None:
    rendered = rendered_case("nats-3")
    (rule,) = rendered.one("Ingress", "pipelinerl-page")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    service = rendered.one("Service", backend["name"])["spec"]
    assert [pod.component for pod in rendered.selected(service["selector"])] == ["page"]
    assert f",{rule['host']}" in rendered.pod("page").main["args"][-1]
    controller = {"metadata": {"labels": {"app": "controller"}}, "spec": {"containers": []}}
    outside = Peer("controller", "10.0.0.9", "ingress-nginx", controller)
    reached = [pod for pod in PODS if why_not(rendered, outside, _peer(rendered.pod(pod)), 8080) == ""]
    assert reached == ["page"]
