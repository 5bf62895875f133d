"""A release lives: install, scale, upgrade, roll back, uninstall, with Helm 3 and both ways of Helm 4. Only in a real cluster,
with `make cluster-check`: the one that KUBECONFIG names, or a control plane whose programs are on PATH.
"""

import json
import os
import shutil
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chart import control_plane
from tests.chart.control_plane import Cluster, CommandError, Node
from tests.chart.rendering import CHART, COMPONENT, CPU_VALUES, HELM, WORKLOADS, render

HELM3 = HELM.with_name("helm3")
HELMS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "helm-4": (HELM, ("--server-side=true",)),
    "helm-4-client-side": (HELM, ("--server-side=false",)),
    "helm-3": (HELM3, ()),
}


@pytest.fixture(scope="session")
def real_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not request.config.getoption("--cluster"):
        pytest.skip("needs a real cluster: make cluster-check")
    if file := os.environ.get("KUBECONFIG"):
        yield Cluster(Path(file))
    elif absent := [name for name in control_plane.BINARIES if shutil.which(name) is None]:
        pytest.exit(f"nothing was checked: KUBECONFIG is not set, and {', '.join(absent)} not on PATH", returncode=1)
    else:
        with control_plane.started(tmp_path_factory.mktemp("control-plane")) as cluster:
            yield cluster


