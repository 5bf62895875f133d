"""Where the chart's pods run, by a model of Kubernetes' scheduler; and first the rules of it that are easily misread."""

import copy
from typing import Any

import pytest

from tests.chart.cases import rendered_case
from tests.chart.placements import PLACEMENTS
from tests.chart.rendering import COMPONENT, Object, render
from tests.chart.scheduler import AWAY, REQUIRED, Cluster, Node

A, B, FULL = Node("a", {"cpu": 2}, labels={"pool": "x"}), Node("b", {"cpu": 2}), Node("f", {"cpu": 0})
TAINTED = Node("t", {"cpu": 2}, [{"key": "spot", "value": "yes", "effect": "NoSchedule"}])


def pod(name: str = "p", cpu: int = 1, **spec: Any) -> Object:
    metadata = {"name": name, "labels": {name: "yes"}}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": [asking(cpu)], **spec}}


def asking(cpu: int, **more: Any) -> Object:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def places(nodes: list[Node], *objects: Object, emptiest: bool = False) -> str:
    """The node of each pod, or a dash."""
    cluster = Cluster(nodes, objects, emptiest)
    cluster.settle()
    return "".join(one.node.name if one.node else "-" for one in cluster.pods)


def test_requests_add_up_and_of_init_containers_the_largest_counts_beside_those_that_stay() -> None:
    assert places([A, B], *[pod()] * 5) == "aabb-"
    assert places([A, B], *[pod()] * 2, emptiest=True) == "ab"
    assert places([A], pod(initContainers=[asking(2), asking(2)])) == "a"
    assert places([A], pod(initContainers=[asking(1, restartPolicy="Always"), asking(2)])) == "-"
    assert places([A], pod(containers=[{"resources": {"limits": {"gpu": 1}}}])) == "-"
    assert places([Node("a", {"pods": 1})], pod(), pod()) == "a-"


def test_one_pod_meets_all_terms_of_a_pod_affinity_and_the_first_of_its_kind_may_meet_its_own() -> None:
    def term(label: str, **more: Any) -> Object:
        return {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {label: "yes"}}, **more}

    def near(*terms: Object) -> Object:
        return pod(affinity={"podAffinity": {REQUIRED: terms}})

    both = pod("q")
    both["metadata"]["labels"]["r"] = "yes"
    assert places([A, B], pod("q", 2), near(term("q"))) == "a-", "near the pod, or nowhere"
    assert places([Node("a")], pod("q"), pod("r"), near(term("q"), term("r"))) == "aa-"
    assert places([Node("a")], both, near(term("q"), term("r"))) == "aa"
    assert places([A, B], *[near(term("p"))] * 3) == "aa-"
    assert places([A], near(term("p", topologyKey="zone"))) == "-"
    with pytest.raises(ValueError, match="does not know matchLabelKeys"):
        places([A], pod("q"), near(term("q", matchLabelKeys=["x"])))
    away = pod(affinity={AWAY: {REQUIRED: [term("q")]}})
    assert (places([A, B], pod("q"), away), places([A, B], away, pod("q")), places([A], away, away)) == ("ab", "ab", "aa")


def test_a_pod_in_the_network_of_its_node_takes_the_ports_of_the_node() -> None:
    both, gpus = {"hostNetwork": True, "gpus": 1}, {"nvidia.com/gpu": 4}
    rendered = render({"actor": both | {"replicas": 2}, "trainer": both, "networkPolicy": {"enabled": False}})
    pods = rendered.one("StatefulSet", "pipelinerl-trainer"), rendered.one("Deployment", "pipelinerl-actor")
    assert places([Node("a", gpus), Node("b", gpus)], *pods) == "ab-"


def test_a_spread_constraint_counts_the_nodes_that_its_policies_include() -> None:
    def spread(action: str = "DoNotSchedule", selector: Object | None = None, **more: Any) -> Object:
        one = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": action, **more}
        one["labelSelector"] = {"matchExpressions": [{"key": "p", "operator": "Exists"}]}
        return pod(topologySpreadConstraints=[one], nodeSelector=selector or {})

    assert places([A, B], *[spread()] * 4) == "abab"
    assert places([A, FULL], *[spread()] * 2) == places([A, TAINTED], *[spread()] * 2) == "a-", "both count"
    assert places([A, FULL], *[spread(selector={"pool": "x"})] * 2) == "aa"
    assert places([B, A], *[spread(topologyKey="pool")] * 2) == "aa", "a node without the label is in no domain"
    assert places([A, B], *[spread("ScheduleAnyway")] * 3) == "aba"
    small = Node("s", {"cpu": 1, "memory": 1})
    assert places([Node("a"), small], *[spread("ScheduleAnyway")] * 2, emptiest=True) == "as"
    assert places([Node("a"), small], *[spread("ScheduleAnyway", maxSkew=9)] * 2, emptiest=True) == "aa"


def test_two_pods_run_on_two_nodes_even_if_one_has_much_more_room() -> None:
    devices, labels = {"nvidia.com/gpu": 2, "rdma/hca": 2}, {"pool": "gpu", "gpu": "h100"}
    small = Node("s", {"cpu": "1100m", "memory": "2100Mi", **devices}, labels=labels)
    for case, kind, name in (("everything", "Job", "pipelinerl-test-transfer"), ("default", "StatefulSet", "pipelinerl-nats")):
        spec = rendered_case(case).one(kind, name)["spec"] | {"replicas": 2}
        pair = {"kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        assert places([Node("a", devices, labels=labels), small], pair, emptiest=True) == "as", name


@pytest.mark.parametrize("name", PLACEMENTS)
def test_pods_run_where_they_should(name: str) -> None:
    """In any order of the nodes, and with the trainer's pods among the others or one by one after them."""
    placement = PLACEMENTS[name]
    objects = placement.objects()
    for turn in range(12):
        cluster = Cluster([*placement.nodes[turn % 3 :], *placement.nodes[: turn % 3]], objects, emptiest=turn % 2 == 0)
        late = [one for one in cluster.pods if turn >= 6 and one.labels[COMPONENT] == "trainer"]
        cluster.pods = [one for one in cluster.pods if one not in late]
        for added in ([], *([one] for one in late)):
            cluster.pods += added
            cluster.settle()
        if placement.drained:
            cluster.nodes += copy.deepcopy(placement.joining)
            cluster.drain(placement.drained)
        pods = ((one.labels[COMPONENT], one.node.name if one.node else "", one.reason) for one in cluster.pods)
        assert placement.found(pods) == placement.runs, turn


def test_every_case_runs_and_leaves_a_drained_node_actors_at_once_and_others_one_at_a_time(case: str) -> None:
    labels, high = {"pool": "gpu", "gpu": "h100"}, {"kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1}
    devices: dict[str, str | int] = {"cpu": 256, "nvidia.com/gpu": 32, "rdma/hca": 32}
    nodes = [Node(f"{zone}{index}", devices, labels={**labels, "zone": zone}) for zone in "ab" for index in "12"]
    for drained in nodes:
        cluster = Cluster(nodes, [high, *rendered_case(case).objects])
        cluster.settle()
        first = {one for one in cluster.pods if one.node and one.node.name == drained.name and one.labels[COMPONENT] == "actor"}
        rounds = cluster.drain(drained.name)
        assert first <= {*rounds[0]} if rounds else not first
        for left in rounds:
            components = [one.labels[COMPONENT] for one in left if one not in first]
            assert len(components) == len({*components})
        assert {one.name: one.reason for one in cluster.pods if one.node is None or one.node.name == drained.name} == {}
