"""Held-out evaluation through the same actors, at one stated policy version.

Consumes the held-out problems, produces an accuracy. While it runs, the caller holds commits of later versions, so that every
completion is of the version that is being measured; the spans that come back prove it. Training sequences go on beside it,
and so does the optimizer, up to the next version's commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.types import FinishReason, SamplingParams, TokenIds
from pipelinerl.verify import VerifierClient, VerifyItem
from services.trainer.actor_client import ActorClient, EvaluatedCompletion

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HeldoutProblem:
    problem_id: str
    task: str
    prompt_token_ids: TokenIds
    prompt_text: str
    reference_json: str


@dataclass(frozen=True)
class HeldoutSample:
    prompt: str
    completion: str
    reward: float
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class HeldoutResult:
    """`accuracy`: share of all problems answered with at least the reward of a right answer."""

    version: int
    accuracy: float
    num_problems: int
    num_unanswered: int
    samples: tuple[HeldoutSample, ...]


class HeldoutEvaluator:
    """See the module. `members()` gives the addresses of the actors that serve, by name."""

    def __init__(
        self,
        problems: Sequence[HeldoutProblem],
        members: Callable[[], Mapping[str, str]],
        verifier: VerifierClient,
        sampling: SamplingParams,
        *,
        incarnation: int,
        correct_reward: float,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._problems = {problem.problem_id: problem for problem in problems}
        self._members, self._verifier = members, verifier
        self._sampling, self._incarnation, self._seed = sampling, incarnation, seed
        self._correct_reward, self._timeout_s = correct_reward, timeout_s

    async def evaluate(self, version: int) -> HeldoutResult:
        """The caller holds commits of later versions. Raises `ServiceError` when no actor answers within the timeout."""
        return await self._judge(version, await self._generate(version))

    async def _generate(self, version: int) -> dict[str, EvaluatedCompletion]:
        """Asks the actors for what is still missing until nothing is, or the timeout passes."""
        done: dict[str, EvaluatedCompletion] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                while missing := [p for p in self._problems if p not in done]:
                    members = dict(self._members())
                    if not members:
                        raise ServiceError("no actor serves: held-out evaluation has nobody to ask")
                    before = len(done)
                    await self._ask(members, missing, version, done)
                    if len(done) == before:
                        raise ServiceError(f"{len(members)} actors answered none of {len(missing)} held-out problems")
        except TimeoutError as error:
            if not done:
                raise ServiceError(f"no held-out completion within {self._timeout_s:.0f} s") from error
            log.warning("held-out evaluation: %d of %d problems in time", len(done), len(self._problems))
        return done

    async def _ask(
        self, members: dict[str, str], missing: list[str], version: int, done: dict[str, EvaluatedCompletion]
    ) -> None:
        names = sorted(members)
        shares = {name: missing[position :: len(names)] for position, name in enumerate(names)}
        async with asyncio.TaskGroup() as tasks:
            for name, share in shares.items():
                if share:
                    tasks.create_task(self._ask_one(name, members[name], share, version, done))

    async def _ask_one(
        self, name: str, address: str, share: list[str], version: int, done: dict[str, EvaluatedCompletion]
    ) -> None:
        prompts = {problem_id: self._problems[problem_id].prompt_token_ids for problem_id in share}
        try:
            async with ActorClient(name, address) as client:
                async for completion in client.generate(prompts, self._sampling, self._seed, self._timeout_s):
                    if self._is_of(version, completion):
                        done[completion.problem_id] = completion
        except (ServiceError, MessageError) as error:
            log.warning("held-out evaluation goes on without %s: %s", name, error)

    def _is_of(self, version: int, completion: EvaluatedCompletion) -> bool:
        versions = {(span.incarnation, span.version) for span in completion.spans}
        if completion.failure:
            log.warning("held-out problem %s counts as wrong: %s", completion.problem_id, completion.failure)
            return True
        if versions != {(self._incarnation, version)}:
            log.warning("held-out problem %s is asked again: sampled by versions %s", completion.problem_id, versions)
            return False
        return True

    async def _judge(self, version: int, completions: dict[str, EvaluatedCompletion]) -> HeldoutResult:
        items = [self._item(completion) for completion in completions.values() if not completion.failure]
        rewards = {outcome.sequence_id: outcome for outcome in await self._verifier.verify(items)}
        right = sum(1 for outcome in rewards.values() if outcome.ok and outcome.reward >= self._correct_reward - 1e-9)
        samples = tuple(
            HeldoutSample(
                prompt=self._problems[problem_id].prompt_text,
                completion=completion.text,
                reward=rewards[problem_id].reward if problem_id in rewards else 0.0,
                spans=tuple((span.version, span.start, span.end) for span in completion.spans),
            )
            for problem_id, completion in sorted(completions.items())[:4]
        )
        return HeldoutResult(
            version, right / len(self._problems), len(self._problems), len(self._problems) - len(completions), samples
        )

    def _item(self, completion: EvaluatedCompletion) -> VerifyItem:
        problem = self._problems[completion.problem_id]
        return VerifyItem(
            sequence_id=problem.problem_id,
            task=problem.task,
            prompt_text=problem.prompt_text,
            completion_text=completion.text,
            reference_json=problem.reference_json,
            completion_tokens=len(completion.token_ids),
            max_tokens=self._sampling.max_tokens,
            finish_reason=FinishReason.LENGTH if completion.finish_reason == 2 else FinishReason.STOP,
        )
