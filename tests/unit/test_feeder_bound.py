"""The feeder's closed form by hand, and a simulated run in which lag must stay within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError
from pipelinerl.rl.feeding import FeederBound, default_backlog


def test_bounded_by_hand() -> None:
    bound = FeederBound(groups_per_step=16, max_lag=4)
    assert bound.groups_allowed(version=0, issued_groups=0, lost_groups=0) == 80
    assert bound.groups_allowed(version=0, issued_groups=80, lost_groups=0) == 0
    assert bound.groups_allowed(version=1, issued_groups=80, lost_groups=0) == 16
    assert bound.groups_allowed(version=1, issued_groups=96, lost_groups=3) == 3


def test_max_lag_zero_is_one_batch_at_a_time() -> None:
    bound = FeederBound(groups_per_step=16, max_lag=0)
    assert [bound.limit(version) for version in range(3)] == [16, 32, 48]


def test_unbounded_lag_is_still_a_bounded_queue() -> None:
    bound = FeederBound(groups_per_step=16, backlog_groups=100)
    assert bound.groups_allowed(0, 0, 0) == 100
    assert bound.groups_allowed(5, 150, 0) == 30


def test_conventional_issues_exactly_one_phase() -> None:
    bound = FeederBound(groups_per_step=4, mode="conventional", conventional_g=3)
    assert [bound.limit(version) for version in range(7)] == [12, 12, 12, 24, 24, 24, 36]
    assert [bound.starts_phase(version) for version in range(4)] == [True, False, False, True]
    assert [bound.groups_before_step(version) for version in range(4)] == [12, 8, 4, 12]


def test_nothing_is_issued_that_no_step_consumes() -> None:
    bound = FeederBound(groups_per_step=16, max_lag=4, total_steps=3)
    assert bound.groups_allowed(0, 0, 0) == 48
    assert bound.groups_allowed(2, 48, 0) == 0
    assert bound.groups_allowed(2, 48, 1) == 1


def test_never_negative() -> None:
    assert FeederBound(groups_per_step=1, max_lag=0).groups_allowed(0, 5, 0) == 0


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(FieldError, match=r"algorithm\.max_lag = 2"):
        FeederBound(groups_per_step=4, mode="conventional", conventional_g=4, max_lag=2)
    with pytest.raises(FieldError, match="backlog_groups = 3"):
        FeederBound(groups_per_step=4, backlog_groups=3)
    with pytest.raises(FieldError, match=r"trainer\.batch_size"):
        FeederBound(groups_per_step=0, max_lag=1)


def test_default_backlog_by_hand() -> None:
    assert default_backlog(groups_per_step=16, sequences_in_progress=60, group_size=8) == 2 * 16 + 2 * 8


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_in_issue_order_lag_never_exceeds_max_lag(per_step: int, max_lag: int, data: st.DataObject) -> None:
    """Issue as much as allowed, lose some groups at random, train in order of issue; every lag is within the bound,
    and a step can always be taken: the bound does not starve the trainer."""
    bound = FeederBound(groups_per_step=per_step, max_lag=max_lag)
    waiting: list[int] = []
    issued = lost = 0
    for version in range(12):
        for _ in range(3):
            allowed = bound.groups_allowed(version, issued, lost)
            waiting += [version] * allowed
            issued += allowed
            drop = data.draw(st.lists(st.integers(0, len(waiting) - 1), max_size=3, unique=True))
            waiting = [group for index, group in enumerate(waiting) if index not in drop]
            lost += len(drop)
        allowed = bound.groups_allowed(version, issued, lost)
        waiting += [version] * allowed
        issued += allowed
        batch, waiting = waiting[:per_step], waiting[per_step:]
        assert len(batch) == per_step
        assert all(version - sampled <= max_lag for sampled in batch)


@given(st.integers(1, 5), st.lists(st.integers(0, 8), min_size=12, max_size=12), st.data())
def test_a_backlog_that_follows_the_actors_bounds_what_is_in_flight_and_starves_nobody(
    per_step: int, actors: list[int], data: st.DataObject
) -> None:
    """What is in flight is at most the largest backlog so far, and a step can always be taken."""
    issued = lost = largest = 0
    for version, num_actors in enumerate(actors):
        backlog = default_backlog(per_step, 6 * max(1, num_actors), 2)
        bound, largest = FeederBound(per_step, backlog_groups=backlog), max(largest, backlog)
        allowed = bound.groups_allowed(version, issued, lost)
        in_flight = issued - lost - version * per_step
        assert allowed == max(0, backlog - in_flight)
        issued += allowed
        in_flight += allowed
        assert backlog <= in_flight <= largest
        lost += data.draw(st.integers(0, in_flight - per_step))
