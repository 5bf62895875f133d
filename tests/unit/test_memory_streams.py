"""The in-memory streams against a clock that the test sets. What they share with JetStream is in tests/contract."""

from __future__ import annotations

import pytest

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import BusError
from tests.support.memory_bus import Members, MemoryBus, MemoryServer, RecentIds, WorkQueue

LIMITS = StreamLimits(ack_wait_s=30.0, prompts_max_messages=10)


def taken(queue: WorkQueue, now_s: float) -> list[tuple[int, int]]:
    """(position, num_deliveries) of everything that can be taken at `now_s`."""
    found = []
    while (item := queue.take(now_s)) is not None:
        found.append((item.position, item.num_deliveries))
    return found


def test_an_id_is_remembered_for_the_window_and_no_longer() -> None:
    ids = RecentIds(window_s=10.0)
    ids.add("a", 1, now_s=100.0)
    ids.add("b", 2, now_s=105.0)
    assert ids.position_of("a", 109.9) == 1
    assert ids.position_of("a", 110.0) is None
    assert ids.position_of("b", 114.9) == 2


def test_a_message_without_id_is_never_a_repeat() -> None:
    queue = WorkQueue(LIMITS)
    queue.put(b"x", "", 0.0)
    queue.put(b"x", "", 0.0)
    assert queue.info().messages == 2


def test_the_deadline_is_exact_and_redelivered_ones_come_first() -> None:
    queue = WorkQueue(LIMITS)
    for name in ("a", "b"):
        queue.put(name.encode(), name, 0.0)
    assert taken(queue, 0.0) == [(1, 1), (2, 1)]
    queue.put(b"c", "c", 1.0)
    queue.extend(2, 5.0)
    assert queue.next_deadline_s() == 30.0
    assert taken(queue, 29.9) == [(3, 1)]
    assert taken(queue, 30.0) == [(1, 2)]
    assert taken(queue, 35.0) == [(2, 2)]


def test_what_is_acknowledged_after_its_deadline_is_not_delivered_again() -> None:
    queue = WorkQueue(LIMITS)
    queue.put(b"a", "a", 0.0)
    queue.take(0.0)
    queue.give_back(1)
    queue.remove(1)
    assert taken(queue, 100.0) == []
    assert queue.info().messages == 0


def test_members_expire_at_their_own_time() -> None:
    members = Members(ttl_s=10.0)
    members.put("a", b"1", 0.0)
    members.put("b", b"2", 4.0)
    members.put("a", b"3", 8.0)
    assert members.next_expiry_s() == 14.0
    members.expire(14.0)
    assert members.changes.get(("member", "b")) is None
    assert members.changes.get(("member", "a")) == b"3"


async def test_an_unreachable_server_fails_calls_and_keeps_what_it_has() -> None:
    server = MemoryServer()
    async with MemoryBus("demo", server=server) as bus:
        await bus.create_streams()
        await bus.publish_sequence(b"a", "s1")
        server.set_reachable(False)
        assert not bus.is_connected
        with pytest.raises(BusError):
            await bus.publish_sequence(b"b", "s2")
        with pytest.raises(BusError):
            await bus.next_prompt(1.0)
        server.set_reachable(True)
        assert (await bus.sequences_info()).messages == 1
