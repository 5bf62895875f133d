"""Groups: how many may be issued, in a simulated run too, which sequences may be trained on, and with which advantages; lag."""

import heapq
import math
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.messages.sequences import VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, Recipe
from pipelinerl.rl.groups import (
    LAG_BUCKETS,
    IssueBounds,
    IssuedGroups,
    Lineage,
    StaleReason,
    group_advantages,
    groups_before_step,
    issue_limit,
    lag_bucket,
    length_bucket,
    stale_reason,
    starts_phase,
    untrainable_reason,
)
from tests.unit.builders import make_group, make_recipe, make_sequence


def spans(*versions: int, incarnation: int = 1) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, 2 * i, 2 * i + 2, incarnation) for i, version in enumerate(versions))


@pytest.mark.parametrize(
    ("versions", "version", "max_lag", "reason"),
    [
        (spans(6, 8), 8, 2, None),  # the oldest token decides
        (spans(5, 8), 8, 2, StaleReason.LAG),
        (spans(5, 8), 8, None, None),
        (spans(8), 8, 0, None),
        (spans(7), 8, 0, StaleReason.LAG),
        (spans(9), 8, None, StaleReason.UNKNOWN),  # not made yet
        (spans(3, incarnation=2), 8, None, StaleReason.UNKNOWN),
        (spans(3, incarnation=0), 8, None, StaleReason.UNKNOWN),
    ],
)
def test_which_sequences_are_stale(
    versions: tuple[VersionSpan, ...], version: int, max_lag: int | None, reason: StaleReason | None
) -> None:
    assert stale_reason(versions, version, AlgorithmConfig(max_lag=max_lag)) is reason


def test_a_sequence_may_be_judged_by_the_mean_over_its_tokens() -> None:
    versions = (VersionSpan(2, 0, 2, 1), VersionSpan(8, 2, 12, 1))  # at 8: 2 tokens of lag 6, 10 of lag 0
    by_mean = [AlgorithmConfig(max_lag=max_lag, max_lag_of="mean") for max_lag in (0, 1, None)]
    reasons = [StaleReason.LAG, None, None]
    assert [stale_reason(versions, 8, algorithm) for algorithm in by_mean] == reasons
    assert stale_reason(spans(9), 8, by_mean[-1]) is StaleReason.UNKNOWN
    assert [length_bucket(length) for length in (0, 1, 16, 17, 32, 33, 4096)] == [16, 16, 16, 32, 32, 64, 4096]


ONCE, TWICE = Lineage().restarted(20), Lineage().restarted(20).restarted(10)


@pytest.mark.parametrize(
    ("lineage", "versions", "reason"),
    [
        (ONCE, spans(20), None),
        (ONCE, spans(21), StaleReason.UNDONE),
        (ONCE, spans(20, 22, incarnation=2), None),
        (ONCE, spans(19, incarnation=2), StaleReason.UNKNOWN),  # an incarnation makes nothing before its start
        (ONCE, (*spans(20, 25), VersionSpan(21, 4, 5, incarnation=2)), StaleReason.UNDONE),  # one token is enough
        (TWICE, spans(15), StaleReason.UNDONE),  # a later restart undoes earlier incarnations, too
        (TWICE, spans(10), None),
        (TWICE, spans(20, incarnation=2), StaleReason.UNDONE),
        (TWICE, spans(12, incarnation=3), None),
    ],
)
def test_versions_undone_by_a_restart(lineage: Lineage, versions: tuple[VersionSpan, ...], reason: StaleReason | None) -> None:
    assert stale_reason(versions, 30, AlgorithmConfig(max_lag=None), lineage) is reason


def test_lag_buckets_by_hand() -> None:
    labels = [LAG_BUCKETS[index] for index in lag_bucket(np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 500]))]
    assert labels == ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "9-16", "17+", "17+"]


# --- the feeder's bound


def bounded(
    batch_size: int, steps: int = 1000, mode: str = "pipeline", *, group_size: int = 1, slots: int = 6, **algorithm: Any
) -> Recipe:
    """Each actor keeps `slots` sequences in progress."""
    return make_recipe(
        mode=mode,
        sampling={"group_size": group_size, "max_tokens": 16},
        algorithm={"advantage": "value", **algorithm},
        trainer={"steps": steps, "batch_size": batch_size, "tokens_per_microbatch": 64},
        actor={"sequences_in_progress": slots},
    )


@pytest.mark.parametrize(
    ("recipe", "limits"),
    [
        (bounded(16, max_lag=4), [80, 96, 112]),
        (bounded(16, max_lag=0), [16, 32, 48]),
        (bounded(16, max_lag=4, steps=3), [48, 48, 48]),  # nothing is issued that no step consumes
        (bounded(16, max_lag=None, steps=3), [48, 48, 48]),
        (bounded(4, mode="conventional", conventional_g=3, max_lag=None), [12, 12, 12, 24, 24, 24, 36]),
    ],
)
def test_issue_limits_by_hand(recipe: Recipe, limits: list[int]) -> None:
    assert [issue_limit(recipe, version) for version in range(len(limits))] == limits


