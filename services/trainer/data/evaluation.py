"""Measure one policy version through the actors that serve it: held-out accuracy, and parity with the trained weights.

The parity probe is a fixed token sequence that the actors and the trainer score with the same version. The largest difference
of token log-probabilities is the run's `logprob_mismatch_max`. `parity_failures` counts the actors' answers that differ too
much, lack a part of the change that training made, or cannot be compared. A stale KV cache does not affect the probe.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.errors import FieldError, MessageError, ServiceError
from pipelinerl.messages.sequences import (
    EMPTY_COMPLETION,
    FINISH_REASON_FROM_PROTO,
    FLOAT32,
    Branch,
    FinishReason,
    Logprobs,
    PolicyVersion,
    Sequence,
    TokenIds,
    array_from_bytes,
    branch_from_proto,
    read_completion,
)
from pipelinerl.messages.verification import VerifierClient, item_of, judged, status_name
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.accuracy import Accuracy, accuracy_of, means_of
from pipelinerl.rl.groups import answer_reward
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.tracing import Trace, child, headers_of, root, trace_of
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, sequence_pb2
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyItem, VerifyResult
from services.trainer.data.feeder import EncodedProblem, longest_completion, sampling_of
from services.trainer.learn.meter import in_sixteen_bits
from services.trainer.weight_sync.updater import WeightUpdater

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S, SCORE_TOKEN_S = 60.0, 0.2
"""Maximum time for a probe: a fixed part, and a part for each token."""


@dataclass(frozen=True, eq=False)
class Scored:
    """An actor's log-probabilities [tokens - 1] of the probe, their version, and how its weights were loaded (`loader`)."""

    logprobs: Logprobs
    version: PolicyVersion
    loader: str = ""


def branches_of(result: actor_pb2.GenerateResult) -> tuple[Branch, ...]:
    """Return an answer's branches. Outside an episode, the completion is the only branch. Raises `MessageError`."""
    kind = "GenerateResult"
    if result.branches:
        return tuple(branch_from_proto(branch, kind) for branch in result.branches)
    return (Branch(prompt_token_ids=np.empty(0, np.int32), **read_completion(result, kind)),)


@asynccontextmanager
async def calls_to(name: str, address: str, *, tls_dir: Path | None = None, tls_name: str = "") -> AsyncIterator[Any]:
    """Yield a stub of one actor's service. `tls_dir`: certificates; None = plain text. `tls_name`: name in the actor's
    certificate. Raises `ServiceError` if the certificates cannot be used, or a call in the block fails."""
    try:
        channel = open_channel(address, tls_dir, tls_name)
    except FieldError as error:
        raise ServiceError(f"cannot call actor {name} at {address}: {error}") from error
    try:
        async with channel:
            yield actor_pb2_grpc.ActorServiceStub(channel)
    except grpc.aio.AioRpcError as error:
        raise ServiceError(f"actor {name} at {address} does not answer: {explained(error, tls_dir)}") from error


JUDGE_BATCH = 64
"""Number of completions per verifier call. A failed call loses only these."""


def is_right(outcome: VerifyResult, correct_reward: float) -> bool:
    """Return whether the verdict is OK and its reward, without format and length terms, reaches `correct_reward` (> 0)."""
    earned = answer_reward(outcome.components)
    return outcome.status == VERIFY_STATUS_OK and earned is not None and earned >= correct_reward * (1 - 1e-9)


def reason_left_out(completion: actor_pb2.GenerateResult | None, verdict: VerifyResult | None) -> str:
    """Return why an answer does not count in the accuracy; empty if it counts."""
    if completion is None:
        return "no completion"
    if completion.failure:
        return "" if (reason := short_reason(completion.failure)) == EMPTY_COMPLETION else reason
    if verdict is None:
        return "not judged"
    return "" if verdict.status == VERIFY_STATUS_OK else f"reward_{status_name(verdict.status)}"


