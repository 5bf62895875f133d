"""Held-out evaluation: what counts as right, and what happens when actors or verifier do not answer."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
import pytest

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import SamplingParams
from pipelinerl.messages.verification import VerifyStatus
from services.trainer.data.evaluation import (
    JUDGE_BATCH,
    HeldoutEvaluator,
    HeldoutProblem,
    HeldoutResult,
    is_right,
    judge,
)
from tests.unit.trainer_fakes import FakeActor, FakeVerifier, serving, verdict


def problems(count: int) -> list[HeldoutProblem]:
    tokens = np.array([1, 2], dtype=np.int32)
    return [HeldoutProblem(f"h{index}", "chain_sum", tokens, f"prompt {index}", "{}") for index in range(count)]


async def evaluate(
    verifier: FakeVerifier, count: int = 4, version: int = 0, timeout_s: float = 10.0, **actors: FakeActor
) -> HeldoutResult:
    async with serving(**(actors or {"a": FakeActor()})) as addresses:
        evaluator = HeldoutEvaluator(
            problems(count),
            lambda: addresses,
            verifier,
            SamplingParams(max_tokens=16),
            incarnation=1,
            correct_reward=1.0,
            seed=1,
            timeout_s=timeout_s,
        )
        return await evaluator.evaluate(version)


@pytest.mark.parametrize(
    ("terms", "correct", "right"),
    [
        ({"answer": 1.0}, 1.0, True),
        ({"answer": 0.0, "format": 1.0}, 1.0, False),
        ({"answer": 0.5, "format": 0.5}, 1.0, False),
        ({"answer": 1.0, "overlong": -0.9}, 1.0, True),
        ({"answer": 2.0, "format": -1.0}, 2.0, True),
        ({"answer": 1.0}, 2.0, False),
        ({"answer__steps": 0.4, "answer__sum": 0.6}, 1.0, True),
        ({"answer__steps": 0.4, "format": 0.6}, 1.0, False),
        ({"answers": 1.0}, 1.0, False),
        ({}, 1.0, False),
    ],
)
def test_right_is_what_the_answer_alone_earns(terms: dict[str, float], correct: float, right: bool) -> None:
    assert is_right(verdict("h0", **terms), correct) is right


def test_a_failed_reward_is_not_right() -> None:
    assert not is_right(verdict("h0", VerifyStatus.TIMEOUT, answer=1.0), 1.0)


async def test_a_wrong_answer_in_the_right_format_is_wrong() -> None:
    outcomes = {
        "h0": verdict("h0", answer=0.0, format=1.0),
        "h1": verdict("h1", answer=1.0, overlong=-0.5),
        "h2": verdict("h2", answer=0.0),
    }
    result = await evaluate(FakeVerifier(outcomes))
    assert (result.accuracy, result.num_problems, result.num_unanswered) == (0.5, 4, 0)
    assert [sample.reward for sample in result.samples] == [1.0, 0.5, 0.0, 1.0]


async def test_failed_rewards_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = {"h0": verdict("h0", VerifyStatus.TIMEOUT), "h1": verdict("h1", answer=0.0)}
    with caplog.at_level(logging.WARNING):
        result = await evaluate(FakeVerifier(outcomes))
    assert (result.accuracy, result.num_unanswered) == (2 / 3, 1)
    assert result.samples[0].reward is None
    assert "leaves out problems: {'reward_timeout': 1}" in caplog.text


async def test_an_empty_completion_is_wrong_and_a_failure_of_the_actor_is_left_out() -> None:
    actor = FakeActor(failures={"h0": "empty_completion", "h1": "non_finite_logprobs", "h2": "engine: out of blocks"})
    verifier = FakeVerifier()
    result = await evaluate(verifier, a=actor)
    assert (result.accuracy, result.num_unanswered) == (0.5, 2)
    assert verifier.asked == ["h3"]


async def test_what_actors_do_not_answer_in_time_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    result = await evaluate(FakeVerifier(), timeout_s=1.0, a=FakeActor(silent=frozenset({"h1"})))
    assert (result.accuracy, result.num_unanswered) == (1.0, 1)
    assert "3 of 4 completions in time" in caplog.text
    assert "{'no completion': 1}" in caplog.text


async def test_completions_of_another_version_do_not_count() -> None:
    result = await evaluate(FakeVerifier(), version=3, a=FakeActor(version=3), b=FakeActor(version=2))
    assert result.accuracy == 1.0
    with pytest.raises(ServiceError, match=r"no held-out problem has a verdict: \{'no completion': 4\}"):
        await evaluate(FakeVerifier(), version=3, a=FakeActor(version=2))


@pytest.mark.parametrize("away", [True, False])
async def test_a_verifier_that_is_away_ends_the_evaluation_and_nothing_else(away: bool) -> None:
    verifier = FakeVerifier(away=away, error=None if away else MessageError("VerifyResponse", "results", "too few"))
    began_at = time.monotonic()
    with pytest.raises(ServiceError, match=r"no held-out problem has a verdict: \{'not judged': 4\}"):
        await evaluate(verifier, timeout_s=0.5)
    assert time.monotonic() - began_at < 5


async def test_nobody_to_ask_is_said() -> None:
    evaluator = HeldoutEvaluator(
        problems(2),
        dict,
        FakeVerifier(),
        SamplingParams(),
        incarnation=1,
        correct_reward=1.0,
        seed=1,
        timeout_s=1.0,
    )
    with pytest.raises(ServiceError, match=r"\{'no completion': 2\}"):
        await evaluator.evaluate(0)


async def test_one_lost_call_of_the_verifier_costs_its_own_verdicts_only() -> None:
    class Flaky(FakeVerifier):
        async def verify(self, items):  # type: ignore[no-untyped-def]
            outcomes = await super().verify(items)
            if items[0].sequence_id == "h0":
                raise ServiceError("verifier refused a batch")
            return outcomes

    result = await evaluate(Flaky(), count=JUDGE_BATCH + 6)
    assert (result.num_unanswered, result.accuracy) == (JUDGE_BATCH, 1.0)


async def test_verdicts_given_before_the_deadline_are_kept() -> None:
    class Slow(FakeVerifier):
        async def verify(self, items):  # type: ignore[no-untyped-def]
            if items[0] == 0:
                await asyncio.sleep(600)
            return [verdict(str(item), answer=1.0) for item in items]

    deadline = asyncio.get_running_loop().time() + 0.2
    verdicts = await judge(Slow(), list(range(JUDGE_BATCH + 1)), deadline)  # type: ignore[arg-type]
    assert set(verdicts) == {str(JUDGE_BATCH)}
