"""The record of one episode: its turns, each with its context tokens and its sampled tokens. Pure.

Turns that extend each other's tokens form a branch. A turn that extends no other begins a new branch, whose prompt is the
turn's context, and so does a second turn that extends the same tokens. This module handles tokens only, not text.

An environment runs again if its verifier died or if another actor continues the episode. Then no turn counts as served, and a
request with the context of a recorded turn gets that turn. Turns that the last run did not request are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipelinerl.messages.sequences import (
    Branch,
    Completion,
    FinishReason,
    PartialSequence,
    SamplingParams,
    TokenIds,
    Turn,
    VersionSpan,
)
from services.actor.engine import followed_by


@dataclass(eq=False)
class RecordedTurn:
    """A turn with its context, int32[context], and its sampled tokens in `made`, whose spans count from the turn's start. If
    `made.finish_reason` is None, the turn is not complete."""

    context_token_ids: TokenIds
    made: Completion = field(default_factory=Completion)
    extends: RecordedTurn | None = None
    """The turn whose context and sampled tokens are the start of this turn's context."""
    asked: SamplingParams | None = None
    """Requested sampling parameters; None if another actor began the turn."""
    served: int = 0
    """Number, from 1, of the request in this run of the environment that has or waits for this turn; 0 = none."""
    is_asked_for: bool = False
    """True if this run of the environment has requested the turn, even if the client hung up later."""
    messages: Any = None
    """The request's messages and the answer, for `rendering`; None for a request with tokens."""

    @property
    def is_finished(self) -> bool:
        return self.made.finish_reason is not None

    @property
    def token_ids(self) -> TokenIds:
        """Context and sampled tokens, int32[context + sampled]."""
        return np.concatenate([self.context_token_ids, self.made.completion_token_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.context_token_ids) + len(self.made.completion_token_ids)

    def is_start_of(self, token_ids: TokenIds) -> bool:
        """Return whether `token_ids` begin with this turn's context and sampled tokens."""
        seen, sampled = len(self.context_token_ids), self.made.completion_token_ids
        return (
            seen + len(sampled) <= len(token_ids)
            and np.array_equal(token_ids[seen : seen + len(sampled)], sampled)
            and np.array_equal(token_ids[:seen], self.context_token_ids)
        )


class EpisodeRecord:
    """The turns of an episode, in the order of their first requests."""

    def __init__(self, branches: Iterable[Branch] = ()) -> None:
        """Begin with the branches that another actor has recorded."""
        self._requests = itertools.count(1)
        self.turns: list[RecordedTurn] = []
        for branch in branches:
            self.turns.extend(_turns_of(branch))

    @property
    def served(self) -> list[RecordedTurn]:
        """Turns served to this run, in the order of its requests."""
        return sorted((turn for turn in self.turns if turn.served), key=lambda turn: turn.served)

    @property
    def num_asked_for(self) -> int:
        """Number of turns that this run requested, served or not."""
        return sum(turn.is_asked_for for turn in self.turns)

    def restart(self) -> None:
        """Mark all turns as not requested, since the environment runs again."""
        for turn in self.turns:
            turn.served, turn.is_asked_for = 0, False

    def known(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn | None:
        """Return the first recorded turn with this context and the same sampling parameters that is not served in this run.
        For a turn that another actor began, only its length is compared."""
        for turn in self.turns:
            is_short = len(turn.made.completion_token_ids) <= sampling.max_tokens
            fits = not turn.served and (is_short if turn.asked is None else turn.asked == sampling)
            if fits and np.array_equal(turn.context_token_ids, context_token_ids):
                return turn
        return None

    def take(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn:
        """Return the `known` turn or a new one, and mark it as served. If it is not finished, the caller must sample it."""
        turn = self.known(context_token_ids, sampling)
        if turn is None:
            turn = RecordedTurn(context_token_ids)
            self.turns.append(turn)
        turn.asked, turn.is_asked_for = sampling, True
        turn.extends, turn.served = self._extended_by(context_token_ids), next(self._requests)
        return turn

    def sampled(self, turn: RecordedTurn, generation: Completion) -> None:
        """Append sampled tokens to a turn."""
        turn.made = followed_by(turn.made, generation)

    def drop(self, turn: RecordedTurn) -> None:
        """Remove a turn whose sampling failed."""
        self.turns.remove(turn)

    def result(self) -> tuple[tuple[Branch, ...], int]:
        """Return the branches of the finished turns served to this run, and the number of other turns, which are dropped."""
        good = [turn for turn in self.served if turn.is_finished]
        return _branches(good), len(self.turns) - len(good)

    def partial(self, sample_index: int, generation_s: float = 0.0) -> PartialSequence:
        """Return all sampled tokens, including interrupted turns, for another actor."""
        begun = [turn for turn in self.turns if len(turn.made.completion_token_ids)]
        return PartialSequence(sample_index=sample_index, generation_s=generation_s, branches=_branches(begun))

    def _extended_by(self, context_token_ids: TokenIds) -> RecordedTurn | None:
        """Return the longest turn that the context extends. Among equal turns, which parallel requests may have sampled, one
        that no other turn extends is preferred."""
        extended = {id(turn.extends) for turn in self.turns if turn.served}
        starts = [turn for turn in self.turns if turn.served and turn.is_finished and turn.is_start_of(context_token_ids)]
        return max(starts, key=lambda turn: (turn.num_tokens, id(turn) not in extended), default=None)


def _branches(turns: list[RecordedTurn]) -> tuple[Branch, ...]:
    """Arrange turns in branches, each turn once. Only the first turn that extends another one continues its branch."""
    paths: dict[int, list[RecordedTurn]] = {}  # by the last turn of each
    for turn in turns:
        path = paths.pop(id(turn.extends), [])
        paths[id(turn)] = [*path, turn]
    order = {id(turn): number for number, turn in enumerate(turns)}
    return tuple(_branch(path) for path in sorted(paths.values(), key=lambda path: order[id(path[0])]))


def _branch(path: list[RecordedTurn]) -> Branch:
    prompt = path[0].context_token_ids
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    for turn in path:
        start = len(turn.context_token_ids) - len(prompt)
        turns.append(Turn(start, start + len(turn.made.completion_token_ids), turn.made.finish_reason))
        spans += [replace(span, start=span.start + start, end=span.end + start) for span in turn.made.spans]
    return Branch(
        prompt_token_ids=prompt,
        completion_token_ids=path[-1].token_ids[len(prompt) :],
        behaviour_logprobs=np.concatenate([turn.made.behaviour_logprobs for turn in path]),
        spans=tuple(spans),
        turns=tuple(turns),
        finish_reason=turns[-1].finish_reason,
    )


def _turns_of(branch: Branch) -> list[RecordedTurn]:
    """Return the turns of a branch, the inverse of `_branch`."""
    token_ids = np.concatenate([branch.prompt_token_ids, branch.completion_token_ids])
    offset, read, made = len(branch.prompt_token_ids), 0, list[RecordedTurn]()
    for turn in branch.turns or (Turn(0, len(branch.completion_token_ids), FinishReason.STOP),):
        size = turn.end - turn.start
        spans = tuple(
            replace(span, start=span.start - turn.start, end=span.end - turn.start)
            for span in branch.spans
            if turn.start <= span.start < turn.end
        )
        generation = Completion(
            branch.completion_token_ids[turn.start : turn.end],
            branch.behaviour_logprobs[read : read + size],
            spans,
            turn.finish_reason,
        )
        extends = made[-1] if made else None
        made.append(RecordedTurn(token_ids[: offset + turn.start], generation, extends))
        read += size
    return made
