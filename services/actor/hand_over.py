"""Keep an actor's prompt groups until they are acknowledged or handed over to another actor."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.reader import PromptDelivery
from pipelinerl.errors import BusError, MessageError, NotPermitted
from pipelinerl.messages.sequences import PartialSequence, PromptGroup, encode_group
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry.tracing import headers_of, trace_in
from services.actor.engine import state_of
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

HEADER_ROOM_BYTES = 1024
AT_ONCE = 16
ANSWER_WITHIN_S = 1.0


async def answered(answer: Awaitable[None], action: str) -> bool:
    """Await `answer`, a call of a `PromptDelivery`, and return whether it succeeded. `action` names the call in the log. A
    failure is only logged, because the call is repeated or the message is delivered again."""
    try:
        await answer
    except BusError as error:
        log.warning("cannot %s; the actor tries again, or NATS delivers the message again: %s", action, error)
        return False
    return True


@dataclass(eq=False)
class HeldMessage:
    """One delivered message, and its samples that are not stored yet."""

    delivery: PromptDelivery
    missing: set[int]


@dataclass(eq=False)
class HeldGroup:
    """One group, which may have arrived in several messages, and its unfinished samples."""

    group: PromptGroup
    messages: dict[int, HeldMessage] = field(default_factory=dict)
    partials: dict[int, PartialSequence] = field(default_factory=dict)
    """All known tokens of each sample that is not stored yet, by sample index."""

    @property
    def missing(self) -> set[int]:
        return {index for message in self.messages.values() for index in message.missing}


class HeldGroups(dict[str, HeldGroup]):
    """Groups by id. The ack deadline of each message is extended until all its samples are stored; then the message is
    acknowledged.

    A group arrives in several messages if it was handed over in parts, or by an actor that died before it acknowledged its own
    message. This actor generates each sample once."""

    def holds(self, group: PromptGroup, delivery: PromptDelivery) -> bool:
        return group.group_id in self and delivery.position in self[group.group_id].messages

    def take(self, group: PromptGroup, delivery: PromptDelivery) -> list[int]:
        """Add a message. Return the indices of those of its samples that no earlier held message requests."""
        held = self.setdefault(group.group_id, HeldGroup(group))
        if delivery.position in held.messages:  # redelivered: answer the later delivery
            held.messages[delivery.position].delivery = delivery
            return []
        in_hand, missing = held.missing, set(range(group.num_samples)) - set(group.done_samples)
        held.messages[delivery.position] = HeldMessage(delivery, missing)
        for brought in group.partials:
            here = held.partials.get(brought.sample_index)
            if here is None or here.num_sampled_tokens < brought.num_sampled_tokens:
                held.partials[brought.sample_index] = brought
        return sorted(missing - in_hand)

    def keep(self, group: PromptGroup, sample: PartialSequence) -> None:
        self[group.group_id].partials[sample.sample_index] = sample

    async def published(self, group: PromptGroup, sample_index: int) -> None:
        """Mark a sample as stored in SEQUENCES or handed back to PROMPTS, and acknowledge messages that waited only for it."""
        if held := self.get(group.group_id):
            held.partials.pop(sample_index, None)
            for message in held.messages.values():
                message.missing.discard(sample_index)
            await self.acknowledge(group.group_id)

    async def acknowledge(self, group_id: str) -> None:
        """Acknowledge this group's messages whose samples are all stored. If that fails, `keep_alive` tries again."""
        held = self.get(group_id)
        if held is None:
            return
        for position, message in list(held.messages.items()):
            if not message.missing and await answered(message.delivery.ack(), f"acknowledge group {group_id}"):
                held.messages.pop(position, None)
        if not held.messages and self.get(group_id) is held:
            del self[group_id]

    async def keep_alive(self, every_s: float) -> None:
        """Repeat failed acknowledgements and extend the other messages' deadlines every `every_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            for group_id, held in list(self.items()):
                await self.acknowledge(group_id)
                for message in list(held.messages.values()):
                    await answered(message.delivery.in_progress(), f"extend the deadline of group {group_id}")


async def hand_over(bus: Bus, held: HeldGroups, metrics: ActorMetrics, *, instance: str, timeout_s: float) -> int:
    """Publish the unfinished groups of the leaving actor `instance` on PROMPTS, with their generated tokens. Return the number
    of stored groups. If a group cannot be stored in time, NATS delivers its old messages again. Takes at most `ANSWER_WITHIN_S`
    longer than `timeout_s`."""
    until, at_once = asyncio.get_running_loop().time() + timeout_s, asyncio.Semaphore(AT_ONCE)

    async def pass_on(one: HeldGroup) -> bool:
        group_id, missing = one.group.group_id, sorted(one.missing)
        try:
            if missing:
                async with asyncio.timeout_at(until), at_once:
                    await publish_samples(bus, one, missing, instance)
        except (BusError, NotPermitted, MessageError, TimeoutError) as error:
            lost = sum(sample.num_sampled_tokens for sample in one.partials.values())
            log.error(
                "cannot hand over group %s: NATS delivers its %d unfinished samples again; up to %d tokens are lost: %s",
                group_id, len(missing), lost, str(error) or "the stream did not take it in time",
            )  # fmt: skip
        else:
            for sample in one.partials.values():
                metrics.handed_over.labels(state_of(sample)).inc()
            for message in one.messages.values():
                message.missing.clear()
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                for message in list(one.messages.values()):
                    await (message.delivery.give_back() if message.missing else message.delivery.ack())
        except (BusError, TimeoutError) as error:
            log.warning("cannot ack or return group %s; NATS delivers it again: %s", group_id, str(error) or "timed out")
        held.pop(group_id, None)
        return bool(missing) and not one.missing

    return sum(await asyncio.gather(*(pass_on(one) for one in list(held.values()))))


async def publish_samples(bus: Bus, held: HeldGroup, samples: Sequence[int], instance: str) -> None:
    """Publish messages that ask another actor to generate `samples`. Retries while NATS is unreachable or PROMPTS is full.
    Raises `PayloadTooLarge`, `MessageError` or `NotPermitted`."""
    group_id, partials = held.group.group_id, [held.partials[index] for index in sorted(held.partials)]
    room = bus.max_payload_bytes - HEADER_ROOM_BYTES
    payloads, left_out = messages_of(held.group, samples, partials, room)
    if left_out:
        log.error("group %s: %d tokens are too many for a message and will be generated again", group_id, left_out)
    first = next(iter(held.messages.values()))
    headers = headers_of(trace_in(first.delivery.headers))  # the next actor continues the same trace
    for payload in payloads:
        msg_id = f"{group_id}/{instance}-{uuid.uuid4().hex[:8]}"
        await retry_forever(partial(bus.publish_prompt, payload, msg_id, headers), f"hand over {msg_id}")


def messages_of(
    group: PromptGroup, missing: Sequence[int], partials: Collection[PartialSequence], max_bytes: int
) -> tuple[list[bytes], int]:
    """Return messages for PROMPTS, and the number of discarded tokens. The messages request each sample in `missing` once, with
    its partial sequence. They are split to fit `max_bytes`; a sample too long for one message loses its tokens. Raises
    `MessageError`. Pure."""
    others = tuple(sorted(set(range(group.num_samples)) - set(missing)))
    mine = tuple(sample for sample in partials if sample.sample_index in missing)
    payload = encode_group(replace(group, partials=mine, done_samples=others))
    if len(payload) <= max_bytes or not mine:
        return [payload], 0
    if len(missing) == 1:
        bare, _ = messages_of(group, missing, (), max_bytes)
        return bare, mine[0].num_sampled_tokens
    half = len(missing) // 2
    first, left_out = messages_of(group, missing[:half], mine, max_bytes)
    second, also_left_out = messages_of(group, missing[half:], mine, max_bytes)
    return first + second, left_out + also_left_out
