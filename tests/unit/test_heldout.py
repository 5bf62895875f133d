"""Held-out evaluation: what counts as right, what happens when actors do not answer; and the parity probe."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.messages.sequences import FinishReason, PolicyVersion, PromptGroup, SamplingParams, encode_group
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.accuracy import accuracy_of
from services.trainer.data import evaluation
from services.trainer.data.evaluation import (
    Evaluator,
    HeldoutResult,
    Parity,
    Scored,
    compare,
    is_right,
    probe_tolerance,
    served_share,
)
from tests.support.machine import an_hour_later, until
from tests.unit.builders import RUN, make_problem, make_recipe
from tests.unit.trainer_fakes import FakeActor, FakeUpdater, serving


def problems(count: int) -> list[PromptGroup]:
    return [make_problem(index, tokens=(1, 2)) for index in range(count)]


def evaluator(addresses: dict[str, str], asked: Sequence[PromptGroup] = (), recipe: Recipe | None = None) -> Evaluator:
    updater: Any = FakeUpdater()
    updater.serve(addresses)
    recipe = recipe or make_recipe(evaluation={"timeout_s": 60.0}, weights={"probe_tokens": 3})
    return Evaluator(recipe, list(asked), 20, updater, RUN, incarnation=1)


async def evaluate(
    *, asked: list[PromptGroup] | None = None, recipe: Recipe | None = None, version: int = 0, **actors: FakeActor
) -> HeldoutResult:
    async with serving(**(actors or {"a": FakeActor()})) as addresses:
        return await evaluator(addresses, problems(4) if asked is None else asked, recipe).evaluate(version)


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
    assert is_right({name.replace("__", "."): value for name, value in terms.items()}, correct) is right


async def test_a_wrong_answer_in_the_right_format_is_wrong() -> None:
    terms = {
        "h000000": {"answer": 0.0, "format": 1.0},
        "h000001": {"answer": 1.0, "overlong": -0.5},
        "h000002": {"answer": 0.0},
    }
    result = await evaluate(a=FakeActor(terms=terms))
    assert (result.overall.accuracy.value, result.overall.unanswered, result.num_tokens) == (0.5, 0, 4)
    assert [accuracy.reported["format"] for accuracy in result.sets.values()] == [1.0], "of the one answer that has the term"
    assert [sample.reward for sample in result.samples] == [1.0, 0.5, 0.0, 1.0]
    assert {sample.finish_reason for sample in result.samples} == {FinishReason.LENGTH}


FAILED = {"h000000": "empty_completion", "h000001": "non_finite_logprobs", "h000002": "reward_timeout: too slow"}


@pytest.mark.parametrize(
    ("actor", "accuracy", "lower_bound", "told"),
    [
        # an empty one is wrong
        (FakeActor(failures=FAILED), 0.5, 1 / 4, "{'non_finite_logprobs': 1, 'reward_timeout': 1}"),
        (FakeActor(silent=frozenset({"h000001"})), 1.0, 3 / 4, "{'no answer': 1}"),
    ],
    ids=["failed", "silent"],
)
async def test_what_has_no_verdict_is_left_out_and_counted_and_wrong_in_the_lower_bound(
    actor: FakeActor, accuracy: float, lower_bound: float, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    evaluating, arrived = asyncio.create_task(evaluate(a=actor)), Mock(wraps=evaluation.decode_sequence)
    with patch.object(evaluation, "decode_sequence", arrived):
        await until(lambda: arrived.call_count == (3 if actor.silent else 4))
    with an_hour_later() if actor.silent else nullcontext():
        result = await evaluating
    assert (result.overall.accuracy.value, result.overall.lower_bound) == (accuracy, lower_bound)
    assert f"leaves out answers, by reason: {told}" in caplog.text
    assert ("3 of 4 answers arrived in time" in caplog.text) is bool(actor.silent)


async def test_answers_are_sampled_as_in_training_apart_from_the_temperature() -> None:
    trained, actor = SamplingParams(1.0, 16, stop_token_ids=(7, 9, 11), stop=("\n",)), FakeActor()
    asked = [replace(problem, sampling=trained) for problem in problems(2)]
    await evaluate(asked=asked, a=actor)
    ((group, other),) = actor.requests
    assert group.sampling == replace(trained, temperature=0.0)
    assert (group.task, group.reference_json, group.num_samples) == ("chain_sum", asked[0].reference_json, 1)
    assert len({0, group.seed, other.seed}) == 3


async def test_several_answers_to_each_problem_give_mean_pass_at_k_and_what_is_missing() -> None:
    recipe = make_recipe(evaluation={"timeout_s": 60.0, "samples": 2, "temperature": 1.0})
    actor = FakeActor(terms={"h000001": {"answer": 0.0}}, failures={"h000003": "reward_timeout"})
    asked = [replace(problem, prompt_token_ids=np.array([one], np.int32)) for one, problem in enumerate(problems(2))]
    result = await evaluate(asked=asked, recipe=recipe, a=actor)
    sent = [(group.group_id[:7], group.prompt_token_ids[0]) for group in actor.requests[0]]
    assert sent == [("h000000", 0), ("h000001", 0), ("h000002", 1), ("h000003", 1)]
    overall = result.overall
    assert (overall.accuracy.value, overall.lower_bound, overall.unanswered) == (0.75, 0.5, 1)  # (1/2 + 1) / 2; 2 of 4
    (of_task,) = result.sets.values()
    assert replace(of_task, reported={}) == accuracy_of([[True, False], [True, None]])
    assert of_task.reported == {"answer": pytest.approx(2 / 3)}
    assert of_task.pass_at["2"].value == 1.0


async def test_each_task_and_set_has_its_limit_its_reward_and_its_accuracy_and_sets_do_not_count_with_the_tasks() -> None:
    actor = FakeActor()
    strict: dict[str, Any] = {"name": "strict", "task": {}, "max_tokens": 9, "reward": {"correct": 2.0}}
    recipe = make_recipe(task=None, tasks=[{"task": {}}, strict], evaluation={"sets": [strict | {"name": "further"}]})
    asked = [*problems(3), *(make_problem(task=name, max_tokens=9) for name in ("strict", "further"))]
    result = await evaluate(asked=asked, recipe=recipe, a=actor)  # every answer earns 1
    assert [group.sampling.max_tokens for group in actor.requests[0]] == [16, 16, 16, 9, 9]
    assert result.overall.accuracy.value == 0.75
    accuracies = {name: one.accuracy.value for name, one in result.sets.items()}
    assert accuracies == {"chain_sum": 1.0, "strict": 0.0, "further": 0.0}
    assert [sample.task for sample in result.samples] == ["chain_sum", "strict", "further", "chain_sum"]


async def test_more_groups_than_fit_into_a_message_are_asked_for_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = FakeActor()
    await evaluate(asked=problems(1), a=actor)
    (group,) = actor.requests.pop()
    monkeypatch.setattr(evaluation, "MOST_REQUESTED_BYTES", 3 * len(encode_group(group)) + 9)
    result = await evaluate(asked=problems(7), a=actor)
    assert [len(groups) for groups in actor.requests] == [3, 3, 1]
    assert (result.overall.accuracy.value, result.overall.unanswered) == (1.0, 0)


async def test_answers_of_another_version_do_not_count_and_nobody_to_ask_is_said() -> None:
    result = await evaluate(version=3, a=FakeActor(version=3), b=FakeActor(version=2))
    assert result.overall.accuracy.value == 1.0
    with pytest.raises(ServiceError, match=r"held-out problems was scored; answers by reason: \{'no answer': 4\}"):
        await evaluate(version=3, a=FakeActor(version=2))
    with pytest.raises(ServiceError, match=r"\{'no answer': 2\}"):
        await evaluator({}, problems(2)).evaluate(0)


# --- the parity probe --------------------------------------------------------------------------------------------------

TRAINED = np.array([-1.0, -2.0], dtype=np.float32)


def served(*logprobs: float, loader: str = "") -> Scored:
    return Scored(np.array(logprobs, dtype=np.float32), PolicyVersion(1, 3), loader)


def test_the_largest_difference_counts_and_in_sixteen_bits_that_of_the_median_token() -> None:
    """Rounding sends single tokens of a mixture to other experts."""
    parity = compare({"a": served(-1.0, -2.25), "b": served(-0.5, -2.0)}, TRAINED, 0.5)
    assert parity == Parity(0.5)
    trained, one_off = np.full(5, -1.0, np.float32), served(-1.1, -1.1, -1.1, -1.1, -4.0)
    parity = compare({"a": one_off}, trained, 0.25, of_median=True)
    assert (parity.mismatch, parity.problems) == (3.0, ())
    parity = compare({"a": one_off}, trained, 0.05, of_median=True)
    assert parity.problems == ("a at version 1:3: half of the log-probabilities are at least 0.1 nats off, more than 0.05",)


@pytest.mark.parametrize(
    ("dtype", "weights", "tolerance"),
    [
        ("float32", {}, 1e-3),
        ("bfloat16", {}, 0.25),
        ("float32", {"wire_dtype": "bfloat16"}, 0.25),
        ("bfloat16", {"probe_tolerance": 0.05}, 0.05),
    ],
)
def test_the_coarsest_dtype_or_the_recipe_sets_the_tolerance(dtype: str, weights: dict[str, Any], tolerance: float) -> None:
    model = {"source": "path", "name": "nowhere", "max_context": 64, "dtype": dtype}
    assert probe_tolerance(make_recipe(model=model, weights=weights)) == tolerance


BASE = np.full(8, -2.0, np.float32)
CHANGE = np.array([1.0, -1.0] * 4)
ROUNDING = 0.07 * np.array([1.0, 1.0, -1.0, -1.0] * 2)
"""Its products with CHANGE sum to 0."""


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0, 2.0])
def test_the_share_of_the_change_that_an_actor_serves_by_hand(share: float) -> None:
    """Each token has 1/8 of the change. Its residual under the slope of the others is 0.07 · 8/7 = 0.08: the standard error is
    0.08 / √8 = 0.028284, and the residuals' size over that of the change 8 · 0.08² / 8 = 0.0064."""
    found, error = served_share(BASE + share * CHANGE + ROUNDING, BASE + CHANGE, BASE)
    assert (found, error) == (pytest.approx(share, abs=1e-6), pytest.approx(6 * 0.028284 + 2 * 0.0064, abs=1e-5))


