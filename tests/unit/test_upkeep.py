"""What is purged, and what is noticed when it was lost: the trainer's upkeep over an in-memory bus."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from nats.js.errors import NotFoundError

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import BusError, NotPermitted
from pipelinerl.messages.sequences import decode_group
from services.trainer import stream_upkeep
from tests.support.memory_bus import Log, MemoryServer
from tests.unit.builders import make_sequence
from tests.unit.trainer_fakes import Desk, desk

EVERY_S, LOST_AFTER_S = 0.01, 0.05
KEPT = ("feeder", "intake", "upkeep")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_upkeep, "LOOK_EVERY_S", EVERY_S)
    monkeypatch.setattr(stream_upkeep, "LOST_AFTER_S", LOST_AFTER_S)


async def several_looks() -> None:
    await asyncio.sleep(2 * LOST_AFTER_S + 5 * EVERY_S)


async def purged_up_to(one: Desk, position: int) -> None:
    while (await one.bus.sequences_info()).first_position != position:
        await asyncio.sleep(EVERY_S)


async def test_the_log_is_purged_up_to_the_oldest_checkpoint_that_is_kept() -> None:
    async with desk(*KEPT) as one:
        groups = await one.take_issued()
        await one.answer(groups[0])  # positions 1 and 2
        await one.answer(groups[1])  # 3 and 4
        await several_looks()
        assert (await one.bus.sequences_info()).first_position == 1
        assert one.run.view().streams["sequences"].messages == 4
        one.run.loop.checkpoints.positions = {2: 3, 3: 4}
        await purged_up_to(one, 4)


async def test_a_log_that_fills_up_gets_a_checkpoint_and_is_purged_up_to_it_though_no_step_is_possible() -> None:
    async with desk(*KEPT, limits=StreamLimits(sequences_max_messages=6)) as one:
        groups = await one.take_issued()
        for group in groups[:3]:
            await one.answer(group)
        await purged_up_to(one, 7)
        await one.answer(groups[3])
        assert one.run.loop.version == 0


async def test_a_group_that_left_the_queue_without_its_sequences_ends_as_failed() -> None:
    async with desk(*KEPT) as one:
        deliveries = [await one.bus.next_prompt(1.0) for _ in range(4)]
        assert all(deliveries)
        await deliveries[0].terminate("does not parse")  # type: ignore[union-attr]
        await one.until_lost()
        assert one.failed() == {"prompt group lost": 2}
        assert await one.bus.next_prompt(1.0) is not None  # another group in its place
        await several_looks()
        assert one.tracker.lost_groups == 1  # the others are in an actor's hands


async def test_the_samples_that_came_before_their_group_was_lost_are_trained_where_they_can() -> None:
    async with desk("feeder", "intake") as one:
        groups = await one.take_issued()  # all acknowledged
        await one.publish(make_sequence(groups[0], 0))
        for group in groups[1:]:
            await one.answer(group)
        upkeep = asyncio.create_task(one.run.upkeep.run())  # it must not look before the answers are there
        await one.until_lost()
        assert one.failed() == {"prompt group lost": 1, "group incomplete": 1}
        assert len(await one.intake.take_batch(version=0)) == 2
        upkeep.cancel()


async def test_a_group_is_not_lost_while_the_log_is_still_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_upkeep, "LOST_AFTER_S", 0.0)
    async with desk("feeder", "upkeep") as one:
        for group in await one.take_issued():
            await one.answer(group)
        await several_looks()  # the intake has read nothing
        assert one.tracker.ledger.counts["failed"] == 0
        reading = asyncio.create_task(one.intake.run())
        assert len(await one.intake.take_batch(version=0)) == 2
        await several_looks()
        assert one.tracker.ledger.counts["failed"] == 0
        reading.cancel()


async def test_an_outage_loses_nothing() -> None:
    server = MemoryServer()
    async with desk(*KEPT, server=server) as one:
        deliveries = [await one.bus.next_prompt(1.0) for _ in range(4)]
        server.set_reachable(False)
        await several_looks()
        server.set_reachable(True)
        for delivery in deliveries:
            await one.answer(decode_group(delivery.payload))
            await delivery.ack()
        await several_looks()
        assert len(await one.intake.take_batch(version=0)) == 2
        assert one.tracker.ledger.counts["failed"] == 0


async def test_groups_of_a_queue_that_was_made_anew_are_lost_and_those_since_are_not() -> None:
    async with desk(*KEPT) as one:
        assert all([await one.bus.next_prompt(1.0) for _ in range(4)])
        one.bus.server.streams.prompts = Log("PROMPTS", 100)
        await one.until_lost()
        await several_looks()
        assert (one.tracker.lost_groups, one.failed()) == (4, {"prompt group lost": 8})
        assert (await one.bus.prompts_info()).messages == 4


@pytest.mark.parametrize("fault", ["permission", "stream"])
async def test_a_missing_permission_or_stream_is_not_waited_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = BusError("looking at PROMPTS_unit")
    gone.__cause__ = NotFoundError(err_code=10059)
    error = NotPermitted("trainer", "$JS.API.STREAM.INFO.PROMPTS_unit") if fault == "permission" else gone
    async with desk("feeder") as one:
        monkeypatch.setattr(one.bus, "prompts_info", AsyncMock(side_effect=error))
        with pytest.raises(type(error)):
            await one.run.upkeep.run()
