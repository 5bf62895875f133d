"""What an API server and a quota would say of each case, and of each upgrade, without asking one."""

import collections
import copy
import functools
import itertools

import pytest

from tests.chart.cases import CASES, rendered_case
from tests.chart.fields import IMMUTABLE, defaulted, problems, upgraded
from tests.chart.rendering import Object, Rendered, render

GROUP = "kueue.x-k8s.io/pod-group"


@functools.cache
def longest() -> list[Object]:
    values = {"fullnameOverride": "y" * 40, "metrics": {"dashboards": {"enabled": True}}}
    return [*render(release="x" * 53).objects, *render(values).objects]


def test_names_and_labels_are_such_that_a_server_takes_them_and_leave_room_for_what_controllers_add(rendered: Rendered) -> None:
    """Labels and host names that a StatefulSet makes of its own name have at most 63 characters."""
    assert [problem for item in (*rendered.objects, *longest()) for problem in problems(defaulted(copy.deepcopy(item)))] == []
    for item in longest():
        if item["kind"] == "StatefulSet":
            name, claims = item["metadata"]["name"], item["spec"].get("volumeClaimTemplates", [])
            assert len(f"{name}-5c57d5df6d") <= 63, name  # the label controller-revision-hash
            assert all(len(f"{claim['metadata']['name']}-{name}-0") <= 63 for claim in claims)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pod_group_has_as_many_pods_as_each_of_them_says(nodes: int) -> None:
    """Kueue admits no group with fewer pods, and deletes those of a group with more."""
    trainer = {"nodes": nodes, "expectedActors": 5, "persistence": {"accessMode": "ReadWriteMany"}}
    rendered = render({"kueue": {"queue": "rl"}, "trainer": trainer})
    grouped = [pod for pod in rendered.pods if pod.labels.get(f"{GROUP}-name") == "pipelinerl"]
    assert {pod.owner: pod.metadata["annotations"][f"{GROUP}-total-count"] for pod in grouped} == {
        "Deployment/pipelinerl-actor": f"{nodes + 5}",
        "StatefulSet/pipelinerl-trainer": f"{nodes + 5}",
    }
    assert sum(rendered.one(*pod.owner.split("/"))["spec"]["replicas"] for pod in grouped) == nodes + 5


FIXED = {
    ("StatefulSet", "pipelinerl-nats", "spec.volumeClaimTemplates"): "nats.persistence of a release stays as it was installed",
    ("PersistentVolumeClaim", "pipelinerl-trainer", "spec.accessModes"): "so does trainer.persistence.accessMode",
    ("PersistentVolumeClaim", "pipelinerl-trainer", "spec.resources.requests.storage"): "without a lookup (test_upgrade.py)",
}
"""What Kubernetes lets nobody change; each is said in docs/kubernetes.md."""
UPGRADES = [name for name, case in CASES.items() if case.release == "pipelinerl"]


def test_every_case_may_be_upgraded_to_every_other_and_back() -> None:
    """No field that Kubernetes lets nobody change differs, but for those that the documents name."""
    refused: set[tuple[str, str, str]] = set()
    seen: dict[tuple[str, str], list[Object]] = collections.defaultdict(list)
    for name in UPGRADES:
        for item in rendered_case(name).of_kind(*IMMUTABLE):
            if item not in (versions := seen[item["kind"], item["metadata"]["name"]]):
                versions.append(item)
    for (kind, name), versions in seen.items():
        for before, after in itertools.permutations(versions, 2):
            found = problems(upgraded(before, after), defaulted(copy.deepcopy(before)))
            refused |= {(kind, name, problem.partition(": Forbidden")[0]) for problem in found}
    assert refused == FIXED.keys()


def test_every_container_fits_a_quota(rendered: Rendered) -> None:
    """On requests of CPU, memory and disk and on limits of memory; `defaultLimits` adds the others, as below."""
    for pod in rendered.pods:
        for container in pod.containers:
            given = {f"{side}.{name}" for side, names in container["resources"].items() for name in names}
            asked = {"requests.cpu", "requests.memory", "requests.ephemeral-storage", "limits.memory"}
            assert given >= asked, (pod.owner, container["name"])


def test_default_limits_are_those_of_every_container_without_its_own() -> None:
    """As a ResourceQuota on limits.cpu requires of all containers, also of hooks and init containers."""
    everything = CASES["everything"].values
    own = everything["nats"] | {"resources": {"limits": {"cpu": "3"}}}
    values = {**everything, "defaultLimits": {"cpu": "16", "memory": "1Ti"}, "nats": own, "model": {"source": "a/checkpoint"}}
    containers = [container for pod in render(values).pods for container in pod.containers]
    assert {"initial-model", "exporter", "validation", "release", "transfer", "page"} <= {one["name"] for one in containers}
    limits = [(one["name"], one["resources"]["limits"]) for one in containers if "fabric" not in one["name"]]
    assert all(limit["memory"] != "1Ti" for _, limit in limits)
    assert [limit["cpu"] for name, limit in limits if limit["cpu"] != "16"] == ["3"]
