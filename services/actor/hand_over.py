"""The prompt groups in an actor's hands, until they are acknowledged or handed over to another actor.

It generates nothing and stops nothing: whoever calls it has done so.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.reader import PromptDelivery
from pipelinerl.errors import BusError, MessageError
from pipelinerl.messages.sequences import PartialSequence, PromptGroup, check_group, encode_group
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry.spans import headers_of, trace_in
from services.actor.completions import start_of, state_of
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldGroup:
    """One delivered message and the sample indices still to be published of those that it asks for."""

    group: PromptGroup
    delivery: PromptDelivery
    missing: set[int]


@dataclass(frozen=True, eq=False)
class Remainder:
    """What is left to do of one group, whatever the messages it came in."""

    group: PromptGroup
    missing: tuple[int, ...]
    partials: tuple[PartialSequence, ...]
    """Of those among `missing` of which there is something."""
    deliveries: tuple[PromptDelivery, ...]
    untouched: bool
    """Nothing was added here to what the message says."""


class HeldGroups:
    """Groups are acknowledged when all their sequences are published, and kept alive until then.

    A group may be here in several messages: one that was handed over in parts, or one whose first actor died between handing
    it over and acknowledging it. Each sample is then generated once, and each message acknowledged when its own samples are
    stored. Consumes published sample indices, produces acknowledgements. Bounded by H: every group has a sample in progress.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[int, HeldGroup]] = {}  # by group, then by position of the message
        self._kept: dict[str, PartialSequence] = {}  # by sequence id

    def __len__(self) -> int:
        return sum(len(messages) for messages in self._held.values())

    @property
    def num_groups(self) -> int:
        """Groups in hand, whatever the messages they came in. May be read on any thread."""
        return len(self._held)

    def holds(self, group: PromptGroup, delivery: PromptDelivery) -> bool:
        return delivery.position in self._held.get(group.group_id, ())

    def take(self, group: PromptGroup, delivery: PromptDelivery) -> list[int]:
        """Sample indices to generate: those asked for that no message in hand has asked for already."""
        messages = self._held.setdefault(group.group_id, {})
        if delivery.position in messages:  # delivered twice: the later delivery is the one to answer
            messages[delivery.position].delivery = delivery
            return []
        missing = set(range(group.num_samples)) - set(group.done_samples)
        in_hand = {index for held in messages.values() for index in held.missing}
        messages[delivery.position] = HeldGroup(group, delivery, missing)
        return sorted(missing - in_hand)

    def keep(self, group: PromptGroup, partial: PartialSequence) -> None:
        """Notes what there is of a sample that is not published yet: a hand-over takes it along."""
        self._kept[group.sequence_id(partial.sample_index)] = partial

    async def published(self, group: PromptGroup, sample_index: int) -> None:
        """Marks one sequence as stored in SEQUENCES; acknowledges a message with its last one."""
        self._kept.pop(group.sequence_id(sample_index), None)
        for held in self._held.get(group.group_id, {}).values():
            held.missing.discard(sample_index)
        await self.acknowledge(group.group_id)

    async def acknowledge(self, group_id: str) -> None:
        """Acknowledges what is done of this group. What cannot be now is tried again by `keep_alive`."""
        for position, held in list(self._held.get(group_id, {}).items()):
            if held.missing:
                continue
            try:
                await held.delivery.ack()
            except BusError as error:
                log.warning("group %s is published but not acknowledged yet: %s", group_id, error)
            else:
                messages = self._held.get(group_id, {})
                messages.pop(position, None)
                if not messages:
                    self._held.pop(group_id, None)

    async def acknowledge_all(self) -> None:
        for group_id in list(self._held):
            await self.acknowledge(group_id)

    def remainders(self) -> Iterator[Remainder]:
        """Of each group in hand that lacks samples."""
        for messages in list(self._held.values()):
            if remainder := self._remainder(list(messages.values())):
                yield remainder

    def forget(self, group_id: str) -> None:
        """It is another actor's now."""
        for held in self._held.pop(group_id, {}).values():
            for index in held.missing:
                self._kept.pop(held.group.sequence_id(index), None)

    async def keep_alive(self, every_s: float) -> None:
        """Extends the ack deadline of everything held, for as long as the actor works. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.acknowledge_all()
            for group_id, messages in list(self._held.items()):
                for held in list(messages.values()):
                    try:
                        await held.delivery.in_progress()
                    except BusError as error:
                        log.warning("cannot extend the deadline of group %s: %s", group_id, error)

    def _remainder(self, messages: list[HeldGroup]) -> Remainder | None:
        unfinished = [held for held in messages if held.missing]
        if not unfinished:
            return None
        group, missing = unfinished[0].group, sorted({index for held in unfinished for index in held.missing})
        asked = sum(held.group.num_samples - len(held.group.done_samples) for held in unfinished)
        partials = [self._there_is(unfinished, index) for index in missing]
        added = any(group.sequence_id(index) in self._kept for index in missing)
        return Remainder(
            group=group,
            missing=tuple(missing),
            partials=tuple(partial for partial in partials if len(partial.completion_token_ids)),
            deliveries=tuple(held.delivery for held in unfinished),
            untouched=len(unfinished) == 1 and asked == len(missing) and not added,
        )

    def _there_is(self, messages: list[HeldGroup], index: int) -> PartialSequence:
        """Of sample `index`: what was made here, else the longest of what the messages brought."""
        kept = self._kept.get(messages[0].group.sequence_id(index))
        brought = (start_of(held.group, index) for held in messages)
        return kept or max(brought, key=lambda partial: len(partial.completion_token_ids))


HEADER_ROOM_BYTES = 1024
"""For a message's headers, its id above all."""
AT_ONCE = 16
ANSWER_WITHIN_S = 1.0


