"""Record episodes as tokens, serve the turns that environments request, and have verifiers run the environments.

Turn B extends turn A if B's context begins with A's context and sampled tokens. A chain of such turns forms a branch. A turn
begins a new branch if it extends no turn, or if an earlier turn already extends the same turn.

An environment runs again if its verifier died, or if another actor continues the episode. A request whose context was recorded
then gets the recorded turn. Turns that the last run did not receive are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any

import numpy as np

from pipelinerl.episodes import CONTEXT_LENGTH, MAX_TURNS
from pipelinerl.errors import MessageError, PipelineRLError, ServiceError
from pipelinerl.messages import sequences
from pipelinerl.messages.sequences import Branch, Completion, PartialSequence, PromptGroup, SamplingParams, TokenIds, Turn
from pipelinerl.messages.verification import VerifierAway, VerifierClient, judged, status_name
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import StartStopped, unless_stopped
from pipelinerl.service.retry import LOG_EVERY_S, Backoff
from pipelinerl.tasks.source import Split, episode_seed
from pipelinerl.telemetry.tracing import Trace, headers_of
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_CRASHED, VERIFY_STATUS_OK, EpisodeRequest, VerifyResult
from services.actor.engine import EngineError, defect_of, sequence_of
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

CALL_SLACK_S = 30.0
"""Seconds added to an episode's time limit, to get the timeout of the call to its verifier."""
MOST_RUNS = 5
"""An episode fails after this many runs of its environment that requested turns and then lost their verifier."""
NO_TURNS = "no_turns: the environment ended without requesting a turn"
_BACKOFF = Backoff(first_s=0.1, most_s=5.0, jitter=0.5)

Sample = Callable[[TokenIds, Completion, SamplingParams, int], Awaitable[Completion]]
"""`sample(context_token_ids, made, sampling, number)` continues the turn `made` until it ends or is interrupted
(`finish_reason` None). `sampling.max_tokens` limits the whole turn. `number` counts calls from 0. Raises `EngineError`."""


class Refused(PipelineRLError):
    """A request that gets no turn. `status`: HTTP status; `code`: machine-readable code, as in OpenAI's errors."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False)
class RecordedTurn:
    """A turn. `context_token_ids` is int32[context]. `made`: sampled tokens, whose spans begin at position 0."""

    context_token_ids: TokenIds
    made: Completion = field(default_factory=Completion)
    extends: RecordedTurn | None = None
    asked: SamplingParams | None = None
    """Sampling parameters of the last request for the turn on this actor; None if there was no request."""
    messages: Any = None
    """History that ends with the turn's message, for `endpoint.context_of`; None if the turn was not served as a message."""

    @property
    def is_finished(self) -> bool:
        return self.made.finish_reason is not None

    @property
    def token_ids(self) -> TokenIds:
        """Context and sampled tokens, int32[context + sampled]."""
        return np.concatenate([self.context_token_ids, self.made.completion_token_ids])


