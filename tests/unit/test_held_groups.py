"""Which samples of a group are still to be done, and when its messages are acknowledged, however they come."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from pipelinerl.errors import BusError
from pipelinerl.messages.sequences import PartialSequence, VersionSpan
from services.actor.hand_over import HeldGroups
from tests.unit.builders import make_group


@dataclass
class Delivery:
    position: int
    payload: bytes = b""
    msg_id: str = ""
    num_deliveries: int = 1
    said: list[str] = field(default_factory=list)
    refuse: int = 0
    """Acknowledgements that do not get through."""

    async def ack(self) -> None:
        if self.refuse:
            self.refuse -= 1
            raise BusError("no connection")
        self.said.append("ack")

    async def in_progress(self) -> None:
        self.said.append("in progress")

    async def give_back(self) -> None:
        self.said.append("give back")

    async def terminate(self, reason: str) -> None:
        self.said.append(reason)


def partial(index: int, *tokens: int) -> PartialSequence:
    spans = (VersionSpan(0, 0, len(tokens)),)
    return PartialSequence(index, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), spans)


async def test_a_message_is_acknowledged_with_its_last_sample() -> None:
    held, delivery, group = HeldGroups(), Delivery(1), make_group(num_samples=3, done_samples=(1,))
    assert held.take(group, delivery) == [0, 2]
    await held.published(group, 0)
    assert (len(held), delivery.said) == (1, [])
    await held.published(group, 2)
    assert (len(held), delivery.said) == (0, ["ack"])


async def test_a_message_that_asks_for_nothing_is_acknowledged_at_once() -> None:
    held, delivery, group = HeldGroups(), Delivery(1), make_group(done_samples=(0, 1))
    assert held.take(group, delivery) == []
    await held.acknowledge(group.group_id)
    assert (len(held), delivery.said) == (0, ["ack"])


async def test_a_message_delivered_again_starts_nothing_and_its_later_delivery_is_answered() -> None:
    held, first, again, group = HeldGroups(), Delivery(1), Delivery(1, num_deliveries=2), make_group()
    assert held.take(group, first) == [0, 1]
    assert not held.holds(group, Delivery(2))
    assert held.holds(group, again)
    assert held.take(group, again) == []
    for index in (0, 1):
        await held.published(group, index)
    assert (first.said, again.said) == ([], ["ack"])


async def test_two_messages_with_other_samples_of_one_group_are_both_done() -> None:
    held, one, two = HeldGroups(), Delivery(1), Delivery(2)
    first, second = make_group(num_samples=4, done_samples=(2, 3)), make_group(num_samples=4, done_samples=(0, 1))
    assert held.take(first, one) == [0, 1]
    assert held.take(second, two) == [2, 3]
    for index in (2, 3, 0):
        await held.published(first, index)
    assert (one.said, two.said) == ([], ["ack"])
    await held.published(second, 1)
    assert one.said == ["ack"]
    assert len(held) == 0


async def test_samples_that_two_messages_ask_for_are_generated_once_and_settle_both() -> None:
    """The first actor died after it had handed the group over, and before it could acknowledge it."""
    held, original, handed_over = HeldGroups(), Delivery(1), Delivery(2)
    rest, whole = make_group(num_samples=3, done_samples=(0,)), make_group(num_samples=3)
    assert held.take(rest, handed_over) == [1, 2]
    assert held.take(whole, original) == [0]
    for index in (1, 2):
        await held.published(rest, index)
    assert (original.said, handed_over.said) == ([], ["ack"])
    await held.published(whole, 0)
    assert original.said == ["ack"]


async def test_an_acknowledgement_that_fails_is_tried_again() -> None:
    held, delivery, group = HeldGroups(), Delivery(1, refuse=2), make_group(num_samples=1)
    held.take(group, delivery)
    await held.published(group, 0)
    assert (len(held), delivery.said) == (1, [])
    keeping = asyncio.create_task(held.keep_alive(0.001))
    async with asyncio.timeout(5):
        while len(held):
            await asyncio.sleep(0)
    keeping.cancel()
    with suppress(asyncio.CancelledError):
        await keeping
    assert delivery.said[-1] == "ack"


async def test_what_remains_is_what_is_missing_with_the_most_that_there_is_of_it() -> None:
    held, one, two = HeldGroups(), Delivery(1), Delivery(2)
    first = make_group(num_samples=4, done_samples=(3,), partials=(partial(0, 7), partial(1, 7, 8)))
    held.take(first, one)
    held.keep(first, partial(0, 7, 9))
    held.keep(first, partial(2, 5))
    await held.published(first, 2)
    (remainder,) = held.remainders()
    assert remainder.missing == (0, 1)
    assert [p.completion_token_ids.tolist() for p in remainder.partials] == [[7, 9], [7, 8]]
    assert (remainder.deliveries, remainder.untouched) == ((one,), False)
    held.take(make_group(num_samples=4, done_samples=(0, 1, 2)), two)
    (remainder,) = held.remainders()
    assert (remainder.missing, remainder.deliveries) == ((0, 1, 3), (one, two))


async def test_a_group_to_which_nothing_was_added_is_untouched() -> None:
    held, group = HeldGroups(), make_group(num_samples=3, partials=(partial(1, 7),))
    held.take(group, Delivery(1))
    (remainder,) = held.remainders()
    assert remainder.untouched
    held.keep(group, partial(1, 7, 8))
    assert not next(held.remainders()).untouched
    held.forget(group.group_id)
    assert (len(held), list(held.remainders())) == (0, [])
