"""Lag and effective sample size: which sequences may be trained on, restarts, buckets, and ESS at extreme weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.messages.sequences import PolicyVersion, VersionSpan
from pipelinerl.rl.lag import (
    LAG_BUCKETS,
    EssSums,
    Lineage,
    StaleReason,
    ess_by_lag,
    lag_bucket,
    largest_lag,
    stale_reason,
)


def spans(*versions: int, incarnation: int = 1) -> tuple[VersionSpan, ...]:
    """Two tokens of each version."""
    return tuple(VersionSpan(version, 2 * i, 2 * i + 2, incarnation) for i, version in enumerate(versions))


def test_the_oldest_token_decides() -> None:
    assert stale_reason(spans(6, 8), version=8, max_lag=2) is None
    assert stale_reason(spans(5, 8), version=8, max_lag=2) is StaleReason.LAG
    assert stale_reason(spans(5, 8), version=8, max_lag=None) is None


def test_on_policy_only() -> None:
    assert stale_reason(spans(8), version=8, max_lag=0) is None
    assert stale_reason(spans(7), version=8, max_lag=0) is StaleReason.LAG


def test_versions_undone_by_a_restart() -> None:
    lineage = Lineage().restarted(20)
    assert lineage.incarnation == 2
    assert stale_reason(spans(20, incarnation=1), 22, None, lineage) is None
    assert stale_reason(spans(21, incarnation=1), 22, None, lineage) is StaleReason.UNDONE
    assert stale_reason(spans(20, 22, incarnation=2), 22, None, lineage) is None


def test_one_undone_token_is_enough() -> None:
    lineage = Lineage().restarted(20)
    mixed = (*spans(20, 25), VersionSpan(21, 4, 5, incarnation=2))
    assert stale_reason(mixed, 21, None, lineage) is StaleReason.UNDONE


def test_a_later_restart_undoes_earlier_incarnations_too() -> None:
    lineage = Lineage().restarted(20).restarted(10)
    assert stale_reason(spans(15, incarnation=1), 30, None, lineage) is StaleReason.UNDONE
    assert stale_reason(spans(10, incarnation=1), 30, None, lineage) is None
    assert stale_reason(spans(20, incarnation=2), 30, None, lineage) is StaleReason.UNDONE
    assert stale_reason(spans(12, incarnation=3), 30, None, lineage) is None


@pytest.mark.parametrize(
    "span", [VersionSpan(9, 0, 1, 1), VersionSpan(3, 0, 1, 2), VersionSpan(3, 0, 1, 0)], ids=["future", "next", "none"]
)
def test_versions_this_run_has_not_made(span: VersionSpan) -> None:
    assert stale_reason((span,), 8, None) is StaleReason.UNKNOWN


def test_an_incarnation_makes_nothing_before_its_start() -> None:
    assert stale_reason(spans(19, incarnation=2), 22, None, Lineage((0, 20))) is StaleReason.UNKNOWN


def test_lineage_of_versions() -> None:
    assert Lineage((0, 20)).reason_against(PolicyVersion(1, 25), newest=30) is StaleReason.UNDONE


def test_lag_buckets_by_hand() -> None:
    labels = [LAG_BUCKETS[index] for index in lag_bucket(np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 500]))]
    assert labels == ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "9-16", "17+", "17+"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 20))
def test_a_fresh_sequence_is_one_whose_every_lag_is_within(versions: list[int], extra: int, max_lag: int) -> None:
    version = max(versions) + extra
    is_fresh = stale_reason(spans(*versions), version, max_lag) is None
    assert is_fresh == all(version - sampled <= max_lag for sampled in versions)


def test_largest_lag_of_the_papers_worked_case() -> None:
    # H = 192 on I = 44 accelerators, lengths uniform on 1..L (mean L / 2), B = 128: 132. (The paper says about 133.)
    assert largest_lag(192 * 44, longest_tokens=2.0, mean_tokens=1.0, batch_size=128) == 132


# --- effective sample size

LOG_WEIGHTS = st.lists(st.floats(-50, 50), min_size=1, max_size=50).map(np.array)


def test_ess_by_hand() -> None:
    # w = 1, 3: (1 + 3)² / (2 · (1 + 9)) = 0.8
    assert EssSums.of(np.log([1.0, 3.0])).ratio == pytest.approx(0.8)


def test_one_on_policy() -> None:
    assert EssSums.of(np.zeros(100)).ratio == pytest.approx(1.0)


def test_weights_are_not_clamped() -> None:
    # Clamped at 5 this would be (3 + 5)² / (4 · (3 + 25)) = 0.57.
    assert EssSums.of(np.log([1.0, 1.0, 1.0, 97.0])).ratio == pytest.approx(100**2 / (4 * (3 + 97**2)))


def test_weights_no_float_holds() -> None:
    assert EssSums.of(np.array([2000.0, 2000.0, -2000.0])).ratio == pytest.approx(2 / 3)
    assert EssSums.of(np.array([-2000.0, -2000.0])).ratio == pytest.approx(1.0)


def test_nothing_and_nothing_but_zeros() -> None:
    assert EssSums.of(np.array([])).ratio is None
    assert EssSums.of(np.array([-math.inf, -math.inf])).ratio == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_no_policy_gives_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="log weights must be finite"):
        EssSums.of(np.array([0.0, bad]))


def test_ess_by_lag_bucket() -> None:
    sums = ess_by_lag(np.log([1.0, 3.0, 2.0, 2.0, 2.0]), np.array([0, 0, 3, 4, 40]))
    assert list(sums) == ["0", "3-4", "17+"]
    assert sums["0"].ratio == pytest.approx(0.8)
    assert sums["3-4"].count == 2
    assert sums["17+"].ratio == pytest.approx(1.0)


@given(LOG_WEIGHTS, st.floats(-30, 30), st.integers(0, 50))
def test_a_share_that_ignores_scale_and_adds_up(log_weights: np.ndarray, shift: float, cut: int) -> None:
    ratio = EssSums.of(log_weights).ratio
    assert ratio is not None
    assert 1 / len(log_weights) - 1e-9 <= ratio <= 1.0
    assert EssSums.of(log_weights + shift).ratio == pytest.approx(ratio, rel=1e-6)
    parts = EssSums.of(log_weights[:cut]) + EssSums.of(log_weights[cut:])
    assert parts.ratio == pytest.approx(ratio, rel=1e-6)
