"""The record of one episode: its turns, each with the tokens that it saw and those that were sampled. Pure.

Turns that extend each other's tokens make a branch. A turn that extends none begins a branch of its own, and so does a second
one that extends the same tokens: its prompt is all that it saw. Nothing here is text, and no token is made here.

An environment may be run again, where its verifier died or another actor goes on with the episode. Then no turn is served
at first, and a request whose tokens are those of a recorded turn gets that turn. What the last run did not ask for is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipelinerl.messages.sequences import Branch, FinishReason, PartialSequence, SamplingParams, TokenIds, Turn, VersionSpan
from services.actor.engine import NO_TOKENS, Generation, appended, nothing_yet


@dataclass(eq=False)
class RecordedTurn:
    """`context_token_ids` int32[context]: what it saw. `made`: what was sampled after that, spans counted from its own start;
    `made.finish_reason` None: it was not sampled to its end yet."""

    context_token_ids: TokenIds
    made: Generation = NO_TOKENS
    extends: RecordedTurn | None = None
    """The turn whose tokens, and those that it saw, are the start of what this one saw."""
    asked: SamplingParams | None = None
    """How it was to be sampled; None where another actor knew."""
    served: int = 0
    """Which request of this run of the environment has it, or waits for it, counted from 1; 0: none."""
    is_asked_for: bool = False
    """In this run of the environment, also by a client that has hung up since."""
    messages: Any = None
    """What the request that had it said, with the answer; None: it asked with tokens. `rendering` reads it."""

    @property
    def is_finished(self) -> bool:
        return self.made.finish_reason is not None

    @property
    def token_ids(self) -> TokenIds:
        """int32[context + sampled]"""
        return np.concatenate([self.context_token_ids, self.made.completion_token_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.context_token_ids) + len(self.made.completion_token_ids)

    def is_start_of(self, token_ids: TokenIds) -> bool:
        """Whether `token_ids` begin with what it saw and what it sampled."""
        seen, sampled = len(self.context_token_ids), self.made.completion_token_ids
        return (
            seen + len(sampled) <= len(token_ids)
            and np.array_equal(token_ids[seen : seen + len(sampled)], sampled)
            and np.array_equal(token_ids[:seen], self.context_token_ids)
        )


class EpisodeRecord:
    """`turns` in the order in which they were first asked for."""

    def __init__(self, branches: Iterable[Branch] = ()) -> None:
        """`branches`: what another actor has recorded."""
        self._requests = itertools.count(1)
        self.turns: list[RecordedTurn] = []
        for branch in branches:
            self.turns.extend(_turns_of(branch))

    @property
    def served(self) -> list[RecordedTurn]:
        """In the order in which this run asked for them."""
        return sorted((turn for turn in self.turns if turn.served), key=lambda turn: turn.served)

    @property
    def num_asked_for(self) -> int:
        """Turns that this run asked for, whether they are served or not."""
        return sum(turn.is_asked_for for turn in self.turns)

    def restart(self) -> None:
        """The environment is run anew: it has asked for no turn yet."""
        for turn in self.turns:
            turn.served, turn.is_asked_for = 0, False

    def known(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn | None:
        """The first recorded turn that saw these tokens, was asked for with the same length and stops and is not served in this
        run. Of one that another actor began, only the length is known."""
        for turn in self.turns:
            is_short = len(turn.made.completion_token_ids) <= sampling.max_tokens
            fits = not turn.served and (is_short if turn.asked is None else turn.asked == sampling)
            if fits and np.array_equal(turn.context_token_ids, context_token_ids):
                return turn
        return None

    def take(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn:
        """The `known` turn or a new one. It counts as served from now on; where it is not finished, it is to be sampled
        further."""
        turn = self.known(context_token_ids, sampling)
        if turn is None:
            turn = RecordedTurn(context_token_ids)
            self.turns.append(turn)
        turn.asked, turn.is_asked_for = sampling, True
        turn.extends, turn.served = self._extended_by(context_token_ids), next(self._requests)
        return turn

    def sampled(self, turn: RecordedTurn, generation: Generation) -> None:
        """Adds what was sampled after what there is of it."""
        turn.made = appended(turn.made, generation)

    def drop(self, turn: RecordedTurn) -> None:
        """Sampling it failed."""
        self.turns.remove(turn)

    def result(self) -> tuple[tuple[Branch, ...], int]:
        """The branches of the turns that this run was served, and how many other turns are dropped: those that it did not ask
        for, and those that were not sampled to their end."""
        good = [turn for turn in self.served if turn.is_finished]
        return _branches(good), len(self.turns) - len(good)

    def partial(self, sample_index: int, generation_s: float = 0.0) -> PartialSequence:
        """For another actor: everything that was sampled, also what was interrupted."""
        begun = [turn for turn in self.turns if len(turn.made.completion_token_ids)]
        return replace(nothing_yet(sample_index), generation_s=generation_s, branches=_branches(begun))

    def _extended_by(self, context_token_ids: TokenIds) -> RecordedTurn | None:
        """The longest one; of equal ones, which parallel requests may have sampled, one that nothing extends yet."""
        extended = {id(turn.extends) for turn in self.turns if turn.served}
        starts = [turn for turn in self.turns if turn.served and turn.is_finished and turn.is_start_of(context_token_ids)]
        return max(starts, key=lambda turn: (turn.num_tokens, id(turn) not in extended), default=None)


def _branches(turns: list[RecordedTurn]) -> tuple[Branch, ...]:
    """Of the given turns, each once: the first that extends another one continues its branch."""
    paths: dict[int, list[RecordedTurn]] = {}  # by the turn that ends each so far
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
    )


def _turns_of(branch: Branch) -> list[RecordedTurn]:
    """The inverse of `_branch`."""
    token_ids = np.concatenate([branch.prompt_token_ids, branch.completion_token_ids])
    offset, read, made = len(branch.prompt_token_ids), 0, list[RecordedTurn]()
    for turn in branch.turns or (Turn(0, len(branch.completion_token_ids), FinishReason.STOP),):
        size = turn.end - turn.start
        spans = tuple(
            replace(span, start=span.start - turn.start, end=span.end - turn.start)
            for span in branch.spans
            if turn.start <= span.start < turn.end
        )
        generation = Generation(
            branch.completion_token_ids[turn.start : turn.end],
            branch.behaviour_logprobs[read : read + size],
            spans,
            turn.finish_reason,
        )
        extends = made[-1] if made else None
        made.append(RecordedTurn(token_ids[: offset + turn.start], generation, extends))
        read += size
    return made
