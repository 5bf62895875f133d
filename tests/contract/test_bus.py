"""What services rely on, against a real JetStream with a run's users: each call goes by the user that makes it in a run."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import EVERY_ACTOR, MemberEvent, StreamLimits, group_id_of
from pipelinerl.bus.reader import PromptDelivery
from pipelinerl.errors import BusError, FieldError
from tests.support.guarded_nats import LIMITS, connected_in_roles, guarded

Item = TypeVar("Item")
Connect = Callable[..., AbstractAsyncContextManager[Bus]]

SOON_S = 120.0
"""Longer than anything that should happen takes."""
QUIET_S = 0.2
"""How long a test watches for something that should not happen."""


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connect]:
    """`connect(limits)`: another client of the run, whose streams each test makes and deletes."""
    folder = tmp_path_factory.mktemp("contract")
    with guarded(folder, "contract") as server:
        yield lambda limits=LIMITS: connected_in_roles(server.url, "contract", folder, limits)


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


async def soon(items: AsyncIterator[Item]) -> Item:
    async with asyncio.timeout(SOON_S):
        return await anext(items)


async def take(bus: Bus) -> PromptDelivery:
    delivery = await bus.next_prompt(SOON_S)
    assert delivery is not None
    return delivery


async def is_quiet(items: AsyncIterator[object]) -> bool:
    try:
        async with asyncio.timeout(QUIET_S):
            await anext(items)
    except TimeoutError:
        return True
    return False


# --- prompts


async def test_prompts_are_taken_once_in_order_of_publication_by_whoever_waits(connect: Connect) -> None:
    async with run_streams(connect) as bus:
        waiting = asyncio.create_task(take(bus))
        await asyncio.sleep(0)
        await bus.publish_prompt(b"first", "g1")
        await bus.publish_prompt(b"second", "g2/actor-0-a1")
        one, two = await waiting, await take(bus)
        found = [(each.payload, each.msg_id, each.position, each.num_deliveries) for each in (one, two)]
        assert found == [(b"first", "g1", 1, 1), (b"second", "g2/actor-0-a1", 2, 1)]
        await one.ack()
        await two.ack()
        assert await bus.next_prompt(QUIET_S) is None
        assert (await bus.prompts_info()).messages == 0


async def test_an_unacknowledged_prompt_goes_to_somebody_else_after_ack_wait_and_a_terminated_one_to_nobody(
    connect: Connect,
) -> None:
    async with run_streams(connect, replace(LIMITS, ack_wait_s=0.5)) as bus, connect() as other:
        await bus.publish_prompt(b"group", "g1")
        began = time.monotonic()
        first, second = await take(bus), await take(other)
        assert time.monotonic() - began >= 0.5 * 0.95
        assert (second.payload, second.num_deliveries >= 2) == (first.payload, True)
        await first.ack()  # late, and not too late
        assert (await bus.prompts_info()).messages == 0
        await second.ack()
        await bus.publish_prompt(b"bad", "g2")
        await (await take(bus)).terminate("does not parse:\r\n line two")
        assert await bus.next_prompt(1.0) is None
        assert (await bus.prompts_info()).messages == 0


async def test_in_progress_extends_the_deadline(connect: Connect) -> None:
    async with run_streams(connect, replace(LIMITS, ack_wait_s=3.0)) as bus:
        await bus.publish_prompt(b"group", "g1")
        extended_s = time.monotonic()
        delivery = await take(bus)
        for _ in range(3):  # 3.6 s in all
            late = await bus.next_prompt(1.2)
            assert late is None or time.monotonic() - extended_s >= 3.0 * 0.95, "only a machine that stood still meanwhile"
            extended_s = time.monotonic()
            await delivery.in_progress()
        await delivery.ack()
        assert (await bus.prompts_info()).messages == 0


async def test_given_back_is_redelivered_at_once_and_beyond_max_deliveries(connect: Connect) -> None:
    """The bus counts; giving up is the actor's decision, so that no group stays behind unseen."""
    async with run_streams(connect, replace(LIMITS, max_deliveries=2, ack_wait_s=600.0)) as bus:
        await bus.publish_prompt(b"kept", "g0")
        await bus.publish_prompt(b"group", "g1")
        assert (await take(bus)).payload == b"kept"
        for count in (1, 2, 3, 4):
            delivery = await take(bus)
            assert (delivery.msg_id, delivery.position, delivery.num_deliveries) == ("g1", 2, count)
            await delivery.give_back()


