"""The ledger's equation, every way of breaking it, and a state machine that cannot; and the tracker's open groups."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import Sequence
from pipelinerl.rl.ledger import Ledger, LedgerViolation, Outcome, SequenceTracker, ledger_counts
from tests.unit.builders import make_episode, make_group, make_sequence


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
