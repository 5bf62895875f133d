"""Where Kubernetes runs pods: a model of the documented rules of its scheduler, of preemption and of node drains.

A pod is ready as soon as it has a node. Volumes are left out, and so are scores of taints, affinities, images and balance: of
nodes with equal scores, the first is taken. What the model does not know raises a `ValueError` or a `KeyError`. Sources:
https://kubernetes.io/docs/concepts/scheduling-eviction/ and pkg/scheduler/framework/plugins of Kubernetes.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tests.chart.rendering import WORKLOADS, Object

REQUIRED, AWAY = "requiredDuringSchedulingIgnoredDuringExecution", "podAntiAffinity"
CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
OPERATORS: dict[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value in values,
    "Exists": lambda value, _: value is not None,
}


@dataclass(eq=False)
class Node:
    """`resources` for pods, beside much of everything but devices."""

    name: str
    resources: Mapping[str, str | int] = field(default_factory=dict)
    taints: Sequence[Object] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels}
        self.resources = {"cpu": "64", "memory": "1Ti", "pods": "110", "ephemeral-storage": "4Ti", **self.resources}


@dataclass(eq=False)
class Pod:
    """`reason`: why it has no node."""

    name: str
    labels: Mapping[str, str]
    spec: Object
    priority: int = 0
    node: Node | None = None
    reason: str = ""

    @cached_property
    def requests(self) -> Counter[str]:
        """Thousandths. Init containers run one after another, and those that always restart stay."""
        staying, peak = Counter({"pods": 1000}), Counter[str]()
        for kind in ("initContainers", "containers"):
            for container in self.spec.get(kind, []):
                resources = container.get("resources", {})
                asked = _thousandths({**resources.get("limits", {}), **resources.get("requests", {})})
                peak |= staying + asked
                staying += asked if kind == "containers" or container.get("restartPolicy") == "Always" else Counter()
        return peak | staying

    @cached_property
    def host_ports(self) -> set[int]:
        """Ports of the node that the pod takes: in the node's network, all that its containers name."""
        ports = [port for container in self.spec["containers"] for port in container.get("ports", [])]
        return {port["containerPort"] for port in ports if self.spec.get("hostNetwork")}

    def affinity(self, kind: str) -> Any:
        """Required terms."""
        affinities = self.spec.get("affinity", {})
        _check_fields(affinities, "nodeAffinity", "podAffinity", AWAY)
        return affinities.get(kind, {}).get(REQUIRED, [])

    def tolerates(self, taint: Object) -> bool:
        """Whether a toleration has the taint's key, or none, and its effect, or none. The chart gives no values."""
        tolerations = self.spec.get("tolerations", [])
        assert all(one["operator"] == "Exists" for one in tolerations)
        fitting = [one for one in tolerations if one.get("effect") in (None, taint["effect"])]
        return any(one.get("key") in (None, taint["key"]) for one in fitting)

    def selects(self, node: Node) -> bool:
        """Whether the node has all labels of the node selector, and meets one term of the required node affinity."""
        required = self.affinity("nodeAffinity")
        met = not required or any(_matches(term, node.labels) for term in required["nodeSelectorTerms"])
        return met and self.spec.get("nodeSelector", {}).items() <= node.labels.items()

    def wants(self, term: Object, other: "Pod") -> bool:
        """Whether `other` has the labels of this pod's term."""
        _check_fields(term, "labelSelector", "topologyKey")
        return _matches(term.get("labelSelector"), other.labels)

    def is_near(self, term: Object, node: Node) -> bool:
        """Whether the pod runs in the node's domain of the term."""
        value = node.labels.get(term["topologyKey"])
        return value is not None and self.node is not None and self.node.labels.get(term["topologyKey"]) == value


def _thousandths(quantities: Mapping[str, str | int]) -> Counter[str]:
    return Counter({name: round(parse_quantity(value) * 1000) for name, value in quantities.items()})


def _check_fields(term: Object, *known: str) -> None:
    if unknown := term.keys() - {*known}:
        raise ValueError(f"the model of the scheduler does not know {', '.join(sorted(unknown))}")


def _matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """No label selector matches nothing, and an empty one everything. A term of a node affinity has the same form."""
    given = selector or {}
    _check_fields(given, "matchLabels", "matchExpressions")
    expressions = given.get("matchExpressions", [])
    held = all(OPERATORS[one["operator"]](labels.get(one["key"]), one.get("values", [])) for one in expressions)
    return selector is not None and held and given.get("matchLabels", {}).items() <= labels.items()