@dataclass(eq=False)
class Episode:
    """One running episode. `sampling.max_tokens` bounds a turn; `carried`: branches that another actor recorded. `turns`: all
    recorded turns. A turn is sampled to its end even if its client hangs up, so that a repeated request gets the same turn."""

    sampling: SamplingParams
    sample: Sample
    metrics: ActorMetrics
    decode: Callable[[TokenIds], str]
    carried: InitVar[Iterable[Branch]] = ()
    _: KW_ONLY
    max_turns: int
    """Maximum number of turns in one run of the environment. Turns whose client hung up count, too."""
    max_context: int
    turn_timeout_s: float
    """Maximum seconds for a turn, including the wait while the `Sampler` already decodes `places` turns."""
    failure: str = field(default="", init=False)
    """Why the engine or a deadline ended the episode, or empty. If set, all further requests are refused."""

    def __post_init__(self, carried: Iterable[Branch]) -> None:
        self.turns = [turn for branch in carried for turn in _turns_of(branch)]
        self._calls = itertools.count()
        self._sampling: dict[RecordedTurn, asyncio.Task[None]] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a run of the environment."""
        self.over = asyncio.Event()
        """Set when the current run of the environment has ended."""
        self.served: list[RecordedTurn] = []
        """Turns that this run has received or awaits, in the order of its requests."""
        self.asked_for: set[RecordedTurn] = set()
        """Turns that this run has requested, including turns whose client hung up."""
        self.policy_fault = ""
        """Error code of this run's first request that exceeded a limit, or empty."""

    def not_served(self, turn: RecordedTurn, over: asyncio.Event) -> None:
        """Record that a run of the environment did not receive `turn`. `over` is the event of that run. If another run has
        begun since, change nothing."""
        if over is self.over and turn in self.served:
            self.served.remove(turn)

    async def turn(
        self,
        context_token_ids: TokenIds,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> RecordedTurn:
        """Return the recorded or newly sampled turn after `context_token_ids`, int32[context]. `max_tokens` can only lower the
        recipe's limit; stop strings and ids add to the recipe's. Raises `Refused`."""
        if self.failure:
            raise Refused(500, "failed", self.failure)
        num_tokens = len(context_token_ids)
        if (room := self.max_context - num_tokens) < 1:
            problem = f"leave no room for a turn in a context of {self.max_context} (model.max_context)"
            raise self.policy_refused(CONTEXT_LENGTH, f"{num_tokens} tokens {problem}")
        sampling = replace(
            self.sampling,
            max_tokens=min(max_tokens or room, self.sampling.max_tokens, room),
            stop=tuple(dict.fromkeys((*self.sampling.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*self.sampling.stop_token_ids, *stop_token_ids))),
        )
        turn, over = self.take(context_token_ids, sampling), self.over
        is_known = turn.is_finished or turn in self._sampling
        self.metrics.episode_turns.labels("replayed" if is_known else "sampled").inc()
        try:
            if not turn.is_finished:
                await asyncio.shield(self._sampled(turn, sampling))
        except asyncio.CancelledError:
            self.not_served(turn, over)
            raise
        if turn.is_finished:
            return turn
        if self.failure:
            raise Refused(500, "failed", self.failure)
        raise Refused(503, "interrupted", "the actor stops; another actor continues the episode")

    def take(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn:
        """Return the recorded turn for a request, or a new one, marked as served. Raises `Refused` after `max_turns` turns."""
        turn = self._known(context_token_ids, sampling)
        if turn not in self.asked_for and len(self.asked_for) >= self.max_turns:
            raise self.policy_refused(MAX_TURNS, f"this episode has used its {self.max_turns} turns (task.max_turns)")
        if turn is None:
            turn = RecordedTurn(context_token_ids)
            self.turns.append(turn)
        turn.asked, turn.extends = sampling, self._extended_by(context_token_ids)
        self.asked_for.add(turn)
        self.served.append(turn)
        return turn

    def _known(self, context_token_ids: TokenIds, sampling: SamplingParams) -> RecordedTurn | None:
        """Return the first turn with this context and these parameters that is not in `served`, or None."""
        for turn in self.turns:
            is_short = len(turn.made.completion_token_ids) <= sampling.max_tokens
            # The parameters of a turn from another actor are unknown.
            fits = turn not in self.served and (is_short if turn.asked is None else turn.asked == sampling)
            if fits and np.array_equal(turn.context_token_ids, context_token_ids):
                return turn
        return None

    def _extended_by(self, context_token_ids: TokenIds) -> RecordedTurn | None:
        """Return a served turn whose tokens are the longest prefix of the context, or None. Prefer one that no turn extends."""
        served = [turn for turn in self.turns if turn in self.served]
        extended, known = {id(turn.extends) for turn in served}, [(turn, turn.token_ids) for turn in served if turn.is_finished]
        starts = [(turn, len(own)) for turn, own in known if np.array_equal(context_token_ids[: len(own)], own)]
        return max(starts, key=lambda start: (start[1], id(start[0]) not in extended), default=(None, 0))[0]

    async def end(self) -> None:
        for task in (tasks := list(self._sampling.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def result(self) -> tuple[Branch, ...]:
        """Return the branches of the finished turns that the environment's last run received. Count other turns as dropped."""
        good = [turn for turn in self.served if turn.is_finished]
        branches = _branches(good)
        self.metrics.episode_branches.inc(max(0, len(branches) - 1))
        self.metrics.episode_dropped_turns.inc(len(self.turns) - len(good))
        return branches

    def partial(self, sample_index: int, generation_s: float = 0.0) -> PartialSequence:
        """Return all sampled tokens, including interrupted turns, for another actor."""
        begun = [turn for turn in self.turns if len(turn.made.completion_token_ids)]
        return PartialSequence(sample_index=sample_index, generation_s=generation_s, branches=_branches(begun))

    @property
    def finish_reason(self) -> sequences.FinishReason | None:
        """Finish reason of the last finished turn in the environment's current run; None if no turn is finished."""
        reasons = [turn.made.finish_reason for turn in self.served if turn.is_finished]
        return reasons[-1] if reasons else None

    def policy_refused(self, code: str, problem: str, status: int = 400) -> Refused:
        """Record the policy's fault `code`, unless the environment's run has an earlier fault. Return the error to raise."""
        self.policy_fault = self.policy_fault or code
        return Refused(status, code, problem)

    def _sampled(self, turn: RecordedTurn, sampling: SamplingParams) -> asyncio.Task[None]:
        """Return the task, shared by all requests for the turn, that samples the turn to its end."""
        task = self._sampling.get(turn)
        if task is None:
            task = self._sampling[turn] = asyncio.create_task(self._go_on_with(turn, sampling))
            task.add_done_callback(lambda _: self._sampling.pop(turn))
        return task

    async def _go_on_with(self, turn: RecordedTurn, sampling: SamplingParams) -> None:
        try:
            async with asyncio.timeout(self.turn_timeout_s):
                made = await self.sample(turn.context_token_ids, turn.made, sampling, next(self._calls))
        except (EngineError, TimeoutError) as error:
            timeout = f"turn_timeout: no turn within {self.turn_timeout_s:g} s (task.turn_timeout_s)"
            self._fail(turn, f"engine: {error}"[:500] if isinstance(error, EngineError) else timeout)
            return
        is_interrupted_before_any = made.finish_reason is None and not len(made.completion_token_ids)
        if not is_interrupted_before_any and (defect := defect_of(made)):
            self._fail(turn, defect)
        else:
            turn.made = made

    def _fail(self, turn: RecordedTurn, failure: str) -> None:
        """Drop a turn, and fail the episode if this run of the environment waits for the turn."""
        if turn in self.served:
            self.failure = self.failure or failure
            self.served.remove(turn)
        self.turns.remove(turn)
        self.asked_for.discard(turn)


def no_such_episode() -> Refused:
    return Refused(404, "episode_not_found", "no running episode has this key")


class Episodes:
    """The running episodes of one recipe's tasks. The caller must first set `address`, the endpoint's `host:port`."""

    def __init__(
        self, verifier: VerifierClient, metrics: ActorMetrics, recipe: Recipe, decode: Callable[[TokenIds], str]
    ) -> None:
        self._verifier, self._metrics, self._recipe, self._decode = verifier, metrics, recipe, decode
        self.tasks, self.address = recipe.episodic_tasks, ""
        self._running: dict[str, Episode] = {}
        self._told_at_s = -math.inf

    @contextmanager
    def running(self, episode: Episode) -> Iterator[str]:
        """Restart the episode and yield a key under which its environment is served. At the end, refuse open requests."""
        key = secrets.token_urlsafe(24)
        episode.restart()
        self._running[key] = episode
        try:
            yield key
        finally:
            del self._running[key]
            episode.over.set()

    def __getitem__(self, key: str) -> Episode:
        if episode := self._running.get(key):
            return episode
        raise no_such_episode()

    async def play(
        self, group: PromptGroup, start: PartialSequence, sample: Sample, *, split: Split, stopped: asyncio.Event, trace: Trace
    ) -> tuple[Episode, VerifyResult | None]:
        """Run an episode and return it with the environment's result. The result is None if `stopped` is set before the episode
        ends. Waits without limit for a verifier, but gives up when `MOST_RUNS` runs with turns have lost their verifier."""
        request = EpisodeRequest(
            sequence_id=group.sequence_id(start.sample_index),
            task=group.task,
            prompt_text=group.prompt_text,
            reference_json=group.reference_json,
            seed=episode_seed(self._recipe.seed, split, group.problem_index),
            max_tokens=group.sampling.max_tokens,
            traceparent=headers_of(trace).get("traceparent", ""),
        )
        task, judge = self.tasks[request.task].task, self.tasks[request.task].reward.judge
        episode = Episode(
            *(group.sampling, sample, self._metrics, self._decode, start.branches),
            max_turns=task.max_turns,
            max_context=self._recipe.model.max_context,
            turn_timeout_s=task.turn_timeout_s,
        )
        timeout_s = task.episode_timeout_s + CALL_SLACK_S + (judge.timeout_s if judge is not None else 0.0)
        try:
            return episode, await unless_stopped(self._run(episode, request, timeout_s), stopped)
        except StartStopped:
            return episode, None
        finally:
            await episode.end()

    async def _run(self, episode: Episode, request: EpisodeRequest, timeout_s: float) -> VerifyResult:
        tries = lost = 0
        while True:
            with self.running(episode) as key:
                request.base_url = f"http://{self.address}/episodes/{key}/v1"
                try:
                    return await self._verifier.run_episode(request, timeout_s * 2**lost)  # a slow judge may need longer
                except VerifierAway as error:
                    tries, lost = tries + 1, lost + bool(episode.asked_for)
                    failure = f"{lost} verifiers were lost while they ran the episode; the last error: {error}"
                    if (now_s := time.monotonic()) - self._told_at_s >= LOG_EVERY_S:  # one line for all episodes
                        self._told_at_s = now_s
                        log.warning("a verifier is full or was lost; starting its episodes again: %s", error)
                except (ServiceError, MessageError) as error:
                    return VerifyResult(sequence_id=request.sequence_id, message=str(error))
            if lost >= MOST_RUNS:
                return VerifyResult(sequence_id=request.sequence_id, message=failure)
            await asyncio.sleep(_BACKOFF.delay_s(tries))


def verdict_of(episode: Episode, result: VerifyResult) -> tuple[str, VerifyResult]:
    """Return why the episode cannot be used ("" if it can), and its result. If the environment crashes after a turn was refused
    because of a limit, the episode counts with a reward of 0. Pure."""
    if episode.failure:
        return episode.failure, result
    if result.status == VERIFY_STATUS_CRASHED and episode.policy_fault:
        why = f"{episode.policy_fault}: {result.message}"
        terms = {"answer": 0.0}
        return "", VerifyResult(sequence_id=result.sequence_id, status=VERIFY_STATUS_OK, components=terms, message=why)
    if result.status == VERIFY_STATUS_OK:
        return "", result
    code = f"episode_{status_name(result.status)}" if result.status else "verifier_refused"
    return f"{code}: {result.message}"[:500], result


def sequence_of_episode(
    group: PromptGroup, sample: PartialSequence, episode: Episode, result: VerifyResult, actor: str
) -> sequences.Sequence:
    """Return the episode as a sequence with its reward and the first branch's text, or as a failed one with the reason."""
    failure, result = verdict_of(episode, result)
    branches, last = episode.result(), episode.finish_reason
    if failure or not branches or last is None:
        return sequence_of(group, sample, actor, result.answer, failure or NO_TURNS)
    first, *others = branches
    sequence = replace(
        sequence_of(group, sample, actor, failure=NO_TURNS),
        **{**vars(first), "finish_reason": last},
        failure="",
        branches=tuple(others),
        prompt_text=episode.decode(first.prompt_token_ids),
        completion_text=episode.decode(first.completion_token_ids),
    )
    return judged(sequence, result)


def _branches(turns: list[RecordedTurn]) -> tuple[Branch, ...]:
    """Arrange turns in branches. If several extend the same turn, only the first continues its branch."""
    paths: dict[int, list[RecordedTurn]] = {}  # by the id of the path's last turn
    for turn in turns:
        paths[id(turn)] = [*paths.pop(id(turn.extends), []), turn]
    return tuple(_branch(path) for path in sorted(paths.values(), key=lambda path: turns.index(path[0])))


def _branch(path: list[RecordedTurn]) -> Branch:
    prompt = path[0].context_token_ids
    spans: list[sequences.VersionSpan] = []
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
    token_ids = np.concatenate([branch.prompt_token_ids, branch.completion_token_ids])
    offset, read, made = len(branch.prompt_token_ids), 0, list[RecordedTurn]()
    for turn in branch.turns or (Turn(0, len(branch.completion_token_ids), sequences.FinishReason.STOP),):
        size = turn.end - turn.start
        spans = tuple(
            replace(span, start=span.start - turn.start, end=span.end - turn.start)
            for span in branch.spans
            if turn.start <= span.start < turn.end
        )
        completion = Completion(
            branch.completion_token_ids[turn.start : turn.end],
            branch.behaviour_logprobs[read : read + size],
            spans,
            turn.finish_reason,
        )
        extends = made[-1] if made else None
        made.append(RecordedTurn(token_ids[: offset + turn.start], completion, extends))
        read += size
    return made