async def test_a_cancelled_wait_loses_no_prompt_even_if_it_arrives_after(connect: Connect) -> None:
    async with run_streams(connect, replace(LIMITS, ack_wait_s=600.0)) as bus, connect() as stayer:
        async with connect() as leaver:
            for client in (leaver, stayer):
                waiting = asyncio.create_task(client.next_prompt(60.0))
                assert not (await asyncio.wait([waiting], timeout=QUIET_S))[0]
                waiting.cancel()
                if client is leaver:
                    await bus.publish_prompt(b"group", "g1")
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await asyncio.sleep(QUIET_S)  # nothing to await: the delivery is invisible to the caller
        assert (await take(stayer)).payload == b"group"  # handed on when the client has left
        await bus.publish_prompt(b"another", "g2")
        delivery = await take(stayer)
        assert (delivery.payload, delivery.num_deliveries) == (b"another", 1)
        assert await bus.next_prompt(QUIET_S) is None


async def test_a_full_prompt_queue_refuses_and_loses_nothing(connect: Connect) -> None:
    async with run_streams(connect, replace(LIMITS, prompts_max_messages=2)) as bus:
        await bus.publish_prompt(b"one", "g1")
        await bus.publish_prompt(b"two", "g2")
        with pytest.raises(BusError, match=r"PROMPTS.* is full: it may hold 2 messages"):
            await bus.publish_prompt(b"three", "g3")
        first = await take(bus)
        with pytest.raises(BusError):  # taken is not done: it still counts
            await bus.publish_prompt(b"three", "g3")
        await first.ack()
        await bus.publish_prompt(b"three", "g3")
        assert [(await take(bus)).payload, (await take(bus)).payload] == [b"two", b"three"]


async def flood(publish: Callable[[int], Awaitable[object]], most: int) -> int:
    for taken in range(most):
        try:
            await publish(taken)
        except BusError as error:
            return taken if "maximum bytes" in str(error) or "is full" in str(error) else most
    return most


async def test_a_flood_fills_no_disk_and_drops_nothing_that_others_wait_for(connect: Connect) -> None:
    """By an actor, which may write to all of these. Registrations are renewed and orders replaced all the while."""
    size, most = 60_000, 100
    async with run_streams(connect, replace(LIMITS, sequences_max_bytes=1024**2, member_ttl_s=600.0)) as bus:
        await bus.publish_control("commit", bytes(100))
        await bus.put_member("actor-0", bytes(100))
        bound = 1024**2 // size
        assert 0 < await flood(lambda n: bus.publish_control("staged", bytes(size), f"a{n}"), most) <= bound
        assert 0 < await flood(lambda n: bus.put_member(f"a{n}", bytes(size)), most) <= bound
        assert 0 < await flood(lambda n: bus.publish_prompt(bytes(size), f"g{n}"), most) <= bound
        await bus.publish_control("commit", b"new")
        await bus.put_member("actor-0", b"new")
        async with bus.watch_control(["commit"]) as orders, bus.watch_members() as members:
            assert (await soon(orders)).payload == b"new"
            while (event := await soon(members)).actor != "actor-0":
                pass
            assert event.payload == b"new"
        assert await flood(lambda n: bus.publish_dead_letter(bytes(size), f"d{n}"), most) == most  # for people: the newest stay
        assert 0 < len(await bus.dead_letters()) <= bound


async def test_the_queues_first_position_says_what_is_done(bus: Bus) -> None:
    """Below it, nobody works on anything; a group in somebody's hands, or behind a hole, is not below it."""
    assert (await bus.prompts_info()).first_position == 1
    assert [await bus.publish_prompt(b"group", f"g{number}") for number in (1, 2, 3)] == [1, 2, 3]
    assert await bus.publish_prompt(b"group", "g2") == 2
    one, two, three = await take(bus), await take(bus), await take(bus)
    await two.ack()
    assert (await bus.prompts_info()).first_position == 1
    await one.terminate("does not parse")
    assert (await bus.prompts_info()).first_position == 3
    await three.ack()
    info = await bus.prompts_info()
    assert (info.messages, info.first_position, info.last_position) == (0, 4, 3)


