"""Advantages by hand, what must hold for any group, and what cannot be trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError
from pipelinerl.rl.advantages import all_equal, group_advantages, smallest_group, untrainable_reason
from tests.unit.builders import make_group, make_sequence

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("rewards", "baseline", "normalize", "advantages"),
    [
        ([1.0, 0.0, 0.0, 1.0, 0.5], "group_mean", False, [0.5, -0.5, -0.5, 0.5, 0.0]),
        # 3 - (0 + 6) / 2, 0 - (3 + 6) / 2, 6 - (3 + 0) / 2
        ([3.0, 0.0, 6.0], "leave_one_out", False, [0.0, -4.5, 4.5]),
        # The standard deviation is that of the sample: of (0, 2) with n - 1 it is sqrt(2).
        ([0.0, 2.0], "group_mean", True, [-1 / math.sqrt(2), 1 / math.sqrt(2)]),
        ([1.0], "group_mean", True, [0.0]),
        ([0.1] * 3, "group_mean", False, [0.0] * 3),
        ([0.1] * 3, "leave_one_out", True, [0.0] * 3),
        ([3.0, 0.0], "value", False, [3.0, 0.0]),
    ],
)
def test_by_hand(rewards: list[float], baseline: Any, normalize: bool, advantages: list[float]) -> None:
    assert group_advantages(rewards, baseline, normalize) == pytest.approx(advantages, abs=1e-5)
    if len(set(rewards)) == 1:
        assert group_advantages(rewards, baseline, normalize).tolist() == advantages, "exactly"


def test_one_sample_has_no_others_to_leave_in() -> None:
    assert smallest_group("leave_one_out") == 2
    with pytest.raises(FieldError, match="leave_one_out needs 2 samples"):
        group_advantages([1.0], "leave_one_out")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_must_be_finite(bad: float) -> None:
    with pytest.raises(FieldError, match="must be finite"):
        group_advantages([0.0, bad])


def test_all_equal() -> None:
    assert all_equal([0.5, 0.5])
    assert not all_equal([0.5, 0.5, 0.25])


@given(REWARDS, st.floats(-100, 100))
def test_a_baseline_adds_nothing_and_ignores_a_constant(rewards: list[float], constant: float) -> None:
    for baseline in ("group_mean", "leave_one_out"):
        advantages = group_advantages(rewards, baseline)
        assert advantages.sum() == pytest.approx(0.0, abs=1e-8)
        shifted = group_advantages(np.array(rewards) + constant, baseline)
        assert shifted == pytest.approx(advantages, abs=1e-8)
    mean, others = group_advantages(rewards, "group_mean"), group_advantages(rewards, "leave_one_out")
    assert others * (len(rewards) - 1) == pytest.approx(mean * len(rewards), abs=1e-8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"failure": "verifier timeout"}, "verifier timeout"),
        ({"prompt_token_ids": np.array([1, 1, 1, 1], dtype=np.int32)}, "longer than the context"),
        ({"completion_token_ids": np.array([6], dtype=np.int32)}, "token outside the vocabulary"),
        ({"prompt_token_ids": np.array([1, 6], dtype=np.int32)}, "token outside the vocabulary"),
    ],
)
def test_why_a_sequence_cannot_be_trained_on(change: dict[str, Any], reason: str) -> None:
    good = make_sequence(make_group(prompt=(1, 2, 5)), 0, completion=(4,))
    assert untrainable_reason(replace(good, **change), max_context=4, vocab_size=6) == reason
