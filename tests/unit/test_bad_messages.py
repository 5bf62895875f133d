"""What an actor does with messages that are none: it counts them, sets them aside and goes on. Any bytes, on every subject."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import FROM_TRAINER, ControlMessage
from pipelinerl.errors import MessageError
from pipelinerl.messages.control import (
    Abort,
    Announce,
    Commit,
    EpochMember,
    EpochStart,
    RunEnd,
)
from pipelinerl.messages.sequences import (
    PartialSequence,
    PolicyVersion,
    VersionSpan,
    decode_dead_letter,
    decode_group,
    encode_group,
)
from pipelinerl.transfer.manifest import Manifest
from services.actor.generation import ServingGate
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import UpdateListener, decode_order
from tests.support.generation import stage
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, damaged, make_group
from tests.unit.test_update_protocol import MANIFEST, ScriptedReceiver

EXAMPLES = 150


# --- PROMPTS

PARTIAL = PartialSequence(
    1, np.array([7, 8], np.int32), np.array([-0.5, -1.0], np.float32), (VersionSpan(3, 0, 2),), None, 0.5
)
WHOLE = make_group(5, num_samples=3, done_samples=(0,), partials=(PARTIAL,))
GROUPS = st.sampled_from(
    [
        encode_group(WHOLE),
        encode_group(make_group(6)),
        encode_group(make_group(7, run="another-run")),
        encode_group(make_group(8, prompt=tuple(range(200)))),  # beyond the context
    ]
)


def is_group(payload: bytes) -> bool:
    try:
        decode_group(payload, expected_run=RUN)
    except MessageError:
        return False
    return True


@settings(max_examples=EXAMPLES)
@given(st.lists(damaged(GROUPS), min_size=1, max_size=4))
@example([encode_group(make_group(7, run="another-run"))])
@example([b"", bytes(10_000)])
def test_any_bytes_on_prompts_are_set_aside_and_the_next_group_is_done(payloads: list[bytes]) -> None:
    asyncio.run(set_aside(payloads))


async def set_aside(payloads: list[bytes]) -> None:
    bad = [payload for payload in payloads if not is_group(payload)]
    async with stage(in_progress=8) as one:
        for number, payload in enumerate(payloads):
            await one.bus.publish_prompt(payload, f"junk-{number}")
        await one.issue(99)
        seen: set[str] = set()
        async with asyncio.timeout(20), one.bus.read_sequences(1) as entries:
            while not {"g00000099.0", "g00000099.1"} <= seen:
                seen.add((await anext(entries)).msg_id)
            while (await one.bus.prompts_info()).messages:
                await asyncio.sleep(0)
        assert not one.running.done()
        assert one.counted("bad_messages", kind="prompt_group") == len(bad)
        letters = [decode_dead_letter(letter) for letter in await one.bus.dead_letters()]
        assert [letter.prompt_group for letter in letters] == bad
        assert all(letter.reason.startswith("unreadable_group: ") for letter in letters)


def test_a_message_too_large_for_its_dead_letter_is_given_up_all_the_same() -> None:
    async def run() -> None:
        async with stage(max_payload_bytes=2000) as one:
            await one.bus.publish_prompt(bytes(2000), "junk")
            await one.issue(99)
            await one.published(2)
            (letter,) = map(decode_dead_letter, await one.bus.dead_letters())
            assert letter.prompt_group == b""
            assert "its 2000 bytes are too many to be kept" in letter.reason

    asyncio.run(run())


# --- CONTROL

ME = EpochMember(actor="a", process="p1", first_rank=1, ranks=1)
EPOCH = EpochStart(
    incarnation=9,
    epoch=1,
    store_address="127.0.0.1:1",
    backend="gloo",
    world_size=2,
    members=(ME,),
    manifest_id=MANIFEST.manifest_id,
    deadline_s=5.0,
)
GOOD_ORDERS = {
    "manifest": MANIFEST.to_bytes(),
    "epoch": EPOCH.SerializeToString(),
    "announce": Announce(
        incarnation=9, epoch=1, version=3, manifest_id=MANIFEST.manifest_id, deadline_s=5.0
    ).SerializeToString(),
    "commit": Commit(incarnation=9, epoch=1, version=3).SerializeToString(),
}
FOREIGN_ORDERS = [
    (
        "epoch",
        EpochStart(
            incarnation=8,
            epoch=1,
            store_address="x:1",
            backend="gloo",
            world_size=2,
            members=(EpochMember(actor="a", process="p0", first_rank=1, ranks=1),),
            manifest_id="m",
            deadline_s=5.0,
        ).SerializeToString(),
    ),
    (
        "epoch",
        EpochStart(
            incarnation=9,
            epoch=7,
            store_address="x:1",
            backend="gloo",
            world_size=2,
            members=(ME,),
            manifest_id="another manifest",
            deadline_s=5.0,
        ).SerializeToString(),
    ),
    (
        "announce",
        Announce(
            incarnation=8, epoch=1, version=40, manifest_id=MANIFEST.manifest_id, deadline_s=5.0
        ).SerializeToString(),
    ),
    (
        "announce",
        Announce(
            incarnation=9, epoch=2, version=1, manifest_id=MANIFEST.manifest_id, deadline_s=5.0
        ).SerializeToString(),
    ),
    ("commit", Commit(incarnation=8, epoch=1, version=40).SerializeToString()),
    ("commit", Commit(incarnation=9, epoch=1, version=2).SerializeToString()),
    ("abort", Abort(incarnation=8, epoch=1, version=40, reason="of another incarnation").SerializeToString()),
    ("end", RunEnd(incarnation=8, version=40, ok=True).SerializeToString()),
]
"""Well-formed, and not for this actor: of another incarnation, another epoch, another manifest, another process."""
ORDERS = st.sampled_from([*GOOD_ORDERS.values(), *(payload for _, payload in FOREIGN_ORDERS)])


@st.composite
def junk_orders(draw: st.DrawFn) -> tuple[str, bytes]:
    if draw(st.booleans()):
        return draw(st.sampled_from(FOREIGN_ORDERS))
    kind = draw(st.sampled_from(FROM_TRAINER))
    return kind, draw(damaged(ORDERS))


def is_fatal_by_right(kind: str, payload: bytes) -> bool:
    """A well-formed manifest of another model: the one thing that must end an actor."""
    if kind != "manifest":
        return False
    try:
        return Manifest.from_bytes(payload).manifest_id != MANIFEST.manifest_id
    except MessageError:
        return False


def is_order(kind: str, payload: bytes) -> bool:
    try:
        decode_order(ControlMessage(kind, "", payload, 1))
    except MessageError:
        return False
    return True


@settings(max_examples=EXAMPLES)
@given(st.lists(junk_orders().filter(lambda order: not is_fatal_by_right(*order)), min_size=1, max_size=6))
@example([("announce", b""), ("commit", bytes(100_000)), ("manifest", b"\xff")])
def test_any_bytes_on_control_leave_the_actor_able_to_serve_the_next_version(orders: list[tuple[str, bytes]]) -> None:
    asyncio.run(listens_on(orders))


async def listens_on(orders: list[tuple[str, bytes]]) -> None:
    registry, receiver, gate = CollectorRegistry(), ScriptedReceiver(), ServingGate(max_lag=None)
    async with MemoryBus(RUN, server=MemoryServer()) as bus:
        await bus.create_streams()
        listener = UpdateListener(bus, receiver, gate, ActorMetrics(registry), instance="a", process="p1")
        listening = asyncio.create_task(listener.run())
        await publish_all(bus, orders)
        assert receiver.served == []
        # What these say of version 3 of incarnation 9 may have been damaged into something that it still waits for.
        await publish_all(bus, list(GOOD_ORDERS.items()))
        async with asyncio.timeout(20):
            while not receiver.served:
                assert not listening.done(), listening.exception()
                await asyncio.sleep(0)
        assert receiver.served == [PolicyVersion(9, 3)]
        bad = sum(not is_order(*order) for order in orders)
        assert registry.get_sample_value("pipelinerl_actor_bad_messages_total", {"kind": "control"}) or bad == 0
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


async def publish_all(bus: MemoryBus, orders: list[tuple[str, bytes]]) -> None:
    """One after the other, each read before the next one takes its place."""
    for kind, payload in orders:
        await bus.publish_control(kind, payload)
        for _ in range(20):
            await asyncio.sleep(0)