async def test_pending_prompts_are_those_that_nobody_has_finished_and_looking_takes_none(bus: Bus) -> None:
    assert await bus.pending_prompts() == {}
    for number in range(1, 301):  # more than are looked at together
        await bus.publish_prompt(b"group", f"g{number}")
    assert await bus.pending_prompts() == {f"g{number}": number for number in range(1, 301)}
    for number in range(1, 297):
        delivery = await take(bus)
        assert (delivery.position, delivery.num_deliveries) == (number, 1)
        await delivery.ack()
    await (await take(bus)).terminate("does not parse")
    await (await take(bus)).give_back()
    await bus.publish_prompt(b"the rest of it", "g1/actor-0-a1")
    pending = await bus.pending_prompts()
    assert pending == {"g298": 298, "g299": 299, "g300": 300, "g1/actor-0-a1": 301}
    assert list(map(group_id_of, pending)) == ["g298", "g299", "g300", "g1"]


async def test_no_streams_is_an_error_and_not_an_empty_queue(connect: Connect) -> None:
    async with connect() as bus:
        for call in (
            bus.next_prompt(QUIET_S),
            bus.publish_prompt(b"group", "g1"),
            bus.pending_prompts(),
            bus.publish_sequence(b"sequence", "s1"),
            bus.publish_dead_letter(b"letter", "m1"),
            bus.dead_letters(),
            bus.read_sequences(1).__aenter__(),
        ):
            with pytest.raises(BusError):
                await call


# --- sequences


async def test_sequences_are_read_in_order_from_any_position_and_waited_for(bus: Bus) -> None:
    payloads = [b"first", bytes(range(256)) * 3000, b"", b"last"]
    positions = [await bus.publish_sequence(payload, f"s{number}") for number, payload in enumerate(payloads)]
    assert positions == [1, 2, 3, 4]
    async with bus.read_sequences(1) as entries:
        read = [await soon(entries) for _ in payloads]
        assert await is_quiet(entries)
        await bus.publish_sequence(b"later", "s4")
        assert (await soon(entries)).payload == b"later"
        assert await is_quiet(entries)
        await bus.publish_sequence(b"still later", "s5")
        assert (await soon(entries)).payload == b"still later"
    assert [(entry.position, entry.msg_id) for entry in read] == [(1, "s0"), (2, "s1"), (3, "s2"), (4, "s3")]
    assert [entry.payload for entry in read] == payloads
    async with bus.read_sequences(4) as entries:
        assert [(await soon(entries)).payload for _ in range(3)] == [b"last", b"later", b"still later"]


async def test_many_sequences_pass_a_reader_that_started_first_while_what_it_has_read_is_purged(bus: Bus) -> None:
    """More than a reader holds at once, published by several tasks while it reads."""
    count, read = 2000, list[int]()

    async def publish(start: int) -> None:
        for number in range(start, count, 8):
            await bus.publish_sequence(str(number).encode(), f"s{number}")

    async with bus.read_sequences(1) as entries, asyncio.TaskGroup() as tasks:
        for start in range(8):
            tasks.create_task(publish(start))
        for position in range(1, count + 1):
            entry = await soon(entries)
            read.append(int(entry.payload))
            assert entry.position == position
            if position % 500 == 0:
                await bus.purge_sequences(position + 1)
                assert (await bus.sequences_info()).first_position == position + 1
    assert sorted(read) == list(range(count))


