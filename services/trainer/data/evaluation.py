"""Measures one policy version through the actors that serve it: held-out accuracy, and parity with the trained weights.

Held-out evaluation consumes the held-out problems and produces an accuracy; it waits for actors and verifier up to a deadline.
The parity probe is a fixed token sequence, which every actor scores with the version it serves, and the trainer with that
version's weights: the largest absolute difference of token log-probabilities, in nats, is the run's `logprob_mismatch_max`; an
answer that cannot be compared is one of its `parity_failures`. Unlike `mismatch_kl` it contains no effect of a stale KV cache.

While this runs, the caller holds commits of later versions, so that every completion is of the version that is measured; the
spans that come back prove it. Training goes on beside it, up to the next version's commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import Logprobs, PolicyVersion, SamplingParams, TokenIds, finish_reason_to_proto
from pipelinerl.messages.verification import VerifierClient, status_name
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.spans import (
    Trace,
    child,
    root,
    trace_of,
)
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyItem, VerifyResult
from services.trainer.data.actor_client import ActorClient, ActorClients, EvaluatedCompletion
from services.trainer.data.feeder import EncodedProblem

log = logging.getLogger(__name__)

JUDGE_BATCH = 64
"""Completions per verifier call: what one call loses, others keep."""


def is_right(outcome: VerifyResult, correct_reward: float) -> bool:
    """Whether the terms of the answer alone reach `correct_reward` (> 0); format and length terms do not count."""
    terms = [term for name, term in outcome.components.items() if name == "answer" or name.startswith("answer.")]
    return outcome.status == VERIFY_STATUS_OK and sum(terms) >= correct_reward * (1 - 1e-9)


async def judge(verifier: VerifierClient, items: list[VerifyItem], deadline: float) -> dict[str, VerifyResult]:
    """Outcomes by sequence id, as far as the verifier gives them before `deadline` (seconds of the loop's clock)."""
    verdicts: dict[str, VerifyResult] = {}

    async def verify(batch: list[VerifyItem]) -> None:
        try:
            verdicts.update((outcome.sequence_id, outcome) for outcome in await verifier.verify(batch))
        except (ServiceError, MessageError) as error:
            log.warning("held-out evaluation goes on without %d verdicts: %s", len(batch), error)

    try:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            for first in range(0, len(items), JUDGE_BATCH):
                tasks.create_task(verify(items[first : first + JUDGE_BATCH]))
    except TimeoutError:
        log.warning("held-out evaluation: %d of %d completions judged in time", len(verdicts), len(items))
    return verdicts


GENERATION_SHARE = 0.9
"""Of the evaluation's time; what generation leaves of it is the verifier's."""
EMPTY = "empty_completion"
"""An actor's reason that is the policy's own fault: a wrong answer."""


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
    """`members()` gives the addresses of the actors that serve, by name."""

    def __init__(
        self,
        problems: list[EncodedProblem],
        members: Callable[[], Mapping[str, str]],
        verifier: VerifierClient,
        sampling: SamplingParams,
        *,
        incarnation: int,
        correct_reward: float,
        seed: int,
        timeout_s: float,
        client: ActorClients = ActorClient,
    ) -> None:
        self._problems = {f"h{index:06d}": problem for index, problem in enumerate(problems)}
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

        async def ask(name: str, address: str, share: list[str]) -> None:
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

        try:
            async with asyncio.timeout_at(deadline):
                while missing := [p for p in self._problems if p not in done]:
                    members, before = sorted(self._members().items()), len(done)
                    async with asyncio.TaskGroup() as tasks:
                        for position, (name, address) in enumerate(members):
                            if share := missing[position :: len(members)]:
                                tasks.create_task(ask(name, address, share))
                    if len(done) == before:
                        log.warning("%d actors answered none of %d held-out problems", len(members), len(missing))
                        break
        except TimeoutError:
            log.warning("held-out evaluation: %d of %d completions in time", len(done), len(self._problems))
        return done

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
        self, version: int, completions: Mapping[str, EvaluatedCompletion], verdicts: Mapping[str, VerifyResult]
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
        self, completions: Mapping[str, EvaluatedCompletion], verdicts: Mapping[str, VerifyResult]
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
            elif verdict.status != VERIFY_STATUS_OK:
                yield f"reward_{status_name(verdict.status)}"

    def _sample(self, completion: EvaluatedCompletion, verdicts: Mapping[str, VerifyResult]) -> HeldoutSample:
        verdict = verdicts.get(completion.problem_id)
        return HeldoutSample(
            prompt=self._problems[completion.problem_id].prompt_text,
            completion=completion.text,
            reward=verdict.reward if verdict is not None and verdict.status == VERIFY_STATUS_OK else None,
            spans=tuple((span.version, span.start, span.end) for span in completion.spans),
            token_ids=completion.token_ids,
        )

    def _item(self, completion: EvaluatedCompletion) -> VerifyItem:
        problem = self._problems[completion.problem_id]
        return VerifyItem(
            sequence_id=completion.problem_id,
            task=problem.task,
            prompt_text=problem.prompt_text,
            completion_text=completion.text,
            reference_json=problem.reference_json,
            completion_tokens=len(completion.token_ids),
            max_tokens=self._sampling.max_tokens,
            finish_reason=finish_reason_to_proto(completion.finish_reason),
        )


# --- the parity probe --------------------------------------------------------------------------------------------------

SCORE_TIMEOUT_S = 60.0


def probe_tokens(vocabulary_size: int, num_tokens: int, seed: int) -> TokenIds:
    """int32[num_tokens], fixed by the seed: any tokens will do, the models only have to agree on them."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocabulary_size, size=num_tokens, dtype=np.int32)


@dataclass(frozen=True)
class Parity:
    """One probe. `mismatch`: largest difference, nats, always finite; None when no answer could be compared.

    `failures`: answers of actors that serve the version and cannot be compared, for numbers that are not finite or missing.
    """

    mismatch: float | None
    failures: int


async def measure_parity(
    members: Mapping[str, str],
    tokens: TokenIds,
    trained: Logprobs,
    version: PolicyVersion,
    client: ActorClients = ActorClient,
) -> Parity | None:
    """Over all actors that serve `version`; None when none of them could say."""
    answers = await asyncio.gather(
        *(_score(client(name, address), tokens, version) for name, address in members.items())
    )
    served = {name: answer for name, answer in zip(members, answers, strict=True) if answer is not None}
    return compare(served, trained, version) if served else None


def compare(served: Mapping[str, Logprobs], trained: Logprobs, version: PolicyVersion) -> Parity:
    """The parity of the answers of actors, by name; logs each one that cannot be compared as an error."""
    differences: list[float] = []
    for name, logprobs in served.items():
        if len(logprobs) != len(trained):
            problem = f"{len(logprobs)} log-probabilities where the trainer has {len(trained)}"
        elif not np.isfinite(trained).all():
            problem = "log-probabilities of the trainer are not finite"
        elif not np.isfinite(logprobs).all():
            problem = "log-probabilities of the actor are not finite"
        else:
            differences.append(float(np.abs(logprobs.astype(np.float64) - trained.astype(np.float64)).max()))
            continue
        log.error("parity probe of version %s fails on %s: %s", version, name, problem)
    return Parity(max(differences, default=None), len(served) - len(differences))


async def _score(actor: ActorClient, tokens: TokenIds, version: PolicyVersion) -> Logprobs | None:
    """None when it does not answer, or serves another version."""
    try:
        async with actor:
            served, served_version = await actor.score(tokens, SCORE_TIMEOUT_S)
    except (ServiceError, MessageError) as error:
        log.warning("parity probe goes on without %s: %s", actor.name, error)
        return None
    if served_version != version:
        log.warning("parity probe: %s serves %s, not %s", actor.name, served_version, version)
        return None
    return served