def test_no_share_is_known_without_a_change_or_where_one_token_has_most_of_it_or_rounding_hides_it() -> None:
    one_token = np.array([3.0, *CHANGE[1:]])  # 9 of 16
    for change in (0 * CHANGE, one_token):
        assert served_share(BASE, BASE + change, BASE) == (1.0, math.inf)
    parity = compare({"a": served(*(BASE + 3 * ROUNDING))}, (BASE + 0.3 * CHANGE).astype(np.float32), 2.0, base=BASE)
    assert parity.problems == ()


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_an_actor_that_serves_a_part_of_the_change_is_a_problem_however_small_the_change(size: float) -> None:
    trained = BASE + size * CHANGE
    for share, served_part in ((1.0, None), (0.5, "50%"), (0.0, "0%"), (2.0, "200%")):
        logprobs = BASE + share * size * CHANGE + size * ROUNDING
        parity = compare({"a": served(*logprobs)}, trained.astype(np.float32), 2.0, base=BASE)
        told = f"a at version 1:3: the actor shows {served_part} (± 18%) of training's change to the log-probabilities"
        assert parity.problems == (() if served_part is None else (f"{told}, instead of 100%",))


@pytest.mark.parametrize("broken", [served(-1.0, math.nan), served(-1.0, -math.inf), served(-1.0)])
def test_an_answer_that_cannot_be_compared_is_a_failure(broken: Scored, caplog: pytest.LogCaptureFixture) -> None:
    parity = compare({"a": broken, "b": served(-1.0, -2.5)}, TRAINED, 0.5)
    assert (parity.mismatch, len(parity.problems)) == (0.5, 1)
    assert "parity probe fails: a at version 1:3: " in caplog.text
    assert compare({"a": broken}, TRAINED, 0.5).mismatch is None
    of_nan = compare({"a": served(-1.0, -2.0)}, np.array([math.nan, -2.0], dtype=np.float32), 0.5)
    assert (of_nan.mismatch, len(of_nan.problems)) == (None, 1), "the trainer's are not finite"


async def test_actors_are_asked_and_those_of_another_version_left_out() -> None:
    same = FakeActor(version=3, logprobs=(-1.0, -2.5), loader="paused: quantised")
    other = FakeActor(version=2, logprobs=(-9.0, -9.0))
    async with serving(a=same, b=other) as addresses:
        everybody = {**addresses, "gone": "127.0.0.1:1"}
        parity = await evaluator(everybody).parity(3, TRAINED)
        problem = "log-probabilities are up to 0.5 nats off, more than 0.001 (weights loaded by paused: quantised)"
        assert parity == Parity(0.5, (f"a at version 1:3: {problem}",))
        assert await evaluator({"b": addresses["b"]}).parity(3, TRAINED) is None
