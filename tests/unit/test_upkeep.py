"""What is purged, and what is noticed when it was lost: the trainer's upkeep over an in-memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pipelinerl.bus.protocol import StreamInfo, StreamLimits
from pipelinerl.messages.sequences import decode_group
from pipelinerl.rl.ledger import Outcome
from services.trainer.data.intake import StreamUpkeep
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, make_recipe, make_sequence
from tests.unit.test_feeder_and_intake import Desk

EVERY_S, LOST_AFTER_S = 0.01, 0.05
SOON_S = 5.0


class KeptDesk(Desk):
    """`readable_from`: set by the test."""

    readable_from = newest = 1
    checkpoints = 0
    looks: list[tuple[str, StreamInfo]]


@asynccontextmanager
async def kept_desk(
    server: MemoryServer | None = None, *, lost_after_s: float = LOST_AFTER_S, limits: StreamLimits | None = None
) -> AsyncIterator[KeptDesk]:
    """A desk whose streams are looked after, every few milliseconds."""
    async with MemoryBus(RUN, server=server, limits=limits) as bus:
        await bus.create_streams()
        one = KeptDesk(bus, make_recipe())
        one.looks = []

        async def checkpoint() -> None:
            one.checkpoints, one.newest = one.checkpoints + 1, one.intake.position + 1

        upkeep = StreamUpkeep(
            bus,
            one.tracker,
            one.intake,
            lambda filling: one.newest if filling else one.readable_from,
            checkpoint,
            on_look=lambda stream, info: one.looks.append((stream, info)),
            every_s=EVERY_S,
            lost_after_s=lost_after_s,
        )
        tasks = [asyncio.create_task(part) for part in (one.feeder.run(), one.intake.run(), upkeep.run())]
        try:
            async with asyncio.timeout(SOON_S):
                yield one
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


async def no_checkpoint() -> None:
    return


async def several_looks() -> None:
    await asyncio.sleep(2 * LOST_AFTER_S + 5 * EVERY_S)


async def first_position(one: Desk) -> int:
    return (await one.bus.sequences_info()).first_position


async def test_what_it_sees_of_the_streams_is_told_from_the_start() -> None:
    async with kept_desk(lost_after_s=60.0) as one:
        while len(one.looks) < 2:
            await asyncio.sleep(EVERY_S)
        assert [stream for stream, _ in one.looks[:2]] == ["prompts", "sequences"]
        assert one.looks[1][1].messages == 0


async def test_the_log_is_purged_up_to_what_may_be_read_again() -> None:
    async with kept_desk(lost_after_s=60.0) as one:
        groups = await one.take_issued()
        await one.answer(groups[0])  # positions 1 and 2
        await one.answer(groups[1])  # 3 and 4
        await several_looks()
        assert await first_position(one) == 1
        one.readable_from = 4
        while await first_position(one) != 4:
            await asyncio.sleep(EVERY_S)


async def test_a_log_that_fills_up_gets_a_checkpoint_and_is_purged_up_to_it_though_no_step_is_possible() -> None:
    limits = StreamLimits(sequences_max_messages=6)
    async with kept_desk(lost_after_s=60.0, limits=limits) as one:
        groups = await one.take_issued()
        for group in groups[:3]:
            await one.answer(group)
        while await first_position(one) != 7:
            await asyncio.sleep(EVERY_S)
        await one.answer(groups[3])
        assert one.checkpoints > 0


async def test_a_group_that_left_the_queue_without_its_sequences_ends_as_failed() -> None:
    async with kept_desk() as one:
        deliveries = [await one.bus.next_prompt(1.0) for _ in range(4)]
        assert all(deliveries)
        await deliveries[0].terminate("does not parse")  # type: ignore[union-attr]
        while one.tracker.lost_groups == 0:
            await asyncio.sleep(EVERY_S)
        assert one.tracker.ledger.reasons(Outcome.FAILED) == {"prompt group lost": 2}
        assert await one.bus.next_prompt(1.0) is not None  # another group in its place
        await several_looks()
        assert one.tracker.lost_groups == 1  # the others are in an actor's hands


async def test_the_samples_that_came_before_their_group_was_lost_are_trained_where_they_can() -> None:
    async with kept_desk() as one:
        groups = await one.take_issued()  # all acknowledged
        await one.publish(make_sequence(groups[0], 0))
        for group in groups[1:]:
            await one.answer(group)
        while one.tracker.lost_groups == 0:
            await asyncio.sleep(EVERY_S)
        assert one.tracker.ledger.reasons(Outcome.FAILED) == {"prompt group lost": 1, "group incomplete": 1}
        assert len(await one.intake.take_batch(version=0)) == 2


async def test_a_group_is_not_lost_while_the_log_is_still_to_be_read() -> None:
    async with MemoryBus(RUN) as bus:
        await bus.create_streams()
        one = Desk(bus, make_recipe())
        upkeep = StreamUpkeep(
            bus, one.tracker, one.intake, lambda filling: 1, no_checkpoint, every_s=EVERY_S, lost_after_s=0.0
        )
        tasks = [asyncio.create_task(part) for part in (one.feeder.run(), upkeep.run())]
        for group in await one.take_issued():
            await one.answer(group)
        await several_looks()  # the intake has read nothing
        assert one.tracker.ledger.counts.failed == 0
        tasks.append(asyncio.create_task(one.intake.run()))
        assert len(await one.intake.take_batch(version=0)) == 2
        await several_looks()
        assert one.tracker.ledger.counts.failed == 0
        for task in tasks:
            task.cancel()


async def test_an_outage_loses_nothing() -> None:
    server = MemoryServer()
    async with kept_desk(server) as one:
        deliveries = [await one.bus.next_prompt(1.0) for _ in range(4)]
        server.set_reachable(False)
        await several_looks()
        server.set_reachable(True)
        for delivery in deliveries:
            assert delivery is not None
            await one.answer(decode_group(delivery.payload, expected_run=RUN))
            await delivery.ack()
        await several_looks()
        assert len(await one.intake.take_batch(version=0)) == 2
        assert one.tracker.ledger.counts.failed == 0
