"""The prompt groups in an actor's hands: acknowledged when all their sequences are published, kept alive until then.

A group may be here in several messages: one that was handed over in parts, or one whose first actor died between handing it
over and acknowledging it. Each sample is then generated once, and each message acknowledged when its own samples are stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from pipelinerl.bus.protocol import PromptDelivery
from pipelinerl.errors import BusError
from pipelinerl.types import PartialSequence, PromptGroup
from services.actor.completions import start_of

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
    """Consumes published sample indices, produces acknowledgements. Bounded by H: every group has a sample in progress."""

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
        await self.settle(group.group_id)

    async def settle(self, group_id: str) -> None:
        """Acknowledges what is done of this group. What cannot be now is tried again by `keep_alive`."""
        for position, held in list(self._held.get(group_id, {}).items()):
            if held.missing:
                continue
            try:
                await held.delivery.ack()
            except BusError as error:
                log.warning("group %s is published but not acknowledged yet: %s", group_id, error)
            else:
                self._drop(group_id, position)

    async def settle_all(self) -> None:
        for group_id in list(self._held):
            await self.settle(group_id)

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
            await self.settle_all()
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
        missing = sorted({index for held in unfinished for index in held.missing})
        asked = sum(held.group.num_samples - len(held.group.done_samples) for held in unfinished)
        partials = [self._there_is(unfinished, index) for index in missing]
        some = tuple(partial for partial in partials if len(partial.completion_token_ids))
        return Remainder(
            group=unfinished[0].group,
            missing=tuple(missing),
            partials=some,
            deliveries=tuple(held.delivery for held in unfinished),
            untouched=len(unfinished) == 1 and asked == len(missing) and not self._has_kept(unfinished[0]),
        )

    def _there_is(self, messages: list[HeldGroup], index: int) -> PartialSequence:
        """Of sample `index`: what was made here, else the longest of what the messages brought."""
        kept = self._kept.get(messages[0].group.sequence_id(index))
        brought = (start_of(held.group, index) for held in messages)
        return kept or max(brought, key=lambda partial: len(partial.completion_token_ids))

    def _has_kept(self, held: HeldGroup) -> bool:
        return any(held.group.sequence_id(index) in self._kept for index in held.missing)

    def _drop(self, group_id: str, position: int) -> None:
        messages = self._held.get(group_id, {})
        messages.pop(position, None)
        if not messages:
            self._held.pop(group_id, None)
