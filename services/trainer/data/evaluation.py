"""Measure one policy version through the actors that serve it: held-out accuracy, and parity with the trained weights.

The parity probe is a fixed token sequence that the actors and the trainer score with the same version. The largest difference
of token log-probabilities is the run's `logprob_mismatch_max`. `parity_failures` counts the probe answers of actors whose
scores differ too much, show too little or too much of the change made by training, or cannot be compared. Actors score the
probe without cached keys and values.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.errors import FieldError, MessageError, ServiceError
from pipelinerl.messages.sequences import (
    EMPTY_COMPLETION,
    FLOAT32,
    Logprobs,
    PolicyVersion,
    PromptGroup,
    Sequence,
    TokenIds,
    array_from_bytes,
    decode_sequence,
    encode_group,
)
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.accuracy import Accuracy, accuracy_of, means_of
from pipelinerl.rl.groups import answer_reward
from pipelinerl.service.grpc import MAX_MESSAGE_BYTES, explained, open_channel
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.metrics import short_reason
from pipelinerl.telemetry.tracing import Trace, child, headers_of, root, trace_of
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from services.trainer.data.feeder import group_seed
from services.trainer.learn.meter import in_sixteen_bits
from services.trainer.weight_sync.updater import WeightUpdater

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S, SCORE_TOKEN_S = 60.0, 0.2
"""Maximum seconds for a probe: a constant, plus a time for each token."""


@dataclass(frozen=True, eq=False)
class Scored:
    """An actor's log-probabilities [tokens - 1] of the probe, and the version and loader of the actor's weights."""

    logprobs: Logprobs
    version: PolicyVersion
    loader: str = ""


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


MOST_REQUESTED_BYTES = MAX_MESSAGE_BYTES // 4
"""Maximum total size of the prompt groups in one call. A single group may be larger."""


def is_right(terms: Mapping[str, float], correct_reward: float) -> bool:
    """Return whether the sum of a reward's answer terms (without format and length) reaches `correct_reward` (> 0)."""
    earned = answer_reward(terms)
    return earned is not None and earned >= correct_reward * (1 - 1e-9)


@dataclass(frozen=True)
class HeldoutResult:
    """Result of an evaluation. `overall`: accuracy over the recipe's tasks. `sets`: accuracy of each problem set. `num_tokens`:
    sampled tokens of all answers. `samples`: some answers for people to read."""

    version: int
    overall: Accuracy
    num_tokens: int
    samples: tuple[Sequence, ...]
    sets: Mapping[str, Accuracy] = field(default_factory=dict)


