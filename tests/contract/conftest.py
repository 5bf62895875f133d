"""Both adapters behind one fixture: every contract test runs on JetStream and in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from pipelinerl.bus import jetstream
from pipelinerl.bus.memory import MemoryBus, MemoryServer
from pipelinerl.bus.protocol import Bus, StreamLimits
from pipelinerl.local.nats_server import NatsServer

LIMITS = StreamLimits(sequences_max_bytes=64 * 1024**2, ack_wait_s=0.5, member_ttl_s=1.0)

Connect = Callable[..., AbstractAsyncContextManager[Bus]]


@pytest.fixture(params=["memory", "jetstream"])
def connect(request: pytest.FixtureRequest, run_name: str) -> Connect:
    """`connect(limits=...)`: another client of this test's run."""
    if request.param == "jetstream":
        server: NatsServer = request.getfixturevalue("nats_server")
        return lambda limits=LIMITS: jetstream.connect(server.url, run_name, limits=limits)
    memory = MemoryServer()
    return lambda limits=LIMITS: MemoryBus(run_name, server=memory, limits=limits)


@asynccontextmanager
async def run_streams(connect: Connect, limits: StreamLimits = LIMITS) -> AsyncIterator[Bus]:
    """A bus whose streams exist meanwhile."""
    async with connect(limits) as bus:
        await bus.create_streams()
        try:
            yield bus
        finally:
            await bus.delete_streams()


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    async with run_streams(connect) as bus:
        yield bus