async def judge(verifier: VerifierClient, items: list[VerifyItem], deadline: float) -> dict[str, VerifyResult]:
    """Return the verifier's outcomes that arrive before `deadline` (the event loop's clock, seconds), by sequence id."""
    verdicts: dict[str, VerifyResult] = {}

    async def verify(batch: list[VerifyItem]) -> None:
        try:
            verdicts.update((outcome.sequence_id, outcome) for outcome in await verifier.verify(batch))
        except (ServiceError, MessageError) as error:
            log.warning("held-out evaluation continues without %d verdicts: %s", len(batch), error)

    try:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            for first in range(0, len(items), JUDGE_BATCH):
                tasks.create_task(verify(items[first : first + JUDGE_BATCH]))
    except TimeoutError:
        log.warning("held-out evaluation: only %d of %d completions were judged in time", len(verdicts), len(items))
    return verdicts


MOST_ASKED = 10_000
"""Maximum number of answers requested from an actor per call, which bounds the call's size."""
GENERATION_SHARE = 0.9
"""Share of the evaluation's time for generation; the rest is for the verifier."""


@dataclass(frozen=True)
class HeldoutResult:
    """Result of an evaluation. `overall`: accuracy over the recipe's tasks. `sets`: accuracy of each problem set. `num_tokens`:
    sampled tokens. `samples`: some answers; those without a verdict have a `failure`."""

    version: int
    overall: Accuracy
    num_tokens: int
    samples: tuple[Sequence, ...]
    sets: Mapping[str, Accuracy] = field(default_factory=dict)


