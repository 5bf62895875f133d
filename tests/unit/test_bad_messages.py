"""What services do with messages that are none, or untrue: they count them, set them aside and go on. Any bytes, on every
subject."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import FROM_TRAINER, ControlMessage
from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import (
    PartialSequence,
    PolicyVersion,
    Sequence,
    VersionSpan,
    decode_dead_letter,
    decode_group,
    encode_group,
    encode_sequence,
)
from pipelinerl.rl.ledger import Outcome
from pipelinerl.transfer.manifest import Manifest
from pipelinerl.v1 import control_pb2 as pb
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import ServingGate, UpdateListener, decode_order
from services.trainer.weight_sync.updater import ANSWER_TYPES, WeightUpdater
from tests.support.generation import stage
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, changed, damaged, make_group, make_sequence
from tests.unit.test_update_protocol import MANIFEST, ScriptedReceiver
from tests.unit.trainer_fakes import Desk, FakeSender, desk

EXAMPLES = 150


def good(message: Any, decode: Callable[[Any], object]) -> bool:
    try:
        decode(message)
    except MessageError:
        return False
    return True


# --- PROMPTS

PARTIAL = PartialSequence(
    np.array([7, 8], np.int32), np.array([-0.5, -1.0], np.float32), (VersionSpan(3, 0, 2),), sample_index=1, generation_s=0.5
)
GROUPS = st.sampled_from(
    [
        encode_group(make_group(5, num_samples=3, done_samples=(0,), partials=(PARTIAL,))),
        encode_group(make_group(6)),
        encode_group(make_group(7, run="another-run")),
        encode_group(make_group(8, prompt=tuple(range(200)))),  # beyond the context
    ]
)


@settings(max_examples=EXAMPLES)
@given(st.lists(damaged(GROUPS), min_size=1, max_size=4))
@example([encode_group(make_group(7, run="another-run"))])
@example([b"", bytes(10_000)])
def test_any_bytes_on_prompts_are_set_aside_and_the_next_group_is_done(payloads: list[bytes]) -> None:
    asyncio.run(set_aside(payloads))


async def set_aside(payloads: list[bytes]) -> None:
    bad = [payload for payload in payloads if not good(payload, lambda data: decode_group(data, expected_run=RUN))]
    async with stage(in_progress=8) as one:
        for number, payload in enumerate(payloads):
            await one.bus.publish_prompt(payload, f"junk-{number}")
        await one.issue(99)
        seen: set[str] = set()
        async with asyncio.timeout(60), one.bus.read_sequences(1) as entries:
            while not {"g00000099.0", "g00000099.1"} <= seen:
                seen.add((await anext(entries)).msg_id)
            while (await one.bus.prompts_info()).messages:
                await asyncio.sleep(0)
        assert not one.running.done()
        assert one.counted("bad_messages", kind="prompt_group") == len(bad)
        letters = [decode_dead_letter(letter) for letter in await one.bus.dead_letters()]
        assert [letter.prompt_group for letter in letters] == bad
        assert all(letter.reason.startswith("unreadable_group: ") for letter in letters)


async def test_a_message_too_large_for_its_dead_letter_is_given_up_all_the_same() -> None:
    async with stage(max_payload_bytes=2000) as one:
        await one.bus.publish_prompt(bytes(2000), "junk")
        await one.issue(99)
        await one.published(2)
        (letter,) = map(decode_dead_letter, await one.bus.dead_letters())
        assert letter.prompt_group == b""
        assert "because its 2000 bytes are too many" in letter.reason


# --- CONTROL, as actors read it

EPOCH = pb.EpochStart(
    incarnation=9,
    epoch=1,
    store_address="127.0.0.1:1",
    backend="gloo",
    world_size=2,
    members=(pb.EpochMember(actor="a", process="p1", first_rank=1, ranks=1),),
    manifest_id=MANIFEST.manifest_id,
    deadline_s=5.0,
)
ANNOUNCE = pb.Announce(incarnation=9, epoch=1, version=3, manifest_id=MANIFEST.manifest_id, deadline_s=5.0)
COMMIT = pb.Commit(incarnation=9, epoch=1, version=3)
GOOD_ORDERS = {
    "manifest": MANIFEST.to_bytes(),
    "epoch": EPOCH.SerializeToString(),
    "announce": ANNOUNCE.SerializeToString(),
    "commit": COMMIT.SerializeToString(),
}
FOREIGN_ORDERS: list[tuple[str, Message]] = [
    ("epoch", changed(EPOCH, incarnation=8, members_0__process="p0")),
    ("epoch", changed(EPOCH, epoch=7, manifest_id="another manifest")),
    ("announce", changed(ANNOUNCE, incarnation=8, version=40)),
    ("announce", changed(ANNOUNCE, epoch=2, version=1)),
    ("commit", changed(COMMIT, incarnation=8, version=40)),
    ("commit", changed(COMMIT, version=2)),
    ("abort", pb.Abort(incarnation=8, epoch=1, version=40, reason="of another incarnation")),
    ("end", pb.RunEnd(incarnation=8, version=40, ok=True)),
]
"""Well-formed, and not for this actor: of another incarnation, another epoch, another manifest, another process."""
ORDERS = st.sampled_from([*GOOD_ORDERS.values(), *(message.SerializeToString() for _, message in FOREIGN_ORDERS)])


@st.composite
def junk_orders(draw: st.DrawFn) -> tuple[str, bytes]:
    if draw(st.booleans()):
        kind, message = draw(st.sampled_from(FOREIGN_ORDERS))
        return kind, message.SerializeToString()
    return draw(st.sampled_from(FROM_TRAINER)), draw(damaged(ORDERS))


def is_fatal_by_right(kind: str, payload: bytes) -> bool:
    """A well-formed manifest of another model: the one thing that must end an actor."""
    if kind != "manifest" or not good(payload, Manifest.from_bytes):
        return False
    return Manifest.from_bytes(payload).manifest_id != MANIFEST.manifest_id


@settings(max_examples=EXAMPLES)
@given(st.lists(junk_orders().filter(lambda order: not is_fatal_by_right(*order)), min_size=1, max_size=6))
@example([("announce", b""), ("commit", bytes(100_000)), ("manifest", b"\xff")])
def test_any_bytes_on_control_leave_the_actor_able_to_serve_the_next_version(orders: list[tuple[str, bytes]]) -> None:
    asyncio.run(listens_on(orders))


async def listens_on(orders: list[tuple[str, bytes]]) -> None:
    registry, receiver, gate = CollectorRegistry(), ScriptedReceiver(), ServingGate(max_lag=None)
    async with MemoryBus(RUN) as bus:
        listener = UpdateListener(bus, receiver, gate, ActorMetrics(registry), instance="a", process="p1")
        listening = asyncio.create_task(listener.run())
        await publish_all(bus, orders)
        assert receiver.served == []
        # What these say of version 3 of incarnation 9 may have been damaged into something that it still waits for.
        await publish_all(bus, GOOD_ORDERS.items())
        async with asyncio.timeout(60):
            while not receiver.served:
                assert not listening.done(), listening.exception()
                await asyncio.sleep(0)
        assert receiver.served == [PolicyVersion(9, 3)]
        bad = [order for order in orders if not good(ControlMessage(order[0], "", order[1], 1), decode_order)]
        assert registry.get_sample_value("pipelinerl_actor_bad_messages_total", {"kind": "control"}) or not bad
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


async def publish_all(bus: MemoryBus, orders: Iterable[tuple[str, bytes]]) -> None:
    """One after the other, each read before the next one takes its place."""
    for kind, payload in orders:
        await bus.publish_control(kind, payload)
        for _ in range(20):
            await asyncio.sleep(0)


# --- SEQUENCES

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


@settings(max_examples=100)
@given(
    payloads=st.lists(st.one_of(damaged(GOOD), UNTRUE), max_size=6), names=st.lists(st.integers(0, 9), min_size=6, max_size=6)
)
def test_whatever_is_on_the_log_the_trainer_goes_on_and_its_books_add_up(payloads: list[bytes], names: list[int]) -> None:
    asyncio.run(read_all(payloads, names))


async def read_all(payloads: list[bytes], names: list[int]) -> None:
    async with desk() as one, asyncio.timeout(60):
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


# --- CONTROL and the registrations, as the trainer reads them

ABOUT = {"actor": "a", "incarnation": 1, "epoch": 1}
ANSWERS = {
    "joined": pb.EpochJoined(**ABOUT),
    "staged": pb.Staged(**ABOUT, version=3, checksum=7, bytes=8, receive_s=0.5, prepare_s=0.5),
    "serving": pb.Serving(**ABOUT, version=3, stall_s=0.5),
    "failed": pb.Abort(**ABOUT, version=3, reason="why"),
}
REGISTRATION = pb.Registration(
    actor="a", process="p", grpc_address="host:1", ranks=1, manifest_id="m", policy_version=3, incarnation=1, phase="serving"
)


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["registration", *ANSWERS]),
    payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    data=st.data(),
)
def test_damaged_answers_and_registrations_are_harmless(kind: str, payloads: list[bytes], data: st.DataObject) -> None:
    payloads += data.draw(st.lists(damaged(st.just(ANSWERS.get(kind, REGISTRATION).SerializeToString())), max_size=3))
    asyncio.run(hear_all(kind, payloads))


async def hear_all(kind: str, payloads: list[bytes]) -> None:
    async with MemoryBus(RUN) as bus:
        nothing: Any = FakeSender()
        updater = WeightUpdater(bus, nothing, nothing, incarnation=1, deadline_s=5, join_timeout_s=60)
        running = asyncio.create_task(updater.run())
        try:
            async with asyncio.timeout(60):
                for payload in payloads:
                    if kind in ANSWER_TYPES:
                        await bus.publish_control(kind, payload, "a")
                    else:
                        await bus.put_member("b", payload)
                    await asyncio.sleep(0)
                await bus.put_member("a", REGISTRATION.SerializeToString())
                await updater.wait_for_members(1)
        finally:
            assert not running.done(), running
            running.cancel()
