"""What an API server and a quota would say of each case, and of each upgrade, without asking one. Not modelled: patches, who
manages a field, normalized quantities, custom resources.
"""

import collections
import copy
import functools
import itertools
import re
from collections.abc import Iterator

import pytest
from kubernetes.utils.quantity import parse_quantity

from tests.chart.cases import CASES, rendered_case
from tests.chart.rendering import Object, Rendered, render

MODES = {"configMap", "secret", "projected", "downwardAPI"}
ROLLING: dict[str, tuple[str, Object]] = {
    "Deployment": ("strategy", {"maxSurge": "25%", "maxUnavailable": "25%"}),
    "StatefulSet": ("updateStrategy", {"partition": 0}),
}


def defaulted(item: Object) -> Object:
    """As an API server fills it in."""
    if item["kind"] in ROLLING:
        name, parts = ROLLING[item["kind"]]
        strategy = item["spec"].setdefault(name, {})
        if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
            strategy["rollingUpdate"] = copy.deepcopy(parts) | (strategy.get("rollingUpdate") or {})
        for volume in item["spec"]["template"]["spec"].get("volumes", []):
            for source in volume.keys() & MODES:
                volume[source].setdefault("defaultMode", 420)
    return item


def upgraded(before: Object, after: Object) -> Object:
    """`after` as it is in place of `before`: what the server had filled in there, and no manifest takes back, stays."""
    live, item = defaulted(copy.deepcopy(before)), copy.deepcopy(after)
    if item["kind"] in ROLLING:
        name, _ = ROLLING[item["kind"]]
        written = before["spec"].get(name) or {}
        filled_in = {part: value for part, value in live["spec"][name].items() if part not in written}
        item["spec"][name] = filled_in | (item["spec"].get(name) or {})
        old, new = (one["spec"]["template"]["spec"].get("volumes", []) for one in (before, item))
        for was, volume in ((one, other) for one in old for other in new if one["name"] == other["name"]):
            filled_in = {source: {"defaultMode": 420} for source in was.keys() & MODES if "defaultMode" not in was[source]}
            volume.update({source: mode for source, mode in filled_in.items() if source not in volume})
    return defaulted(item)


DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z")
LABEL_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName"),
    "Service": ("spec.clusterIP",),
    "RoleBinding": ("roleRef",),
}


def problems(item: Object, before: Object | None = None) -> Iterator[str]:
    """Why a server refuses it, in place of `before`."""
    name, labels = item["metadata"]["name"], item["metadata"].get("labels") or {}
    if not (SERVICE_NAME if item["kind"] == "Service" else DNS_SUBDOMAIN).match(name):
        yield f'metadata.name: Invalid value: "{name}": not a name of RFC 1123 (a Service: 1035) for a {item["kind"]}'
    template = item.get("spec", {}).get("template", {}) if item["kind"] in (*ROLLING, "Job") else {}
    for key, value in [*labels.items(), *(template.get("metadata", {}).get("labels") or {}).items()]:
        if not (LABEL_KEY.match(key) and isinstance(value, str) and LABEL_VALUE.match(value)):
            yield f'metadata.labels: Invalid value: "{key}={value}"'
    if item["kind"] == "ConfigMap" and not all(re.match(r"[-._a-zA-Z0-9]{1,253}\Z", key) for key in item.get("data", {})):
        yield f"data: Invalid value: {[*item['data']]}"
    if item["kind"] in ROLLING:
        strategy = item["spec"].get(ROLLING[item["kind"]][0]) or {}
        if strategy.get("type") != "RollingUpdate" and strategy.get("rollingUpdate") is not None:
            yield f"spec.{ROLLING[item['kind']][0]}.rollingUpdate: Forbidden: only allowed for 'RollingUpdate'"
        parts = strategy.get("rollingUpdate") or {}
        if all(str(parts.get(name)).rstrip("%") == "0" for name in ("maxSurge", "maxUnavailable")):
            yield "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: may not be 0 when `maxSurge` is 0"
    pod = template.get("spec", {}) if template else item.get("spec", {}) if item["kind"] == "Pod" else {}
    for volume in pod.get("volumes", []):
        if len(sources := sorted(volume.keys() - {"name"})) != 1:
            yield f"volumes[{volume['name']}]: Forbidden: may not specify more than 1 volume type: {sources}"
    for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
        requests, limits = (container.get("resources", {}).get(side) or {} for side in ("requests", "limits"))
        for name in requests.keys() & limits.keys():
            if parse_quantity(requests[name]) > parse_quantity(limits[name]):
                at = f"containers[{container['name']}].resources.requests.{name}"
                yield f"{at}: Invalid value: {requests[name]!r}: must be less than or equal to the limit of {limits[name]}"
    if before and item["kind"] == "PersistentVolumeClaim":
        old, new = (one["spec"]["resources"]["requests"]["storage"] for one in (before, item))
        if parse_quantity(new) < parse_quantity(old):
            yield "spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"
    for path in IMMUTABLE.get(item["kind"], ()) if before else ():
        old, new = (functools.reduce(lambda node, part: (node or {}).get(part), path.split("."), one) for one in (before, item))
        if old != new and old is not None:
            yield f"{path}: Forbidden: field is immutable"


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
