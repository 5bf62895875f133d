"""The equation, every way of breaking it, and a state machine that cannot."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.rl.ledger import (
    Ledger,
    LedgerCounts,
    LedgerViolation,
    Outcome,
)


def issued(*sequence_ids: str) -> Ledger:
    ledger = Ledger()
    ledger.issue(sequence_ids)
    return ledger


def test_each_outcome_is_counted() -> None:
    ledger = issued("a", "b", "c", "d", "e")
    ledger.close("a", Outcome.TRAINED)
    ledger.close("b", Outcome.DROPPED_STALE, "lag above max_lag")
    ledger.close("c", Outcome.DROPPED_FILTERED)
    ledger.close("d", Outcome.FAILED, "verifier timeout")
    assert ledger.counts == LedgerCounts(5, 1, 1, 1, 1, 1)
    assert ledger.in_flight() == ("e",)
    assert ledger.reasons(Outcome.FAILED) == {"verifier timeout": 1}
    assert ledger.reasons(Outcome.DROPPED_STALE) == {"lag above max_lag": 1}
    assert ledger.reasons(Outcome.TRAINED) == {}


def test_a_sequence_ends_once() -> None:
    ledger = issued("a")
    ledger.close("a", Outcome.TRAINED)
    with pytest.raises(LedgerViolation, match="sequence a ends as trained, but it is not in flight"):
        ledger.close("a", Outcome.TRAINED)
    assert not ledger.is_open("a")


def test_only_what_was_issued_ends() -> None:
    with pytest.raises(LedgerViolation, match="sequence b ends as failed"):
        issued("a").close("b", Outcome.FAILED, "x")


def test_issued_once() -> None:
    with pytest.raises(LedgerViolation, match="sequence a was issued twice"):
        issued("a").issue(["a"])


def test_a_failure_has_a_reason() -> None:
    ledger = issued("a")
    with pytest.raises(LedgerViolation, match="failed without a reason"):
        ledger.close("a", Outcome.FAILED)
    assert ledger.is_open("a")


def test_a_state_that_does_not_add_up_is_refused_with_its_numbers() -> None:
    state = issued("a", "b").to_state()
    state["in_flight"].remove("a")
    with pytest.raises(LedgerViolation, match=r"issued 2, trained 0.*in_flight 1"):
        Ledger.from_state(state)


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
                ledger.close(name, outcome, "r")
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
    expected = LedgerCounts(count, in_flight=len(open_ids), **{key.value: value for key, value in closed.items()})
    assert ledger.counts == expected
    restored = Ledger.from_state(json.loads(json.dumps(ledger.to_state())))
    assert restored.counts == expected
    assert restored.in_flight() == ledger.in_flight()
