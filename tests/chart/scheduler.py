"""Where Kubernetes runs pods: a model of the documented rules of its scheduler, of preemption and of node drains.

A pod is ready as soon as it has a node. Volumes are left out, and so are scores of affinities, resources and images: of nodes
that a pod prefers equally, the first is taken. A field of a term that the model does not know raises a `ValueError`. Sources:
https://kubernetes.io/docs/concepts/scheduling-eviction/ and pkg/scheduler/framework/plugins of Kubernetes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.chart.fields import quantity
from tests.chart.rendering import NAMESPACE, WORKLOADS, Object

REQUIRED, PREFERRED = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
CORDONED = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
OPERATORS: dict[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
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
    namespace: str = NAMESPACE
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

    def affinity(self, kind: str, how: str = REQUIRED) -> Any:
        return self.spec.get("affinity", {}).get(kind, {}).get(how, [])

    def untolerated(self, taints: Iterable[Object], effects: Sequence[str] = ("NoSchedule", "NoExecute")) -> int:
        """Number of taints with these effects that the pod does not tolerate."""

        def tolerates(one: Object, taint: Object) -> bool:
            exists = {"Exists": True, "Equal": False}[one.get("operator", "Equal")]
            same = one.get("key") == taint["key"] or (exists and not one.get("key"))
            equal = exists or one.get("value", "") == taint.get("value", "")
            return same and equal and one.get("effect") in (None, taint["effect"])

        tolerations, found = self.spec.get("tolerations", []), [taint for taint in taints if taint["effect"] in effects]
        return sum(not any(tolerates(one, taint) for one in tolerations) for taint in found)

    def selects(self, node: Node) -> bool:
        """Whether the node has all labels of the node selector, and meets one term of the required node affinity."""
        required = self.affinity("nodeAffinity")  # of which an empty term matches no node
        met = not required or any(term and _matches(term, node.labels) for term in required["nodeSelectorTerms"])
        return met and self.spec.get("nodeSelector", {}).items() <= node.labels.items()

    def wants(self, term: Object, other: "Pod") -> bool:
        """Whether `other` has the labels of this pod's term, and is in this pod's namespace."""
        _check_fields(term, "labelSelector", "topologyKey")
        return other.namespace == self.namespace and _matches(term.get("labelSelector"), other.labels)

    def is_near(self, term: Object, node: Node) -> bool:
        """Whether the pod runs in the node's domain of the term."""
        value = node.labels.get(term["topologyKey"])
        return value is not None and self.node is not None and self.node.labels.get(term["topologyKey"]) == value


def _thousandths(quantities: Mapping[str, str | int]) -> Counter[str]:
    return Counter({name: round(quantity(value) * 1000) for name, value in quantities.items()})


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
                namespace = metadata.get("namespace", NAMESPACE)
                yield Pod(f"{name}-{index}", {**metadata["labels"], **labels}, template["spec"], namespace, priority)


class Cluster:
    """`emptiest`: of nodes that a pod prefers equally, that with the fewest requested CPUs is taken."""

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
        """Why the pod cannot run on the node, or nothing if it can."""
        return next((reason for refused, reason in self._filters(pod, node) if refused), "")

    def _filters(self, pod: Pod, node: Node) -> Iterator[tuple[bool, str]]:
        """Whether each filter of the scheduler, in its order, refuses the node, and its words for that."""
        yield CORDONED in node.taints and pod.untolerated([CORDONED]) > 0, "node(s) were unschedulable"
        yield pod.untolerated(node.taints) > 0, "node(s) had untolerated taint"
        yield not pod.selects(node), "node(s) didn't match Pod's node affinity/selector"
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
        own = sum(self._number_near(pod, term, node) for term in pod.affinity("podAntiAffinity"))
        yield own > 0, "node(s) didn't match pod anti-affinity rules"
        near = [(other, term) for other in self.pods for term in other.affinity("podAntiAffinity") if other.is_near(term, node)]
        yield any(other.wants(term, pod) for other, term in near), "node(s) didn't satisfy existing pods anti-affinity rules"

    def _number_near(self, pod: Pod, term: Object, node: Node) -> int:
        return sum(other.is_near(term, node) and pod.wants(term, other) for other in self.pods)

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

    def _preference(self, pod: Pod, node: Node) -> tuple[int, ...]:
        """What the scheduler's scores prefer, the heaviest first: tolerated taints, even spread. Affinities are left out."""
        crowd = sum(counts[node.labels.get(one["topologyKey"], "")] for one, counts in self._domains(pod, "ScheduleAnyway"))
        used = sum(other.requests["cpu"] for other in self._on(node)) if self._emptiest else 0
        return -pod.untolerated(node.taints, ["PreferNoSchedule"]), -crowd, -used

    def _schedule(self, pod: Pod) -> bool:
        refusals = {node: self._refusal(pod, node) for node in self.nodes}
        fitting = [node for node, reason in refusals.items() if not reason]
        pod.node = max(fitting, key=lambda node: self._preference(pod, node)) if fitting else self._preempt(pod)
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
            given = budget.get("minAvailable", budget.get("maxUnavailable"))
            number = -(-len(pods) * int(given[:-1]) // 100) if isinstance(given, str) else given
            wanted = number if "minAvailable" in budget else len(pods) - number
            if pod in pods and sum(other.node is not None for other in pods) <= max(0, wanted):
                return False
        pod.node = None
        return True
