"""The prompt groups in an actor's hands, until they are acknowledged or handed over to another actor.

It generates nothing and stops nothing: whoever calls it has done so.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
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


@dataclass(eq=False)
class HeldMessage:
    """One delivered message, and the samples still to be stored of those that it asks for."""

    delivery: PromptDelivery
    missing: set[int]


@dataclass(eq=False)
class HeldGroup:
    """What is left to do of one group, whatever the messages it came in."""

    group: PromptGroup
    messages: dict[int, HeldMessage] = field(default_factory=dict)
    """By position in the stream."""
    partials: dict[int, PartialSequence] = field(default_factory=dict)
    """What there is of a sample that is not stored yet: made here, or else the longest that a message brought."""

    @property
    def missing(self) -> set[int]:
        """Samples that are not stored yet."""
        return {index for message in self.messages.values() for index in message.missing}


class HeldGroups:
    """Groups are acknowledged when all their sequences are published, and kept alive until then.

    A group may be here in several messages: one that was handed over in parts, or one whose first actor died between handing
    it over and acknowledging it. Each sample is then generated once, and each message acknowledged when its own samples are
    stored. Consumes published sample indices, produces acknowledgements. Bounded by H: every group has a sample in progress.
    """

    def __init__(self) -> None:
        self._held: dict[str, HeldGroup] = {}

    def __len__(self) -> int:
        """Groups in hand, whatever the messages they came in. May be read on any thread."""
        return len(self._held)

    def __getitem__(self, group_id: str) -> HeldGroup:
        return self._held[group_id]

    def unfinished(self) -> list[HeldGroup]:
        """Those that lack samples."""
        return [held for held in self._held.values() if held.missing]

    def holds(self, group: PromptGroup, delivery: PromptDelivery) -> bool:
        return group.group_id in self._held and delivery.position in self._held[group.group_id].messages

    def take(self, group: PromptGroup, delivery: PromptDelivery) -> list[int]:
        """Sample indices to generate: those asked for that no message in hand has asked for already."""
        held = self._held.setdefault(group.group_id, HeldGroup(group))
        if delivery.position in held.messages:  # delivered twice: the later delivery is the one to answer
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
        """Notes what there is of a sample that is not published yet: a hand-over takes it along."""
        held = self._held[group.group_id]
        held.partials[sample.sample_index] = sample

    async def published(self, group: PromptGroup, sample_index: int) -> None:
        """Marks one sequence as stored in SEQUENCES; acknowledges a message with its last one."""
        await self.done_with(group.group_id, [sample_index])

    async def done_with(self, group_id: str, samples: Iterable[int]) -> None:
        """They are stored, or another actor's from now on; a message that asks for no other is acknowledged."""
        if held := self._held.get(group_id):
            for sample_index in samples:
                held.partials.pop(sample_index, None)
                for message in held.messages.values():
                    message.missing.discard(sample_index)
            await self.acknowledge(group_id)

    async def acknowledge(self, group_id: str) -> None:
        """Acknowledges what is done of this group. What cannot be now is tried again by `keep_alive`."""
        held = self._held.get(group_id)
        if held is None:
            return
        for position, message in list(held.messages.items()):
            if message.missing:
                continue
            try:
                await message.delivery.ack()
            except BusError as error:
                log.warning("group %s is published but not acknowledged yet: %s", group_id, error)
            else:
                held.messages.pop(position, None)
        if not held.messages and self._held.get(group_id) is held:
            del self._held[group_id]

    async def acknowledge_all(self) -> None:
        for group_id in list(self._held):
            await self.acknowledge(group_id)

    def forget(self, group_id: str) -> None:
        """It is another actor's now."""
        del self._held[group_id]

    async def keep_alive(self, every_s: float) -> None:
        """Extends the ack deadline of everything held, for as long as the actor works. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.acknowledge_all()
            for group_id, held in list(self._held.items()):
                for message in list(held.messages.values()):
                    try:
                        await message.delivery.in_progress()
                    except BusError as error:
                        log.warning("cannot extend the deadline of group %s: %s", group_id, error)


HEADER_ROOM_BYTES = 1024
"""For a message's headers, its id above all."""
AT_ONCE = 16
ANSWER_WITHIN_S = 1.0


