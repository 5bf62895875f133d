"""One prompt group: collected from a stream, judged sample by sample, and given its advantages.

Sequences may arrive in any order and repeatedly, and have passed `decode_sequence`. The caller says which groups it issued;
everything else is counted and ignored. Memory is bounded by the open groups. The learned baseline of the paper's equation 4 is
the trainer's to subtract: here `value` leaves rewards unchanged. Not here: staleness and outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import FieldError, MessageError
from pipelinerl.messages.sequences import Sequence

Baseline = Literal["group_mean", "leave_one_out", "value"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, in units of reward, so that a nearly constant group does not explode."""


def untrainable_reason(sequence: Sequence, max_context: int, vocab_size: int) -> str:
    """Why `sequence` ends as failed, short and from a fixed set except for the actor's own reason; "" when it is good.

    `max_context`: prompt plus completion tokens at most. `vocab_size`: token ids are below it.
    """
    if sequence.failure:
        return sequence.failure
    if sequence.num_tokens > max_context:
        return "longer than the context"
    if max(sequence.prompt_token_ids.max(), sequence.completion_token_ids.max()) >= vocab_size:
        return "token outside the vocabulary"
    return ""


@dataclass(frozen=True, eq=False)
class CompletedGroup:
    """All samples of one prompt, each list in order of sample index. `failed` ones carry their reason in `failure`."""

    group_id: str
    sequences: tuple[Sequence, ...]
    """Good ones."""
    failed: tuple[Sequence, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the good ones."""
        return tuple(sequence.reward for sequence in self.sequences)


@dataclass
class _OpenGroup:
    num_samples: int
    members: dict[int, Sequence] = field(default_factory=dict)


class GroupAssembler:
    """Stepped by `expect` when a group is issued and `add` when a sequence arrives."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenGroup] = {}
        self.duplicates = 0
        """Sequences that arrived a second time while their group was open."""
        self.unexpected = 0
        """Sequences of groups that are not open: never issued, complete, or discarded."""

    def expect(self, group_id: str, num_samples: int) -> None:
        """Opens a group. Expecting one twice is our own mistake."""
        assert group_id not in self._open, f"group {group_id} was issued twice"
        assert num_samples >= 1, f"group {group_id} of {num_samples} samples"
        self._open[group_id] = _OpenGroup(num_samples)

    def add(self, sequence: Sequence) -> CompletedGroup | None:
        """The group that this sequence completes, else None. A group is returned once.

        Raises `MessageError` when the sequence contradicts its group's size; nothing is changed then.
        """
        group = self._open.get(sequence.group_id)
        if group is None:
            self.unexpected += 1
            return None
        if sequence.group_size != group.num_samples:
            raise MessageError("Sequence", "group_size", f"{sequence.group_size}, issued with {group.num_samples}")
        if sequence.sample_index in group.members:
            self.duplicates += 1
            return None
        group.members[sequence.sample_index] = sequence
        if len(group.members) < group.num_samples:
            return None
        ordered = self.discard(sequence.group_id)
        good = tuple(sequence for sequence in ordered if not sequence.failure)
        return CompletedGroup(sequence.group_id, good, tuple(sequence for sequence in ordered if sequence.failure))

    def discard(self, group_id: str) -> tuple[Sequence, ...]:
        """Gives an open group up (its prompt was delivered too often) and returns what had arrived of it."""
        group = self._open.pop(group_id)
        return tuple(group.members[index] for index in sorted(group.members))

    def missing(self, group_id: str) -> tuple[int, ...]:
        """Sample indices of an open group that have not arrived; none of a group that is not open."""
        group = self._open.get(group_id)
        return tuple(index for index in range(group.num_samples) if index not in group.members) if group else ()

    def arrived(self, group_id: str) -> tuple[int, ...]:
        """The others: sample indices of an open group that have arrived."""
        group = self._open.get(group_id)
        return tuple(sorted(group.members)) if group else ()

    def is_open(self, group_id: str) -> bool:
        return group_id in self._open

    def open_groups(self) -> dict[str, int]:
        """Samples expected of each open group, in order of issue: with `held`, all that a checkpoint needs."""
        return {group_id: group.num_samples for group_id, group in self._open.items()}

    def held(self) -> tuple[Sequence, ...]:
        """Sequences of groups that are still open. Adding them to a new assembler that expects the same groups
        restores this one."""
        return tuple(sequence for group in self._open.values() for sequence in group.members.values())


def smallest_group(baseline: Baseline) -> int:
    """Rewards that the baseline needs at least. A group with fewer good samples cannot be trained on."""
    return 2 if baseline == "leave_one_out" else 1


def group_advantages(
    rewards: list[float] | tuple[float, ...] | NDArray[np.floating],
    baseline: Baseline = "leave_one_out",
    normalize_std: bool = False,
) -> NDArray[np.float64]:
    """Advantage of each sample of one group, float64[n], for rewards [n].

    `group_mean`: r_i - mean(r) (GRPO, arXiv 2402.03300). `leave_one_out`: r_i - mean of the others (RLOO, arXiv
    2402.14740), which is n / (n - 1) times the former. `normalize_std` then divides by the group's sample standard
    deviation (n - 1 in the denominator) plus `STD_FLOOR`. Equal rewards give exactly 0. `value`: r_i itself, of which the
    learned baseline is subtracted token by token (`services/trainer/learn/loss.py`).

    Raises `FieldError` for non-finite rewards and for fewer than `smallest_group(baseline)` of them.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise FieldError("rewards", values.tolist(), "rewards must be finite; fail such samples before this point")
    if values.size < smallest_group(baseline):
        raise FieldError("rewards", values.tolist(), f"baseline {baseline} needs {smallest_group(baseline)} samples")
    if baseline == "value":
        return values.copy()
    shifted = values - values[0]
    centred = shifted - shifted.mean()
    advantages = centred * (values.size / (values.size - 1)) if baseline == "leave_one_out" else centred
    if normalize_std and values.size > 1:
        advantages = advantages / (values.std(ddof=1) + STD_FLOOR)
    return advantages


def all_equal(rewards: list[float] | tuple[float, ...] | NDArray[np.floating]) -> bool:
    """Whether a group carries no signal: what `filter_equal_rewards` drops (DAPO, arXiv 2503.14476)."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool((values == values[0]).all())
