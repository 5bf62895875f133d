"""What a Kubernetes API server makes of an object that is applied, patched or scaled: managers of fields, defaults, refusals.

A model of server-side apply (KEP 555), of strategic merge patches, and of the defaults and the validation that this chart's
releases meet. Lists and maps merge as the schemas of Kubernetes say. Not modelled: the order of list items that come anew,
normalized quantities, migration of fields between the two ways of applying, custom resources' schemas (their lists are atomic).
"""

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate

from tests.chart.rendering import Object

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.31.0-local" / "_definitions.json"
FieldPath = tuple[Any, ...]
"""Names of fields; a tuple of (key, value) pairs for an item of a list that has keys; ("=", value) for one of a set."""


class Manager(NamedTuple):
    """Who set a field: `operation` is Apply or Update."""

    name: str
    operation: str
    subresource: str = ""


class Refusal(Exception):
    """An answer of the server. `code`: of HTTP."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@functools.cache
def _definitions() -> dict[str, Any]:
    return dict(json.loads(SCHEMAS.read_text(encoding="utf-8"))["$defs"])


@functools.cache
def _schema_name(api_version: str, kind: str) -> str:
    """Empty for a custom resource."""
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "kind": kind, "version": version}
    return next(
        (name for name, found in _definitions().items() if wanted in found.get("x-kubernetes-group-version-kind", [])), ""
    )


def schema_of(item: Object) -> Object:
    return dict(_definitions().get(_schema_name(item["apiVersion"], item["kind"]), {}))


_RESOLVED: dict[int, tuple[Object, Object]] = {}
"""By the identity of a schema, which is kept beside what it says."""


def _resolved(schema: Object) -> Object:
    if "$ref" not in schema:
        return schema
    if id(schema) not in _RESOLVED:
        own = {name: value for name, value in schema.items() if name != "$ref"}
        _RESOLVED[id(schema)] = schema, _definitions()[schema["$ref"].rpartition("/")[2]] | own
    return _RESOLVED[id(schema)][1]


def _property(schema: Object, name: str) -> Object:
    return _resolved(schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {})


def _key(item: Object, schema: Object) -> FieldPath:
    return tuple((name, item.get(name, "TCP" if name == "protocol" else None)) for name in schema["x-kubernetes-list-map-keys"])


def leaves(item: Object) -> dict[FieldPath, Any]:
    """What can have a manager, in order, with its value. An item of a keyed list comes before its fields, as None."""
    found: dict[FieldPath, Any] = {}

    def walk(value: Any, schema: Object, at: FieldPath) -> None:
        schema = _resolved(schema)
        list_type = schema.get("x-kubernetes-list-type")
        if isinstance(value, dict) and value and schema.get("x-kubernetes-map-type") != "atomic":
            for name, part in value.items():
                walk(part, _property(schema, name), (*at, name))
        elif isinstance(value, list) and list_type == "map":
            for one in value:
                found[key := (*at, _key(one, schema))] = None
                walk(one, schema["items"], key)
        elif isinstance(value, list) and list_type == "set":
            found.update({(*at, ("=", one)): one for one in value})
        elif value is not None and at:
            found[at] = value

    walk(item, schema_of(item) if item else {}, ())
    return found


def _built(found: Mapping[FieldPath, Any]) -> Object:
    """The object of these leaves."""
    tree: Object = {}
    for path, value in found.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        if not (value is None or value == {}) or path[-1] not in node:
            node[path[-1]] = copy.deepcopy(value) if value is not None else {}

    def plain(node: Any) -> Any:
        if not isinstance(node, dict) or not node:
            return node
        if isinstance(next(iter(node)), str):
            return {name: plain(part) for name, part in node.items()}
        return [part if key[0] == "=" else plain(part) for key, part in node.items()]

    return dict(plain(tree))


def shown(path: FieldPath) -> str:
    """As the server writes it: .spec.template.spec.containers[name="actor"].image"""
    parts = [f".{part}" if isinstance(part, str) else "[" + ",".join(f'{k}="{v}"' for k, v in part) + "]" for part in path]
    return "".join(parts)


@dataclass
class Stored:
    """An object and who manages its fields. Metadata that the server keeps is not in `content`."""

    content: Object = field(default_factory=dict)
    managers: dict[Manager, set[FieldPath]] = field(default_factory=dict)

    def apply(self, manager: str, config: Object, force: bool = False) -> "Stored":
        """After a server-side apply. Raises `Refusal`."""
        own, config_leaves, live = Manager(manager, "Apply"), leaves(config), leaves(self.content)
        given = {path: value for path, value in config_leaves.items() if path not in UNMANAGED}
        others = {name: set(paths) for name, paths in self.managers.items() if name != own}
        conflicts = [
            (name, path) for name, paths in others.items() for path in given if path in paths and live.get(path) != given[path]
        ]
        if conflicts and not force:
            raise Refusal(409, "Conflict", _conflict_message(conflicts, config["apiVersion"]))
        for name, path in conflicts:
            others[name].discard(path)
        kept = set(given).union(*others.values())
        gone = self.managers.get(own, set()) - kept
        rest = {path: value for path, value in live.items() if path not in config_leaves}
        for path in gone:
            rest = {one: value for one, value in rest.items() if one[: len(path)] != path or one in kept}
        content = defaulted(_built(config_leaves | rest))
        check(content, self.content)
        return Stored(content, {name: paths for name, paths in (others | {own: set(given)}).items() if paths})

    def update(self, manager: Manager, content: Object) -> "Stored":
        """After an update, whatever patch made it of what was there. Raises `Refusal`."""
        content = defaulted(copy.deepcopy(content))
        check(content, self.content)
        before, after = _managed(self.content), _managed(content)
        changed = {path for path, value in after.items() if path not in before or before[path] != value}
        managers = {name: (paths - changed) & set(after) for name, paths in self.managers.items()}
        managers[manager] = managers.get(manager, set()) | changed
        return Stored(content, {name: paths for name, paths in managers.items() if paths})


UNMANAGED = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}


def _managed(item: Object) -> dict[FieldPath, Any]:
    return {path: value for path, value in leaves(item).items() if path not in UNMANAGED}


def _conflict_message(conflicts: list[tuple[Manager, FieldPath]], api_version: str) -> str:
    def who(name: Manager) -> str:
        return (
            f'"{name.name}"' + (f' with subresource "{name.subresource}"' if name.subresource else "") + f" using {api_version}"
        )

    found = "; ".join(f"conflict with {who(name)}: {shown(path)}" for name, path in conflicts)
    return f"Apply failed with {len(conflicts)} conflict{'s' if len(conflicts) > 1 else ''}: {found}"


# --- patches ----------------------------------------------------------------------------------------------------------


def merge_patch(live: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(live) if isinstance(live, dict) else {}
    for name, value in patch.items():
        merged[name] = merge_patch(merged.get(name), value)
    return {name: value for name, value in merged.items() if patch.get(name, value) is not None}


def strategic_merge(live: Object, patch: Object, schema: Object) -> Object:
    """A strategic merge patch, with the directives that clients write."""
    schema, merged = _resolved(schema), dict(live)
    if "$retainKeys" in patch:
        merged = {name: value for name, value in merged.items() if name in patch["$retainKeys"]}
    for name, value in patch.items():
        of = _property(schema, name)
        if name.startswith("$deleteFromPrimitiveList/"):
            at = name.partition("/")[2]
            merged[at] = [item for item in merged.get(at, []) if item not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            replace = value.get("$patch") == "replace"
            merged[name] = strategic_merge({} if replace else merged.get(name) or {}, value, of)
        elif isinstance(value, list) and "merge" in of.get("x-kubernetes-patch-strategy", ""):
            order = patch.get(f"$setElementOrder/{name}")
            merged[name] = _merged_list(merged.get(name) or [], value, of, order)
        else:
            merged[name] = value
    return merged


def _merged_list(live: list[Any], patch: list[Any], schema: Object, order: list[Any] | None) -> list[Any]:
    key = schema.get("x-kubernetes-patch-merge-key")
    if key is None:
        return [*live, *(item for item in patch if item not in live)]
    merged = {item[key]: item for item in live}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_merge(merged.get(item[key], {}), item, schema["items"])
    wanted = [item[key] for item in order or ()]
    return sorted(merged.values(), key=lambda item: wanted.index(item[key]) if item[key] in wanted else -1)


# --- defaults and refusals --------------------------------------------------------------------------------------------

POD_DEFAULTS = {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"}
MODES = {"configMap", "secret", "projected", "downwardAPI"}
DEFAULTS: dict[str, Object] = {
    "Deployment": {"replicas": 1, "strategy": {"type": "RollingUpdate"}, "revisionHistoryLimit": 10},
    "StatefulSet": {"replicas": 1, "updateStrategy": {"type": "RollingUpdate"}, "podManagementPolicy": "OrderedReady"},
    "Service": {"type": "ClusterIP", "sessionAffinity": "None"},
    "PersistentVolumeClaim": {"volumeMode": "Filesystem"},
}
ROLLING: dict[str, tuple[str, Object]] = {
    "Deployment": ("strategy", {"maxSurge": "25%", "maxUnavailable": "25%"}),
    "StatefulSet": ("updateStrategy", {"partition": 0}),
}


def defaulted(item: Object) -> Object:
    """In place: what the server writes where nobody did."""
    spec = item.setdefault("spec", {}) if item["kind"] in DEFAULTS else item.get("spec", {})
    for name, value in DEFAULTS.get(item["kind"], {}).items():
        spec.setdefault(name, copy.deepcopy(value))
    if item["kind"] in ROLLING:
        name, parts = ROLLING[item["kind"]]
        strategy = spec[name]
        if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
            strategy["rollingUpdate"] = copy.deepcopy(parts) | (strategy.get("rollingUpdate") or {})
        _default_pod(spec["template"]["spec"])
    elif item["kind"] == "Pod":
        _default_pod(spec)
    elif item["kind"] == "Service":
        for port in spec.get("ports", []):
            port.setdefault("protocol", "TCP")
    return item


def _default_pod(spec: Object) -> None:
    for name, value in POD_DEFAULTS.items():
        spec.setdefault(name, value)
    for volume in spec.get("volumes", []):
        for source in volume.keys() & MODES:
            volume[source].setdefault("defaultMode", 420)
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        for port in container.get("ports", []):
            port.setdefault("protocol", "TCP")


DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
PATH_SEGMENT = re.compile(r"(?!\.\.?\Z)[^/%]+\Z")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?\Z")
LABEL_KEY = re.compile(r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")
NAMES = {"Service": SERVICE_NAME, "Namespace": DNS_LABEL, "Role": PATH_SEGMENT, "RoleBinding": PATH_SEGMENT}
IMMUTABLE: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName"),
    "Service": ("spec.clusterIP",),
    "RoleBinding": ("roleRef",),
}


UNITS = {"": 1, "m": 1e-3, "k": 1e3} | {
    unit + binary: (1024 if binary else 1000) ** power for power, unit in enumerate("KMGTPE", 1) for binary in ("", "i")
}


def quantity(text: str | int) -> float:
    """Of a resource: 24Gi, 500m."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def problems(item: Object, before: Object | None = None) -> Iterator[str]:
    """Why a server refuses it, in place of `before`."""
    name, labels = item["metadata"]["name"], item["metadata"].get("labels") or {}
    if not NAMES.get(item["kind"], DNS_SUBDOMAIN).match(name):
        yield f'metadata.name: Invalid value: "{name}": not a name of RFC 1123 (a Service: 1035) for a {item["kind"]}'
    template = item.get("spec", {}).get("template", {}) if item["kind"] in (*ROLLING, "Job") else {}
    for key, value in [*labels.items(), *(template.get("metadata", {}).get("labels") or {}).items()]:
        if not (LABEL_KEY.match(key) and isinstance(value, str) and LABEL_VALUE.match(value)):
            yield f'metadata.labels: Invalid value: "{key}={value}"'
    if item["kind"] == "ConfigMap":
        yield from (
            f"data: Invalid value: {key!r}" for key in item.get("data", {}) if not re.match(r"[-._a-zA-Z0-9]{1,253}\Z", key)
        )
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
            if quantity(requests[name]) > quantity(limits[name]):
                at = f"containers[{container['name']}].resources.requests.{name}"
                yield f"{at}: Invalid value: {requests[name]!r}: must be less than or equal to the limit of {limits[name]}"
    for path in IMMUTABLE.get(item["kind"], ()) if before else ():
        old, new = (functools.reduce(lambda node, part: (node or {}).get(part), path.split("."), one) for one in (before, item))
        if old != new and old is not None:
            yield f"{path}: Forbidden: field is immutable"


def check(item: Object, before: Object | None = None) -> None:
    """Raises `Refusal` with all of them."""
    if found := list(problems(item, before or None)):
        raise Refusal(422, "Invalid", f'{item["kind"]} "{item["metadata"]["name"]}" is invalid: {"; ".join(found)}')