async def hand_over(bus: Bus, held: HeldGroups, metrics: ActorMetrics, *, instance: str, timeout_s: float) -> None:
    """Returns to PROMPTS what a leaving actor has begun, with the tokens it has generated; another actor goes on there.

    Consumes the groups in hand, produces new messages on PROMPTS and acknowledges the old ones, in this order: a group is never
    acknowledged before the messages that take its place are stored. It waits for the stream, for `timeout_s` and a little at
    most. What cannot be stored in time is given back as it came, or redelivered by itself; the log says what is generated anew
    then. `instance`: name of the actor that leaves.
    """
    until, at_once = asyncio.get_running_loop().time() + timeout_s, asyncio.Semaphore(AT_ONCE)

    async def pass_on(one: HeldGroup) -> None:
        group_id = one.group.group_id
        try:
            async with asyncio.timeout_at(until), at_once:
                await _publish(bus, one, sorted(one.missing), instance)
        except (BusError, NotPermitted, MessageError, TimeoutError) as error:
            lost = sum(sample.num_sampled_tokens for sample in one.partials.values())
            log.error(
                "group %s cannot be handed over, its %d missing samples start anew and %d tokens are lost: %s",
                group_id, len(one.missing), lost, error or "the stream did not take it in time",
            )  # fmt: skip
            await _answer(one, acknowledge=False)
        else:
            for sample in one.partials.values():
                metrics.handed_over.labels(state_of(sample)).inc()
            await _answer(one, acknowledge=True)
        held.forget(group_id)

    await asyncio.gather(*(pass_on(one) for one in held.unfinished()))
    with suppress(TimeoutError):  # what is done comes again, and is recognised by its sequences' ids
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await held.acknowledge_all()


async def hand_back(bus: Bus, held: HeldGroups, group_id: str, samples: Sequence[int], *, instance: str) -> None:
    """Returns `samples` of a group in hand to PROMPTS, which this actor has not begun; another one generates them.

    Waits for the stream. Raises `MessageError`, `PayloadTooLarge`; they stay in hand then.
    """
    await _publish(bus, held[group_id], samples, instance)
    await held.done_with(group_id, samples)


async def _publish(bus: Bus, held: HeldGroup, samples: Sequence[int], instance: str) -> None:
    """Asks for `samples` of what is held. Raises `PayloadTooLarge`, `MessageError`."""
    group_id, partials = held.group.group_id, [held.partials[index] for index in sorted(held.partials)]
    room = bus.max_payload_bytes - HEADER_ROOM_BYTES
    payloads, left_out = messages_of(held.group, samples, partials, room)
    if left_out:
        log.error("group %s: %d tokens are too many for a message, and are generated anew", group_id, left_out)
    first = next(iter(held.messages.values()))
    headers = headers_of(trace_in(first.delivery.headers))  # who goes on follows the same trace
    for payload in payloads:
        msg_id = f"{group_id}/{instance}-{uuid.uuid4().hex[:8]}"
        await retry_forever(partial(bus.publish_prompt, payload, msg_id, headers), f"hand over {msg_id}")


async def _answer(held: HeldGroup, *, acknowledge: bool) -> None:
    """Where that is not possible the messages are redelivered when their deadline has passed: repeated work, no loss."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            for message in held.messages.values():
                done = acknowledge or not message.missing
                await (message.delivery.ack() if done else message.delivery.give_back())
    except (BusError, TimeoutError) as error:
        log.warning("group %s is redelivered later: %s", held.group.group_id, error or "no answer in time")


def messages_of(
    group: PromptGroup, missing: Sequence[int], partials: Collection[PartialSequence], max_bytes: int
) -> tuple[list[bytes], int]:
    """PROMPTS messages that together ask for the samples `missing` of `group`, each once, and each with its partial.

    Each is `max_bytes` long at most: too long a one is halved. The second value counts the tokens of samples that are too
    long by themselves; these are asked for from the prompt on. Raises `MessageError`. Pure.
    """
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
