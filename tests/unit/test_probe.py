"""The parity probe: a number where there is one, a failure that shows where there is none."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from pipelinerl.messages.sequences import PolicyVersion
from services.trainer.probe import Parity, compare, measure_parity, probe_tokens
from tests.unit.trainer_fakes import FakeActor, serving

VERSION = PolicyVersion(1, 3)
TRAINED = np.array([-1.0, -2.0], dtype=np.float32)


def served(*logprobs: float) -> np.ndarray:
    return np.array(logprobs, dtype=np.float32)


def test_the_largest_difference_over_tokens_and_actors() -> None:
    parity = compare({"a": served(-1.0, -2.25), "b": served(-0.5, -2.0)}, TRAINED, VERSION)
    assert parity == Parity(0.5, 0)


@pytest.mark.parametrize("broken", [served(-1.0, math.nan), served(-1.0, -math.inf), served(-1.0)])
def test_an_answer_that_cannot_be_compared_is_a_failure(broken: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert compare({"a": broken, "b": served(-1.0, -2.5)}, TRAINED, VERSION) == Parity(0.5, 1)
    assert "parity probe of version 1:3 fails on a" in caplog.text
    assert compare({"a": broken}, TRAINED, VERSION) == Parity(None, 1)


def test_a_trainer_that_gives_nan_fails_on_every_actor(caplog: pytest.LogCaptureFixture) -> None:
    trained = np.array([math.nan, -2.0], dtype=np.float32)
    with caplog.at_level(logging.ERROR):
        assert compare({"a": TRAINED, "b": TRAINED}, trained, VERSION) == Parity(None, 2)
    assert "log-probabilities of the trainer are not finite" in caplog.text


async def test_actors_are_asked_and_those_of_another_version_left_out() -> None:
    same, other = FakeActor(version=3, logprobs=(-1.0, -2.5)), FakeActor(version=2, logprobs=(-9.0, -9.0))
    tokens = probe_tokens(20, 3, seed=0)
    async with serving(a=same, b=other) as addresses:
        members = {**addresses, "gone": "127.0.0.1:1"}
        assert await measure_parity(members, tokens, TRAINED, VERSION) == Parity(0.5, 0)
        assert await measure_parity({"b": addresses["b"]}, tokens, TRAINED, VERSION) is None


async def test_nan_over_the_wire_is_a_failure() -> None:
    async with serving(a=FakeActor(version=3, logprobs=(math.nan, -2.0))) as addresses:
        parity = await measure_parity(addresses, probe_tokens(20, 3, seed=0), TRAINED, VERSION)
    assert parity == Parity(None, 1)


def test_the_same_seed_gives_the_same_tokens() -> None:
    assert probe_tokens(20, 32, seed=5).tolist() == probe_tokens(20, 32, seed=5).tolist()
    assert probe_tokens(20, 32, seed=5).dtype == np.int32
