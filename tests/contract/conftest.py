"""One real server with a run's users for all contract tests: each call goes by the user that makes it in a run."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import StreamLimits
from tests.support.guarded_nats import LIMITS, connected_in_roles, guarded

RUN = "contract"

Connect = Callable[..., AbstractAsyncContextManager[Bus]]


@pytest.fixture(scope="session")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    """`connect(limits)`: another client of the run, whose streams each test makes and deletes."""
    folder = tmp_path_factory.mktemp("contract")
    with guarded(folder, RUN) as server:
        yield lambda limits=LIMITS: connected_in_roles(server.url, RUN, folder, limits)


@asynccontextmanager
async def run_streams(connect: Connect, limits: StreamLimits = LIMITS) -> AsyncIterator[Bus]:
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
