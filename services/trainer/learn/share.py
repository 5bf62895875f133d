"""What each rank computes of an optimizer step: planned and packed once, in NumPy, before any device is touched.

Weights of tokens come from totals of the whole step, so that losses and gradients of all shares add up to those of one
rank. It sends nothing and knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from pipelinerl.algorithms.step_cost import UNIT_COST, CostModel
from pipelinerl.algorithms.step_plan import plan_step
from pipelinerl.types import Sequence
from services.trainer.learn.batch import HostMicroBatch, TrainingGroup, host_microbatch
from services.trainer.learn.flops import training_flops
from services.trainer.learn.normalization import BatchTotals, Normalization
from services.trainer.learn.phases import PhaseTimer
from services.trainer.learn.sampled import sampled_places
from services.trainer.ranks.message import Message

TRAIN = "train"
_COUNTS = ("num_sequences", "num_tokens")


@dataclass(frozen=True, eq=False)
class StepShare:
    """Micro-batches of one row of ranks; all shares of a step have equally many."""

    version: int
    """Policy version that the gradient is taken at."""
    batches: tuple[HostMicroBatch, ...]

    def to_message(self) -> Message:
        arrays, counts = {}, []
        for index, batch in enumerate(self.batches):
            counts.append({name: getattr(batch, name) for name in _COUNTS})
            for name in _array_names():
                arrays[f"{index}/{name}"] = getattr(batch, name)
        return Message(TRAIN, {"version": self.version, "counts": counts}, arrays)

    @classmethod
    def from_message(cls, message: Message) -> StepShare:
        """Inverse of `to_message`."""
        batches = []
        for index, counts in enumerate(message.fields["counts"]):
            arrays: dict[str, Any] = {name: message.arrays[f"{index}/{name}"] for name in _array_names()}
            batches.append(HostMicroBatch(**arrays, **counts))
        return cls(message.fields["version"], tuple(batches))


def _array_names() -> list[str]:
    return [field.name for field in fields(HostMicroBatch) if field.name not in _COUNTS]


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step, ready to be computed."""

    version: int
    shares: tuple[StepShare, ...]
    """One for each row that is computed at the same time."""
    sequence_ids: tuple[str, ...]
    advantage_abs_mean: float
    """Over sequences; 0 means that no group told anything."""
    imbalance: float
    """Share of the ranks' compute time in which they wait for each other (`StepPlan.imbalance`)."""
    flops: float
    """Model FLOPs of the whole step."""
    phases_s: Mapping[str, float]
    """Seconds in `plan` and `build`, beside the step before."""
    sampled: Mapping[str, slice] = field(default_factory=dict)
    """Where the completion tokens of sequences that people get to see stand among those of `batches`."""

    @property
    def batches(self) -> list[HostMicroBatch]:
        """Of all shares, one share after the other."""
        return [batch for share in self.shares for batch in share.batches]


def prepare_step(
    groups: Many[TrainingGroup],
    version: int,
    normalization: Normalization,
    budget: int,
    *,
    data_ranks: int = 1,
    pad_multiple: int = 1,
    cost_model: CostModel = UNIT_COST,
) -> PreparedStep:
    """Plans and packs one optimizer step on `groups` at policy version `version`, for `data_ranks` rows at a time.

    `budget`: tokens of a micro-batch, `pad_multiple`: what its row is rounded up to. Raises `FieldError` when a sequence
    exceeds the budget.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    advantages = np.concatenate([group.advantages for group in groups])
    totals = BatchTotals(len(sequences), sum(sequence.num_completion_tokens for sequence in sequences))

    def packed(members: list[int]) -> HostMicroBatch:
        chosen: list[Sequence] = [sequences[index] for index in members]
        return host_microbatch(chosen, advantages[members], version, normalization, totals, pad_multiple)

    lengths = [sequence.num_tokens for sequence in sequences]
    outputs = [sequence.num_completion_tokens for sequence in sequences]
    timer = PhaseTimer()
    with timer.measure("plan"):
        plan = plan_step(lengths, budget, data_ranks, cost_model, outputs)
    with timer.measure("build"):
        shares = [
            StepShare(version, tuple(packed(members) for members in plan.of_rank(rank))) for rank in range(data_ranks)
        ]
    return PreparedStep(
        version=version,
        shares=tuple(shares),
        sequence_ids=tuple(sequence.sequence_id for sequence in sequences),
        advantage_abs_mean=float(np.abs(advantages).mean()),
        imbalance=plan.imbalance,
        flops=training_flops(cost_model, lengths, outputs),
        phases_s=timer.take(),
        sampled=sampled_places(groups, (members for rank in range(data_ranks) for members in plan.of_rank(rank))),
    )
