"""One trainer's part in a run that several trainers may make: it takes over from the one before, and leaves to the next.

Takes over: state of a checkpoint, what is on the streams. Leaves: the journal's words, what a checkpoint holds beside tensors,
which positions of the log somebody may still read. It decides neither when a checkpoint is due nor how it is written.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pipelinerl.audit.journal import JOURNAL, Journal, reserved_groups
from pipelinerl.bus.jetstream import Bus
from pipelinerl.recipe.changes import recipe_hash
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.retry import retry_forever
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.checkpoint.run_state import RunState, Start
from services.trainer.data.feeder import Feeder, scan_in_flight
from services.trainer.data.intake import Intake
from services.trainer.data.tracker import SequenceTracker
from services.trainer.reporting.recorder import Recorder

log = logging.getLogger(__name__)


class Resume:
    """Of `start`. What it restores belongs to `tracker`, `feeder`, `intake` and `recorder`."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        bus: Bus,
        journal: Journal,
        start: Start,
        tracker: SequenceTracker,
        feeder: Feeder,
        intake: Intake,
        recorder: Recorder,
    ) -> None:
        self._run_dir, self._recipe, self._bus, self._journal, self._start = run_dir, recipe, bus, journal, start
        self._tracker, self._feeder, self._intake, self._recorder = tracker, feeder, intake, recorder
        self._kept_positions = dict(start.positions)
        """Of SEQUENCES, by version of the checkpoints that are kept: what is up to there is in that checkpoint."""

    async def begin(self) -> int:
        """Says in the journal that a trainer started, and takes over what the one before left; returns how many groups it
        published again. Waits while NATS is away."""
        start = self._start
        self._journal.write(
            {
                "event": "start",
                "incarnation": start.lineage.incarnation,
                "version": start.version,
                "keep": start.journal_bytes,
            }
        )
        await asyncio.to_thread(self._journal.sync)
        if (state := start.state) is not None:
            self._tracker.restore(state.books)
            self._feeder.next_group = state.next_group
            self._intake.restore(state.held, state.position)
            self._intake.tokens_arrived = state.figures["tokens_arrived"]
            self._intake.bad_messages = state.figures["bad_messages"]
            self._recorder.restore(state.figures["report"])
        return await self._adopt() if start.again else 0

    def capture(self, version: int, skipped_in_a_row: int) -> RunState:
        """All but the tensors of this moment, which must be between two steps: after the one that made `version`."""
        self._journal.flush()
        figures = {
            "tokens_arrived": self._intake.tokens_arrived,
            "bad_messages": self._intake.bad_messages,
            "skipped_in_a_row": skipped_in_a_row,
            "report": self._recorder.to_state(),
        }
        return RunState(
            run=self._bus.run,
            policy_version=version,
            starts=self._start.lineage.starts,
            recipe=self._recipe.model_dump(mode="json"),
            recipe_hash=recipe_hash(self._recipe),
            journal_bytes=self._journal.size,
            books=self._tracker.to_state(),
            next_group=self._feeder.next_group,
            position=self._intake.position,
            held=self._intake.held(),
            figures=figures,
        )

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._kept_positions.pop(written.version, None)
        self._kept_positions[written.version] = written.position
        while len(self._kept_positions) > self._recipe.checkpoint.keep:
            del self._kept_positions[next(iter(self._kept_positions))]
        self._journal.write({"event": "checkpoint", "version": written.version, "position": written.position})
        self._journal.flush()

    def end(self, version: int, *, finished: bool) -> None:
        """This trainer's last word."""
        self._journal.write({"event": "end", "version": version, "finished": finished})
        self._journal.flush()

    def readable_from(self, filling: bool) -> int:
        """Position of SEQUENCES that somebody may still read: a trainer that goes on from any checkpoint that is kept; where
        the log is `filling` up, from the newest one."""
        positions = self._kept_positions.values()
        return (max(positions) if filling else min(positions)) + 1 if positions else 1

    async def _adopt(self) -> int:
        """What the incarnation before issued after the checkpoint, as far as the streams show it."""
        scan = await retry_forever(
            lambda: scan_in_flight(self._bus, self._intake.position), "look at what is on the streams"
        )
        if scan.position < self._intake.position:
            self._journal.write({"event": "position", "position": scan.position})
            self._kept_positions = dict.fromkeys(self._kept_positions, scan.position)
        self._intake.position = scan.position
        reserved = await asyncio.to_thread(reserved_groups, self._run_dir / JOURNAL)
        incarnation = self._start.lineage.incarnation
        published = await self._feeder.adopt(reserved, scan, f"i{incarnation}")
        log.info(
            "incarnation %d goes on from version %d, sequences from position %d; %d groups are out, %d published again",
            incarnation,
            self._start.version,
            scan.position,
            len(self._tracker.groups.open_groups()),
            published,
        )
        return published
