"""Parts of the bus without a server: membership events, positions in reply subjects, addresses without logins."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.msg import Msg

from pipelinerl.bus.link import AckSubject, redacted
from pipelinerl.bus.protocol import MemberEvent
from pipelinerl.bus.reader import MemberWatch, Received, SnapshotStart
from pipelinerl.errors import BusError

TTL_S = 0.05


class FakeReader:
    """Delivers what the test puts in; answers a restart with the snapshot the test has prepared."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Received | SnapshotStart] = asyncio.Queue()
        self.snapshot_on_restart: list[Received | SnapshotStart] = []
        self.restarts = 0

    async def __anext__(self) -> Received | SnapshotStart:
        return await self.items.get()

    def restart(self) -> None:
        self.restarts += 1
        for item in self.snapshot_on_restart:
            self.items.put_nowait(item)
        self.snapshot_on_restart = []

    def deliver(self, *items: Received | SnapshotStart) -> None:
        for item in items:
            self.items.put_nowait(item)


def put(actor: str, pending: int = 0, headers: dict[str, str] | None = None) -> Received:
    message = Msg(None, subject=f"$KV.members-demo.{actor}", data=actor.encode(), headers=headers)  # type: ignore[arg-type]
    return Received(message, AckSubject(1, 1, 1, 0, pending))


def marker(actor: str, reason: str = "MaxAge") -> Received:
    return put(actor, headers={"Nats-Marker-Reason": reason})


def present(actor: str) -> MemberEvent:
    return MemberEvent(actor, actor.encode())


def gone(actor: str) -> MemberEvent:
    return MemberEvent(actor, None)


async def events_of(watch: MemberWatch, count: int) -> list[MemberEvent]:
    async with asyncio.timeout(5):
        return [await anext(watch) for _ in range(count)]


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader()


@pytest.fixture
def watch(reader: FakeReader) -> MemberWatch:
    return MemberWatch(reader, ttl_s=60.0)  # type: ignore[arg-type]


async def test_puts_and_markers_become_events(reader: FakeReader, watch: MemberWatch) -> None:
    reader.deliver(SnapshotStart(1), put("a"), put("b"), marker("a"), put("c", headers={"KV-Operation": "DEL"}))
    reader.deliver(put("b", headers={"KV-Operation": "PURGE"}))
    assert await events_of(watch, 4) == [present("a"), present("b"), gone("a"), gone("b")]


async def test_who_is_missing_from_a_later_snapshot_has_left(reader: FakeReader, watch: MemberWatch) -> None:
    reader.deliver(SnapshotStart(2), put("a", pending=1), put("b"))
    assert await events_of(watch, 2) == [present("a"), present("b")]
    reader.deliver(SnapshotStart(2), put("b", pending=1), put("c"))
    assert await events_of(watch, 3) == [present("b"), present("c"), gone("a")]


async def test_nobody_in_a_later_snapshot_means_everybody_has_left(reader: FakeReader, watch: MemberWatch) -> None:
    reader.deliver(SnapshotStart(1), put("a"))
    assert await events_of(watch, 1) == [present("a")]
    reader.deliver(SnapshotStart(0))
    assert await events_of(watch, 1) == [gone("a")]


async def test_nobody_is_gone_before_the_snapshot_is_complete(reader: FakeReader, watch: MemberWatch) -> None:
    """A heartbeat of b replaces b's entry in the snapshot and comes at its end: b has not left meanwhile."""
    reader.deliver(SnapshotStart(2), put("a", pending=1), put("b"))
    assert await events_of(watch, 2) == [present("a"), present("b")]
    reader.deliver(SnapshotStart(2), put("a", pending=2), put("c", pending=1), put("b", pending=0))
    assert await events_of(watch, 3) == [present("a"), present("c"), present("b")]
    reader.deliver(marker("b"))
    assert await events_of(watch, 1) == [gone("b")]


async def test_a_member_silent_for_two_ttls_is_looked_up(reader: FakeReader) -> None:
    """Its marker was missed. The snapshot decides."""
    watch = MemberWatch(reader, TTL_S)  # type: ignore[arg-type]
    reader.snapshot_on_restart = [SnapshotStart(0)]
    reader.deliver(SnapshotStart(1), put("a"))
    assert await events_of(watch, 2) == [present("a"), gone("a")]
    assert reader.restarts == 1


async def test_silence_of_one_is_noticed_while_others_beat(reader: FakeReader) -> None:
    watch = MemberWatch(reader, TTL_S)  # type: ignore[arg-type]
    reader.snapshot_on_restart = [SnapshotStart(1), put("b")]
    reader.deliver(SnapshotStart(2), put("a", pending=1), put("b"))
    seen = await events_of(watch, 2)

    async def beat() -> None:
        while True:
            reader.deliver(put("b"))
            await asyncio.sleep(TTL_S / 2)

    beating = asyncio.create_task(beat())
    while gone("a") not in seen:
        seen += await events_of(watch, 1)
    beating.cancel()
    assert gone("b") not in seen


# --- the reply subject that carries positions


def test_both_forms_of_the_reply_subject_are_read() -> None:
    old = AckSubject.parse("$JS.ACK.STREAM.CONSUMER.2.30.4.1700000000000000000.7")
    new = AckSubject.parse("$JS.ACK._.hash.STREAM.CONSUMER.2.30.4.1700000000000000000.7.random")
    assert old == new == AckSubject(2, 30, 4, 1_700_000_000_000_000_000, 7)


@pytest.mark.parametrize("reply", ["", "_INBOX.abc", "$JS.ACK.too.short"])
def test_other_subjects_are_no_delivery(reply: str) -> None:
    with pytest.raises(BusError):
        AckSubject.parse(reply)


# --- addresses in messages and logs


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("host:4222", "host:4222"),
        ("nats://user:secret@host:4222", "nats://***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("user:secret@host", "***@host"),
        ("nats://user:sec@ret@host", "nats://***@host"),
        ("nats://user:sec/ret@host:4222", "nats://***@host:4222"),
        ("nats://user:sec://ret@host", "nats://***@host"),
        ("nats://user:sec,ret@host", "nats://***@host"),
        ("nats://a,nats://user:secret@b,tls://user:sec@ret@c", "nats://a,nats://***@b,tls://***@c"),
        ("nats://user:secret@a,NATS://user:sec/ret@b", "nats://***@a,NATS://***@b"),
        ("nats://user:secret@a,user:secret@b", "nats://***@b"),
    ],
)
def test_no_part_of_a_login_is_shown(urls: str, shown: str) -> None:
    assert redacted(urls) == shown
