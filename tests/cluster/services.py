"""Service names and cluster IPs: a DNS server as pods see it, and a proxy in the place of kube-proxy.

A headless Service resolves to its endpoints, one with a cluster IP to that; connections to a cluster IP go to any ready
endpoint. Only A records; names outside the cluster do not exist.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from tests.cluster.objects import Object, Objects, container_port, labels_of, matches, name_of

DOMAIN = "svc.cluster.local"
_A, _NAME_ERROR, _TTL_S = 1, 3, 1


class Endpoint(Protocol):
    """A pod, as far as Services care."""

    manifest: Object
    ip: str

    @property
    def ready(self) -> bool: ...

    @property
    def deleting(self) -> bool: ...


@dataclass(frozen=True)
class Directory:
    """Who is behind a name. `pods` answers with those that are there now; `cluster_ips` by Service name."""

    objects: Objects
    namespace: str
    pods: Callable[[], Iterable[Endpoint]]
    cluster_ips: dict[str, str]

    def endpoints(self, service: Object) -> list[Endpoint]:
        """Pods that a Service sends to: ready and not being deleted, unless it publishes them all."""
        selector = service["spec"].get("selector")
        return [
            pod
            for pod in self.pods()
            if selector
            and matches(selector, labels_of(pod.manifest))
            and (service["spec"].get("publishNotReadyAddresses") or (pod.ready and not pod.deleting))
        ]

    def addresses(self, name: str) -> list[str] | None:
        """Of a full name; None where it does not exist."""
        suffix = f".{self.namespace}.{DOMAIN}"
        name = name.lower().rstrip(".")
        if name in (f"kubernetes.default.{DOMAIN}",):
            return [self.cluster_ips["kubernetes"]]
        if not name.endswith(suffix):
            return None
        host, _, service_name = name.removesuffix(suffix).rpartition(".")
        service = self.objects.find("Service", service_name)
        if service is None:
            return None
        if service_name in self.cluster_ips:
            return None if host else [self.cluster_ips[service_name]]
        found = self.endpoints(service)
        if host:
            found = [pod for pod in found if _host_of(pod, service_name) == host]
        return [pod.ip for pod in found] or None


def _host_of(pod: Endpoint, service: str) -> str:
    """A pod has a name of its own in the Service that its subdomain names."""
    spec = pod.manifest["spec"]
    return spec.get("hostname", "") if spec.get("subdomain") == service else ""


class DnsProtocol(asyncio.DatagramProtocol):
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        with suppress(IndexError, struct.error, UnicodeDecodeError):  # no question at all
            self._transport.sendto(answer(data, self._directory.addresses), address)


def answer(query: bytes, addresses: Callable[[str], list[str] | None]) -> bytes:
    """The response to a query of one question. Order of addresses is random, as CoreDNS has it."""
    identifier, flags = struct.unpack_from("!HH", query)
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    question = query[12 : at + 5]
    (kind,) = struct.unpack_from("!H", query, at + 1)
    found = addresses(".".join(labels))
    shown = random.sample(found, len(found)) if found and kind == _A else []
    code = _NAME_ERROR if found is None else 0
    header = struct.pack("!HHHHHH", identifier, 0x8480 | (flags & 0x0100) | code, 1, len(shown), 0, 0)
    records = b"".join(
        b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, _TTL_S, 4) + bytes(map(int, ip.split("."))) for ip in shown
    )
    return header + question + records


@asynccontextmanager
async def serve_names(directory: Directory, address: str) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: DnsProtocol(directory), local_addr=(address, 53))
    try:
        yield
    finally:
        transport.close()


@asynccontextmanager
async def serve_cluster_ips(directory: Directory) -> AsyncIterator[None]:
    """Listens on every port of every Service that has a cluster IP."""
    proxies, servers = [], []
    try:
        for service in directory.objects.of("Service"):
            ip = directory.cluster_ips.get(name_of(service))
            for port in service["spec"].get("ports", []) if ip else []:
                proxies.append(_Proxy(directory, service, port))
                servers.append(await asyncio.start_server(proxies[-1].connected, ip, port["port"]))
        yield
    finally:
        for server in servers:
            server.close()
        for proxy in proxies:
            await proxy.close()


@dataclass
class _Proxy:
    directory: Directory
    service: Object
    port: Object
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To any ready endpoint; where there is none the connection is closed at once."""
        endpoints = self.directory.endpoints(self.service)
        try:
            if endpoints:
                pod = random.choice(endpoints)
                port = container_port(pod.manifest, self.port.get("targetPort", self.port["port"]))
                with suppress(OSError):
                    to_reader, to = await asyncio.open_connection(pod.ip, port)
                    try:
                        await asyncio.gather(_pump(reader, to), _pump(to_reader, writer))
                    finally:
                        to.close()
        finally:
            writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """To the end of one direction; then the other side learns of it."""
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    with suppress(OSError):
        sink.write_eof()


def cluster_ips(objects: Objects, subnet: str) -> dict[str, str]:
    """One address for each Service that wants one, and one for the API server: from .200 of the subnet on."""
    wanted = [name_of(service) for service in objects.of("Service") if service["spec"].get("clusterIP") != "None"]
    return dict(zip(["kubernetes", *wanted], (f"{subnet}.{number}" for number in itertools.count(200)), strict=False))
