"""What a Kubernetes API server fills in, and why it refuses an object, alone or in place of another.

Covers what this chart's releases meet. Not modelled: patches, who manages a field, normalized quantities, custom resources.
"""

import copy
import functools
import re
from collections.abc import Iterator

from kubernetes.utils.quantity import parse_quantity

from tests.chart.rendering import Object

MODES = {"configMap", "secret", "projected", "downwardAPI"}
ROLLING: dict[str, tuple[str, Object]] = {
    "Deployment": ("strategy", {"maxSurge": "25%", "maxUnavailable": "25%"}),
    "StatefulSet": ("updateStrategy", {"partition": 0}),
}


def defaulted(item: Object) -> Object:
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