def pods_of(objects: Sequence[Object]) -> Iterator[Pod]:
    """The pods of these objects in their order, without Helm's hooks. Pods of a StatefulSet are created in parallel."""
    classes = {one["metadata"]["name"]: one["value"] for one in objects if one["kind"] == "PriorityClass"} | {"": 0}
    scalers = [one["spec"] for one in objects if "scaleTargetRef" in one.get("spec", {})]
    least = {one["scaleTargetRef"]["name"]: one.get("minReplicas", one.get("minReplicaCount", 1)) for one in scalers}
    for owner in objects:
        if owner["kind"] in ("Pod", *WORKLOADS) and "helm.sh/hook" not in owner["metadata"].get("annotations", {}):
            template, name = owner["spec"].get("template", owner), owner["metadata"]["name"]
            metadata, priority = template["metadata"], classes[template["spec"].get("priorityClassName", "")]
            for index in range(max(owner["spec"].get("replicas", 1), least.get(name, 1))):
                labels = {"apps.kubernetes.io/pod-index": str(index)} if owner["kind"] == "StatefulSet" else {}
                yield Pod(f"{name}-{index}", {**metadata["labels"], **labels}, template["spec"], priority)


class Cluster:
    """`emptiest`: free resources count, too (`LeastAllocated`, a default of the scheduler)."""

    def __init__(self, nodes: Iterable[Node], objects: Sequence[Object], emptiest: bool = False) -> None:
        self.nodes, self.pods, self._emptiest = copy.deepcopy([*nodes]), [*pods_of(objects)], emptiest
        self._budgets = [one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"]

    def settle(self) -> None:
        """Give pods nodes until nothing changes: higher priorities first, then those that arrived first."""
        queue = sorted(self.pods, key=lambda pod: -pod.priority)
        while [pod for pod in queue if not pod.node and self._schedule(pod)]:
            pass

    def drain(self, name: str) -> list[list[Pod]]:
        """Cordon a node and evict its pods, as far as budgets permit. Returns the pods of each round, which then come again."""
        (node,) = (node for node in self.nodes if node.name == name)
        node.taints = (*node.taints, CORDONED)
        rounds = []
        while evicted := [pod for pod in self._on(node) if self._evict(pod)]:
            rounds.append(evicted)
            self.settle()
        return rounds

    def _on(self, node: Node) -> list[Pod]:
        return [pod for pod in self.pods if pod.node is node]

    def _refusal(self, pod: Pod, node: Node) -> str:
        return next((reason for refused, reason in self._filters(pod, node) if refused), "")

    def _filters(self, pod: Pod, node: Node) -> Iterator[tuple[bool, str]]:
        """Whether each filter of the scheduler, in its order, refuses the node, and its words for that."""
        yield not all(map(pod.tolerates, node.taints)), "node(s) had untolerated taint"
        yield not pod.selects(node), "node(s) didn't match Pod's node affinity/selector"
        taken = {port for other in self._on(node) for port in other.host_ports}
        yield bool(pod.host_ports & taken), "node(s) didn't have free ports for the requested pod ports"
        free = _thousandths(node.resources)
        for other in self._on(node):
            free.subtract(other.requests)
        for name, asked in pod.requests.items():
            yield asked > free[name], "Too many pods" if name == "pods" else f"Insufficient {name}"
        for one, counts in self._domains(pod, "DoNotSchedule"):
            value = node.labels.get(one["topologyKey"], "")
            skew = counts[value] + _matches(one.get("labelSelector"), pod.labels) - min(counts.values(), default=0)
            yield not value or skew > one["maxSkew"], "node(s) didn't match pod topology spread constraints"
        yield not self._meets_affinity(pod, node), "node(s) didn't match pod affinity rules"
        away = any(pod.wants(term, one) and one.is_near(term, node) for term in pod.affinity(AWAY) for one in self.pods)
        yield away, "node(s) didn't match pod anti-affinity rules"
        kept_away = any(one.wants(term, pod) and one.is_near(term, node) for one in self.pods for term in one.affinity(AWAY))
        yield kept_away, "node(s) didn't satisfy existing pods anti-affinity rules"

    def _meets_affinity(self, pod: Pod, node: Node) -> bool:
        """One pod must meet all required terms. If there is none, the first of pods that meet their own terms may run."""
        terms = pod.affinity("podAffinity")
        keys = {term["topologyKey"] for term in terms}
        placed = [other for other in self.pods if other.node and keys & other.node.labels.keys()]
        if found := [other for other in placed if all(pod.wants(term, other) for term in terms)]:
            return all(any(other.is_near(term, node) for other in found) for term in terms)
        return keys <= node.labels.keys() and all(pod.wants(term, pod) for term in terms)

    def _domains(self, pod: Pod, action: str) -> Iterator[tuple[Object, Counter[str]]]:
        """Spread constraints with the number of pods in each domain. A node without one of their keys is in no domain."""
        constraints = [one for one in pod.spec.get("topologySpreadConstraints", []) if one["whenUnsatisfiable"] == action]
        keys = {one["topologyKey"] for one in constraints}
        for one in constraints:
            _check_fields(one, "maxSkew", "topologyKey", "whenUnsatisfiable", "labelSelector")
            term, counts = {"labelSelector": one.get("labelSelector")}, Counter[str]()
            for node in self.nodes:
                if pod.selects(node) and keys <= node.labels.keys():
                    counts[node.labels[one["topologyKey"]]] += sum(pod.wants(term, other) for other in self._on(node))
            yield one, counts

    def _scores(self, pod: Pod, nodes: Sequence[Node]) -> dict[Node, float]:
        """The scheduler's weighted scores of even spread and, if `emptiest`, of free resources."""
        crowds = dict.fromkeys(nodes, 0.0)
        for one, counts in self._domains(pod, "ScheduleAnyway"):
            for node in nodes:  # `maxSkew` waters differences down
                crowds[node] += counts[node.labels.get(one["topologyKey"], "")] * math.log(len(counts) + 2) + one["maxSkew"] - 1
        rounded = {node: round(crowds[node]) for node in nodes}
        most, least = max(rounded.values()), min(rounded.values())
        free = {node: 100 * self._emptiest * self._free_share(pod, node) for node in nodes}
        return {node: 200 * (least - rounded[node]) / (most or 1) + free[node] for node in nodes}

    def _free_share(self, pod: Pod, node: Node) -> float:
        """Share of CPU and memory that is left with the pod on the node."""
        capacity, pods = _thousandths(node.resources), [pod, *self._on(node)]
        return sum(1 - sum(one.requests[name] for one in pods) / (capacity[name] or 1) for name in ("cpu", "memory")) / 2

    def _schedule(self, pod: Pod) -> bool:
        refusals = {node: self._refusal(pod, node) for node in self.nodes}
        fitting = [node for node, reason in refusals.items() if not reason]
        scores = self._scores(pod, fitting) if fitting else {}
        pod.node = max(scores, key=scores.__getitem__) if scores else self._preempt(pod)
        numbers = {} if pod.node else Counter(refusals.values())
        pod.reason = ", ".join(f"{number} {reason}" for reason, number in numbers.items())
        return pod.node is not None

    def _preempt(self, pod: Pod) -> Node | None:
        """Evict the least important pods of lower priority, from the node where that costs least. Budgets do not count."""
        found: dict[Node, list[Pod]] = {}
        for node in self.nodes:
            victims = []
            for one in sorted((one for one in self._on(node) if one.priority < pod.priority), key=lambda one: one.priority):
                if self._refusal(pod, node):
                    one.node = None
                    victims.append(one)
            if victims and not self._refusal(pod, node):
                found[node] = victims
            for one in victims:
                one.node = node
        best = min(found, key=lambda node: (max(one.priority for one in found[node]), len(found[node])), default=None)
        for one in found[best] if best else ():
            one.node = None
        return best

    def _evict(self, pod: Pod) -> bool:
        """Take the pod from its node, unless a budget permits no disruption. Shares of pods are rounded up."""
        for budget in self._budgets:
            pods = [other for other in self.pods if _matches(budget["selector"], other.labels)]
            given = budget["maxUnavailable"]
            most = -(-len(pods) * int(given[:-1]) // 100) if isinstance(given, str) else given
            if pod in pods and sum(other.node is None for other in pods) >= most:
                return False
        pod.node = None
        return True
