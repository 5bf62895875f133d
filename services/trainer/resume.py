"""One trainer's part in a run that several trainers may make: it takes over from the one before, and leaves to the next.

Takes over: state of a checkpoint, what is on the streams. Leaves: the journal's words, what a checkpoint holds beside tensors,
which positions of the log somebody may still read. It decides neither when a checkpoint is due nor how it is written.

Every few seconds it purges from SEQUENCES what nobody will read again, has a checkpoint written where the log
fills up before one is due, and looks for prompt groups that nobody works on: taken off PROMPTS although samples of them never
came. What it ends goes through `Intake`, so that the feeder issues another group.
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
"""Of a log's limit: fuller than this, it should become shorter."""


@dataclass
class Resume:
    """Of `start`. What it restores belongs to `tracker`, `feeder`, `intake` and `recorder`."""

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
        """Of SEQUENCES, by version of the checkpoints that are kept: what is up to there is in that checkpoint."""
        self._purged_below = 1
        self._gone: dict[str, tuple[float, int]] = {}
        """When a group was first missed on the queue, and the end of the log then."""

    async def begin(self) -> int:
        """Says in the journal that a trainer started, and takes over what the one before left; returns how many groups it
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
        """All but the tensors of this moment, which must be between two steps: after the one that made `version`."""
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
        """This trainer's last word."""
        self.journal.write({"event": "end", "version": version, "finished": finished})
        self.journal.flush()

    async def _adopt(self, reserved: int) -> int:
        """What the incarnation before issued after the checkpoint, as far as the streams show it."""
        position, prompts, arrived = await retry_forever(
            lambda: scan_in_flight(self.bus, self.intake.position), "look at what is on the streams"
        )
        if position < self.intake.position:
            self.journal.write({"event": "position", "position": position})
            self._kept_positions = dict.fromkeys(self._kept_positions, position)
        self.intake.position = position
        incarnation = self.start.lineage.incarnation
        published = await self.feeder.adopt(reserved, prompts, arrived, f"i{incarnation}")
        log.info(
            "incarnation %d goes on from version %d, sequences from position %d; %d groups are out, %d published again",
            incarnation,
            self.start.version,
            position,
            len(self.tracker.open_groups),
            published,
        )
        return published

    # --- upkeep of the streams --------------------------------------------------------------------------------------

    async def keep_streams(self, loop: OptimizerLoop) -> None:
        """Keeps the run's streams short and notices what was lost on them, until cancelled. Raises `UserError` where `Intake`
        does, and `BusError` when a stream is gone: the next trainer makes it, and publishes open groups again."""
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
                log.info("the streams are looked after later: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _purge(self, sequences: StreamInfo, loop: OptimizerLoop) -> None:
        limits = self.bus.limits
        bytes_share = sequences.bytes / limits.sequences_max_bytes
        messages_share = sequences.messages / limits.sequences_max_messages
        filling = max(bytes_share, messages_share) > FULL_SHARE  # on its way to refuse the next sequence
        if filling:
            try:
                await loop.checkpoints.write(anew=True)
            except ServiceError as error:
                log.error("SEQUENCES is more than half full, and stays so: %s", error)
        # A trainer may go on from any checkpoint that is kept; where the log is filling up, from the newest one only.
        positions = self._kept_positions.values()
        readable_from = (max(positions) if filling else min(positions)) + 1 if positions else 1
        if readable_from > self._purged_below:
            await self.bus.purge_sequences(readable_from)
            self._purged_below = readable_from

    async def _look_for_lost_groups(self, prompts: StreamInfo) -> None:
        """An actor acknowledges a group when all its sequences are stored, and an acknowledged group leaves the queue. So once
        a group has left it, and the log has been read up to where it ended at that time, what did not come never will.
        `LOST_AFTER_S` is on top of that. A group that was handed over is on the queue again, at another position."""
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
                log.error("group %s left the queue, and not all of its sequences came", group_id)
                await self.intake.fail_missing(group_id, GROUP_LOST)
