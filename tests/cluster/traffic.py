"""Which connections pods have opened: looked at now and then in each pod's network namespace, so short ones may be missed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.objects import Object, container_port, labels_of, name_of
from tests.cluster.pod import Pod
from tests.cluster.policies import Peer, dns_server, why_not
from tests.cluster.services import Directory

_ESTABLISHED, _LISTENING = "01", "0A"


@dataclass(frozen=True)
class Connection:
    """From a pod. `port`: at the pod behind a cluster IP, where the target is a Service."""

    source: Peer
    target: Peer
    port: int


@dataclass
class Traffic:
    """`seen`: all connections so far."""

    directory: Directory
    nameserver: str
    seen: set[Connection] = field(default_factory=set)

    def look(self) -> None:
        for pod in self.directory.pods():
            if isinstance(pod, Pod):
                for address, port in _opened(pod):
                    self.seen |= set(self._connections(pod, address, port))

    def forbidden(self) -> list[str]:
        """Connections that the rendered NetworkPolicies would not let pass; names of Services are looked up by every pod."""
        objects, dns = self.directory.objects, dns_server(self.nameserver)
        wrong = {why_not(objects, one.source, one.target, one.port) for one in self.seen}
        wrong |= {why_not(objects, source, dns, 53, "UDP") for source in {one.source for one in self.seen}}
        return sorted(wrong - {""})

    def components(self) -> set[tuple[str, str, int]]:
        """Of both ends, with the port: ("actor", "nats", 4222)."""
        return {(_component(one.source), _component(one.target), one.port) for one in self.seen}

    def _connections(self, pod: Pod, address: str, port: int) -> Iterator[Connection]:
        """One for each pod that a cluster IP may have meant."""
        source = self._peer(pod)
        for other in self.directory.pods():
            if other.ip == address and isinstance(other, Pod):
                yield Connection(source, self._peer(other), port)
        for service in self.directory.objects.of("Service"):
            if self.directory.cluster_ips.get(name_of(service)) == address:
                for end in self.directory.endpoints(service):
                    if isinstance(end, Pod):
                        yield Connection(source, self._peer(end), _target_port(service, port, end.manifest))
        if self.directory.cluster_ips["kubernetes"] == address:
            yield Connection(source, Peer("kubernetes", address), port)

    def _peer(self, pod: Pod) -> Peer:
        return Peer(pod.name, pod.ip, self.directory.namespace, pod.manifest)


def _component(peer: Peer) -> str:
    return labels_of(peer.pod).get("app.kubernetes.io/component", peer.name) if peer.pod else peer.name


def _target_port(service: Object, port: int, pod: Object) -> int:
    said = next(one for one in service["spec"]["ports"] if one["port"] == port)
    return container_port(pod, said.get("targetPort", port))


def _opened(pod: Pod) -> Iterator[tuple[str, int]]:
    """Address and port of the other end of each connection that the pod has and has not accepted."""
    pid = next((one.process.pid for one in pod.containers.values() if one.process.pid), None)
    rows = [row for table in ("tcp", "tcp6") for row in _rows(Path(f"/proc/{pid}/net/{table}"))] if pid else []
    listening = {local for local, _, state in rows if state == _LISTENING}
    accepting = {port for _, port in listening}
    for local, other, state in rows:
        if state == _ESTABLISHED and local[1] not in accepting and not other[0].startswith("127."):
            yield other


def _rows(table: Path) -> list[tuple[tuple[str, int], tuple[str, int], str]]:
    """Local end, other end, state."""
    with suppress(OSError):
        lines = [line.split() for line in table.read_text().splitlines()[1:]]
        return [(_end(words[1]), _end(words[2]), words[3]) for words in lines]
    return []


def _end(text: str) -> tuple[str, int]:
    """Of 0100007F:1F90: address bytes stand in words of this machine's order."""
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)
