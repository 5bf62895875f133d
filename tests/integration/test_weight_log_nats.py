"""The weight log in JetStream: with a run's users on a real nats-server that is slow, full, and goes away."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.permissions import ACTOR, TRAINER
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import NotPermitted
from pipelinerl.transfer.stores import BucketStore, LogStore, ObjectMissing, StoreError, open_store
from pipelinerl.transfer.weight_log import Replica, WeightLog
from tests.support.guarded_nats import guarded
from tests.unit.test_weight_log import MIXED, History, content, run_history, torn

RUN = "demo"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with guarded(tmp_path / "nats", RUN) as server:
        yield server


@asynccontextmanager
async def opened(server: NatsServer, folder: Path, **options: object) -> AsyncIterator[tuple[LogStore, LogStore]]:
    """The stores of the trainer and of an actor."""
    async with AsyncExitStack() as stack:

        async def store(user: str) -> LogStore:
            bus: Bus = await stack.enter_async_context(
                jetstream.connect(server.url, RUN, credentials=folder / "nats" / user, **options)  # type: ignore[arg-type]
            )
            return await stack.enter_async_context(open_store("nats", bus))

        yield await store(TRAINER), await store(ACTOR)


async def bucket_bytes(store: LogStore) -> int:
    assert isinstance(store, BucketStore)
    return (await store._js.stream_info(store._stream)).state.bytes


async def test_versions_are_read_bit_for_bit(server: NatsServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path) as (trainer, actor):
        await run_history(trainer, actor, tmp_path, versions=60, seed=11)


async def test_an_actor_only_reads(server: NatsServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path) as (trainer, actor):
        with pytest.raises(ObjectMissing):  # not even the bucket is there
            await content(actor, "w/1")
        await trainer.put("w/1", [b"x" * 300_000, b"y"])
        assert await content(actor, "w/1") == b"x" * 300_000 + b"y"
        for call in (actor.put("w/2", [b"x"]), actor.delete("w/1")):
            with pytest.raises(NotPermitted):
                await call
        assert await content(actor, "w/1") == b"x" * 300_000 + b"y"


async def test_what_is_torn_or_cancelled_is_never_visible_and_leaves_nothing(server: NatsServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path) as (trainer, actor):
        with pytest.raises(RuntimeError, match="torn"):
            await trainer.put("w/1", torn([b"x" * 1_000_000]))
        with pytest.raises(ObjectMissing):
            await content(actor, "w/1")

        halfway, loop = asyncio.Event(), asyncio.get_running_loop()

        def slow() -> Iterator[bytes]:
            yield b"x" * 1_000_000
            loop.call_soon_threadsafe(halfway.set)
            yield b"x" * 10_000_000

        writing = asyncio.create_task(trainer.put("w/1", slow()))
        await halfway.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await bucket_bytes(trainer) > 500_000
        assert await trainer.keys("w") == []
    async with opened(server, tmp_path) as (trainer, actor):  # the next process
        await trainer.put("w/2", [b"small"])
        assert await bucket_bytes(trainer) < 10_000
        assert await content(actor, "w/2") == b"small"
        await trainer.delete("w/2")
        await trainer.delete("w/2")
        assert await bucket_bytes(trainer) == 0


async def test_a_full_bucket_names_its_limit_and_has_room_after_a_deletion(server: NatsServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, limits=StreamLimits(weights_max_bytes=1_000_000)) as (trainer, actor):
        await trainer.put("w/1", [b"1" * 700_000])
        for _ in range(3):
            with pytest.raises(StoreError, match="OBJ_weights-demo is full: it may hold 1000000 bytes"):
                await trainer.put("w/2", [b"2" * 700_000])
        assert await trainer.keys("w") == ["w/1"]
        await trainer.delete("w/1")
        await trainer.put("w/2", [b"2" * 700_000])
        assert await content(actor, "w/2") == b"2" * 700_000


async def test_an_object_deleted_while_it_is_read_is_missing(server: NatsServer, tmp_path: Path) -> None:
    async with opened(server, tmp_path, request_timeout_s=5.0) as (trainer, actor):
        await trainer.put("w/1", [b"x" * 20_000_000])
        pieces = actor.get("w/1")
        await anext(pieces)
        await trainer.delete("w/1")
        with pytest.raises(ObjectMissing, match="w/1"):
            _ = [piece async for piece in pieces]


async def test_a_server_that_hangs_or_is_away_is_an_error_in_time_and_then_goes_on(server: NatsServer, tmp_path: Path) -> None:
    history = History(MIXED, 12)
    async with opened(server, tmp_path, request_timeout_s=3.0) as (trainer, actor):
        log, reader = WeightLog(trainer, MIXED, "w", anchor_every=3), Replica(actor, MIXED, tmp_path / "reader")
        await reader.bring_to(await log.add(history.version, *history.sent()))
        published = await log.add(history.step(), *history.sent())
        held = reader.version
        server.freeze()
        try:
            async with asyncio.timeout(120):
                with pytest.raises(StoreError, match="no answer in time"):
                    await log.add(history.step(), *history.sent())
                with pytest.raises(StoreError, match="no answer in time"):
                    await reader.bring_to(published)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        server.stop()
        async with asyncio.timeout(120):
            with pytest.raises(StoreError):
                await log.add(history.step(), *history.sent())
            with pytest.raises(StoreError):
                await reader.bring_to(published)
        assert reader.version == held
        server.start()
        async with asyncio.timeout(120):
            while True:
                try:
                    path = await reader.bring_to(await log.add(history.step(), *history.sent()))
                except StoreError:
                    continue  # not yet connected again
                break
        assert path.read_bytes() == history.streams[history.version].tobytes()
