"""One trainer's part in a run of possibly several trainers: take over from the previous one, and prepare for the next.

It takes over the state of a checkpoint and the contents of the streams. For the next trainer it writes the journal and the
non-tensor part of checkpoints, and keeps the log from the positions that may still be read. It decides neither when a
checkpoint is due nor how it is written.

Every few seconds it purges messages from SEQUENCES that will not be read again. It has a checkpoint written if the log fills up
before one is due. It also looks for lost prompt groups, which have left PROMPTS although some of their samples never came, and
ends them through `Intake`, so that the feeder issues other groups.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.audit.journal import JOURNAL, Journal, reserved_groups
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.link import is_stream_missing
from pipelinerl.bus.protocol import StreamInfo, group_id_of
from pipelinerl.errors import BusError, ServiceError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_hash
from pipelinerl.rl.ledger import SequenceTracker
from pipelinerl.service.retry import retry_forever
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.checkpoint.run_state import RunState, Start, group_tokens
from services.trainer.checkpoint.uploads import Uploads
from services.trainer.data.feeder import Feeder, scan_in_flight
from services.trainer.data.intake import Intake
from services.trainer.loop import OptimizerLoop
from services.trainer.reporting.recorder import Recorder

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
LOST_AFTER_S = 60.0
GROUP_LOST = "prompt group lost"
FULL_SHARE = 0.5
"""Share of a log's size limit above which it is purged."""


