"""Rank 0's side of a trainer of several ranks: every order is told to all ranks and carried out together with them.

With one rank there is nobody to tell. All methods block and belong to one thread, but for `prepare`. The other side of each
order is `follower.py`. Only checkpoints are written beside: by `saver.py`, once they are staged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from pipelinerl.messages.sequences import Logprobs, TokenIds
from services.trainer.checkpoint.state_files import LeadingSaver, PendingState
from services.trainer.distributed.world import ADAPTER, BEAT, END, SAVE, SCORE, VALUE_HEAD, WEIGHTS, Message, RankLayout
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.step import Learner, PreparedStep, StepOutcome


class RankZero:
    """`learner`: rank 0's."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._layout, self._links = learner.world.layout, learner.world.links
        self._saver = LeadingSaver(learner)

    @property
    def num_ranks(self) -> int:
        return self._layout.size

    def prepare(self, groups: list[TrainingGroup], version: int) -> PreparedStep:
        """The next step's plan, which any thread may make."""
        return self.learner.prepare(groups, version)

    def train_step(self, prepared: PreparedStep) -> StepOutcome:
        """One optimizer step of all ranks."""
        if self._links is not None:
            self._links.tell([prepared.shares[row].to_message() for row in self._rows_of_others()])
        results = [self.learner.compute(prepared.shares[0])]
        if self._links is not None:
            reports = self._links.reports(first_ranks(self._layout)[1:])
            results += [replace(results[0], values=report.arrays["values"], **report.fields) for report in reports]
        return self.learner.outcome(prepared, results)

    def score(self, token_ids: TokenIds) -> Logprobs:
        """See `Learner.score`."""
        self._tell(Message(SCORE, arrays={"token_ids": np.asarray(token_ids)}))
        return self.learner.score(token_ids)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`. Must be gone through to its end, or all ranks wait."""
        self._tell(Message(WEIGHTS))
        yield from self.learner.weights()

    def value_head(self) -> dict[str, Tensor]:
        """Its parameters by name; empty without one."""
        self._tell(Message(VALUE_HEAD))
        return dict(self.learner.value_head())

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.adapter`. Must be gone through to its end, too."""
        self._tell(Message(ADAPTER))
        yield from self.learner.adapter()

    def save(self, folder: Path) -> Future[None]:
        """Stages the state of all ranks, and has it written beside what comes next.

        Done when all of it is durable in `folder`; carries `ServiceError` when a rank cannot write. The one before must be
        done.
        """
        self._saver.make_room()
        self._tell(Message(SAVE))
        return self._saver.save(folder)

    def stage(self) -> PendingState:
        """The first half of `save`, for whoever has a thread to write on, or does not know the folder yet."""
        self._saver.make_room()
        self._tell(Message(SAVE))
        return self._saver.stage()

    def beat(self) -> None:
        """Says that there is no order yet."""
        self._tell(Message(BEAT))

    def end(self) -> None:
        """The last order: the other ranks end. Waits for a checkpoint that is being written."""
        self._tell(Message(END))
        self._saver.end()

    def _tell(self, message: Message) -> None:
        if self._links is not None:
            self._links.tell_all(message)

    def _rows_of_others(self) -> list[int]:
        return [rank // self._layout.sequence_ranks for rank in range(1, self._layout.size)]


def first_ranks(layout: RankLayout) -> list[int]:
    """The first rank of each row, which reports for it."""
    return list(range(0, layout.size, layout.sequence_ranks))
