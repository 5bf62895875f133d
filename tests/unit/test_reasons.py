"""Reasons of failures that are counted stay few and short, whatever is said."""

from __future__ import annotations

from pipelinerl.telemetry.metrics import OTHER, BoundedLabels, short_reason


def test_a_reason_is_what_stands_before_the_colon() -> None:
    assert short_reason("reward_timeout: after 3 s: x") == "reward_timeout"
    assert (short_reason(": x"), len(short_reason("y" * 1000))) == ("unknown", 60)


def test_a_counter_gets_the_first_reasons_and_one_for_all_others() -> None:
    reasons = BoundedLabels(most=2)
    assert [reasons.of(one) for one in ("a: 1", "b: 2", "c: 3", "a: 4", "d" * 100)] == ["a", "b", OTHER, "a", OTHER]
