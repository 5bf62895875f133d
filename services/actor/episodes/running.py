"""Run an episode's environment at a verifier until it has a reward, and make a sequence of the recorded turns.

This module does not sample: the environment requests turns from the endpoint (`endpoint`), and the episode samples them. The
caller bounds the number of running episodes and uses their results.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import Branch, PromptGroup, SamplingParams, Sequence, TokenIds
from pipelinerl.messages.verification import VerifierAway, VerifierClient, judged, status_name
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.retry import LOG_EVERY_S, Backoff
from pipelinerl.tasks.source import Split, episode_seed
from pipelinerl.telemetry.spans import Trace, headers_of
from pipelinerl.v1.actor_pb2 import GeneratePrompt
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_CRASHED, VERIFY_STATUS_OK, EpisodeRequest, VerifyResult
from services.actor.engine import nothing_yet, sequence_of
from services.actor.episodes.episode import Episode, EpisodeBook, EpisodeLimits, Sample, base_path
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

CALL_SLACK_S = 30.0
"""Time after an episode's deadline within which a verifier must answer; otherwise it is taken for dead."""
MOST_RUNS = 5
"""Maximum runs of an environment whose verifiers were lost after it had requested turns, since it may crash verifiers."""
NO_TURNS = "no_turns: the environment ended without requesting a turn"
_BACKOFF = Backoff(first_s=0.1, most_s=5.0, jitter=0.5)


class EpisodeRunner:
    """Runs episodes of one recipe's tasks. `address`: `host:port` at which environments reach this actor's endpoint.
    `decode`: the engine's."""

    def __init__(
        self,
        book: EpisodeBook,
        verifier: VerifierClient,
        metrics: ActorMetrics,
        recipe: Recipe,
        address: str,
        decode: Callable[[TokenIds], str],
    ) -> None:
        self._decode = decode
        self._book, self._verifier, self._metrics, self._recipe = book, verifier, metrics, recipe
        self._told_at_s = -math.inf
        self._address, self.tasks = address, recipe.episodic_tasks

    def request(
        self, name: str, split: Split, problem: PromptGroup | GeneratePrompt, sampling: SamplingParams, trace: Trace
    ) -> EpisodeRequest:
        """Return the request for a verifier. `name`: id of the sample."""
        return EpisodeRequest(
            sequence_id=name,
            task=problem.task,
            prompt_text=problem.prompt_text,
            reference_json=problem.reference_json,
            seed=episode_seed(self._recipe.seed, split, problem.problem_index),
            max_tokens=sampling.max_tokens,
            traceparent=headers_of(trace).get("traceparent", ""),
        )

    async def play(
        self,
        request: EpisodeRequest,
        sampling: SamplingParams,
        sample: Sample,
        stopped: asyncio.Event,
        carried: Iterable[Branch] = (),
    ) -> tuple[Episode, VerifyResult | None]:
        """Run an episode and return it with its environment's result, or with None if `stopped` was set before its end.

        Waits without limit for a verifier that accepts the episode. If its verifier is lost, the environment runs again, at
        another verifier if possible, and gets sampled turns from the record. `carried`: branches that another actor recorded.
        """
        share, max_context = self.tasks[request.task], self._recipe.model.max_context
        task, judge = share.task, share.reward.judge
        limits = EpisodeLimits(task.max_turns, max_context, task.turn_timeout_s)
        episode = Episode(sampling, limits, sample, self._metrics, self._decode, carried)
        timeout_s = task.episode_timeout_s + CALL_SLACK_S + (judge.timeout_s if judge is not None else 0.0)
        running = asyncio.create_task(self._run(episode, request, timeout_s))
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            return episode, running.result() if running.done() else None
        finally:
            running.cancel()
            stopping.cancel()
            await asyncio.wait((running, stopping))
            await episode.end()

    async def _run(self, episode: Episode, request: EpisodeRequest, timeout_s: float) -> VerifyResult:
        tries = lost = 0
        while True:
            with self._book.running(episode) as key:
                request.base_url = f"http://{self._address}{base_path(key)}"
                try:
                    return await self._verifier.run_episode(request, timeout_s * 2**lost)  # it may await its judge
                except VerifierAway as error:
                    tries, lost = tries + 1, lost + bool(episode.record.num_asked_for)
                    self._tell(error)
                    failure = f"{lost} verifiers were lost while they ran it, the last one with: {error}"
                except (ServiceError, MessageError) as error:
                    return _refused(request, str(error))
            if lost >= MOST_RUNS:
                return _refused(request, failure)
            await asyncio.sleep(_BACKOFF.delay_s(tries))

    def _tell(self, error: VerifierAway) -> None:
        """Log at most one line a minute for all episodes."""
        now_s = time.monotonic()
        if now_s - self._told_at_s >= LOG_EVERY_S:
            self._told_at_s = now_s
            log.warning("episodes are run again: %s", error)


def _refused(request: EpisodeRequest, failure: str) -> VerifyResult:
    return VerifyResult(sequence_id=request.sequence_id, message=failure)


def verdict_of(episode: Episode, result: VerifyResult) -> tuple[str, VerifyResult]:
    """Return why the episode cannot be used, or "", and its result.

    An environment that fails after the policy exceeded its turns or length counts as reward 0. Pure."""
    if episode.failure:
        return episode.failure, result
    if result.status == VERIFY_STATUS_CRASHED and episode.policy_fault:
        why = f"{episode.policy_fault}: {result.message}"
        return "", VerifyResult(
            sequence_id=result.sequence_id, status=VERIFY_STATUS_OK, components={"answer": 0.0}, message=why
        )
    if not result.status:
        return f"verifier_refused: {result.message}"[:500], result
    if result.status != VERIFY_STATUS_OK:
        return f"episode_{status_name(result.status)}: {result.message}"[:500], result
    return "", result


def sequence_of_episode(
    group: PromptGroup,
    sample_index: int,
    episode: Episode,
    result: VerifyResult,
    actor: str,
    decode: Callable[[TokenIds], str],
    *,
    failure: str = "",
    generation_s: float = 0.0,
) -> Sequence:
    """Return the episode as a sequence with its reward, or with the reason of its failure. Texts are the first branch's."""
    branches, last = episode.result(), episode.finish_reason
    failure = failure or ("" if branches else NO_TURNS)
    bare = replace(sequence_of(group, nothing_yet(sample_index), actor, failure="-"), generation_s=generation_s)
    if failure:
        return replace(bare, failure=failure, completion_text=result.answer)
    assert last is not None, "a branch ends with a turn"
    first, *others = branches
    played = replace(
        bare,
        failure="",
        **vars(first),
        branches=tuple(others),
        prompt_text=decode(first.prompt_token_ids),
        completion_text=decode(first.completion_token_ids),
        finish_reason=last,
    )
    return judged(played, result)
