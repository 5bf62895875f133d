"""Means, pass@k and intervals of held-out accuracy, against numbers computed by hand."""

from itertools import combinations

import pytest

from pipelinerl.rl.accuracy import Estimate, accuracy_of, pass_at


@pytest.mark.parametrize(
    ("share", "trials", "low", "high"),
    [(0.5, 10, 0.236593, 0.763407), (1.0, 10, 0.722467, 1.0), (0.0, 1, 0.0, 0.793451), (0.81, 100, 0.722197, 0.874860)],
)
def test_wilson_intervals(share: float, trials: int, low: float, high: float) -> None:
    """As tables and other programs have them."""
    assert Estimate.of([share] * trials) == Estimate(*(pytest.approx(one, abs=2e-5) for one in (share, low, high)))


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    for answers in ([True, False, False, True, False], [False] * 3, [True] * 4):
        for k in range(1, len(answers) + 1):
            chosen = [any(choice) for choice in combinations(answers, k)]
            assert pass_at(k, len(answers), sum(answers)) == pytest.approx(sum(chosen) / len(chosen))


def test_answers_without_a_verdict_are_left_out_of_the_mean_and_wrong_in_the_lower_bound_and_none_is_nothing() -> None:
    known = accuracy_of([[True, True, False, False], [True, None, False, None], [None] * 4, [False] * 4])
    assert known.accuracy == Estimate.of([0.5, 0.5, 0.0])
    assert (known.lower_bound, known.unanswered) == (3 / 16, 6)
    # k = 2: 1 - C(2, 2) / C(4, 2) = 5/6 of the first, 1 of the second, 0 of the last; k = 4: of those with four verdicts.
    assert {k: one.value for k, one in known.pass_at.items()} == {"2": pytest.approx(11 / 18), "4": 0.5}
    assert known.pass_at["4"] == Estimate.of([1.0, 0.0])
    known = accuracy_of([[True], [None], [False]])
    assert (known.accuracy.value, known.lower_bound, known.unanswered, known.pass_at) == (0.5, 1 / 3, 1, {})
    assert accuracy_of([[None], [None]]) is None
    assert accuracy_of([]) is None
