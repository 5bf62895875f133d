"""Which sequences may be trained on, by hand; restarts; and one property of the lag bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.messages.sequences import PolicyVersion, VersionSpan
from pipelinerl.rl.lag import (
    LAG_BUCKETS,
    Lineage,
    StaleReason,
    lag_bucket,
    stale_reason,
    token_lags,
    within_max_lag,
)


def spans(*versions: int, incarnation: int = 1) -> tuple[VersionSpan, ...]:
    """Two tokens of each version."""
    return tuple(VersionSpan(version, 2 * i, 2 * i + 2, incarnation) for i, version in enumerate(versions))


def test_the_oldest_token_decides() -> None:
    assert within_max_lag(spans(6, 8), version=8, max_lag=2)
    assert stale_reason(spans(5, 8), version=8, max_lag=2) is StaleReason.LAG
    assert within_max_lag(spans(5, 8), version=8, max_lag=None)


def test_on_policy_only() -> None:
    assert within_max_lag(spans(8), version=8, max_lag=0)
    assert not within_max_lag(spans(7), version=8, max_lag=0)


def test_versions_undone_by_a_restart() -> None:
    lineage = Lineage().restarted(20)
    assert lineage.incarnation == 2
    assert within_max_lag(spans(20, incarnation=1), 22, None, lineage)
    assert stale_reason(spans(21, incarnation=1), 22, None, lineage) is StaleReason.UNDONE
    assert within_max_lag(spans(20, 22, incarnation=2), 22, None, lineage)


def test_one_undone_token_is_enough() -> None:
    lineage = Lineage().restarted(20)
    mixed = (*spans(20, 25), VersionSpan(21, 4, 5, incarnation=2))
    assert stale_reason(mixed, 21, None, lineage) is StaleReason.UNDONE


def test_a_later_restart_undoes_earlier_incarnations_too() -> None:
    lineage = Lineage().restarted(20).restarted(10)
    assert stale_reason(spans(15, incarnation=1), 30, None, lineage) is StaleReason.UNDONE
    assert within_max_lag(spans(10, incarnation=1), 30, None, lineage)
    assert stale_reason(spans(20, incarnation=2), 30, None, lineage) is StaleReason.UNDONE
    assert within_max_lag(spans(12, incarnation=3), 30, None, lineage)


@pytest.mark.parametrize(
    "span", [VersionSpan(9, 0, 1, 1), VersionSpan(3, 0, 1, 2), VersionSpan(3, 0, 1, 0)], ids=["future", "next", "none"]
)
def test_versions_this_run_has_not_made(span: VersionSpan) -> None:
    assert stale_reason((span,), 8, None) is StaleReason.UNKNOWN


def test_an_incarnation_makes_nothing_before_its_start() -> None:
    assert stale_reason(spans(19, incarnation=2), 22, None, Lineage((0, 20))) is StaleReason.UNKNOWN


def test_lineage_of_versions() -> None:
    assert Lineage((0, 20)).reason_against(PolicyVersion(1, 25), newest=30) is StaleReason.UNDONE


def test_lag_of_each_token() -> None:
    assert token_lags(np.array([3, 3, 5]), 7).tolist() == [4, 4, 2]


def test_lag_buckets_by_hand() -> None:
    labels = [LAG_BUCKETS[index] for index in lag_bucket(np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 500]))]
    assert labels == ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "9-16", "17+", "17+"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 20))
def test_a_fresh_sequence_is_one_whose_every_lag_is_within(versions: list[int], extra: int, max_lag: int) -> None:
    version = max(versions) + extra
    lags = token_lags(np.array(versions), version)
    assert within_max_lag(spans(*versions), version, max_lag) == bool((lags <= max_lag).all())
