"""What was issued and where it ended: the ledger and the groups that are still open, kept in step.

Stepped by issue, arrival and close; pure state, no stream and no clock. `lost` groups, of which nothing is trained, are the
ones that the feeder may issue again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pipelinerl.algorithms.grouping import CompletedGroup, GroupAssembler
from pipelinerl.algorithms.ledger import Ledger, Outcome
from pipelinerl.types import PromptGroup, Sequence

REASON_CHARACTERS = 60


class Books:
    """See the module. `issued_groups` counts replacements of lost ones too."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.groups = GroupAssembler()
        self.issued_groups = 0
        self.lost_groups = 0

    def issue(self, group: PromptGroup) -> None:
        self.ledger.issue(group.sequence_id(index) for index in range(group.num_samples))
        self.groups.expect(group.group_id, group.num_samples)
        self.issued_groups += 1

    def arrive(self, sequence: Sequence) -> CompletedGroup | None:
        """The group that this sequence completes. Its failed samples are closed. Raises `MessageError`."""
        group = self.groups.add(sequence)
        if group is not None:
            for failed in group.failed:
                self.ledger.close(failed.sequence_id, Outcome.FAILED, short_reason(failed.failure))
        return group

    def lose(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str) -> None:
        """Nothing of this group is trained: what is left of it ends here, and it may be issued again."""
        self.close(sequences, outcome, reason)
        self.lost_groups += 1

    def close(self, sequences: Iterable[Sequence], outcome: Outcome, reason: str = "") -> None:
        for sequence in sequences:
            self.ledger.close(sequence.sequence_id, outcome, reason)


def short_reason(failure: str) -> str:
    """The part before the colon: reasons are counted, details are in the logs."""
    return failure.partition(":")[0].strip()[:REASON_CHARACTERS] or "unknown"


def unreadable(sequence_id: str, num_samples: int, run: str, problem: str) -> Sequence | None:
    """Accounts for a message that does not parse but whose id says which sequence it was; None when it does not."""
    group_id, dot, index = sequence_id.rpartition(".")
    if not dot or not index.isdigit() or int(index) >= num_samples:
        return None
    nothing = np.empty(0, dtype=np.int32)
    return Sequence(
        run=run,
        sequence_id=sequence_id,
        group_id=group_id,
        sample_index=int(index),
        group_size=num_samples,
        task="",
        prompt_token_ids=nothing,
        completion_token_ids=nothing,
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        reward=0.0,
        failure=f"unreadable: {problem}",
    )


def failed_copy(sequence: Sequence, failure: str) -> Sequence:
    return replace(sequence, failure=failure)
