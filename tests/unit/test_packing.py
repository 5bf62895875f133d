"""Packing by hand, its fill on realistic lengths, and what any packing must keep."""

from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.rl.packing import pack, plan_microbatches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def test_by_hand() -> None:
    # 7 | 6 | 4 into the bin of 6 | 3 into the bin of 7 | 2 opens a third
    assert pack([4, 7, 2, 6, 3], budget=10) == [[1, 4], [3, 0], [2]]
    assert plan_microbatches([5, 4, 3, 2], budget=8) == [[0, 3], [1, 2]]
    bins = plan_microbatches([6, 4, 5, 2], budget=10)  # as few as packing, but even
    assert sorted(sum([6, 4, 5, 2][index] for index in members) for members in bins) == [8, 9]


def test_an_even_split_that_bursts_the_budget_is_not_taken() -> None:
    # LPT puts 3, 3, 2 in one bin (3 | 3, then 2 and 2 level, then the last 2): 3 + 2 + 2 = 7 > 6.
    lengths = [3, 3, 2, 2, 2]
    assert plan_microbatches(lengths, budget=6) == [[0, 1], [2, 3, 4]]


@given(LENGTHS, st.integers(60, 200))
def test_every_sequence_once_within_budget_and_the_same_again(lengths: list[int], budget: int) -> None:
    for bins in (pack(lengths, budget), plan_microbatches(lengths, budget)):
        assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in members) <= budget for members in bins)
        # Any two bins together exceed the budget, so more than half of the room is used.
        assert len(bins) <= max(1, 2 * sum(lengths) / budget)
    assert plan_microbatches(lengths, budget) == plan_microbatches(list(lengths), budget)