class HandOver:
    """Returns to PROMPTS what a leaving actor has begun, with the tokens it has generated; another actor goes on there.

    Consumes the groups in hand, produces new messages on PROMPTS and acknowledges the old ones, in this order: a group is never
    acknowledged before the messages that take its place are stored. It waits for the stream, up to a deadline. What cannot be
    stored in time is given back as it came, or redelivered by itself; the log says what is generated anew then. `instance`:
    name of the actor that leaves.
    """

    def __init__(self, bus: Bus, held: HeldGroups, metrics: ActorMetrics, *, instance: str) -> None:
        self._bus, self._held, self._metrics, self._instance = bus, held, metrics, instance
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def run(self, timeout_s: float) -> None:
        """Returns when every group in hand is handed over or given back, after `timeout_s` and a little at most."""
        until = asyncio.get_running_loop().time() + timeout_s
        await asyncio.gather(*(self._one(remainder, until) for remainder in self._held.remainders()))
        with suppress(TimeoutError):  # what is done comes again, and is recognised by its sequences' ids
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._held.acknowledge_all()

    async def _one(self, remainder: Remainder, until: float) -> None:
        group_id = remainder.group.group_id
        try:
            async with asyncio.timeout_at(until), self._at_once:
                anew = not remainder.untouched or any(one.num_deliveries > 1 for one in remainder.deliveries)
                if anew:  # an untouched one too, once: else orderly stops would add up to too many deliveries
                    await self._publish(remainder)
        except (BusError, MessageError, TimeoutError) as error:
            lost = sum(len(partial.completion_token_ids) for partial in remainder.partials)
            log.error(
                "group %s cannot be handed over, its %d missing samples start anew and %d tokens are lost: %s",
                group_id, len(remainder.missing), lost, error or "the stream did not take it in time",
            )  # fmt: skip
            await self._answer(remainder, acknowledge=False)
        else:
            await self._answer(remainder, acknowledge=anew)
        self._held.forget(group_id)

    async def _publish(self, remainder: Remainder) -> None:
        """Raises `BusError`, `MessageError`."""
        group_id, sound = remainder.group.group_id, [p for p in remainder.partials if _is_sound(remainder.group, p)]
        payloads, left_out = messages_of(
            remainder.group, remainder.missing, sound, self._bus.max_payload_bytes - HEADER_ROOM_BYTES
        )
        if left_out or len(sound) < len(remainder.partials):
            bad = len(remainder.partials) - len(sound)
            log.error("group %s: %d tokens are too many for a message, %d samples unsound", group_id, left_out, bad)
        headers = headers_of(trace_in(remainder.deliveries[0].headers))  # who goes on follows the same trace
        for payload in payloads:
            msg_id = f"{group_id}/{self._instance}-{uuid.uuid4().hex[:8]}"
            publish = partial(self._bus.publish_prompt, payload, msg_id, headers)
            await retry_forever(publish, f"hand over {msg_id}")
        for kept in sound:
            self._metrics.handed_over.labels(state_of(kept)).inc()

    async def _answer(self, remainder: Remainder, *, acknowledge: bool) -> None:
        """Where that is not possible the messages are redelivered when their deadline has passed: repeated work, no loss."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                for delivery in remainder.deliveries:
                    await (delivery.ack() if acknowledge else delivery.give_back())
        except (BusError, TimeoutError) as error:
            log.warning("group %s is redelivered later: %s", remainder.group.group_id, error or "no answer in time")


def messages_of(
    group: PromptGroup, missing: Sequence[int], partials: Sequence[PartialSequence], max_bytes: int
) -> tuple[list[bytes], int]:
    """PROMPTS messages that together ask for the samples `missing` of `group`, each once, and each with its partial.

    Each is `max_bytes` long at most: too long a one is halved. The second value counts the tokens of samples that are too
    long by themselves; these are asked for from the prompt on. Raises `MessageError`. Pure.
    """
    others = tuple(sorted(set(range(group.num_samples)) - set(missing)))
    mine = tuple(partial for partial in partials if partial.sample_index in missing)
    payload = encode_group(replace(group, partials=mine, done_samples=others))
    if len(payload) <= max_bytes or not mine:
        return [payload], 0
    if len(missing) == 1:
        bare, _ = messages_of(group, missing, (), max_bytes)
        return bare, len(mine[0].completion_token_ids)
    half = len(missing) // 2
    first, left_out = messages_of(group, missing[:half], mine, max_bytes)
    second, also_left_out = messages_of(group, missing[half:], mine, max_bytes)
    return first + second, left_out + also_left_out


def _is_sound(group: PromptGroup, partial: PartialSequence) -> bool:
    """The next actor would accept it."""
    try:
        check_group(replace(group, partials=(partial,), done_samples=()))
    except MessageError as error:
        log.error("sequence %s is not handed over: %s", group.sequence_id(partial.sample_index), error)
        return False
    return True