def test_the_lag_limit_holds_the_feeder_where_it_allows_no_more_before_the_end() -> None:
    bounds = IssueBounds(bounded(16, max_lag=4, steps=10))
    assert [bounds.room(3, 1, unlost, 0).held_by_max_lag for unlost in (127, 128)] == [False, True]  # (3 + 1 + 4) · 16
    assert not bounds.room(5, 1, 160, 0).held_by_max_lag, "the run ends"
    conventional = IssueBounds(bounded(4, mode="conventional", conventional_g=3, max_lag=4))
    assert not conventional.room(0, 1, 12, 0).held_by_max_lag


def test_phases_by_hand() -> None:
    recipe = bounded(4, mode="conventional", conventional_g=3, max_lag=None)
    assert [starts_phase(recipe, version) for version in range(4)] == [True, False, False, True]
    assert [groups_before_step(recipe, version) for version in range(4)] == [12, 8, 4, 12]
    assert (starts_phase(bounded(4), 1), groups_before_step(bounded(4), 1)) == (True, 4)
    # Of 4 steps the last one is a phase by itself: more is never issued, and waiting for more would never end.
    shorter = bounded(4, mode="conventional", conventional_g=3, max_lag=None, steps=4)
    assert (groups_before_step(shorter, 2), groups_before_step(shorter, 3), issue_limit(shorter, 3)) == (4, 4, 16)


