"""The record of an episode, by hand: which tokens extend which, what is served again, and what is left at the end."""

import numpy as np

from pipelinerl.messages.sequences import (
    Branch,
    Completion,
    FinishReason,
    PartialSequence,
    SamplingParams,
    Turn,
    VersionSpan,
    decode_group,
    encode_group,
)
from services.actor.episodes.record import EpisodeRecord, RecordedTurn
from tests.support.generation import generated
from tests.unit.builders import make_group

ASKED = SamplingParams(max_tokens=10)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def ask(record: EpisodeRecord, context: tuple[int, ...], made: Completion | None = None) -> RecordedTurn:
    """`made` None: nothing is to be sampled."""
    turn = record.take(tokens(*context), ASKED)
    assert turn.is_finished == (made is None)
    if made is not None:
        record.sampled(turn, made)
    return turn


def lists(branch: Branch) -> tuple[list[int], list[int], list[float]]:
    return branch.prompt_token_ids.tolist(), branch.completion_token_ids.tolist(), branch.behaviour_logprobs.tolist()


def test_turns_that_extend_each_other_are_one_branch_with_the_observations_between_them() -> None:
    record = EpisodeRecord()
    ask(record, (1, 2), generated(3, 4, version=5))
    ask(record, (1, 2, 3, 4, 8, 9), generated(6, version=7, finish=LENGTH))
    (branch,), dropped = record.result()
    assert lists(branch) == ([1, 2], [3, 4, 8, 9, 6], [-5, -5, -7])
    assert branch.spans == (VersionSpan(5, 0, 2), VersionSpan(7, 4, 5))
    assert branch.turns == (Turn(0, 2, STOP), Turn(4, 5, LENGTH))
    assert dropped == 0


def test_what_does_not_extend_and_what_extends_the_same_again_are_branches_of_their_own() -> None:
    record = EpisodeRecord()
    ask(record, (1,), generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 8), generated(4))  # a parallel call with another question
    ask(record, (5, 2, 7), generated(6))  # a rewritten history
    branches, _ = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 7, 3]), ([1, 2, 8], [4]), ([5, 2, 7], [6])]


def test_parallel_calls_with_equal_tokens_are_two_conversations() -> None:
    record = EpisodeRecord()
    first, second = record.take(tokens(1), ASKED), record.take(tokens(1), ASKED)
    assert first is not second
    record.sampled(first, generated(2))
    record.sampled(second, generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 7), generated(4))
    branches, _ = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 7, 3]), ([1], [2, 7, 4])]


def test_a_run_again_is_served_each_turn_once_and_what_it_does_not_ask_for_is_dropped() -> None:
    record = EpisodeRecord()
    ask(record, (1,), generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 7, 3, 8), generated(4))
    record.restart()
    ask(record, (1,))
    ask(record, (1,), generated(5))  # served already: sampled anew
    ask(record, (1, 2, 9), generated(6))  # another observation than before
    branches, dropped = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 9, 6]), ([1], [5])]
    assert dropped == 2


def test_a_recorded_turn_that_is_longer_than_now_allowed_is_not_served() -> None:
    record = EpisodeRecord()
    ask(record, (1,), generated(2, 3, 4))
    record = EpisodeRecord(record.partial(0).branches)
    assert not record.take(tokens(1), SamplingParams(max_tokens=2)).is_finished
    assert record.take(tokens(1), SamplingParams(max_tokens=3)).is_finished
    record.restart()
    assert not record.take(tokens(1), SamplingParams(max_tokens=4)).is_finished


def test_an_episode_goes_on_elsewhere_with_an_interrupted_turn() -> None:
    record = EpisodeRecord()
    ask(record, (1,), generated(2, version=3))
    ask(record, (1, 2, 7), generated(4, version=3, finish=None))
    record.take(tokens(9), ASKED)  # asked for, and nothing sampled yet
    group = make_group(partials=(record.partial(0, 1.5),), prompt_token_ids=tokens(), episodic=True)
    (handed_over,) = decode_group(encode_group(group)).partials
    assert isinstance(handed_over, PartialSequence)
    assert handed_over.generation_s == 1.5

    record = EpisodeRecord(handed_over.branches)
    assert record.result() == ((), 2)
    ask(record, (1,))
    turn = record.take(tokens(1, 2, 7), ASKED)
    assert turn.token_ids.tolist() == [1, 2, 7, 4]
    record.sampled(turn, generated(5, 6, version=4))
    (branch,), dropped = record.result()
    assert lists(branch) == ([1], [2, 7, 4, 5, 6], [-3, -3, -4, -4])
    assert branch.spans == (VersionSpan(3, 0, 1), VersionSpan(3, 2, 3), VersionSpan(4, 3, 5))
    assert branch.turns == (Turn(0, 1), Turn(2, 5))
    assert dropped == 0
