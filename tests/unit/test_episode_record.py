"""The record of an episode, by hand: which tokens extend which, what is served again, and what is left at the end."""

import numpy as np

from pipelinerl.messages.sequences import (
    Branch,
    Completion,
    FinishReason,
    SamplingParams,
    Turn,
    VersionSpan,
    decode_group,
    encode_group,
)
from services.actor.engine import followed_by
from services.actor.episodes.episode import Episode, RecordedTurn
from tests.support.generation import generated, recorded
from tests.unit.builders import make_group

ASKED = SamplingParams(max_tokens=10)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def ask(record: Episode, context: tuple[int, ...], made: Completion | None = None) -> RecordedTurn:
    """`made` None: nothing is to be sampled."""
    turn = record.take(tokens(*context), ASKED)
    assert turn.is_finished == (made is None)
    if made is not None:
        sample(turn, made)
    return turn


def sample(turn: RecordedTurn, made: Completion) -> None:
    turn.made = followed_by(turn.made, made)


def dropped_turns(record: Episode) -> int:
    return len(record.turns) - sum(turn.is_finished for turn in record.served)


def lists(branch: Branch) -> tuple[list[int], list[int], list[float]]:
    return branch.prompt_token_ids.tolist(), branch.completion_token_ids.tolist(), branch.behaviour_logprobs.tolist()


def test_what_does_not_extend_what_extends_the_same_again_and_parallel_calls_are_branches_of_their_own() -> None:
    record = recorded()
    ask(record, (1,), generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 8), generated(4))  # a parallel call with another question
    ask(record, (5, 2, 7), generated(6))  # a rewritten history
    branches = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 7, 3]), ([1, 2, 8], [4]), ([5, 2, 7], [6])]
    record = recorded()
    first, second = record.take(tokens(1), ASKED), record.take(tokens(1), ASKED)
    assert first is not second
    sample(first, generated(2))
    sample(second, generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 7), generated(4))
    branches = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 7, 3]), ([1], [2, 7, 4])]


def test_a_run_again_is_served_each_turn_once_and_what_it_does_not_ask_for_is_dropped() -> None:
    record = recorded()
    ask(record, (1,), generated(2))
    ask(record, (1, 2, 7), generated(3))
    ask(record, (1, 2, 7, 3, 8), generated(4))
    record.restart()
    ask(record, (1,))
    ask(record, (1,), generated(5))  # served already: sampled anew
    ask(record, (1, 2, 9), generated(6))  # another observation than before
    branches = record.result()
    assert [lists(branch)[:2] for branch in branches] == [([1], [2, 9, 6]), ([1], [5])]
    assert dropped_turns(record) == 2


def test_a_recorded_turn_that_is_longer_than_now_allowed_is_not_served() -> None:
    record = recorded()
    ask(record, (1,), generated(2, 3, 4))
    record = recorded(record.partial(0).branches)
    assert not record.take(tokens(1), SamplingParams(max_tokens=2)).is_finished
    assert record.take(tokens(1), SamplingParams(max_tokens=3)).is_finished
    record.restart()
    assert not record.take(tokens(1), SamplingParams(max_tokens=4)).is_finished


def test_an_episode_goes_on_elsewhere_with_an_interrupted_turn() -> None:
    record = recorded()
    ask(record, (1,), generated(2, version=3))
    ask(record, (1, 2, 7), generated(4, version=3, finish=None))
    record.take(tokens(9), ASKED)  # asked for, and nothing sampled yet
    group = make_group(partials=(record.partial(0, 1.5),), prompt_token_ids=tokens(), episodic=True)
    (handed_over,) = decode_group(encode_group(group)).partials
    assert handed_over.generation_s == 1.5

    record = recorded(handed_over.branches)
    assert (record.result(), dropped_turns(record)) == ((), 2)
    ask(record, (1,))
    turn = record.take(tokens(1, 2, 7), ASKED)
    assert turn.token_ids.tolist() == [1, 2, 7, 4]
    sample(turn, generated(5, 6, version=4, finish=LENGTH))
    (branch,) = record.result()
    assert lists(branch) == ([1], [2, 7, 4, 5, 6], [-3, -3, -4, -4])
    assert branch.spans == (VersionSpan(3, 0, 1), VersionSpan(3, 2, 3), VersionSpan(4, 3, 5))
    assert branch.turns == (Turn(0, 1, STOP), Turn(2, 5, LENGTH))
    assert dropped_turns(record) == 0
