"""A DNS server as pods see it, and the connections that they have opened.

Only A records; names outside the cluster do not exist. Connections are looked at now and then, so short ones may be missed.
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

_A, _NAME_ERROR, _TTL_S = 1, 3, 1
_ESTABLISHED, _LISTENING = "01", "0A"

Resolve = Callable[[str], list[str]]


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


def opened(pid: int) -> Iterator[tuple[str, int]]:
    """Address and port of the other end of each connection that the network of a process has and has not accepted."""
    rows: list[list[str]] = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows += [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    accepting = {_end_of(row[1])[1] for row in rows if row[3] == _LISTENING}
    for row in rows:
        (_, port), other = _end_of(row[1]), _end_of(row[2])
        if row[3] == _ESTABLISHED and port not in accepting and not other[0].startswith("127."):
            yield other


def _end_of(text: str) -> tuple[str, int]:
    words, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)
