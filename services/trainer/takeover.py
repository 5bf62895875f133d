"""Take over from the run's previous trainer, and capture what the next one takes over.

A trainer takes over the state of a checkpoint and the contents of the streams. For the next trainer it writes the journal and
captures the non-tensor part of checkpoints. Other modules decide when to write checkpoints, and write them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.audit.journal import JOURNAL, Journal, reserved_groups
from pipelinerl.bus.jetstream import Bus
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_hash
from pipelinerl.service.retry import retry_forever
from services.trainer.checkpoint.checkpointer import Checkpointer, WrittenCheckpoint
from services.trainer.checkpoint.run_state import RunState, Start, group_tokens
from services.trainer.checkpoint.uploads import Uploads
from services.trainer.data.feeder import Feeder, scan_in_flight
from services.trainer.data.intake import Intake
from services.trainer.reporting.recorder import Recorder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Takeover:
    """One trainer's takeover, beginning from `start`. It restores state of `feeder`, `intake` and `recorder`."""

    run_dir: Path
    recipe: Recipe
    bus: Bus
    journal: Journal
    start: Start
    feeder: Feeder
    intake: Intake
    recorder: Recorder
    uploads: Uploads

    async def begin(self, checkpoints: Checkpointer) -> int:
        """Record the start in the journal, take over the previous trainer's work, and return the number of groups published
        again. If the streams were recreated, the positions of the kept `checkpoints` are reset. Waits while NATS is
        unreachable."""
        start, incarnation = self.start, self.start.lineage.incarnation
        said = {"incarnation": incarnation, "version": start.version, "keep": start.journal_bytes}
        self.journal.write({"event": "start", **said})
        await asyncio.to_thread(self.journal.sync)
        reserved = await asyncio.to_thread(reserved_groups, self.run_dir / JOURNAL)
        self.feeder.tokens = await asyncio.to_thread(group_tokens, self.run_dir, reserved)
        self.feeder.bounds.steps_begun = start.version
        if (state := start.state) is not None:
            self.feeder.tracker.restore(state.books)
            self.feeder.next_group = state.next_group
            self.intake.restore(state.held, state.position)
            self.intake.tokens_arrived = state.figures["tokens_arrived"]
            self.intake.bad_messages = state.figures["bad_messages"]
            self.recorder.restore(state.figures["report"])
        return await self._adopt(reserved, checkpoints) if start.again else 0

    def capture(self, version: int, skipped_in_a_row: int) -> RunState:
        """Capture all state except tensors. Call this between two steps, after the step that produced `version`."""
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
            books=self.feeder.tracker.to_state(),
            next_group=self.feeder.next_group,
            position=self.intake.position,
            held=self.intake.held(),
            figures=figures,
        )

    async def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        """Record a checkpoint, and queue its upload."""
        self.recorder.checkpoint_written(written)
        await self.uploads.take(written.folder, written.version)

    def end(self, version: int, *, finished: bool) -> None:
        """Record the end of this trainer."""
        self.journal.write({"event": "end", "version": version, "finished": finished})
        self.journal.flush()

    async def _adopt(self, reserved: int, checkpoints: Checkpointer) -> int:
        """Take over the previous incarnation's groups by what is on the streams. Return how many were published again."""
        position, prompts, arrived = await retry_forever(
            lambda: scan_in_flight(self.bus, self.intake.position), "read the streams"
        )
        if position < self.intake.position:
            self.journal.write({"event": "position", "position": position})
            checkpoints.positions = dict.fromkeys(checkpoints.positions, position)
        self.intake.position = position
        incarnation = self.start.lineage.incarnation
        published = await self.feeder.adopt(reserved, prompts, arrived, f"i{incarnation}")
        log.info(
            "incarnation %d resumes from version %d and log position %d; %d groups are open, %d were published again",
            incarnation,
            self.start.version,
            position,
            len(self.feeder.tracker.open_groups),
            published,
        )
        return published