class Evaluator:
    """Evaluates a version through those actors of `updater` that serve it. `calls`: works like `calls_to`."""

    def __init__(
        self,
        recipe: Recipe,
        problems: list[EncodedProblem],
        vocab_size: int,
        updater: WeightUpdater,
        verifier: VerifierClient,
        incarnation: int,
        calls: Callable[[str, str], AbstractAsyncContextManager[Any]] = calls_to,
    ) -> None:
        self._recipe, self._updater, self._verifier = recipe, updater, verifier
        self._samples = recipe.evaluation.samples
        answers = (problem for problem in problems for _ in range(self._samples))
        self._problems = {f"h{number:06d}": problem for number, problem in enumerate(answers)}
        """Problem of each requested answer, by the answer's id. Answers to the same problem follow each other."""
        self._incarnation, self._calls_to, self._timeout_s = incarnation, calls, recipe.evaluation.timeout_s
        self.tolerance, self._of_median = probe_tolerance(recipe), in_sixteen_bits(recipe)
        num_tokens = min(recipe.weights.probe_tokens, recipe.model.max_context - 1)
        # Any tokens are suitable: the models only have to agree on them.
        self.probe: TokenIds = np.random.default_rng(recipe.seed).integers(0, vocab_size, num_tokens, dtype=np.int32)

    async def evaluate(self, version: int) -> HeldoutResult:
        """Evaluate `version` while the caller holds commits. Raises `ServiceError` if no problem gets a verdict in time."""
        with root("evaluation", attributes={a.VERSION: version}) as span:
            began_at = asyncio.get_running_loop().time()
            generated_by = began_at + GENERATION_SHARE * self._timeout_s
            completions = await self._generate(version, generated_by, trace_of(span))
            good = [completion for completion in completions.values() if not completion.failure]
            items = [self._item(completion) for completion in good if not completion.HasField("verdict")]
            verdicts = await judge(self._verifier, items, began_at + self._timeout_s)
            verdicts |= {one.id: one.verdict for one in good if one.HasField("verdict")}  # episodes already have a verdict
            return self._result(version, completions, verdicts)

    async def _generate(self, version: int, deadline: float, trace: Trace) -> dict[str, actor_pb2.GenerateResult]:
        """Request completions from the actors until none is missing, no actor answers, or the deadline passes."""
        done: dict[str, actor_pb2.GenerateResult] = {}

        async def ask(name: str, address: str, asked: list[str]) -> None:
            sampling = self._sampling(self._problems[asked[0]])
            wanted = {answer: self._prompt(answer) for answer in asked}
            request = actor_pb2.GenerateRequest(prompts=wanted.values(), sampling=sampling, seed=self._recipe.seed + 1)
            about: a.Attributes = {a.ACTOR: name, **a.rpc("pipelinerl.v1.ActorService/Generate")}
            calling = child(trace, "evaluation.generate", kind=SpanKind.CLIENT, attributes=about)
            try:
                with calling as span:
                    metadata = tuple(headers_of(trace_of(span)).items())
                    async with self._calls_to(name, address) as stub:
                        async for completion in stub.Generate(request, timeout=self._timeout_s, metadata=metadata):
                            if completion.id in wanted and self._is_of(version, completion):
                                done[completion.id] = completion
            except (ServiceError, MessageError) as error:
                log.warning("held-out evaluation continues without %s: %s", name, error)

        try:
            async with asyncio.timeout_at(deadline):
                while missing := [p for p in self._problems if p not in done]:
                    members, before = sorted(self._updater.serving.items()), len(done)
                    async with asyncio.TaskGroup() as tasks:
                        for position, (name, member) in enumerate(members):
                            for asked in self._by_task(missing[position :: len(members)]).values():
                                tasks.create_task(ask(name, member.grpc_address, asked[:MOST_ASKED]))
                    if len(done) == before:
                        log.warning("%d actors answered none of %d held-out problems", len(members), len(missing))
                        break
        except TimeoutError:
            log.warning("held-out evaluation: only %d of %d completions arrived in time", len(done), len(self._problems))
        return done

    def _by_task(self, problem_ids: Iterable[str]) -> dict[str, list[str]]:
        """Group the problems by task, because the problems of one task share sampling settings."""
        found: dict[str, list[str]] = {}
        for problem_id in problem_ids:
            found.setdefault(self._problems[problem_id].share.name, []).append(problem_id)
        return found

    def _sampling(self, problem: EncodedProblem) -> sequence_pb2.SamplingParams:
        """Return the settings of training, with the evaluation's temperature and the task's `max_tokens`."""
        changed = {"temperature": self._recipe.evaluation.temperature, "max_tokens": problem.share.max_tokens}
        return sequence_pb2.SamplingParams(**vars(sampling_of(self._recipe, problem)) | changed)

    def _prompt(self, answer: str) -> actor_pb2.GeneratePrompt:
        problem = self._problems[answer]
        if len(problem.prompt_token_ids):
            return actor_pb2.GeneratePrompt(id=answer, prompt_token_ids=problem.prompt_token_ids.tobytes())
        return actor_pb2.GeneratePrompt(  # an episode, whose environment makes the prompt
            id=answer,
            task=problem.share.name,
            prompt_text=problem.prompt_text,
            reference_json=problem.reference_json,
            problem_index=problem.index,
        )

    def _is_of(self, version: int, completion: actor_pb2.GenerateResult) -> bool:
        """Return whether a completion failed or is entirely from `version`. Raises `MessageError` if it cannot be read."""
        branches = branches_of(completion)
        if completion.failure:
            log.warning("held-out problem %s failed: %s", completion.id, completion.failure)
            return True
        versions = {(span.incarnation, span.version) for branch in branches for span in branch.spans}
        if versions != {(self._incarnation, version)}:
            log.warning("asking held-out problem %s again; versions that sampled it: %s", completion.id, versions)
            return False
        return True

    def _result(
        self, version: int, completions: Mapping[str, actor_pb2.GenerateResult], verdicts: Mapping[str, VerifyResult]
    ) -> HeldoutResult:
        reasons = {answer: reason_left_out(completions.get(answer), verdicts.get(answer)) for answer in self._problems}
        told = dict(Counter(filter(None, reasons.values())))
        known = {answer: self._sequence(completion, verdicts.get(answer)) for answer, completion in completions.items()}
        by_set: dict[str, list[list[bool | None]]] = {}
        sets: dict[str, Accuracy] = {}
        for name, answers in self._by_task(self._problems).items():
            correct = self._problems[answers[0]].share.reward.correct
            right = [None if reasons[one] else one in verdicts and is_right(verdicts[one], correct) for one in answers]
            by_set[name] = [right[first : first + self._samples] for first in range(0, len(right), self._samples)]
            if (accuracy := accuracy_of(by_set[name])) is not None:
                reported = means_of(known[one].reported for one in answers if one in verdicts and not reasons[one])
                sets[name] = replace(accuracy, reported=reported)
        overall = accuracy_of(problem for name in self._recipe.mixture for problem in by_set.get(name, ()))
        if overall is None:
            raise ServiceError(f"no held-out problem has a verdict: {told}")
        if told:
            log.warning("held-out accuracy of version %d leaves out answers, by reason: %s", version, told)
        num_tokens = sum(sequence.num_episode_tokens for sequence in known.values())
        return HeldoutResult(version, overall, num_tokens, tuple(known[answer] for answer in self._shown(completions)), sets)

    def _shown(self, completions: Mapping[str, actor_pb2.GenerateResult]) -> list[str]:
        """Return the first answers, taking the sets in turn: four answers, or one per set if there are more sets."""
        by_set = self._by_task(sorted(completions)).values()
        in_turn = [answer for answers in zip_longest(*by_set) for answer in answers if answer is not None]
        return in_turn[: max(4, len(by_set))]

    def _sequence(self, completion: actor_pb2.GenerateResult, verdict: VerifyResult | None) -> Sequence:
        problem, (first, *others) = self._problems[completion.id], branches_of(completion)
        finish_reason = FINISH_REASON_FROM_PROTO.get(completion.finish_reason, FinishReason.STOP)
        sequence = Sequence(
            **{**vars(first), "finish_reason": finish_reason},
            branches=tuple(others),
            run="",
            sequence_id=completion.id,
            group_id="",
            sample_index=0,
            group_size=1,
            task=problem.share.name,
            reward=0.0,
            prompt_text=problem.prompt_text,
            completion_text=completion.completion_text,
            reference_json=problem.reference_json,
        )
        if verdict is None or verdict.status != VERIFY_STATUS_OK:
            return replace(sequence, failure=completion.failure or "no verdict")
        return judged(sequence, verdict)

    def _item(self, completion: actor_pb2.GenerateResult) -> VerifyItem:
        max_tokens = longest_completion(self._recipe, self._problems[completion.id])
        return item_of(self._sequence(completion, None), max_tokens)

    async def parity(self, version: int, trained: Logprobs, base: Logprobs | None = None) -> Parity | None:
        """Compare the scores of all actors that serve `version` with `trained`, the trainer's. Return None if none answers."""
        members = self._updater.serving
        wanted = PolicyVersion(self._incarnation, version)
        scores = (self._score(name, member.grpc_address, wanted) for name, member in members.items())
        answers = zip(members, await asyncio.gather(*scores), strict=True)
        served = {name: answer for name, answer in answers if answer is not None}
        return compare(served, trained, self.tolerance, of_median=self._of_median, base=base) if served else None

    async def _score(self, name: str, address: str, version: PolicyVersion) -> Scored | None:
        """Return the actor's scores; None if the actor does not answer or serves another version."""
        try:
            async with self._calls_to(name, address) as stub:
                request = actor_pb2.ScoreRequest(token_ids=self.probe.tobytes())
                response = await stub.Score(request, timeout=SCORE_TIMEOUT_S + SCORE_TOKEN_S * len(self.probe))
            logprobs = array_from_bytes(response.logprobs, FLOAT32, "ScoreResponse", "logprobs")
        except (ServiceError, MessageError) as error:
            log.warning("parity probe continues without %s: %s", name, error)
            return None
        served = PolicyVersion(response.incarnation, response.policy_version)
        if served != version:
            log.warning("parity probe: %s serves %s, not %s", name, served, version)
            return None
        return Scored(logprobs, served, response.loader)


TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.25
"""Allowed difference in nats: of every token in float32, and of the median token in 16 bits. In 16 bits, rounding can send a
token to other experts of a mixture, which moves its log-probability by whole nats (figures: docs/weight-updates.md)."""
SHARE_TOLERANCE = 0.1
"""Allowed distance of `served_share` from 1, in addition to the error that rounding explains."""


def probe_tolerance(recipe: Recipe) -> float:
    """Return the largest allowed difference between actors and trainer, in nats. Pure."""
    if recipe.weights.probe_tolerance is not None:
        return recipe.weights.probe_tolerance
    return TOLERANCE_16_BIT if in_sixteen_bits(recipe) else TOLERANCE


@dataclass(frozen=True)
class Parity:
    """Result of a probe. `mismatch`: largest difference in nats; None if no answer is comparable. `problems`: one text per
    failure."""

    mismatch: float | None = None
    problems: tuple[str, ...] = ()


def served_share(served: Logprobs, trained: Logprobs, base: Logprobs) -> tuple[float, float]:
    """Return the share of the change from `base` to `trained` that `served` has, and the error that rounding explains. Pure.

    The share is the slope of served − base over trained − base. Its error has two parts. The first is six standard errors of
    the slope. Each token's residual there is computed with the slope of the other tokens, so that no single token decides. The
    second is twice the squared residuals over the squared change, because rounding in `trained` itself biases the slope towards
    0. The error is infinite if nothing has changed, or if one token makes up more than a quarter of the squared change.
    """
    change, off = trained.astype(np.float64) - base, served.astype(np.float64) - trained
    size = float(change @ change)
    if not size or (leverage := change**2 / size).max() > 0.25:
        return 1.0, math.inf
    slope = float(off @ change) / size
    residual = (off - slope * change) / (1 - leverage)
    standard_error = math.sqrt(float(leverage @ residual**2) / size)
    return 1 + slope, 6 * standard_error + 2 * float(residual @ residual) / size


