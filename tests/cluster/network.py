"""Names of Services, by a DNS server as pods see it, and the connections that pods have opened.

A Service resolves to its endpoints, also one with a cluster IP: ports of Services are those of their pods (tests/chart). Only A
records; names outside the cluster do not exist. Connections are looked at now and then, so short ones may be missed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from tests.chart.rendering import Rendered
from tests.cluster.objects import labels_of
from tests.cluster.pod import Pod

DOMAIN = "svc.cluster.local"
_A, _NAME_ERROR, _TTL_S = 1, 3, 1
_ESTABLISHED, _LISTENING = "01", "0A"

Resolve = Callable[[str], list[str]]


def addresses(name: str, rendered: Rendered, namespace: str, pods: list[Pod]) -> list[str]:
    """Of a full name: those of the ready pods of its Service that are not being deleted, or all where it publishes them.

    A pod of a StatefulSet has a name of its own in the Service that governs the set.
    """
    host, _, service_name = name.removesuffix(f".{namespace}.{DOMAIN}").rpartition(".")
    service = rendered.find("Service", service_name)
    if service is None or not name.endswith(f".{namespace}.{DOMAIN}"):
        return []
    spec = service["spec"]
    return [
        pod.ip
        for pod in pods
        if spec["selector"].items() <= labels_of(pod.manifest).items()
        and (spec.get("publishNotReadyAddresses") or (pod.ready and not pod.deleting))
        and host in ("", pod.manifest["spec"].get("hostname"))
    ]


class DnsProtocol(asyncio.DatagramProtocol):
    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self._transport.sendto(answer(data, self._resolve), address)


def answer(query: bytes, resolve: Resolve) -> bytes:
    """The response to a query of one question. Order of addresses is random, as CoreDNS has it."""
    identifier, flags = struct.unpack_from("!HH", query)
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    question = query[12 : at + 5]
    (kind,) = struct.unpack_from("!H", query, at + 1)
    found = resolve(".".join(labels).lower())
    shown = random.sample(found, len(found)) if kind == _A else []
    code = 0 if found else _NAME_ERROR
    header = struct.pack("!HHHHHH", identifier, 0x8480 | (flags & 0x0100) | code, 1, len(shown), 0, 0)
    records = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, _TTL_S, 4) + ipaddress.IPv4Address(ip).packed for ip in shown)
    return header + question + records


@asynccontextmanager
async def serve_names(resolve: Resolve, address: str) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: DnsProtocol(resolve), local_addr=(address, 53))
    try:
        yield
    finally:
        transport.close()


def opened(pod: Pod) -> Iterator[tuple[str, int]]:
    """Address and port of the other end of each connection that the pod has and has not accepted."""
    pid = next((one.pid for one in pod.containers.values() if one.pid), None)
    rows = [row for table in ("tcp", "tcp6") for row in _rows(Path(f"/proc/{pid}/net/{table}"))] if pid else []
    accepting = {port for (_, port), _, state in rows if state == _LISTENING}
    for local, other, state in rows:
        if state == _ESTABLISHED and local[1] not in accepting and not other[0].startswith("127."):
            yield other


def _rows(table: Path) -> list[tuple[tuple[str, int], tuple[str, int], str]]:
    """Local end, other end, state."""
    with suppress(OSError):
        lines = [line.split() for line in table.read_text().splitlines()[1:]]
        return [(end_of(words[1]), end_of(words[2]), words[3]) for words in lines]
    return []


def end_of(text: str) -> tuple[str, int]:
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)
