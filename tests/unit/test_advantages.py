"""Advantages by hand, and what must hold for any group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError
from pipelinerl.rl.grouping import all_equal, group_advantages, smallest_group

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_group_mean_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0, 0.5], "group_mean") == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0])


def test_leave_one_out_by_hand() -> None:
    # 3 - (0 + 6) / 2, 0 - (3 + 6) / 2, 6 - (3 + 0) / 2
    assert group_advantages([3.0, 0.0, 6.0], "leave_one_out") == pytest.approx([0.0, -4.5, 4.5])


def test_std_is_that_of_the_sample() -> None:
    # std of (0, 2) with n - 1 is sqrt(2)
    advantages = group_advantages([0.0, 2.0], "group_mean", normalize_std=True)
    assert advantages == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-5)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_tell_exactly_nothing(baseline: str, normalize: bool) -> None:
    advantages = group_advantages([0.1] * 3, baseline, normalize_std=normalize)  # type: ignore[arg-type]
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_one_sample_has_no_others_to_leave_in() -> None:
    assert smallest_group("leave_one_out") == 2
    with pytest.raises(FieldError, match="leave_one_out needs 2 samples"):
        group_advantages([1.0], "leave_one_out")
    assert group_advantages([1.0], "group_mean", normalize_std=True).tolist() == [0.0]


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