async def test_a_repeated_id_is_one_message_within_the_duplicate_window(connect: Connect) -> None:
    async with run_streams(connect, replace(LIMITS, duplicate_window_s=2.0)) as bus:
        began = time.monotonic()
        positions = [await bus.publish_sequence(b"a", name) for name in ("s1", "s2", "s1")]
        assert positions == [1, 2, 1] or time.monotonic() - began >= 2.0 * 0.95, "only a machine that stood still meanwhile"
        num_stored = max(positions)
        assert (await bus.sequences_info()).messages == num_stored
        async with bus.read_sequences(num_stored + 1) as entries, asyncio.timeout(SOON_S):
            while await bus.publish_sequence(b"a", "s1") <= num_stored:
                assert await is_quiet(entries)
            assert (await soon(entries)).position == num_stored + 1


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, sequences_max_messages=3), replace(LIMITS, sequences_max_bytes=3900)], ids=["messages", "bytes"]
)
async def test_a_full_log_refuses_and_loses_nothing(connect: Connect, limits: StreamLimits) -> None:
    async with run_streams(connect, limits) as bus:
        for number in range(3):
            await bus.publish_sequence(bytes(1000), f"s{number}")
        limit = min(limits.sequences_max_messages, limits.sequences_max_bytes)
        with pytest.raises(BusError, match=rf"SEQUENCES.* is full: it may hold .*\b{limit}\b"):
            await bus.publish_sequence(bytes(1000), "s3")
        assert (await bus.sequences_info()).messages == 3
        assert await bus.publish_sequence(bytes(1000), "s0") == 1  # a repeat of what is stored is no new message
        await bus.purge_sequences(2)
        assert await bus.publish_sequence(bytes(1000), "s3") == 4
        async with bus.read_sequences(1) as entries:
            assert [(await soon(entries)).msg_id for _ in range(3)] == ["s1", "s2", "s3"]


async def test_purging_removes_only_what_is_below_and_emptying_forgets_the_ids(bus: Bus) -> None:
    for number in range(5):
        await bus.publish_sequence(bytes(100), f"s{number}")
    for below, left in ((0, (5, True, 1, 5)), (1, (5, True, 1, 5)), (4, (2, True, 4, 5)), (6, (0, False, 6, 5))):
        await bus.purge_sequences(below)
        info = await bus.sequences_info()
        assert (info.messages, info.bytes > 0, info.first_position, info.last_position) == left
    assert await bus.publish_sequence(b"positions go on", "s5") == 6
    await bus.publish_prompt(b"group", "g0")
    for _ in range(2):
        await bus.empty()
        info, prompts = await bus.sequences_info(), await bus.prompts_info()
        assert (info.messages, info.first_position, info.last_position, prompts.messages) == (0, 7, 6, 0)
    assert await bus.publish_sequence(b"the id is forgotten, and positions go on", "s5") == 7
    await bus.publish_prompt(b"group", "g0")
    assert (await take(bus)).payload == b"group"


async def test_streams_are_fresh_until_something_is_published_even_if_it_has_left_them_again(bus: Bus) -> None:
    await bus.put_member("actor-0", b"")  # of this run already
    await bus.create_streams(fresh=True)
    await bus.publish_prompt(b"group", "g1")
    await (await take(bus)).ack()
    with pytest.raises(FieldError, match=rf"run = '{bus.run}': PROMPTS_{bus.run} on this .*another run name"):
        await bus.create_streams(fresh=True)
    await bus.publish_sequence(b"sequence", "s1")
    await bus.purge_sequences(2)
    await bus.publish_control("end", b"")
    every = f"PROMPTS_{bus.run} and SEQUENCES_{bus.run} and CONTROL_{bus.run} on this"
    with pytest.raises(FieldError, match=every):
        await bus.create_streams(fresh=True)
    await bus.create_streams()
    for _ in range(2):  # the second time there is nothing to delete
        await bus.delete_streams()
    await bus.create_streams(fresh=True)


async def test_dead_letters_are_kept_in_order_and_once_and_the_oldest_make_room(connect: Connect) -> None:
    async with run_streams(connect, replace(LIMITS, dead_max_messages=3)) as bus:
        assert await bus.dead_letters() == []
        for number in (1, 2, 1):
            await bus.publish_dead_letter(str(number).encode(), f"m{number}")
        assert await bus.dead_letters() == [b"1", b"2"]
        for number in (3, 4):
            await bus.publish_dead_letter(str(number).encode(), f"m{number}")
        assert await bus.dead_letters() == [b"2", b"3", b"4"]


# --- control


async def test_a_watcher_gets_the_last_message_of_each_kind_and_actor_and_then_new_ones(bus: Bus) -> None:
    for kind, payload, actor in (
        ("announce", b"v1", ""),
        ("announce", b"v2", ""),
        ("commit", b"c2", ""),
        ("end", b"not watched", ""),
        ("staged", b"old", "actor-0"),
        ("staged", b"0", "actor-0"),
        ("staged", b"2", "actor_2"),
    ):
        await bus.publish_control(kind, payload, actor)
    async with bus.watch_control(["announce", "commit", "staged"]) as messages:
        last = [await soon(messages) for _ in range(4)]
        found = [(message.kind, message.actor, message.payload) for message in last]
        assert found == [
            ("announce", "", b"v2"),
            ("commit", "", b"c2"),
            ("staged", "actor-0", b"0"),
            ("staged", "actor_2", b"2"),
        ]
        assert await is_quiet(messages)
        await bus.publish_control("announce", b"v3")
        new = await soon(messages)
        assert (new.kind, new.payload) == ("announce", b"v3")
        assert new.position > last[-1].position