class Evaluator:
    """Evaluates a version through the actors that serve it, which `updater` lists. As in training, they sample prompt groups
    and have the verifier score the sequences. `calls`: has the interface of `calls_to`."""

    def __init__(
        self,
        recipe: Recipe,
        problems: list[PromptGroup],
        vocab_size: int,
        updater: WeightUpdater,
        run: str,
        incarnation: int,
        calls: Callable[[str, str], AbstractAsyncContextManager[Any]] = calls_to,
    ) -> None:
        self._recipe, self._updater, self._run = recipe, updater, run
        self._samples = recipe.evaluation.samples
        self._problems = [problem for problem in problems for _ in range(self._samples)]
        """Problem of each requested answer, by the answer's number. Answers to the same problem are adjacent."""
        self._incarnation, self._calls_to, self._timeout_s = incarnation, calls, recipe.evaluation.timeout_s
        self.tolerance, self._of_median = probe_tolerance(recipe), in_sixteen_bits(recipe)
        num_tokens = min(recipe.weights.probe_tokens, recipe.model.max_context - 1)
        # Any tokens are suitable, because only the scores of actors and trainer are compared.
        self.probe: TokenIds = np.random.default_rng(recipe.seed).integers(0, vocab_size, num_tokens, dtype=np.int32)

    async def evaluate(self, version: int) -> HeldoutResult:
        """Evaluate `version`. No later version may be committed meanwhile. Raises `ServiceError` if no answer was scored."""
        with root("evaluation", attributes={a.VERSION: version}) as span:
            return self._result(version, await self._answers(version, trace_of(span)))

    async def _answers(self, version: int, trace: Trace) -> dict[int, Sequence]:
        """Request answers from the actors in rounds, until none is missing, a round brings none, or the time is over."""
        done: dict[int, Sequence] = {}

        async def ask(name: str, address: str, asked: list[int]) -> None:
            about: a.Attributes = {a.ACTOR: name, **a.rpc("pipelinerl.v1.ActorService/Generate")}
            try:
                request, numbers = self._request(asked, version)
                with child(trace, "evaluation.generate", kind=SpanKind.CLIENT, attributes=about) as span:
                    metadata = tuple(headers_of(trace_of(span)).items())
                    async with self._calls_to(name, address) as stub:
                        async for result in stub.Generate(request, timeout=self._timeout_s, metadata=metadata):
                            answer = decode_sequence(result.sequence, expected_run=self._run)
                            if answer.group_id in numbers and self._is_of(version, answer):
                                done[numbers[answer.group_id]] = answer
            except (ServiceError, MessageError) as error:
                log.warning("held-out evaluation continues without actor %s: %s", name, error)

        try:
            async with asyncio.timeout(self._timeout_s):
                while missing := [number for number in range(len(self._problems)) if number not in done]:
                    members, before = sorted(self._updater.serving.items()), len(done)
                    async with asyncio.TaskGroup() as tasks:
                        for position, (name, member) in enumerate(members):
                            if asked := missing[position :: len(members)]:
                                tasks.create_task(ask(name, member.grpc_address, asked))
                    if len(done) == before:
                        log.warning("%d actors answered none of %d held-out problems", len(members), len(missing))
                        break
        except TimeoutError:
            log.warning("held-out evaluation: only %d of %d answers arrived in time", len(done), len(self._problems))
        return done

    def _request(self, asked: Iterable[int], version: int) -> tuple[actor_pb2.GenerateRequest, dict[str, int]]:
        """Return a request for as many of the `asked` answers as fit into one call, and these answers' numbers by group id."""
        request, numbers, num_bytes = actor_pb2.GenerateRequest(), dict[str, int](), 0
        for number in asked:
            group = self._group(number, version)
            num_bytes += len(data := encode_group(group))
            if numbers and num_bytes > MOST_REQUESTED_BYTES:
                break
            request.groups.append(data)
            numbers[group.group_id] = number
        return request, numbers

    def _group(self, number: int, version: int) -> PromptGroup:
        """Return the group of answer `number`, which has one sample at the evaluation's temperature."""
        problem = self._problems[number]
        return replace(
            problem,
            run=self._run,
            group_id=f"h{number:06d}-{secrets.token_hex(4)}",  # unique, as an actor may still sample an earlier request's group
            num_samples=1,
            sampling=replace(problem.sampling, temperature=self._recipe.evaluation.temperature),
            seed=group_seed(self._recipe.seed + 1, number),
            issued_version=version,
        )

    def _by_task(self, numbers: Iterable[int]) -> dict[str, list[int]]:
        """Group numbers of answers by problem set. They must ascend, because the problems of a set are adjacent."""
        return {name: list(own) for name, own in groupby(numbers, key=lambda number: self._problems[number].task)}

    def _is_of(self, version: int, answer: Sequence) -> bool:
        """Return whether an answer is final: it failed, or only `version` sampled it."""
        if answer.failure:
            log.warning("held-out problem %s failed: %s", answer.group_id, answer.failure)
            return True
        versions = {(span.incarnation, span.version) for branch in answer.all_branches for span in branch.spans}
        if versions != {(self._incarnation, version)}:
            log.warning("asking held-out problem %s again, as other versions sampled it: %s", answer.group_id, versions)
            return False
        return True

    def _result(self, version: int, answers: Mapping[int, Sequence]) -> HeldoutResult:
        failures = [answers[one].failure if one in answers else "no answer" for one in range(len(self._problems))]
        left_out = ["" if failure in ("", EMPTY_COMPLETION) else short_reason(failure) for failure in failures]
        by_reason = dict(Counter(filter(None, left_out)))
        by_set: dict[str, list[list[bool | None]]] = {}
        sets: dict[str, Accuracy] = {}
        for name, numbers in self._by_task(range(len(self._problems))).items():
            correct = self._recipe.problem_sets[name].reward.correct
            right = [None if left_out[one] else is_right(answers[one].reward_components, correct) for one in numbers]
            by_set[name] = [right[first : first + self._samples] for first in range(0, len(right), self._samples)]
            if (accuracy := accuracy_of(by_set[name])) is not None:
                reported = means_of(answers[one].reported for one in numbers if one in answers and not answers[one].failure)
                sets[name] = replace(accuracy, reported=reported)
        overall = accuracy_of(problem for name in self._recipe.mixture for problem in by_set.get(name, ()))
        if overall is None:
            raise ServiceError(
                f"no answer to the tasks' held-out problems was scored; answers by reason: {by_reason}. If most are "
                "'no answer', check the actors or raise evaluation.timeout_s; docs/errors.md explains the other reasons"
            )
        if by_reason:
            log.warning("held-out accuracy of version %d leaves out answers, by reason: %s", version, by_reason)
        num_tokens = sum(answer.num_episode_tokens for answer in answers.values())
        return HeldoutResult(version, overall, num_tokens, tuple(answers[one] for one in self._shown(answers)), sets)

    def _shown(self, answers: Iterable[int]) -> list[int]:
        """Return the numbers of the answers to show: four, or one of each problem set if there are more than four sets."""
        by_set = self._by_task(sorted(answers)).values()
        in_turn = [number for numbers in zip_longest(*by_set) for number in numbers if number is not None]
        return in_turn[: max(4, len(by_set))]

    async def parity(self, version: int, trained: Logprobs, base: Logprobs | None = None) -> Parity | None:
        """Compare the trainer's scores `trained` with those of actors that serve `version`; None if no such actor answers."""
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
            log.warning("parity probe continues without actor %s: %s", name, error)
            return None
        served = PolicyVersion(response.incarnation, response.policy_version)
        if served != version:
            log.warning("parity probe continues without actor %s: it serves version %s, not %s", name, served, version)
            return None
        return Scored(logprobs, served, response.loader)


TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.25
"""Allowed difference of log-probabilities, in nats: of every token in float32, or of the median token in 16 bits. In 16 bits,
rounding can change the log-probability of a token in a mixture of experts by whole nats (docs/weight-updates.md)."""
SHARE_TOLERANCE = 0.1
"""Allowed difference between 1 and the share that `served_share` returns, in addition to the error that it returns."""


def probe_tolerance(recipe: Recipe) -> float:
    """Return the allowed difference of log-probabilities between actors and trainer, in nats. Pure."""
    if recipe.weights.probe_tolerance is not None:
        return recipe.weights.probe_tolerance
    return TOLERANCE_16_BIT if in_sixteen_bits(recipe) else TOLERANCE


@dataclass(frozen=True)
class Parity:
    """Result of a probe. `mismatch`: largest difference in nats between an actor's scores and the trainer's; None if no actor's
    scores are comparable. `problems`: one text for each actor whose scores fail the probe."""

    mismatch: float | None = None
    problems: tuple[str, ...] = ()


def served_share(served: Logprobs, trained: Logprobs, base: Logprobs) -> tuple[float, float]:
    """Return which share of the change from `base` to `trained` is in `served` (1 = all), and the error due to rounding. Pure.

    With c = trained − base, the share is the slope of a least-squares line through the origin, with a point (c, served − base)
    for each token. r is the point's residual from the line through all other points. The error has two terms:

        6 √(Σ c² r²) / Σ c²     six standard errors of the slope (HC3)
        2 Σ r² / Σ c²           covers the slope's bias towards 0, which rounding in `trained` causes

    If c is 0 for all tokens, or one token has more than a quarter of Σ c², the share is 1 with an infinite error.
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
    """Compare the scores of actors, by name, with the trainer's, and log each problem. `of_median`: apply the tolerance to the
    median token instead of every token. `base`: if given, the actors' scores must show the change from `base` to `trained`
    (`served_share`), even if it is below the tolerance."""
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
            which = "half of the log-probabilities are at least" if of_median else "log-probabilities are up to"
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