def compare(
    served: Mapping[str, Scored], trained: Logprobs, tolerance: float, *, of_median: bool = False, base: Logprobs | None = None
) -> Parity:
    """Compare the actors' answers, by name, with the trainer's, and log each problem. `of_median`: apply the tolerance to the
    median token instead of every token. `base`: log-probabilities before training. Actors must serve the whole change since
    then, even if it is smaller than the tolerance."""
    differences: list[float] = []
    problems: list[str] = []
    for name, scored in served.items():
        if len(scored.logprobs) != len(trained):
            problem = f"{len(scored.logprobs)} log-probabilities where the trainer has {len(trained)}"
        elif not np.isfinite(trained).all():
            problem = "log-probabilities of the trainer are not finite"
        elif not np.isfinite(scored.logprobs).all():
            problem = "log-probabilities of the actor are not finite"
        else:
            off = np.abs(scored.logprobs.astype(np.float64) - trained.astype(np.float64))
            differences.append(float(off.max()))
            bounded = float(np.median(off)) if of_median else differences[-1]
            share, error = served_share(scored.logprobs, trained, trained if base is None else base)
            which = "half of the log-probabilities are" if of_median else "log-probabilities are"
            if bounded > tolerance:
                problem = f"{which} {bounded:.3g} nats off, more than {tolerance:g}"
            elif abs(share - 1) > SHARE_TOLERANCE + error:
                shown = f"{share:.0%} (± {error:.0%})"
                problem = f"the actor shows {shown} of training's change to the log-probabilities, instead of 100%"
            else:
                continue
        loaded = f" (weights loaded by {scored.loader})" if scored.loader else ""
        problems.append(f"{name} at version {scored.version}: {problem}{loaded}")
        log.error("parity probe fails: %s", problems[-1])
    return Parity(max(differences, default=None), tuple(problems))
