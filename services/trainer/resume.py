"""One trainer's part in a run that several trainers may make: it takes over from the one before, and leaves to the next.

Takes over: state of a checkpoint, what is on the streams. Leaves: the journal's words, what a checkpoint holds beside tensors,
which positions of the log somebody may still read. It decides neither when a checkpoint is due nor how it is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from pipelinerl.audit.journal import JOURNAL, Journal, reserved_groups
from pipelinerl.bus.protocol import Bus
from pipelinerl.recipe.changes import recipe_hash
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.retry import retry_forever
from services.trainer.checkpoint.run_state import RunState, Start
from services.trainer.checkpoint.writer import WrittenCheckpoint
from services.trainer.data.feeder import Feeder, FeederState, look_for_left_behind
from services.trainer.data.intake import Intake
from services.trainer.data.tracker import SequenceTracker
from services.trainer.loop import OptimizerLoop
from services.trainer.reporting.recorder import Recorder

log = logging.getLogger(__name__)


async def reserve(journal: Journal, groups: int) -> None:
    """Returns when it is on disk that groups numbered below `groups` may be published."""
    journal.write({"event": "reserve", "groups": groups})
    await asyncio.to_thread(journal.sync)


class Resume:
    """See the module. `loop()` is the optimizer loop, which is made after this."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        bus: Bus,
        journal: Journal,
        start: Start,
        books: SequenceTracker,
        feeder: Feeder,
        intake: Intake,
        recorder: Recorder,
        loop: Callable[[], OptimizerLoop],
    ) -> None:
        self._run_dir, self._recipe, self._bus, self._journal, self._start = run_dir, recipe, bus, journal, start
        self._books, self._feeder, self._intake, self._recorder, self._loop = books, feeder, intake, recorder, loop
        self._kept_positions = dict(start.positions)
        """Of SEQUENCES, by version of the checkpoints that are kept: what is up to there is in that checkpoint."""

    async def begin(self) -> None:
        """Says in the journal that a trainer started, and takes over what the one before left. Waits while NATS is away."""
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
        if start.state is not None:
            self._restore(start.state)
        if start.again:
            await self._adopt()

    def capture(self) -> RunState:
        """All but the tensors of this moment, which must be between two steps."""
        self._journal.flush()
        figures = {
            "tokens_arrived": self._intake.tokens_arrived,
            "bad_messages": self._intake.bad_messages,
            "skipped_in_a_row": self._loop().skipped_in_a_row,
            "report": self._recorder.to_state(),
        }
        return RunState(
            run=self._bus.run,
            policy_version=self._loop().version,
            starts=self._start.lineage.starts,
            recipe=self._recipe.model_dump(mode="json"),
            recipe_hash=recipe_hash(self._recipe),
            journal_bytes=self._journal.size,
            books=self._books.to_state(),
            next_group=self._feeder.state.next_group,
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

    def end(self, *, finished: bool) -> None:
        """This trainer's last word."""
        self._journal.write({"event": "end", "version": self._loop().version, "finished": finished})
        self._journal.flush()

    def readable_from(self, filling: bool) -> int:
        """Position of SEQUENCES that somebody may still read: a trainer that goes on from any checkpoint that is kept; where
        the log is `filling` up, from the newest one."""
        positions = self._kept_positions.values()
        return (max(positions) if filling else min(positions)) + 1 if positions else 1

    def _restore(self, state: RunState) -> None:
        self._books.restore(state.books)
        self._feeder.state = FeederState(state.next_group)
        self._intake.restore(state.held, state.position)
        self._intake.tokens_arrived = state.figures["tokens_arrived"]
        self._intake.bad_messages = state.figures["bad_messages"]
        self._loop().skipped_in_a_row = state.figures["skipped_in_a_row"]
        self._recorder.restore(state.figures["report"])

    async def _adopt(self) -> None:
        """What the incarnation before issued after the checkpoint, as far as the streams show it."""
        left = await retry_forever(
            lambda: look_for_left_behind(self._bus, self._intake.position), "look at what is on the streams"
        )
        if left.position < self._intake.position:
            self._journal.write({"event": "position", "position": left.position})
            self._kept_positions = dict.fromkeys(self._kept_positions, left.position)
        self._intake.position = left.position
        reserved = await asyncio.to_thread(reserved_groups, self._run_dir / JOURNAL)
        incarnation = self._start.lineage.incarnation
        published = await self._feeder.adopt(reserved, left, f"i{incarnation}")
        log.info(
            "incarnation %d goes on from version %d, sequences from position %d; %d groups are out, %d published again",
            incarnation,
            self._start.version,
            left.position,
            len(self._books.groups.open_groups()),
            published,
        )
