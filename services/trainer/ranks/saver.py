"""One rank's checkpoints, one after the other: when its thread stages, and when another thread writes.

All ranks stage between the same two steps, by rank 0's order. Where to write is said later, in a group of the writing
threads, so that no rank's training waits for it. Not here: what is staged and how it is written (`saving.py`).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipelinerl.errors import PipelineRLError
from services.trainer.learn.step import Learner
from services.trainer.ranks.message import Message
from services.trainer.ranks.saving import StagedState, stage
from services.trainer.ranks.world import Links

log = logging.getLogger(__name__)

FOLDER, NOWHERE = "folder", "nowhere"


class PendingState:
    """Rank 0: a state that is staged on all ranks and waits for `write` or `abandon`, one of which must be called, once."""

    def __init__(self, staged: StagedState, others: Links | None) -> None:
        self.staged = staged
        self.settled: Future[None] = Future()
        """Done when the memory is free for the next one."""
        self._others, self._begun, self._lock = others, False, threading.Lock()

    def write(self, folder: Path) -> None:
        """On any thread: blocks until it is durable on all ranks. Raises `ServiceError` when a rank cannot write."""
        assert self._begin(), "a staged state is written once"
        try:
            self._tell(Message(FOLDER, {"folder": str(folder)}))
            self.staged.write(folder)
        finally:
            self.settled.set_result(None)

    def abandon(self) -> None:
        """Does nothing once it is being written."""
        if self._begin():
            self._tell(Message(NOWHERE))
            self.settled.set_result(None)

    def _begin(self) -> bool:
        with self._lock:
            first, self._begun = not self._begun, True
        return first

    def _tell(self, message: Message) -> None:
        if self._others is not None:
            self._others.tell_all(message)


class LeadingSaver:
    """Rank 0's. All but the writing itself belongs to the thread that computes."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._last: PendingState | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")

    def make_room(self) -> None:
        """Before the others are told to stage: a state that nobody has begun to write will not be written."""
        if self._last is not None:
            self._last.abandon()
            assert self._last.settled.done(), "the state before is still being written, from the same memory"

    def stage(self) -> PendingState:
        """This rank's part of an order to stage."""
        staged = stage(self._learner, None if self._last is None else self._last.staged)
        self._last = PendingState(staged, self._learner.world.saving)
        return self._last

    def save(self, folder: Path) -> Future[None]:
        """`stage`, and then `write` on a thread of its own."""
        return self._thread.submit(self.stage().write, folder)

    def end(self) -> None:
        """Waits for a write under way. A state that is not being written is dropped."""
        if self._last is not None:
            self._last.abandon()
            self._last.settled.result()
        self._thread.shutdown()


class FollowingSaver:
    """The same of another rank. A state that cannot be written is rank 0's to tell, and is no end of training."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._staged: StagedState | None = None
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")

    def save(self) -> None:
        """Stages now, and writes on its thread where rank 0 says. First waits for the write before, which rank 0 has done."""
        if self._writing is not None:
            self._writing.result()
        self._staged = stage(self._learner, self._staged)
        self._writing = self._thread.submit(self._write, self._staged)

    def end(self) -> None:
        """Waits for a write under way."""
        self._thread.shutdown()

    def _write(self, staged: StagedState) -> None:
        saving = self._learner.world.saving
        assert saving is not None, "a rank that follows has others"
        try:
            told = saving.hear()
            if told.kind == FOLDER:
                staged.write(Path(told.fields["folder"]))
        except (PipelineRLError, OSError) as error:
            log.error("this rank's part of a checkpoint is not written: %s", error)
