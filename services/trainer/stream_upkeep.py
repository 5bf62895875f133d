"""Keep the run's streams short, and find prompt groups that were lost.

Here, a group is lost if it has left the stream PROMPTS but some of its sequences never arrived. `Intake` then records its
missing samples as failed. If too few samples are left to train on, the feeder issues another group.
"""

from __future__ import annotations

import asyncio
import logging

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.link import is_stream_missing
from pipelinerl.bus.protocol import StreamInfo, group_id_of
from pipelinerl.errors import BusError, ServiceError
from pipelinerl.rl.ledger import SequenceTracker
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.data.intake import Intake

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
LOST_AFTER_S = 60.0
FULL_SHARE = 0.5
"""Share of the limits of SEQUENCES above which a checkpoint is written, so that older messages can be purged."""


class StreamUpkeep:
    """Purges messages from SEQUENCES that no kept checkpoint needs, and fails the missing samples of lost groups. If SEQUENCES
    is more than half full, it first writes a checkpoint, then purges all messages that the newest checkpoint does not need."""

    def __init__(self, bus: Bus, tracker: SequenceTracker, intake: Intake, checkpoints: Checkpointer) -> None:
        self._bus, self._tracker, self._intake, self._checkpoints = bus, tracker, intake, checkpoints
        self.streams: dict[str, StreamInfo] = {}
        self._gone: dict[str, tuple[float, int]] = {}
        """For each group that left PROMPTS: when this was noticed (event loop's clock), and SEQUENCES' last position then."""

    async def run(self) -> None:
        """Work until cancelled. Raises `UserError` if too many consecutive groups are lost, and `BusError` if a stream no
        longer exists. The next trainer then creates the stream and publishes unfinished groups again."""
        while True:
            try:
                prompts, sequences = await self._bus.prompts_info(), await self._bus.sequences_info()
                self.streams = {"prompts": prompts, "sequences": sequences}
                await self._purge(sequences)
                await self._look_for_lost_groups(prompts)
            except BusError as error:
                if is_stream_missing(error):
                    raise
                log.info("the streams cannot be checked or purged now; the trainer will try again: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _purge(self, sequences: StreamInfo) -> None:
        limits = self._bus.limits
        bytes_share = sequences.bytes / limits.sequences_max_bytes
        messages_share = sequences.messages / limits.sequences_max_messages
        filling = max(bytes_share, messages_share) > FULL_SHARE  # a full log would refuse sequences
        if filling:
            try:
                await self._checkpoints.write(anew=True)
            except ServiceError as error:
                log.error("SEQUENCES is more than half full and cannot be purged, as no checkpoint can be written: %s", error)
        # Keep the messages that a resume from any kept checkpoint reads; if the log fills up, only those for the newest.
        positions = self._checkpoints.positions.values()
        readable_from = (max(positions) if filling else min(positions)) + 1 if positions else 1
        if readable_from > sequences.first_position:
            await self._bus.purge_sequences(readable_from)

    async def _look_for_lost_groups(self, prompts: StreamInfo) -> None:
        """Fail the missing samples of groups that have left PROMPTS although some of their sequences never arrived."""
        gone = self._tracker.gone_from_queue(prompts.first_position, prompts.last_position)
        if gone:
            still_there = {group_id_of(msg_id): at for msg_id, at in (await self._bus.pending_prompts()).items()}
            for group_id in set(gone) & set(still_there):  # a group that was handed over is on PROMPTS again
                self._tracker.published(group_id, still_there[group_id])
            gone = [group_id for group_id in gone if group_id not in still_there]
        log_end = (await self._bus.sequences_info()).last_position if gone else 0
        now_s = asyncio.get_running_loop().time()
        self._gone = {group_id: self._gone.get(group_id, (now_s, log_end)) for group_id in gone}
        for group_id, (since_s, end) in self._gone.items():
            # Actors acknowledge a group after storing its sequences, so none comes after `end`. The delay is a margin.
            if now_s - since_s >= LOST_AFTER_S and self._intake.position >= end:
                log.error("group %s left the queue, but some of its sequences never arrived", group_id)
                await self._intake.fail_missing(group_id, "prompt group lost")
