"""What was issued and where it ended: the ledger and the groups that are still open, kept in step.

Stepped by issue, arrival and close; pure state, no stream and no clock. Each step is also an event for the journal
(`pipelinerl/journal.py`). `lost` groups, of which nothing is trained, are the ones that the feeder may issue again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pipelinerl.algorithms.grouping import CompletedGroup, GroupAssembler
from pipelinerl.algorithms.ledger import Ledger, LedgerCounts, Outcome
from pipelinerl.reasons import short_reason
from pipelinerl.types import PromptGroup, Sequence


class Books:
    """See the module. `issued_groups` counts replacements of lost ones too; `record` takes the events.

    `counts` and `tokens` are for readers on other threads: the ledger's numbers after the last event, of one moment, and the
    completion tokens that ended here by outcome, since these books were opened.
    """

    def __init__(self, record: Callable[[Mapping[str, Any]], None] = lambda event: None) -> None:
        self._record = record
        self.ledger = Ledger()
        self.counts = LedgerCounts()
        self.tokens = {outcome.value: 0 for outcome in Outcome}
        self.groups = GroupAssembler()
        self.issued_groups = 0
        self.lost_groups = 0
        self._queue_positions: dict[str, int] = {}  # of open groups whose prompt is, or was, on the stream

    def issue(self, group: PromptGroup) -> None:
        self.ledger.issue(group.sequence_id(index) for index in range(group.num_samples))
        self.groups.expect(group.group_id, group.num_samples)
        self.issued_groups += 1
        self.counts = self.ledger.counts
        samples, version = group.num_samples, group.issued_version
        self._record({"event": "issue", "group": group.group_id, "samples": samples, "version": version})

    def published(self, group_id: str, position: int) -> None:
        """The group is on PROMPTS, at `position`. It may be complete already."""
        if self.groups.is_open(group_id):
            self._queue_positions[group_id] = position

    def refuse(self, group: PromptGroup, reason: str) -> None:
        """A group that was issued and cannot be sent out ends here, and another may take its place."""
        self._close([group.sequence_id(index) for index in range(group.num_samples)], Outcome.FAILED, reason)
        self.groups.discard(group.group_id)
        self.lost_groups += 1

    def arrive(self, sequence: Sequence) -> CompletedGroup | None:
        """The group that this sequence completes. Its failed samples are closed. Raises `MessageError`."""
        group = self.groups.add(sequence)
        if group is not None:
            self._queue_positions.pop(group.group_id, None)
            for failed in group.failed:
                self.close([failed], Outcome.FAILED, short_reason(failed.failure))
        return group

    def lose(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str) -> None:
        """Nothing of this group is trained: what is left of it ends here, and it may be issued again."""
        self.close(sequences, outcome, reason)
        self.lost_groups += 1

    def missing(self, group_id: str, run: str, failure: str) -> tuple[Sequence, ...]:
        """A failed sequence for each sample of an open group that has not arrived; nothing for other groups."""
        size = self.groups.open_groups().get(group_id, 0)
        return tuple(failed_sample(run, group_id, index, size, failure) for index in self.groups.missing(group_id))

    def missing_sample(self, sequence_id: str, run: str, failure: str) -> Sequence | None:
        """The same for one sample, by its id; None when the id names none that is still to come."""
        every = self.missing(sequence_id.rpartition(".")[0], run, failure)
        return next((sequence for sequence in every if sequence.sequence_id == sequence_id), None)

    def gone_from_queue(self, first_position: int) -> tuple[str, ...]:
        """Open groups whose prompt is no longer on PROMPTS, where `first_position` is the oldest one left."""
        return tuple(group_id for group_id, position in self._queue_positions.items() if position < first_position)

    def close(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "") -> None:
        """Raises `LedgerViolation`."""
        self._end(sequences, outcome, reason)

    def train(self, sequences: Iterable[Sequence], version: int) -> None:
        """They were trained on, and `version` came of it. Raises `LedgerViolation`."""
        self._end(sequences, Outcome.TRAINED, version=version)

    def end_step(self, version: int) -> None:
        """All of the step that made `version` is in. Raises `LedgerViolation` when the equation does not hold."""
        self.ledger.check()
        self._record({"event": "step", "version": version, "counts": self.ledger.counts.as_dict()})

    def _end(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "", **more: int) -> None:
        ended = tuple(sequences)
        self._close([sequence.sequence_id for sequence in ended], outcome, reason, **more)
        self.tokens[outcome.value] += sum(sequence.num_completion_tokens for sequence in ended)

    def _close(self, ids: list[str], outcome: Outcome, reason: str = "", **more: int) -> None:
        for sequence_id in ids:
            self.ledger.close(sequence_id, outcome, reason)
        self.counts = self.ledger.counts
        if ids:
            because = {"reason": reason} if reason else {}
            self._record({"event": "close", "outcome": outcome.value, **because, **more, "ids": ids})

    def to_state(self) -> dict[str, Any]:
        """JSON-able. What had arrived of open groups is not in it (`groups.held`)."""
        return {
            "ledger": self.ledger.to_state(),
            "groups": {
                "issued": self.issued_groups,
                "lost": self.lost_groups,
                "open": self.groups.open_groups(),
                "queue_positions": dict(self._queue_positions),
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over `to_state` of other books, without an event. Raises `LedgerViolation`."""
        groups = state["groups"]
        self.ledger, self.groups = Ledger.from_state(state["ledger"]), GroupAssembler()
        self.counts = self.ledger.counts
        self.issued_groups, self.lost_groups = groups["issued"], groups["lost"]
        for group_id, num_samples in groups["open"].items():
            self.groups.expect(group_id, num_samples)
        self._queue_positions = dict(groups["queue_positions"])


def failed_sample(run: str, group_id: str, sample_index: int, group_size: int, failure: str) -> Sequence:
    """Accounts for a sample of which nothing usable came."""
    nothing = np.empty(0, dtype=np.int32)
    return Sequence(
        run=run,
        sequence_id=f"{group_id}.{sample_index}",
        group_id=group_id,
        sample_index=sample_index,
        group_size=group_size,
        task="",
        prompt_token_ids=nothing,
        completion_token_ids=nothing,
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        reward=0.0,
        failure=failure,
    )


def failed_copy(sequence: Sequence, failure: str) -> Sequence:
    return replace(sequence, failure=failure)