@pytest.fixture
def cluster(real_cluster: Cluster) -> Iterator[Cluster]:
    own = replace(real_cluster, namespace=f"pipelinerl-{uuid.uuid4().hex[:8]}")
    own.kubectl("create", "namespace", own.namespace)
    own.kubectl("label", "namespace", own.namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield own
    finally:
        own.kubectl("delete", "namespace", own.namespace, "--wait=false")


@dataclass(frozen=True)
class Release:
    cluster: Cluster
    helm: Path
    options: tuple[str, ...]
    name: str = "pipelinerl"

    def install(self, values: Mapping[str, Any], files: Sequence[Path] = (CPU_VALUES,), verb: str = "install") -> None:
        hooks = "--no-hooks"  # the stand-in runs no Job; tests/cluster runs that of the chart
        given = [f"--values={file}" for file in (*files, "-")]
        self.cluster.run(self.helm, verb, self.name, CHART, *given, hooks, *self.options, text=json.dumps(dict(values)))

    def upgrade(self, values: Mapping[str, Any]) -> None:
        self.install(values, verb="upgrade")

    def rollback(self, revision: int) -> None:
        self.cluster.run(self.helm, "rollback", self.name, str(revision), "--no-hooks", *self.options)

    def uninstall(self) -> None:
        self.cluster.run(self.helm, "uninstall", self.name)

    def replicas(self, component: str, kind: str = "deployment") -> int:
        return int(self.cluster.get(kind, f"{self.name}-{component}")["spec"]["replicas"])

    def scale(self, component: str, replicas: int, kind: str = "deployment") -> None:
        self.cluster.kubectl("scale", f"{kind}/{self.name}-{component}", f"--replicas={replicas}")

    def log_level(self, component: str) -> str:
        pod = self.cluster.get("deployment", f"{self.name}-{component}")["spec"]["template"]["spec"]
        return next(str(entry["value"]) for entry in pod["containers"][0]["env"] if entry["name"] == "PIPELINERL_LOG_LEVEL")


@pytest.fixture(params=HELMS)
def release(cluster: Cluster, request: pytest.FixtureRequest) -> Release:
    program, options = HELMS[request.param]
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make install")
    return Release(cluster, program, options)


BY_HAND = {
    "actor": {"replicas": None},
    "verifier": {"autoscaling": {"enabled": True}},
    "metrics": {"dashboards": {"enabled": True}},
    "trainer": {"persistence": {"accessMode": "ReadWriteMany"}},
}
MORE_STEPS = {"recipe": {"set": {"trainer": {"steps": 5000}}}}
TWO_NODES = {"trainer": BY_HAND["trainer"] | {"nodes": 2}}


def test_install_scale_upgrade_roll_back_uninstall(release: Release) -> None:
    """Actors scaled by hand and verifiers by their autoscaler keep their numbers all the way, and each step is what it says."""

    def scaled() -> tuple[int, int]:
        return release.replicas("actor"), release.replicas("verifier")

    release.install(BY_HAND)
    assert release.log_level("actor") == "info"
    release.scale("actor", 8)
    release.scale("verifier", 5)  # the request that the autoscaler sends
    release.upgrade(BY_HAND | {"log": {"level": "debug"}})
    assert (scaled(), release.log_level("actor")) == ((8, 5), "debug")
    release.rollback(1)
    assert (scaled(), release.log_level("actor")) == ((8, 5), "info")
    release.scale("actor", 3)
    release.upgrade(BY_HAND | {"log": {"level": "warning"}})
    assert (scaled(), release.log_level("verifier")) == ((3, 5), "warning")
    release.upgrade(BY_HAND | TWO_NODES)
    assert release.replicas("trainer", "statefulset") == 2
    release.rollback(2)
    assert release.replicas("trainer", "statefulset") == 1
    assert (scaled(), release.log_level("actor")) == ((3, 5), "debug")
    finish_run(release)
    release.upgrade(BY_HAND | MORE_STEPS)
    assert (release.replicas("trainer", "statefulset"), scaled()) == (1, (0, 5))
    state = release.cluster.get("configmap", "pipelinerl-run")["data"]
    assert state == {"phase": "Finished", "actors": "3"}, "by which the trainer gives them back"
    release.scale("actor", 3)
    release.upgrade(BY_HAND)
    assert (release.replicas("trainer", "statefulset"), scaled()) == (1, (3, 5))
    release.uninstall()
    assert release.cluster.names("deployments") == release.cluster.names("statefulsets") == set()
    assert release.cluster.names("persistentvolumeclaims") == {"pipelinerl-trainer", "data-pipelinerl-nats-0"}


def test_a_number_in_the_values_is_what_there_is_after_each_step(release: Release) -> None:
    release.install({"actor": {"replicas": 2}})
    release.upgrade({"actor": {"replicas": 4}})
    assert release.replicas("actor") == 4
    release.rollback(1)
    assert release.replicas("actor") == 2
    finish_run(release)
    release.upgrade({"actor": {"replicas": 4}} | MORE_STEPS)
    assert (release.replicas("trainer", "statefulset"), release.replicas("actor")) == (1, 4)
    finish_run(release)
    release.rollback(3)
    assert (release.replicas("trainer", "statefulset"), release.replicas("actor")) == (1, 2)
    release.uninstall()


def test_an_autoscaler_that_is_switched_off_leaves_its_number_or_takes_that_of_the_values(release: Release) -> None:
    """A number that the manifest has not named before has no owner in the API server, so that no conflict refuses another."""
    release.install(BY_HAND)
    release.scale("verifier", 5)  # the request that the autoscaler sends
    release.upgrade(BY_HAND | {"verifier": {"replicas": None, "autoscaling": {"enabled": False}}})
    assert release.replicas("verifier") == 5
    release.rollback(1)
    assert release.replicas("verifier") == 5
    numbered = BY_HAND | {"verifier": {"replicas": 2, "autoscaling": {"enabled": False}}}
    release.scale("actor", 5)
    release.upgrade(numbered | {"actor": {"replicas": 3}})
    assert (release.replicas("actor"), release.replicas("verifier")) == (3, 2)
    release.uninstall()


def finish_run(release: Release) -> None:
    state = {"phase": "Finished", "actors": str(release.replicas("actor"))}
    config = f"configmap/{release.name}-run"
    release.cluster.kubectl("patch", config, "--type=merge", "--patch", json.dumps({"data": state}))
    release.scale("actor", 0)
    release.scale("trainer", 0, "statefulset")
    release.cluster.kubectl("wait", "--for=jsonpath={.data.phase}=Finished", config, "--timeout=60s")


def _until(condition: Callable[[], bool], cluster: Cluster, what: str) -> None:
    """Conditions of a real cluster. `kubectl wait` waits for the pods; this is for what it has no word for."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, f"{what}\n{cluster.kubectl('get', 'pods,events', '--output', 'wide')}"
        time.sleep(0.5)


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
GPU, SPOT = "nvidia.com/gpu", "cloud.example.com/spot"
URGENT = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 1000}


@dataclass(frozen=True)
class Placement:
    """`runs`: pods on each node of a pool, which is a node's name up to the dash. Components that are not named run anywhere.
    Pods without a node are in the pool `waiting`, and `waits` says for what. The node `drained` is drained after `joining`."""

    nodes: Sequence[Node]
    values: Mapping[str, Any]
    runs: Mapping[str, Sequence[str]]
    waits: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    joining: Sequence[Node] = ()
    drained: str = ""

    def count(self) -> int:
        """Pods at first: an autoscaler keeps at least its minimum."""
        rendered = render(self.values, self.files)
        scaled = {one["spec"]["scaleTargetRef"]["name"]: one["spec"] for one in rendered.of_kind("HorizontalPodAutoscaler")}
        least = {name: spec["minReplicas"] for name, spec in scaled.items()}
        return sum(
            max(item["spec"].get("replicas", 1), least.get(item["metadata"]["name"], 1))
            for item in rendered.of_kind(*WORKLOADS)
        )

    def found(self, pods: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
        """What is in place of `runs`, given the component of each pod, its node or nothing, and why it has none."""
        named = " ".join(text for texts in self.runs.values() for text in texts)
        nodes, pools = defaultdict[str, Counter[str]](Counter), defaultdict[str, list[str]](list)
        for component, node, reason in pods:
            if not node:
                nodes["waiting"][component if self.waits.get(component, "?") in reason else f"{component} ({reason})"] += 1
            elif component in named:
                nodes[node][component] += 1
        for node, counts in nodes.items():
            pools[node.partition("-")[0]].append(", ".join(f"{counts[one]} {one}" for one in sorted(counts)))
        return {pool: sorted(texts) for pool, texts in pools.items()}


def _nodes(pool: str, *gpus: int, spot: bool = False, cpus: int = 1) -> list[Node]:
    """Nodes of a pool with these numbers of GPUs, tainted as is the custom, and some without."""
    taints = [{"key": key, "value": "true", "effect": "NoSchedule"} for key in (GPU, *([SPOT] if spot else []))]
    labels = {SPOT: "true"} if spot else {}
    given = [Node(f"{pool}-{index}", {GPU: number}, taints, labels) for index, number in enumerate(gpus)]
    return [*given, *(Node(f"cpu-{index}") for index in range(cpus))]


ACTORS, TRAINER = {"replicas": 8, "gpus": 1}, {"gpus": 8, "expectedActors": 8}
EIGHT = {"images": {"variant": "cuda"}, "actor": ACTORS, "trainer": TRAINER}  # the documents' example
TWO_NODES = {"nodes": 2, "persistence": {"accessMode": "ReadWriteMany"}}
ON_SPOT = {"nodeSelectorTerms": [{"matchExpressions": [{"key": SPOT, "operator": "Exists"}]}]}
SPOT_ACTORS = {"tolerations": [{"key": SPOT, "operator": "Exists"}], "affinity": {"nodeAffinity": {REQUIRED: ON_SPOT}}}
OPEN, OLD, NEW = [Node(f"open-{index}", {GPU: 8}) for index in "01"], [Node("old-0", {GPU: 16})], [Node("new-0", {GPU: 16})]
FEW, AFFINITY, ON_CPU = f"Insufficient {GPU}", "node(s) didn't match pod affinity rules", {"cpu": ["1 nats, 2 verifier"]}
PLACEMENTS = {
    "default values on sixteen GPUs": Placement(OPEN, {}, {"open": ["1 verifier", "1 verifier"]}),
    "the documents' example": Placement(OPEN, EIGHT, {"open": ["1 trainer", "8 actor"]}),
    "tainted GPU nodes": Placement(_nodes("gpu", 8, 8), EIGHT, ON_CPU | {"gpu": ["1 trainer", "8 actor"]}),
    "two nodes of a trainer": Placement(
        _nodes("gpu", 8, 8, 8), EIGHT | {"trainer": TRAINER | TWO_NODES}, {"gpu": ["1 trainer", "1 trainer", "8 actor"]}
    ),
    "actors on spot nodes": Placement(
        [*_nodes("gpu", 16), *_nodes("spot", 8, spot=True, cpus=0)],
        EIGHT | {"actor": ACTORS | SPOT_ACTORS},
        ON_CPU | {"gpu": ["1 trainer"], "spot": ["8 actor"]},
    ),
    "a small node that one server of NATS and one verifier fill": Placement(
        [Node("big-0"), Node("small-0", {"cpu": "600m", "memory": "2150Mi"})],
        {"verifier": {"replicas": 2}, "nats": {"replicas": 3, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}},
        {"big": ["2 nats, 1 verifier"], "small": ["1 nats, 1 verifier"]},
        files=[CPU_VALUES],
    ),
    "the trial without GPUs on one node": Placement(
        [Node("one-0", {"cpu": 5, "memory": "11Gi"})],
        {},
        {"one": ["1 actor, 1 nats, 1 trainer, 1 verifier"]},
        files=[CPU_VALUES],
    ),
    "no node with enough GPUs for the trainer": Placement(
        _nodes("gpu", 4, 4, 4),
        EIGHT,
        ON_CPU | {"waiting": ["8 actor, 1 trainer"]},
        {"trainer": f"4 {FEW}", "actor": f"3 {AFFINITY}"},
    ),
    "too few GPUs for the actors": Placement(
        _nodes("gpu", 8, 4), EIGHT, {"gpu": ["1 trainer", "4 actor"], "waiting": ["4 actor"]}, {"actor": f"3 {FEW}"}
    ),
    "a trainer of higher priority takes the place of actors": Placement(
        _nodes("gpu", 8),
        EIGHT | {"actor": ACTORS | {"scheduleAfterTrainer": False}, "trainer": {"gpus": 5, "priorityClassName": "urgent"}},
        {"gpu": ["3 actor, 1 trainer"], "waiting": ["5 actor"]},
        {"actor": FEW},
    ),
    "a drained node": Placement(OLD, EIGHT, {"new": ["8 actor, 1 nats, 1 trainer, 2 verifier"]}, joining=NEW, drained="old-0"),
    "a drained node on which the trainer must stay": Placement(
        OLD,
        EIGHT | {"trainer": TRAINER | {"podDisruptionBudget": {"maxUnavailable": 0}}},
        {"old": ["1 trainer"], "new": ["8 actor, 1 nats, 2 verifier"]},
        joining=NEW,
        drained="old-0",
    ),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("release", ["helm-4"], indirect=True)
def test_pods_run_where_they_should(release: Release, name: str) -> None:
    cluster, placement = release.cluster, PLACEMENTS[name]
    if cluster.stand_in is None:
        pytest.skip("needs the nodes of the table: unset KUBECONFIG to start a control plane that has them")
    number = placement.count()

    def pods() -> list[tuple[str, str, str]]:
        found = json.loads(cluster.kubectl("get", "pods", "--output", "json"))["items"]
        places = [(pod["metadata"]["labels"][COMPONENT], pod["spec"].get("nodeName", "")) for pod in found]
        return [(*place, json.dumps(pod["status"])) for place, pod in zip(places, found, strict=True)]

    def has_settled() -> bool:
        found = pods()
        return len(found) == number and placement.found(found) == placement.runs

    _until(lambda: not cluster.kubectl("get", "pods", "--all-namespaces", "--output", "name"), cluster, "pods of other tests")
    with cluster.stand_in.only(placement.nodes):
        cluster.kubectl("apply", "--filename=-", text=json.dumps(URGENT))
        release.install(placement.values, placement.files)
        if placement.drained:
            _until(lambda: sum(bool(node) for _, node, _ in pods()) == number, cluster, "a pod has no place before the drain")
            cluster.stand_in.join(placement.joining)
            with suppress(CommandError):  # a budget may keep a pod there until the time is over
                cluster.kubectl("drain", placement.drained, "--delete-emptydir-data", "--timeout=30s")
        _until(has_settled, cluster, f"{name}: not {placement.runs}")
