"""ESS by hand, at extreme weights, and its defining properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.rl.ess import EssSums, ess_by_lag, ess_ratio

LOG_WEIGHTS = st.lists(st.floats(-50, 50), min_size=1, max_size=50).map(np.array)


def test_by_hand() -> None:
    # w = 1, 3: (1 + 3)² / (2 · (1 + 9)) = 0.8
    assert ess_ratio(np.log([1.0, 3.0])) == pytest.approx(0.8)


def test_one_on_policy() -> None:
    assert ess_ratio(np.zeros(100)) == pytest.approx(1.0)


def test_weights_are_not_clamped() -> None:
    # Clamped at 5 this would be (3 + 5)² / (4 · (3 + 25)) = 0.57.
    assert ess_ratio(np.log([1.0, 1.0, 1.0, 97.0])) == pytest.approx(100**2 / (4 * (3 + 97**2)))


def test_weights_no_float_holds() -> None:
    assert ess_ratio(np.array([2000.0, 2000.0, -2000.0])) == pytest.approx(2 / 3)
    assert ess_ratio(np.array([-2000.0, -2000.0])) == pytest.approx(1.0)


def test_nothing_and_nothing_but_zeros() -> None:
    assert ess_ratio(np.array([])) is None
    assert ess_ratio(np.array([-math.inf, -math.inf])) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_no_policy_gives_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="log weights must be finite"):
        ess_ratio(np.array([0.0, bad]))


def test_by_lag_bucket() -> None:
    sums = ess_by_lag(np.log([1.0, 3.0, 2.0, 2.0, 2.0]), np.array([0, 0, 3, 4, 40]))
    assert list(sums) == ["0", "3-4", "17+"]
    assert sums["0"].ratio == pytest.approx(0.8)
    assert sums["3-4"].count == 2
    assert sums["17+"].ratio == pytest.approx(1.0)


@given(LOG_WEIGHTS, st.floats(-30, 30), st.integers(0, 50))
def test_a_share_that_ignores_scale_and_adds_up(log_weights: np.ndarray, shift: float, cut: int) -> None:
    ratio = ess_ratio(log_weights)
    assert ratio is not None
    assert 1 / len(log_weights) - 1e-9 <= ratio <= 1.0
    assert ess_ratio(log_weights + shift) == pytest.approx(ratio, rel=1e-6)
    parts = EssSums.of(log_weights[:cut]) + EssSums.of(log_weights[cut:])
    assert parts.ratio == pytest.approx(ratio, rel=1e-6)
