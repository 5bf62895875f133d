"""Groups from a stream in any order, with repeats, unknown sequences and failures, and what cannot be trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import Sequence, VersionSpan
from pipelinerl.rl.grouping import GroupAssembler, untrainable_reason


def sample(group_id: str, index: int, size: int = 3, failure: str = "", reward: float = 0.0) -> Sequence:
    return Sequence(
        run="r",
        sequence_id=f"{group_id}.{index}",
        group_id=group_id,
        sample_index=index,
        group_size=size,
        task="t",
        prompt_token_ids=np.array([1], dtype=np.int32),
        completion_token_ids=np.array([2], dtype=np.int32),
        behaviour_logprobs=np.array([-1.0], dtype=np.float32),
        spans=(VersionSpan(0, 0, 1),),
        reward=reward,
        failure=failure,
    )


def expecting(*group_ids: str, size: int = 3) -> GroupAssembler:
    assembler = GroupAssembler()
    for group_id in group_ids:
        assembler.expect(group_id, size)
    return assembler


def test_the_last_member_completes_a_group_in_sample_order() -> None:
    assembler = expecting("a")
    assert assembler.add(sample("a", 2, reward=2.0)) is None
    assert assembler.add(sample("a", 0, reward=0.5)) is None
    group = assembler.add(sample("a", 1, reward=1.0))
    assert group is not None
    assert group.rewards == (0.5, 1.0, 2.0)
    assert assembler.open_groups() == {}


def test_failed_members_complete_a_group_and_stand_apart() -> None:
    assembler = expecting("a", size=2)
    assembler.add(sample("a", 1, size=2, failure="verifier timeout"))
    group = assembler.add(sample("a", 0, size=2))
    assert group is not None
    assert [sequence.sample_index for sequence in group.sequences] == [0]
    assert [sequence.failure for sequence in group.failed] == ["verifier timeout"]


def test_repeats_and_unknown_sequences_are_counted_and_change_nothing() -> None:
    assembler = expecting("a", size=2)
    first = sample("a", 0, size=2, reward=1.0)
    assembler.add(first)
    assert assembler.add(sample("a", 0, size=2, reward=9.0)) is None
    assert assembler.add(sample("b", 0)) is None
    group = assembler.add(sample("a", 1, size=2))
    assert group is not None
    assert group.sequences[0] is first
    assert assembler.add(sample("a", 1, size=2)) is None
    assert (assembler.duplicates, assembler.unexpected) == (1, 2)


def test_a_sequence_that_contradicts_its_group_is_set_aside() -> None:
    assembler = expecting("a")
    with pytest.raises(MessageError, match="group_size: 4, issued with 3"):
        assembler.add(sample("a", 0, size=4))
    assert assembler.held() == ()


def test_a_discarded_group_gives_back_what_had_arrived() -> None:
    assembler = expecting("a", "b")
    assembler.add(sample("a", 1))
    assert [sequence.sequence_id for sequence in assembler.discard("a")] == ["a.1"]
    assert assembler.add(sample("a", 0)) is None
    assert assembler.open_groups() == {"b": 3}


def test_restored_from_its_open_groups_and_held_sequences() -> None:
    assembler = expecting("a", "b")
    assembler.add(sample("b", 1))
    restored = GroupAssembler()
    for group_id, size in assembler.open_groups().items():
        restored.expect(group_id, size)
    for sequence in assembler.held():
        restored.add(sequence)
    assert restored.add(sample("b", 0)) is None
    assert restored.add(sample("b", 2)) is not None


def test_expecting_a_group_twice_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="issued twice"):
        expecting("a", "a")


@given(st.data())
def test_any_order_with_repeats_gives_each_group_once(data: st.DataObject) -> None:
    ids = ["a", "b", "c"]
    everything = [sample(group_id, index) for group_id in ids for index in range(3)]
    repeats = data.draw(st.lists(st.sampled_from(everything), max_size=6))
    stream = data.draw(st.permutations(everything + repeats))
    assembler = expecting(*ids)
    groups = [group for sequence in stream if (group := assembler.add(sequence)) is not None]
    assert sorted(group.group_id for group in groups) == ids
    assert all([sequence.sample_index for sequence in group.sequences] == [0, 1, 2] for group in groups)
    assert assembler.duplicates + assembler.unexpected == len(repeats)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"failure": "verifier timeout"}, "verifier timeout"),
        ({"prompt_token_ids": np.array([1, 1, 1, 1], dtype=np.int32)}, "longer than the context"),
        ({"completion_token_ids": np.array([6], dtype=np.int32)}, "token outside the vocabulary"),
        ({"prompt_token_ids": np.array([1, 6], dtype=np.int32)}, "token outside the vocabulary"),
    ],
)
def test_why_a_sequence_cannot_be_trained_on(change: dict[str, Any], reason: str) -> None:
    good = replace(sample("a", 0), prompt_token_ids=np.array([1, 2, 5], dtype=np.int32))
    assert untrainable_reason(replace(good, **change), max_context=4, vocab_size=6) == reason