async def test_an_order_to_one_actor_reaches_it_and_does_not_replace_those_to_others(bus: Bus) -> None:
    for actor in ("a", "b"):
        await bus.publish_control("epoch", actor.encode(), actor=actor)
    await bus.publish_control("epoch", b"all")
    async with (
        bus.watch_control(["epoch"], "a") as mine,
        bus.watch_control(["epoch"]) as nobodys,
        bus.watch_control(["epoch"], EVERY_ACTOR) as every,
    ):
        read = [await soon(mine), await soon(mine)]
        assert [(message.actor, message.payload) for message in read] == [("a", b"a"), ("", b"all")]
        assert (await soon(nobodys)).payload == b"all"
        assert [(await soon(every)).payload for _ in range(3)] == [b"a", b"b", b"all"]
        assert await is_quiet(mine)
        assert await is_quiet(nobodys)


TRACED = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "vendor=1"}


async def test_headers_travel_with_each_kind_of_message_and_stay_with_it(bus: Bus) -> None:
    """A message id is none."""
    await bus.publish_prompt(b"group", "g1", TRACED)
    await bus.publish_sequence(b"sequence", "s1", TRACED)
    await bus.publish_control("announce", b"v1", headers=TRACED)
    first = await take(bus)
    await first.give_back()
    async with bus.read_sequences(1) as entries, bus.watch_control(["announce"]) as messages:
        received = [first, await take(bus), await soon(entries), await soon(messages)]
    assert [dict(each.headers) for each in received] == [TRACED] * 4


async def test_watchers_see_present_members_then_changes(bus: Bus) -> None:
    await bus.put_member("gone", b"x")
    await bus.remove_member("gone")
    await bus.remove_member("never-there")
    await bus.put_member("actor-0", b"a")
    async with bus.watch_members() as events:
        assert await soon(events) == MemberEvent("actor-0", b"a")
        await bus.put_member("actor-1", b"b")
        assert await soon(events) == MemberEvent("actor-1", b"b")
        await bus.remove_member("actor-0")
        assert await soon(events) == MemberEvent("actor-0", None)
        assert await is_quiet(events)


async def test_heartbeats_keep_a_member_and_without_them_it_expires(connect: Connect) -> None:
    limits = replace(LIMITS, member_ttl_s=2.0)
    async with run_streams(connect, limits) as bus, bus.watch_members() as events:
        began = time.monotonic()
        for beat in range(4):  # longer than the TTL
            await asyncio.sleep(limits.member_ttl_s * 0.4 if beat else 0)
            before, began = began, time.monotonic()
            await bus.put_member("actor-0", str(beat).encode())
            while (event := await soon(events)) != MemberEvent("actor-0", str(beat).encode()):
                assert event.payload is None
                assert time.monotonic() - before >= limits.member_ttl_s * 0.95, "only a machine that stood still meanwhile"
        assert await soon(events) == MemberEvent("actor-0", None)
        assert time.monotonic() - began >= limits.member_ttl_s * 0.95
        await bus.put_member("actor-0", b"back")
        assert await soon(events) == MemberEvent("actor-0", b"back")


async def test_a_name_that_is_no_subject_or_that_nobody_would_get_is_refused(bus: Bus, nats_url: str) -> None:
    kinds = [("anounce", "", "kind"), ("end", "actor-0", "actor"), ("announce", "a.b", "actor"), ("staged", "", "actor")]
    for kind, actor, field in (*kinds, ("staged", "a.b", "actor")):
        with pytest.raises(FieldError) as caught:
            await bus.publish_control(kind, b"", actor=actor)
        assert caught.value.field == field
    for name in ("", "a.b", "a b", "*", ">"):
        with pytest.raises(FieldError):
            await bus.put_member(name, b"")
    with pytest.raises(FieldError):
        async with jetstream.connect(nats_url, "a.b"):
            pass
