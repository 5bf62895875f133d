"""What a trainer does with messages that are none, or untrue: any bytes on SEQUENCES, as answers and as registrations."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.messages.control import (
    Abort,
    EpochJoined,
    Registration,
    Serving,
    Staged,
)
from pipelinerl.messages.sequences import Sequence, VersionSpan, encode_sequence
from pipelinerl.rl.ledger import Outcome
from services.trainer.weight_sync.updater import ANSWER_TYPES, WeightUpdater
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, damaged, make_group, make_sequence
from tests.unit.trainer_fakes import Desk, FakePort, desk

EXAMPLES = 100
GROUP = make_group(0)


def lying(**changes: object) -> bytes:
    return encode_sequence(replace(make_sequence(GROUP, 0), **changes))  # type: ignore[arg-type]


def of_version(number: int, incarnation: int = 1) -> bytes:
    return lying(spans=(VersionSpan(number, 0, 2, incarnation),))


UNTRUE = st.sampled_from(
    [
        lying(run="another-run"),
        lying(group_size=7),
        lying(group_id="g99999999", sequence_id="g99999999.0"),
        lying(prompt_token_ids=np.arange(5000, dtype=np.int32)),  # beyond the context
        lying(completion_token_ids=np.array([4, 10_000], np.int32)),  # outside the vocabulary
        of_version(1_000_000),  # not made yet
        of_version(0, incarnation=2**31),
        of_version(2**63),
        b"",
        bytes(100_000),
    ]
)
GOOD = st.integers(0, 3).map(lambda number: encode_sequence(make_sequence(make_group(number), number % 2)))


@settings(max_examples=EXAMPLES)
@given(
    payloads=st.lists(st.one_of(damaged(GOOD), UNTRUE), max_size=6),
    names=st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_whatever_is_on_the_log_the_trainer_goes_on_and_its_books_add_up(
    payloads: list[bytes], names: list[int]
) -> None:
    asyncio.run(read_all(payloads, names))


async def read_all(payloads: list[bytes], names: list[int]) -> None:
    async with desk() as one, asyncio.timeout(20):
        groups = await one.take_issued()
        for number, payload in enumerate(payloads):
            name = f"stranger-{number}" if names[number] > 7 else f"g{names[number] // 2:08d}.{names[number] % 2}"
            await one.bus.publish_sequence(payload, f"{name}/{number}")
        for group in groups:
            for index in range(2):
                await one.bus.publish_sequence(
                    encode_sequence(make_sequence(group, index, reward=index)), f"{group.group_id}.{index}/good"
                )
        batches = [await two_groups(one), await two_groups(one)]
        one.tracker.ledger.check()
        trained = [sequence for batch in batches for sequence in batch]
        assert len({sequence.sequence_id for sequence in trained}) == len(trained) > 0
        assert all(span.version == 0 and span.incarnation == 1 for s in trained for span in s.spans)


async def two_groups(one: Desk) -> list[Sequence]:
    """One step's batch, with other groups in place of those that were lost to what is tested."""

    async def answer_more() -> None:
        while True:
            for group in await one.take_issued():
                await one.answer(group)
            await asyncio.sleep(0)

    answering = asyncio.create_task(answer_more())
    try:
        batch = [sequence for group in await one.intake.take_batch(version=0) for sequence in group.sequences]
    finally:
        answering.cancel()
    for sequence in batch:
        one.tracker.close([sequence], Outcome.TRAINED)
    return batch


ANSWERS = {
    "joined": EpochJoined(actor="a", incarnation=1, epoch=1).SerializeToString(),
    "staged": Staged(
        actor="a", incarnation=1, epoch=1, version=3, checksum=7, bytes=8, receive_s=0.5, prepare_s=0.5
    ).SerializeToString(),
    "serving": Serving(actor="a", incarnation=1, epoch=1, version=3, stall_s=0.5).SerializeToString(),
    "failed": Abort(incarnation=1, epoch=1, version=3, reason="why", actor="a").SerializeToString(),
    "registration": Registration(
        actor="a",
        process="p",
        grpc_address="host:1",
        ranks=1,
        manifest_id="m",
        policy_version=3,
        incarnation=1,
        phase="serving",
    ).SerializeToString(),
}


@settings(max_examples=EXAMPLES)
@given(
    kind=st.sampled_from(sorted(ANSWERS)),
    payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_answer_and_registration_is_set_aside_or_of_no_consequence(
    kind: str, payloads: list[bytes], data: st.DataObject
) -> None:
    payloads += data.draw(st.lists(damaged(st.just(ANSWERS[kind])), max_size=3))
    asyncio.run(hear_all(kind, payloads))


async def hear_all(kind: str, payloads: list[bytes]) -> None:
    """The last, good registration is taken, whatever came before it."""
    async with MemoryBus(RUN, server=MemoryServer()) as bus:
        await bus.create_streams()
        updater = WeightUpdater(
            bus,
            FakePort(),
            incarnation=1,
            deadline_s=5,
            join_timeout_s=60,
            on_served=lambda record: None,  # type: ignore[arg-type]
        )
        running = asyncio.create_task(updater.run())
        try:
            async with asyncio.timeout(10):
                for payload in payloads:
                    if kind in ANSWER_TYPES:
                        await bus.publish_control(kind, payload, "a")
                    else:
                        await bus.put_member("b", payload)
                    await asyncio.sleep(0)
                await bus.put_member("a", ANSWERS["registration"])
                await updater.wait_for_members(1)
        finally:
            assert not running.done(), running
            running.cancel()
