"""Groups: how many may be issued, in a simulated run too, which sequences may be trained on, and with which advantages; lag.
The ledger's equation, every way of breaking it, and a state machine that cannot; and the tracker's open groups.
"""

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import Sequence, VersionSpan
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
from pipelinerl.rl.ledger import Ledger, LedgerViolation, Outcome, SequenceTracker, ledger_counts
from tests.unit.builders import make_episode, make_group, make_recipe, make_sequence


def spans(*versions: int, incarnation: int = 1) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, 2 * i, 2 * i + 2, incarnation) for i, version in enumerate(versions))


NEW = Lineage()
ONCE, TWICE = NEW.restarted(20), NEW.restarted(20).restarted(10)


@pytest.mark.parametrize(
    ("lineage", "versions", "version", "max_lag", "reason"),
    [
        (NEW, spans(6, 8), 8, 2, None),  # the oldest token decides
        (NEW, spans(5, 8), 8, 2, StaleReason.LAG),
        (NEW, spans(5, 8), 8, None, None),
        (NEW, spans(8), 8, 0, None),
        (NEW, spans(7), 8, 0, StaleReason.LAG),
        (NEW, spans(9), 8, None, StaleReason.UNKNOWN),  # not made yet
        (NEW, spans(3, incarnation=2), 8, None, StaleReason.UNKNOWN),
        (NEW, spans(3, incarnation=0), 8, None, StaleReason.UNKNOWN),
        (ONCE, spans(20), 30, None, None),
        (ONCE, spans(21), 30, None, StaleReason.UNDONE),
        (ONCE, spans(20, 22, incarnation=2), 30, None, None),
        (ONCE, spans(19, incarnation=2), 30, None, StaleReason.UNKNOWN),  # an incarnation makes nothing before its start
        (ONCE, (*spans(20, 25), VersionSpan(21, 4, 5, 2)), 30, None, StaleReason.UNDONE),  # one token is enough
        (TWICE, spans(15), 30, None, StaleReason.UNDONE),  # a later restart undoes earlier incarnations, too
        (TWICE, spans(10), 30, None, None),
        (TWICE, spans(20, incarnation=2), 30, None, StaleReason.UNDONE),
        (TWICE, spans(12, incarnation=3), 30, None, None),
    ],
)
def test_which_sequences_are_stale_or_were_undone_by_a_restart(
    lineage: Lineage, versions: tuple[VersionSpan, ...], version: int, max_lag: int | None, reason: StaleReason | None
) -> None:
    assert stale_reason(versions, version, AlgorithmConfig(max_lag=max_lag), lineage) is reason


def test_a_sequence_may_be_judged_by_the_mean_over_its_tokens() -> None:
    versions = (VersionSpan(2, 0, 2, 1), VersionSpan(8, 2, 12, 1))  # at 8: 2 tokens of lag 6, 10 of lag 0
    by_mean = [AlgorithmConfig(max_lag=max_lag, max_lag_of="mean") for max_lag in (0, 1, None)]
    reasons = [StaleReason.LAG, None, None]
    assert [stale_reason(versions, 8, algorithm) for algorithm in by_mean] == reasons
    assert stale_reason(spans(9), 8, by_mean[-1]) is StaleReason.UNKNOWN
    assert [length_bucket(length) for length in (0, 1, 16, 17, 32, 33, 4096)] == [16, 16, 16, 32, 32, 64, 4096]


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
    mode=st.sampled_from(["conventional", "pipeline"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3)),
    max_lag=st.sampled_from([None, 0, 1, 4]),
    loss=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_whatever_is_lost_and_nothing_is_left_over(
    mode: str, sizes: tuple[int, int, int, int], max_lag: int | None, loss: float, seed: int
) -> None:
    """Feeder and intake by their rules. Groups are lost as they arrive, failed or filtered, or when their turn comes, as stale;
    in the last phase, too. Whenever the trainer waits, a group is on its way or may be issued."""
    phase_steps, steps, per_step, group_size = sizes
    if mode == "conventional" and max_lag is not None:
        max_lag = max(max_lag, phase_steps - 1)
    algorithm = {"max_lag": max_lag, "conventional_g": phase_steps}
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
def test_advantages_by_hand(rewards: list[float], baseline: Any, normalize: bool, advantages: list[float]) -> None:
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


# --- the ledger


def issued(*sequence_ids: str) -> Ledger:
    ledger = Ledger()
    ledger.issue(sequence_ids)
    return ledger


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda ledger: ledger.close(["ended"], Outcome.TRAINED), "ended ends as trained, but it is not in flight"),
        (lambda ledger: ledger.close(["b"], Outcome.FAILED, "x"), "sequence b ends as failed"),
        (lambda ledger: ledger.issue(["open"]), "sequence open was issued twice"),
        (lambda ledger: ledger.close(["open"], Outcome.FAILED), "failed without a reason"),
    ],
    ids=["ends twice", "never issued", "issued twice", "no reason"],
)
def test_what_cannot_be_is_refused_and_changes_nothing(event: Callable[[Ledger], None], message: str) -> None:
    ledger = issued("ended", "open")
    ledger.close(["ended"], Outcome.TRAINED)
    with pytest.raises(LedgerViolation, match=message):
        event(ledger)
    assert ledger.counts == ledger_counts(issued=2, trained=1, in_flight=1)
    assert ledger.in_flight() == ("open",)


