"""The verifier under one name and several addresses: calls are spread, go on when one dies, and reach one that was added.

Names are resolved by gRPC's own resolver, from a DNS server of this test.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from pipelinerl.messages import verification
from pipelinerl.messages.verification import CHANNEL_OPTIONS, VerifierClient
from pipelinerl.service.retry import Backoff
from tests.support.machine import free_port
from tests.support.verifier import ITEM, ScriptedVerifier

FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.fixture(autouse=True)
def tried_and_looked_up_often(monkeypatch: pytest.MonkeyPatch) -> None:
    often = {**dict(CHANNEL_OPTIONS), "grpc.dns_min_time_between_resolutions_ms": 100}
    monkeypatch.setattr(verification, "CHANNEL_OPTIONS", tuple(often.items()))
    monkeypatch.setattr(verification, "BACKOFF", Backoff(0.01, 0.05))


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with `addresses`, as a headless Service's DNS does with the ready pods."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, question: bytes, sender: tuple[str, int]) -> None:
        end = question.index(b"\0", 12) + 5  # of the name, and of the type and class after it
        (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
        known = self.addresses if kind == 1 else ()  # A records only
        self.asked += kind == 1
        header = question[:2] + struct.pack("!HHHHH", 0x8180, 1, len(known), 0, 0)
        records = [struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address) for address in known]
        self._transport.sendto(header + question[12:end] + b"".join(records), sender)


@asynccontextmanager
async def name_server(*addresses: str) -> AsyncIterator[tuple[NameServer, int]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(*addresses), ("127.0.0.1", 0))
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@asynccontextmanager
async def verifier(address: str, port: int, **options: float) -> AsyncIterator[ScriptedVerifier]:
    async with (one := ScriptedVerifier()).serving(address, port, **options):
        yield one


async def calls_until_all_answer(client: VerifierClient, *verifiers: ScriptedVerifier) -> None:
    before = [one.calls for one in verifiers]
    async with asyncio.timeout(60):
        while any(one.calls == calls for one, calls in zip(verifiers, before, strict=True)):
            await client.verify([ITEM])


async def test_calls_go_on_when_one_of_two_dies_and_return_to_it() -> None:
    port = free_port()
    target = f"ipv4:{FIRST}:{port},{SECOND}:{port}"
    async with AsyncExitStack() as stack, VerifierClient(target) as client:
        lasting = await stack.enter_async_context(verifier(FIRST, port))
        async with verifier(SECOND, port) as dying:
            await calls_until_all_answer(client, lasting, dying)
        async with asyncio.timeout(60):
            for _ in range(20):
                await client.verify([ITEM])
        again = await stack.enter_async_context(verifier(SECOND, port))
        await calls_until_all_answer(client, lasting, again)


async def test_addresses_that_are_added_to_a_name_get_calls_and_those_that_replace_them_too() -> None:
    """As with `kubectl scale deployment/pipelinerl-verifier`: nothing fails, so only a connection's age makes gRPC look. Then
    as with pods that were replaced."""
    port = free_port()
    async with (
        name_server(FIRST) as (names, dns_port),
        VerifierClient(f"dns://127.0.0.1:{dns_port}/verifier.test:{port}") as client,
    ):
        async with verifier(FIRST, port, connection_age_s=0.3) as first, verifier(SECOND, port) as second:
            await calls_until_all_answer(client, first)
            assert second.calls == 0
            names.addresses = (FIRST, SECOND)
            await calls_until_all_answer(client, first, second)
        names.addresses = (THIRD,)
        async with verifier(THIRD, port) as third:
            await calls_until_all_answer(client, third)


@pytest.mark.parametrize("verifiers", [1, 2])
async def test_no_call_is_lost_when_connections_age(verifiers: int) -> None:
    """Servers end each connection after 0.1 s here; not one call fails or is doubled."""
    port = free_port()
    addresses = (FIRST, SECOND)[:verifiers]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(verifier(address, port, connection_age_s=0.1)) for address in addresses]
        target = "ipv4:" + ",".join(f"{address}:{port}" for address in addresses)
        client = await stack.enter_async_context(VerifierClient(target))
        began = asyncio.get_running_loop().time()
        asked = 0
        while asyncio.get_running_loop().time() - began < 0.8:
            await client.verify([ITEM])
            asked += 1
        assert sum(server.calls for server in servers) == asked
