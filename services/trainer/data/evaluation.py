"""Verdicts on held-out completions: what the verifier says of them by a deadline, and whether it means a right answer.

The verifier may be away for as long as it likes; what it has not judged by the deadline has no verdict. Not here: what
an evaluation makes of that.

Held-out evaluation through the same actors, at one stated policy version.

Consumes the held-out problems, produces an accuracy; waits for actors and verifier up to a deadline. While it runs, the
caller holds commits of later versions, so that every completion is of the version that is being measured; the spans that
come back prove it. Training sequences go on beside it, and so does the optimizer, up to the next version's commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import SpanKind

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import FinishReason, SamplingParams, TokenIds
from pipelinerl.messages.verification import VerifyItem, VerifyOutcome
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.spans import (
    Trace,
    child,
    root,
    trace_of,
)
from services.trainer.data.actor_client import ActorClient, ActorClients, EvaluatedCompletion

log = logging.getLogger(__name__)

JUDGE_BATCH = 64
"""Completions per verifier call: what one call loses, others keep."""


class Verifier(Protocol):
    """`pipelinerl.messages.verification.VerifierClient`."""

    async def verify(self, items: Sequence[VerifyItem]) -> list[VerifyOutcome]: ...


def is_right(outcome: VerifyOutcome, correct_reward: float) -> bool:
    """Whether the terms of the answer alone reach `correct_reward` (> 0); format and length terms do not count."""
    terms = [term for name, term in outcome.components.items() if name == "answer" or name.startswith("answer.")]
    return outcome.ok and sum(terms) >= correct_reward * (1 - 1e-9)


async def judge(verifier: Verifier, items: Sequence[VerifyItem], deadline: float) -> dict[str, VerifyOutcome]:
    """Outcomes by sequence id, as far as the verifier gives them before `deadline` (seconds of the loop's clock)."""
    verdicts: dict[str, VerifyOutcome] = {}
    try:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            for first in range(0, len(items), JUDGE_BATCH):
                tasks.create_task(_judge_batch(verifier, items[first : first + JUDGE_BATCH], verdicts))
    except TimeoutError:
        log.warning("held-out evaluation: %d of %d completions judged in time", len(verdicts), len(items))
    return verdicts


async def _judge_batch(verifier: Verifier, items: Sequence[VerifyItem], verdicts: dict[str, VerifyOutcome]) -> None:
    try:
        outcomes = await verifier.verify(items)
    except (ServiceError, MessageError) as error:
        log.warning("held-out evaluation goes on without %d verdicts: %s", len(items), error)
        return
    verdicts.update((outcome.sequence_id, outcome) for outcome in outcomes)


GENERATION_SHARE = 0.9
"""Of the evaluation's time; what generation leaves of it is the verifier's."""
EMPTY = "empty_completion"
"""An actor's reason that is the policy's own fault: a wrong answer."""


@dataclass(frozen=True, eq=False)
class HeldoutProblem:
    problem_id: str
    task: str
    prompt_token_ids: TokenIds
    prompt_text: str
    reference_json: str


@dataclass(frozen=True, eq=False)
class HeldoutSample:
    prompt: str
    completion: str
    reward: float | None
    """None: no verdict."""
    spans: tuple[tuple[int, int, int], ...]
    token_ids: TokenIds


@dataclass(frozen=True)
class HeldoutResult:
    """`accuracy`: share of right answers among the problems with a verdict; `num_unanswered` problems have none.

    No verdict: no completion in time, a failure of the actor, no answer of the verifier in time, or a reward that failed.
    """

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
        verifier: Verifier,
        sampling: SamplingParams,
        *,
        incarnation: int,
        correct_reward: float,
        seed: int,
        timeout_s: float,
        client: ActorClients = ActorClient,
    ) -> None:
        self._problems = {problem.problem_id: problem for problem in problems}
        self._members, self._verifier = members, verifier
        self._sampling, self._incarnation, self._seed = sampling, incarnation, seed
        self._correct_reward, self._timeout_s, self._client = correct_reward, timeout_s, client

    async def evaluate(self, version: int) -> HeldoutResult:
        """Ends within the timeout; the caller holds commits of later versions meanwhile.

        Raises `ServiceError` when not one problem has a verdict by then.
        """
        with root("evaluation", attributes={a.VERSION: version}) as span:
            began_at = asyncio.get_running_loop().time()
            generated_by = began_at + GENERATION_SHARE * self._timeout_s
            completions = await self._generate(version, generated_by, trace_of(span))
            items = [self._item(completion) for completion in completions.values() if not completion.failure]
            verdicts = await judge(self._verifier, items, began_at + self._timeout_s)
            return self._result(version, completions, verdicts)

    async def _generate(self, version: int, deadline: float, trace: Trace) -> dict[str, EvaluatedCompletion]:
        """Asks the actors for what is still missing until nothing is, none answers, or the deadline passes."""
        done: dict[str, EvaluatedCompletion] = {}
        try:
            async with asyncio.timeout_at(deadline):
                while missing := [p for p in self._problems if p not in done]:
                    members = dict(self._members())
                    before = len(done)
                    await self._ask(members, missing, version, done, trace)
                    if len(done) == before:
                        log.warning("%d actors answered none of %d held-out problems", len(members), len(missing))
                        break
        except TimeoutError:
            log.warning("held-out evaluation: %d of %d completions in time", len(done), len(self._problems))
        return done

    async def _ask(
        self,
        members: dict[str, str],
        missing: list[str],
        version: int,
        done: dict[str, EvaluatedCompletion],
        trace: Trace,
    ) -> None:
        names = sorted(members)
        shares = {name: missing[position :: len(names)] for position, name in enumerate(names)}
        async with asyncio.TaskGroup() as tasks:
            for name, share in shares.items():
                if share:
                    tasks.create_task(self._ask_one(name, members[name], share, version, done, trace))

    async def _ask_one(
        self,
        name: str,
        address: str,
        share: list[str],
        version: int,
        done: dict[str, EvaluatedCompletion],
        trace: Trace,
    ) -> None:
        prompts = {problem_id: self._problems[problem_id].prompt_token_ids for problem_id in share}
        about: a.Attributes = {a.ACTOR: name, **a.rpc("pipelinerl.v1.ActorService/Generate")}
        calling = child(trace, "evaluation.generate", kind=SpanKind.CLIENT, attributes=about)
        try:
            with calling as span:
                async with self._client(name, address) as client:
                    answers = client.generate(prompts, self._sampling, self._seed, self._timeout_s, trace_of(span))
                    async for completion in answers:
                        if completion.problem_id in prompts and self._is_of(version, completion):
                            done[completion.problem_id] = completion
        except (ServiceError, MessageError) as error:
            log.warning("held-out evaluation goes on without %s: %s", name, error)

    def _is_of(self, version: int, completion: EvaluatedCompletion) -> bool:
        if completion.failure:
            log.warning("held-out problem %s failed: %s", completion.problem_id, completion.failure)
            return True
        versions = {(span.incarnation, span.version) for span in completion.spans}
        if versions != {(self._incarnation, version)}:
            log.warning("held-out problem %s is asked again: sampled by versions %s", completion.problem_id, versions)
            return False
        return True

    def _result(
        self, version: int, completions: Mapping[str, EvaluatedCompletion], verdicts: Mapping[str, VerifyOutcome]
    ) -> HeldoutResult:
        unanswered = Counter(self._without_verdict(completions, verdicts))
        num_answered = len(self._problems) - unanswered.total()
        if num_answered == 0:
            raise ServiceError(f"no held-out problem has a verdict: {dict(unanswered)}")
        if unanswered:
            log.warning("held-out accuracy of version %d leaves out problems: %s", version, dict(unanswered))
        right = sum(is_right(outcome, self._correct_reward) for outcome in verdicts.values())
        return HeldoutResult(
            version,
            right / num_answered,
            len(self._problems),
            unanswered.total(),
            tuple(self._sample(completion, verdicts) for _, completion in sorted(completions.items())[:4]),
        )

    def _without_verdict(
        self, completions: Mapping[str, EvaluatedCompletion], verdicts: Mapping[str, VerifyOutcome]
    ) -> Iterator[str]:
        """Why, for each problem that is left out."""
        for problem_id in self._problems:
            completion, verdict = completions.get(problem_id), verdicts.get(problem_id)
            if completion is None:
                yield "no completion"
            elif completion.failure:
                if short_reason(completion.failure) != EMPTY:
                    yield short_reason(completion.failure)
            elif verdict is None:
                yield "not judged"
            elif not verdict.ok:
                yield f"reward_{verdict.status}"

    def _sample(self, completion: EvaluatedCompletion, verdicts: Mapping[str, VerifyOutcome]) -> HeldoutSample:
        verdict = verdicts.get(completion.problem_id)
        return HeldoutSample(
            prompt=self._problems[completion.problem_id].prompt_text,
            completion=completion.text,
            reward=verdict.reward if verdict is not None and verdict.ok else None,
            spans=tuple((span.version, span.start, span.end) for span in completion.spans),
            token_ids=completion.token_ids,
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
