"""Keeps the run's streams short and notices what was lost on them.

Every few seconds it purges from SEQUENCES what nobody will read again, has a checkpoint written where the log fills up before
one is due, and looks for prompt groups that nobody works on: taken off PROMPTS although samples of them never came. It waits
for time and for the bus, and consumes nothing; what it ends goes through `Intake`, so that the feeder issues another group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pipelinerl.bus.protocol import Bus, StreamInfo, StreamLimits, group_id_of
from pipelinerl.errors import BusError, ServiceError
from services.trainer.data.intake import Intake
from services.trainer.data.tracker import SequenceTracker

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
LOST_AFTER_S = 60.0
GROUP_LOST = "prompt group lost"
FULL_SHARE = 0.5
"""Of a log's limit: fuller than this, it should become shorter."""


class _Gone(NamedTuple):
    """When a group was first missed, and the end of the log then."""

    since_s: float
    log_end: int


class StreamUpkeep:
    """`checkpoint` writes one; `readable_from(filling)`: lowest position of the log that may be read again, by
    the newest checkpoint alone where the log is `filling` up. `on_look` hears what is seen of `prompts` and `sequences`.

    An actor acknowledges a group when all its sequences are stored, and an acknowledged group leaves the queue. So once
    a group has left it, and the log has been read up to where it ended at that time, what did not come never will.
    `lost_after_s` is on top of that. A group that was handed over is on the queue again, at another position.
    """

    def __init__(
        self,
        bus: Bus,
        tracker: SequenceTracker,
        intake: Intake,
        readable_from: Callable[[bool], int],
        checkpoint: Callable[[], Awaitable[None]],
        *,
        on_look: Callable[[str, StreamInfo], None] = lambda stream, info: None,
        every_s: float = LOOK_EVERY_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self._bus, self._tracker, self._intake = bus, tracker, intake
        self._readable_from, self._checkpoint = readable_from, checkpoint
        self._on_look, self._every_s, self._lost_after_s = on_look, every_s, lost_after_s
        self._purged_below = 1
        self._gone: dict[str, _Gone] = {}

    async def run(self) -> None:
        """Runs until cancelled. Raises `UserError` where `Intake` does."""
        while True:
            try:
                prompts, sequences = await self._bus.prompts_info(), await self._bus.sequences_info()
                self._on_look("prompts", prompts)
                self._on_look("sequences", sequences)
                await self._purge(sequences)
                await self._look_for_lost_groups(prompts)
            except BusError as error:
                log.info("the streams are looked after later: %s", error)
            await asyncio.sleep(self._every_s)

    async def _purge(self, sequences: StreamInfo) -> None:
        filling = fills_up(sequences, self._bus.limits)
        if filling:
            try:
                await self._checkpoint()
            except ServiceError as error:
                log.error("SEQUENCES is more than half full, and stays so: %s", error)
        readable_from = self._readable_from(filling)
        if readable_from > self._purged_below:
            await self._bus.purge_sequences(readable_from)
            self._purged_below = readable_from

    async def _look_for_lost_groups(self, prompts: StreamInfo) -> None:
        gone = self._tracker.gone_from_queue(prompts.first_position)
        if gone:
            still_there = {group_id_of(prompt.msg_id): prompt.position for prompt in await self._bus.pending_prompts()}
            for group_id in set(gone) & set(still_there):
                self._tracker.published(group_id, still_there[group_id])
            gone = tuple(group_id for group_id in gone if group_id not in still_there)
        log_end = (await self._bus.sequences_info()).last_position if gone else 0
        now_s = asyncio.get_running_loop().time()
        self._gone = {group_id: self._gone.get(group_id, _Gone(now_s, log_end)) for group_id in gone}
        for group_id, (since_s, end) in self._gone.items():
            if now_s - since_s >= self._lost_after_s and self._intake.position >= end:
                log.error("group %s left the queue, and not all of its sequences came", group_id)
                await self._intake.fail_missing(group_id, GROUP_LOST)


def fills_up(log: StreamInfo, limits: StreamLimits) -> bool:
    """Whether SEQUENCES is on its way to refuse the next sequence. Pure."""
    bytes_share, messages_share = log.bytes / limits.sequences_max_bytes, log.messages / limits.sequences_max_messages
    return max(bytes_share, messages_share) > FULL_SHARE
