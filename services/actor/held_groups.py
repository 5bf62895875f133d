"""The prompt groups in an actor's hands: acknowledged when all their sequences are published, kept alive until then."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from pipelinerl.bus.protocol import PromptDelivery
from pipelinerl.errors import BusError
from pipelinerl.types import PromptGroup

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldGroup:
    """One delivered group and the sample indices still to be published."""

    group: PromptGroup
    delivery: PromptDelivery
    missing: set[int] = field(default_factory=set)


class HeldGroups:
    """Consumes published sample indices, produces acknowledgements. Bounded by H: every group has a sample in progress."""

    def __init__(self) -> None:
        self._held: dict[str, HeldGroup] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, group: PromptGroup, delivery: PromptDelivery) -> list[int] | None:
        """Sample indices to generate, or None when this group is already here (delivered twice)."""
        if group.group_id in self._held:
            return None
        missing = set(range(group.num_samples)) - set(group.done_samples)
        self._held[group.group_id] = HeldGroup(group, delivery, missing)
        return sorted(missing)

    async def published(self, group: PromptGroup, sample_index: int) -> None:
        """Marks one sequence as stored in SEQUENCES; acknowledges the group with its last one."""
        held = self._held.get(group.group_id)
        if held is None:
            return
        held.missing.discard(sample_index)
        if held.missing:
            return
        del self._held[group.group_id]
        try:
            await held.delivery.ack()
        except BusError as error:
            # It will be delivered again; its sequences are recognised by id and stored once.
            log.warning("group %s is published but not acknowledged: %s", group.group_id, error)

    async def keep_alive(self, every_s: float) -> None:
        """Extends the ack deadline of everything held, for as long as the actor works. Runs until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            for held in list(self._held.values()):
                try:
                    await held.delivery.in_progress()
                except BusError as error:
                    log.warning("cannot extend the deadline of group %s: %s", held.group.group_id, error)
