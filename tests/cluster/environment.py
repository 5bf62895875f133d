"""A container's environment, command and arguments as the kubelet makes them of a Pod. Pure.

Nothing is inherited from whoever runs the test: what a container sees is listed here (`IMAGE` variables come from images.py).
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.objects import ClusterError, Object, Objects, name_of

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_QUANTITY = re.compile(r"([0-9.]+)(m|k|[MGTPE]|[KMGTPE]i)?")
_FACTORS = {"": 1.0, "m": 1e-3, "k": 1e3} | {
    unit: factor
    for power, letter in enumerate("KMGTPE", start=1)
    for unit, factor in ((f"{letter}i", 1024.0**power), (letter, 1000.0**power))
}


@dataclass(frozen=True)
class PodFacts:
    """What the downward API knows of a pod."""

    pod: Object
    namespace: str
    uid: str
    ip: str
    node: str = "node"

    def field(self, path: str) -> str:
        """Value of a fieldRef. Raises `ClusterError` for a path that the downward API has not."""
        keyed = _KEYED.fullmatch(path)
        if keyed:
            return (self.pod["metadata"].get(keyed[1]) or {}).get(keyed[2], "")
        known = {
            "metadata.name": name_of(self.pod),
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.pod["spec"].get("serviceAccountName", "default"),
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": self.ip.rpartition(".")[0] + ".1",
        }
        if path not in known:
            raise ClusterError(f"field path {path!r} is not supported by the downward API")
        return known[path]


def resolved_environment(
    container: Mapping[str, Any],
    facts: PodFacts,
    objects: Objects,
    services: Mapping[str, str],
    image: Mapping[str, str],
) -> dict[str, str]:
    """`services`: service links; `image`: what the image sets. Later sources win, `env` over `envFrom` over both.

    Raises `ClusterError` where a Secret, ConfigMap or key is missing that is not optional.
    """
    environment = dict(image) | {"HOSTNAME": name_of(facts.pod)}
    own = dict(services)
    for source in container.get("envFrom") or []:
        own.update(_whole_source(source, objects))
    for entry in container.get("env") or []:
        value = _value(entry, container, facts, objects, own)
        if value is not None:
            own[entry["name"]] = value
    return environment | own


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the value, `$$` a dollar; a name that is not there stays as it is written."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def service_links(objects: Objects, address_of: Callable[[Object], str]) -> dict[str, str]:
    """Variables that every pod gets for every Service with a cluster IP, as Docker links had them."""
    links = {}
    for service in objects.of("Service"):
        ports = service["spec"].get("ports") or []
        if service["spec"].get("clusterIP") == "None" or not ports:
            continue
        prefix, address = name_of(service).upper().replace("-", "_"), address_of(service)
        links[f"{prefix}_SERVICE_HOST"] = address
        links[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
        links[f"{prefix}_PORT"] = f"{ports[0].get('protocol', 'TCP').lower()}://{address}:{ports[0]['port']}"
        for port in ports:
            protocol = port.get("protocol", "TCP")
            stem = f"{prefix}_PORT_{port['port']}_{protocol}"
            links[stem] = f"{protocol.lower()}://{address}:{port['port']}"
            links |= {f"{stem}_PROTO": protocol.lower(), f"{stem}_PORT": str(port["port"]), f"{stem}_ADDR": address}
            if port.get("name"):
                links[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
    return links


def data_of(found: Object) -> dict[str, bytes]:
    """Entries of a ConfigMap or Secret."""
    plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    if found["kind"] == "Secret":
        decoded = {key: base64.b64decode(value, validate=True) for key, value in (found.get("data") or {}).items()}
        return decoded | {key: value.encode() for key, value in (found.get("stringData") or {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


def resource_value(resource: str, divisor: str, container: Mapping[str, Any]) -> str:
    """A resourceFieldRef: limits.cpu in units of `divisor`, rounded up."""
    kind, _, name = resource.partition(".")
    amounts = (container.get("resources") or {}).get(kind) or {}
    if name not in amounts:
        raise ClusterError(f"container {container['name']} has no {resource}; a real node would give its own size")
    return str(math.ceil(quantity(str(amounts[name])) / quantity(divisor if divisor not in ("", "0") else "1")))


def quantity(text: str) -> float:
    """A Kubernetes quantity: 500m is 0.5, 2Gi is 2·1024³. Raises `ClusterError`."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ClusterError(f"{text!r} is not a quantity")
    return float(match[1]) * _FACTORS[match[2] or ""]


def _whole_source(source: Mapping[str, Any], objects: Objects) -> dict[str, str]:
    kind = "ConfigMap" if "configMapRef" in source else "Secret"
    reference = source["configMapRef" if kind == "ConfigMap" else "secretRef"]
    found = objects.find(kind, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ClusterError(f'{kind.lower()} "{reference["name"]}" not found')
    return {source.get("prefix", "") + key: value.decode() for key, value in data_of(found).items()}


def _value(
    entry: Mapping[str, Any],
    container: Mapping[str, Any],
    facts: PodFacts,
    objects: Objects,
    earlier: Mapping[str, str],
) -> str | None:
    """None: an optional key that is not there."""
    source = entry.get("valueFrom")
    if not source:
        return expanded(str(entry.get("value") or ""), earlier)
    if "fieldRef" in source:
        return facts.field(source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        reference = source["resourceFieldRef"]
        return resource_value(reference["resource"], str(reference.get("divisor", "1")), container)
    kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
    return _keyed_value(kind, source["configMapKeyRef" if kind == "ConfigMap" else "secretKeyRef"], objects)


def _keyed_value(kind: str, reference: Mapping[str, Any], objects: Objects) -> str | None:
    found = objects.find(kind, reference["name"])
    data = data_of(found) if found else {}
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    if found is None:
        raise ClusterError(f'{kind.lower()} "{reference["name"]}" not found')
    raise ClusterError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
