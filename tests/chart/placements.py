"""Where the pods of a release run on described nodes: a table for the model of the scheduler and for a real one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chart.rendering import CPU_VALUES, Object, render
from tests.chart.scheduler import REQUIRED, Node

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

    def objects(self) -> list[Object]:
        return [URGENT, *render(self.values, self.files).objects]

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
