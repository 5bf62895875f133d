"""Both adapters behind one fixture: every contract test runs on JetStream, open and with the run's users, and in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pipelinerl.bus import jetstream
from pipelinerl.bus.protocol import Bus, StreamLimits
from pipelinerl.local.nats import NatsServer
from tests.contract.roles import connected_in_roles, guarded
from tests.support.memory_bus import MemoryBus, MemoryServer

LIMITS = StreamLimits(sequences_max_bytes=64 * 1024**2, ack_wait_s=0.5, member_ttl_s=1.0)

Connect = Callable[..., AbstractAsyncContextManager[Bus]]


@pytest.fixture
def guarded_server(tmp_path: Path, run_name: str) -> Iterator[NatsServer]:
    """With the users of this test's run, and their credentials in the test's folder."""
    with guarded(tmp_path, run_name) as server:
        yield server


@pytest.fixture(params=["memory", "jetstream", "jetstream in roles"])
def connect(request: pytest.FixtureRequest, run_name: str) -> Connect:
    """`connect(limits=...)`: another client of this test's run."""
    if request.param == "jetstream":
        server: NatsServer = request.getfixturevalue("nats_server")
        return lambda limits=LIMITS: jetstream.connect(server.url, run_name, limits=limits)
    if request.param == "jetstream in roles":
        server, folder = request.getfixturevalue("guarded_server"), request.getfixturevalue("tmp_path")
        return lambda limits=LIMITS: connected_in_roles(server.url, run_name, folder, limits)
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