def test_a_state_that_does_not_add_up_is_refused_with_its_numbers() -> None:
    state = issued("a", "b").to_state()
    state["in_flight"].remove("a")
    with pytest.raises(LedgerViolation, match=r"issued 2, trained 0.*in_flight 1"):
        Ledger.from_state(state)
    ledger = Ledger()
    ledger.counts = ledger_counts(issued=10, trained=4, dropped_stale=1, failed=1, in_flight=3)
    assert ledger.discrepancy == 1


@pytest.mark.parametrize(
    "event", [lambda ledger: ledger.issue(["c"]), lambda ledger: ledger.close(["a"], Outcome.TRAINED)], ids=["issue", "close"]
)
def test_a_broken_equation_is_noticed_at_the_next_event(event: Callable[[Ledger], None]) -> None:
    ledger = issued("a", "b")
    ledger.counts = ledger.counts | {"failed": 1}
    with pytest.raises(LedgerViolation, match=r"issued != trained \+ dropped.*failed 1"):
        event(ledger)


EVENTS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, *Outcome])), max_size=60)


@given(EVENTS)
def test_the_equation_survives_any_order_of_events(events: list[tuple[int, Outcome | None]]) -> None:
    """Valid events are taken, invalid ones refused without a trace; state survives a round trip through JSON."""
    ledger, open_ids, closed = Ledger(), set[str](), dict.fromkeys(Outcome, 0)
    count = 0
    for number, outcome in events:
        name = f"s{number}"
        valid = (name in open_ids) == (outcome is not None)
        try:
            if outcome is None:
                ledger.issue([name])
            else:
                ledger.close([name], outcome, "r")
        except LedgerViolation:
            assert not valid
            continue
        assert valid
        if outcome is None:
            open_ids.add(name)
            count += 1
        else:
            open_ids.remove(name)
            closed[outcome] += 1
    expected = ledger_counts(issued=count, in_flight=len(open_ids), **{key.value: value for key, value in closed.items()})
    assert ledger.counts == expected
    restored = Ledger.from_state(json.loads(json.dumps(ledger.to_state())))
    assert restored.counts == expected
    assert restored.in_flight() == ledger.in_flight()


# --- the tracker: groups that are still open


def sample(number: int, index: int, size: int = 3, **changes: Any) -> Sequence:
    return make_sequence(make_group(number, num_samples=size), index, **changes)


def tracking(*numbers: int) -> SequenceTracker:
    tracker = SequenceTracker()
    for number in numbers:
        tracker.issue(make_group(number, num_samples=3))
    return tracker


def test_the_last_member_completes_a_group_whose_failed_members_end() -> None:
    tracker = tracking(1)
    assert not tracker.arrive(sample(1, 2, failure="verifier timeout: 5 s"))
    first = sample(1, 0)
    assert not tracker.arrive(first)
    assert not tracker.arrive(sample(1, 0, reward=9.0))  # a repeat changes nothing
    assert not tracker.arrive(sample(2, 0)), "never issued"
    with pytest.raises(MessageError, match="group_size: 4, but its group has 3"):
        tracker.arrive(sample(1, 1, size=4))
    assert [one.sequence_id for one in tracker.missing("g00000001", "run", "lost")] == ["g00000001.1"]
    samples = tracker.arrive(sample(1, 1))
    assert [one.sample_index for one in samples] == [0, 1, 2]
    assert samples[0] is first
    assert tracker.ledger.reasons(Outcome.FAILED) == {"verifier timeout": 1}
    assert not tracker.arrive(sample(1, 1))
    assert (tracker.open_groups, tracker.held()) == ({}, ())


def test_an_episode_ends_once_with_the_tokens_of_all_its_branches() -> None:
    """Of an episode 3 and 1 sampled tokens, beside a sequence of 2."""
    events: list[dict[str, Any]] = []
    tracker, group = SequenceTracker(lambda event: events.append(dict(event))), make_group(1)
    tracker.issue(group)
    tracker.arrive(make_episode(group, 0))
    tracker.close(tracker.arrive(make_sequence(group, 1)), Outcome.TRAINED, version=1)
    ids = ["g00000001.0", "g00000001.1"]
    expected = {"event": "close", "outcome": "trained", "version": 1, "branches": 3, "tokens": 6, "ids": ids}
    assert events[-1] == expected
    assert tracker.ledger.counts == ledger_counts(issued=2, trained=2)


@given(st.data())
def test_any_order_with_repeats_gives_each_group_once(data: st.DataObject) -> None:
    everything = [sample(number, index) for number in range(3) for index in range(3)]
    repeats = data.draw(st.lists(st.sampled_from(everything), max_size=6))
    tracker = tracking(0, 1, 2)
    groups = [group for one in data.draw(st.permutations(everything + repeats)) if (group := tracker.arrive(one))]
    assert sorted(group[0].group_id for group in groups) == ["g00000000", "g00000001", "g00000002"]
    assert all([one.sample_index for one in group] == [0, 1, 2] for group in groups)


def test_a_tracker_that_is_restored_waits_for_the_same_sequences() -> None:
    before, after = tracking(1, 2), SequenceTracker()
    before.published("g00000001", 7)
    before.arrive(sample(2, 1))
    after.restore(json.loads(json.dumps(before.to_state())))
    for held in before.held():
        after.arrive(held)
    assert (after.ledger.counts, after.open_groups) == (before.ledger.counts, before.open_groups)
    assert [after.gone_from_queue(*ends) for ends in ((7, 9), (8, 9), (1, 6))] == [[], ["g00000001"], ["g00000001"]]


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