@dataclass
class Resume:
    """One trainer's takeover, beginning with `start`. It restores parts of `tracker`, `feeder`, `intake` and `recorder`."""

    run_dir: Path
    recipe: Recipe
    bus: Bus
    journal: Journal
    start: Start
    tracker: SequenceTracker
    feeder: Feeder
    intake: Intake
    recorder: Recorder
    uploads: Uploads

    def __post_init__(self) -> None:
        self._kept_positions = dict(self.start.positions)
        """Position in SEQUENCES by version of the kept checkpoints, each of which covers the messages up to its position."""
        self._purged_below = 1
        self._gone: dict[str, tuple[float, int]] = {}
        """By group: when it was first missed on the queue, and the end of the log at that time."""

    async def begin(self) -> int:
        """Record the start in the journal, and take over the previous trainer's work. Returns the number of groups that were
        published again. Waits while NATS is away."""
        start, incarnation = self.start, self.start.lineage.incarnation
        said = {"incarnation": incarnation, "version": start.version, "keep": start.journal_bytes}
        self.journal.write({"event": "start", **said})
        await asyncio.to_thread(self.journal.sync)
        reserved = await asyncio.to_thread(reserved_groups, self.run_dir / JOURNAL)
        self.feeder.tokens = await asyncio.to_thread(group_tokens, self.run_dir, reserved)
        self.feeder.bounds.steps_begun = start.version
        if (state := start.state) is not None:
            self.tracker.restore(state.books)
            self.feeder.next_group = state.next_group
            self.intake.restore(state.held, state.position)
            self.intake.tokens_arrived = state.figures["tokens_arrived"]
            self.intake.bad_messages = state.figures["bad_messages"]
            self.recorder.restore(state.figures["report"])
        return await self._adopt(reserved) if start.again else 0

    def capture(self, version: int, skipped_in_a_row: int) -> RunState:
        """Capture everything but the tensors, between two steps: after the step that made `version`."""
        self.journal.flush()
        figures = {
            "tokens_arrived": self.intake.tokens_arrived,
            "bad_messages": self.intake.bad_messages,
            "skipped_in_a_row": skipped_in_a_row,
            "report": self.recorder.to_state(),
        }
        return RunState(
            run=self.bus.run,
            policy_version=version,
            starts=self.start.lineage.starts,
            recipe=self.recipe.model_dump(mode="json"),
            recipe_hash=recipe_hash(self.recipe),
            journal_bytes=self.journal.size,
            books=self.tracker.to_state(),
            next_group=self.feeder.next_group,
            position=self.intake.position,
            held=self.intake.held(),
            figures=figures,
        )

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._kept_positions.pop(written.version, None)
        self._kept_positions[written.version] = written.position
        while len(self._kept_positions) > self.recipe.checkpoint.keep:
            del self._kept_positions[next(iter(self._kept_positions))]
        self.journal.write({"event": "checkpoint", "version": written.version, "position": written.position})
        self.journal.flush()
        self.recorder.checkpoint_written(written)

    def end(self, version: int, *, finished: bool) -> None:
        """Record the end of this trainer."""
        self.journal.write({"event": "end", "version": version, "finished": finished})
        self.journal.flush()

    async def _adopt(self, reserved: int) -> int:
        """Take over the groups that the previous incarnation issued after the checkpoint, as far as the streams show them."""
        position, prompts, arrived = await retry_forever(
            lambda: scan_in_flight(self.bus, self.intake.position), "read the streams"
        )
        if position < self.intake.position:
            self.journal.write({"event": "position", "position": position})
            self._kept_positions = dict.fromkeys(self._kept_positions, position)
        self.intake.position = position
        incarnation = self.start.lineage.incarnation
        published = await self.feeder.adopt(reserved, prompts, arrived, f"i{incarnation}")
        log.info(
            "incarnation %d resumes from version %d and log position %d; %d groups are open, %d were published again",
            incarnation,
            self.start.version,
            position,
            len(self.tracker.open_groups),
            published,
        )
        return published

    # --- upkeep of the streams --------------------------------------------------------------------------------------

    async def keep_streams(self, loop: OptimizerLoop) -> None:
        """Keep the run's streams short and find lost groups, until cancelled. Raises `UserError` where `Intake` does, and
        `BusError` when a stream is gone: the next trainer creates it and publishes open groups again."""
        while True:
            try:
                prompts, sequences = await self.bus.prompts_info(), await self.bus.sequences_info()
                self.recorder.metrics.streams.saw("prompts", prompts)
                self.recorder.metrics.streams.saw("sequences", sequences)
                await self._purge(sequences, loop)
                await self._look_for_lost_groups(prompts)
            except BusError as error:
                if is_stream_missing(error):
                    raise
                log.info("the upkeep of the streams is postponed: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _purge(self, sequences: StreamInfo, loop: OptimizerLoop) -> None:
        limits = self.bus.limits
        bytes_share = sequences.bytes / limits.sequences_max_bytes
        messages_share = sequences.messages / limits.sequences_max_messages
        filling = max(bytes_share, messages_share) > FULL_SHARE  # a full log would refuse sequences
        if filling:
            try:
                await loop.checkpoints.write(anew=True)
            except ServiceError as error:
                log.error("SEQUENCES is more than half full and cannot be purged: %s", error)
        # A trainer may resume from any kept checkpoint; while the log is filling up, only from the newest one.
        positions = self._kept_positions.values()
        readable_from = (max(positions) if filling else min(positions)) + 1 if positions else 1
        if readable_from > self._purged_below:
            await self.bus.purge_sequences(readable_from)
            self._purged_below = readable_from

    async def _look_for_lost_groups(self, prompts: StreamInfo) -> None:
        """Fail the missing samples of lost groups. An actor acknowledges a group, which removes it from the queue, only after
        all its sequences are stored. So once the log has been read up to its end at that time, missing sequences will never
        come. `LOST_AFTER_S` is added as a margin. A group that was handed over is on the queue again, at another position."""
        gone = self.tracker.gone_from_queue(prompts.first_position, prompts.last_position)
        if gone:
            still_there = {group_id_of(msg_id): at for msg_id, at in (await self.bus.pending_prompts()).items()}
            for group_id in set(gone) & set(still_there):
                self.tracker.published(group_id, still_there[group_id])
            gone = [group_id for group_id in gone if group_id not in still_there]
        log_end = (await self.bus.sequences_info()).last_position if gone else 0
        now_s = asyncio.get_running_loop().time()
        self._gone = {group_id: self._gone.get(group_id, (now_s, log_end)) for group_id in gone}
        for group_id, (since_s, end) in self._gone.items():
            if now_s - since_s >= LOST_AFTER_S and self.intake.position >= end:
                log.error("group %s left the queue, but some of its sequences never came", group_id)
                await self.intake.fail_missing(group_id, GROUP_LOST)