@given(
    conventional=st.booleans(),
    phase_steps=st.integers(1, 9),
    steps=st.integers(1, 20),
    per_step=st.integers(1, 3),
    group_size=st.integers(1, 3),
    max_lag=st.sampled_from([None, 0, 1, 4]),
    loss=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_whatever_is_lost_and_nothing_is_left_over(
    conventional: bool,
    phase_steps: int,
    steps: int,
    per_step: int,
    group_size: int,
    max_lag: int | None,
    loss: float,
    seed: int,
) -> None:
    """Feeder and intake by their rules. Groups are lost as they arrive, failed or filtered, or when their turn comes, as stale;
    in the last phase, too. Whenever the trainer waits, a group is on its way or may be issued."""
    if conventional and max_lag is not None:
        max_lag = max(max_lag, phase_steps - 1)
    mode, algorithm = "conventional" if conventional else "pipeline", {"max_lag": max_lag, "conventional_g": phase_steps}
    recipe = bounded(per_step * group_size, steps, mode, group_size=group_size, **algorithm)
    bounds, random, on_their_way = (IssueBounds(recipe), Random(seed), list[int]())  # each with the version that samples it
    issued = lost = taken = served = 0
    for version in range(steps):
        sent = version if starts_phase(recipe, version) else served
        while taken < groups_before_step(recipe, version):
            if random.random() < 0.5:
                served = sent
            may_issue = bounds.room(served, 1, issued - lost, 0).allowance
            issued += may_issue
            on_their_way += [served] * may_issue
            if not on_their_way and served < sent:
                continue
            assert on_their_way, f"the step at version {version} waits for ever"
            sampled_by = on_their_way.pop(random.randrange(len(on_their_way)))
            if random.random() < loss or (max_lag is not None and version - sampled_by > max_lag):
                lost += 1
            else:
                taken += 1
        taken -= per_step
        wait_share, oldest = random.random(), issued - len(on_their_way)
        bounds.begin_step(1, IssuedGroups(issued - lost, len(on_their_way), issued, oldest), wait_share, for_max_lag=False)
    assert (issued - lost, taken, on_their_way) == (steps * per_step, 0, [])


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_in_issue_order_lag_never_exceeds_max_lag(per_step: int, max_lag: int, data: st.DataObject) -> None:
    """Issue as much as allowed, lose some groups at random, train in order of issue; every lag is within the bound,
    and a step can always be taken: the bound does not starve the trainer."""
    recipe = bounded(per_step, max_lag=max_lag)
    waiting: list[int] = []
    issued = lost = 0
    for version in range(12):
        for attempt in range(4):
            allowed = issue_limit(recipe, version) - (issued - lost)
            waiting += [version] * allowed
            issued += allowed
            if attempt < 3:
                drop = data.draw(st.lists(st.integers(0, len(waiting) - 1), max_size=3, unique=True))
                waiting = [group for index, group in enumerate(waiting) if index not in drop]
                lost += len(drop)
        batch, waiting = waiting[:per_step], waiting[per_step:]
        assert len(batch) == per_step
        assert all(version - sampled <= max_lag for sampled in batch)


# --- the freshness limit


def test_the_freshness_limit_by_hand() -> None:
    bounds = IssueBounds(bounded(8, max_lag=None, group_size=2, slots=16))

    def begin(left_over: int, wait_share: float = 0.0, oldest_open: int = 0, *, for_max_lag: bool = False) -> int | None:
        """`left_over` groups of 2 beyond the batch, and none on its way but `oldest_open`."""
        unlost = 4 * (bounds.steps_begun + 1) + left_over
        bounds.begin_step(1, IssuedGroups(unlost, 0, unlost, oldest_open or unlost), wait_share, for_max_lag=for_max_lag)
        assert bounds.room(0, 1, unlost, 3).in_flight == 2 * left_over - 3
        return bounds.limit(1)

    assert [bounds.limit(actors) for actors in (0, 1, 2)] == [26, 26, 44]  # actors * (16 + 2) + 8
    assert [begin(left_over) for left_over in (8, 7, 9)] == [26, 26, 26], "26 / 8 + 1 = 4 steps have to begin first"
    assert begin(8) == 22  # by a quarter of 7 groups, rounded up
    assert (bounds.limit(2), bounds.holds_actors_back) == (40, True)  # an actor more adds its 18
    assert [begin(left_over) for left_over in (3, 0, 3, 3)] == [22] * 4, "one step had nothing left over: no queue stands"
    assert begin(0, wait_share=0.5, for_max_lag=True) == 22, "a higher limit would not help"
    assert not bounds.holds_actors_back, "the trainer waits"
    assert begin(0, wait_share=0.5) == 24
    assert not bounds.holds_actors_back, "the trainer waits"
    assert [begin(0, wait_share=0.5) for _ in range(2)] == [26, 26]
    assert [begin(13) for _ in range(50)][-1] == 8, "a batch is the least"
    assert bounds.limit(2) == 26


def test_what_an_actor_had_in_hand_starves_no_step_when_it_is_gone() -> None:
    bounds, unlost = IssueBounds(bounded(8, max_lag=None, group_size=2, slots=16)), 0
    while bounds.limit(2) != 8:
        unlost = 4 * (bounds.steps_begun + 1) + 13
        bounds.begin_step(2, IssuedGroups(unlost, 0, unlost, unlost), 0.0, for_max_lag=False)
    unlost = 4 * bounds.steps_begun + 4
    assert bounds.room(0, 2, unlost, 0).allowance == 0, "a batch is in flight"
    # One of the two is gone, with up to 16 + 2 of them: as many more, and never less than a batch, come from the other.
    assert [bounds.limit(actors) for actors in (0, 1, 2)] == [26, 26, 8]
    assert bounds.room(0, 1, unlost, 0).allowance == 9
    bounds.begin_step(1, IssuedGroups(unlost + 4, 0, unlost + 4, unlost), 0.5, for_max_lag=False)
    assert [bounds.limit(actors) for actors in (1, 2)] == [26, 44]


@given(st.floats(0.2, 5.0), st.integers(1, 3), st.integers(0, 2**32))
def test_the_freshness_limit_keeps_the_slower_side_busy_and_no_queue_standing(trainer_s: float, actors: int, seed: int) -> None:
    """Sequences take 1 to 2 s each in one of 16 slots; a step takes `trainer_s`. Trained at the pace of the slower side."""
    bounds, random = IssueBounds(bounded(16, max_lag=None, slots=16)), Random(seed)
    generating: list[float] = []  # when each ends
    now, unlost, queued, complete = 0.0, 0, 0, 0
    waits, left_over = [], []

    def fill_slots() -> None:
        nonlocal queued, unlost
        allowance = bounds.room(0, actors, unlost, 0).allowance
        queued, unlost = queued + allowance, unlost + allowance
        while queued and len(generating) < 16 * actors:
            queued -= 1
            heapq.heappush(generating, now + random.uniform(1, 2))

    for _ in range(80):
        ready_at = now
        fill_slots()
        while complete < 16:
            now, complete = heapq.heappop(generating), complete + 1
            fill_slots()
        complete -= 16
        waits.append(now - ready_at)
        left_over.append(complete)
        num_open, wait_share = len(generating) + queued, waits[-1] / (waits[-1] + trainer_s)
        bounds.begin_step(actors, IssuedGroups(unlost, num_open, unlost, unlost - num_open), wait_share, for_max_lag=False)
        ends_at = now + trainer_s
        fill_slots()
        while generating and generating[0] <= ends_at:
            now, complete = heapq.heappop(generating), complete + 1
            fill_slots()
        now = ends_at
    generates_s = 1.5 / actors
    assert fmean(waits[40:]) < max(0.0, generates_s - trainer_s) + 0.1 * max(generates_s, trainer_s)
    if trainer_s > 1.2 * generates_s:
        assert fmean(left_over[40:]) < 16


# --- advantages, and what cannot be trained on


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
