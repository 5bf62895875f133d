"""Packing, and plans of one step over ranks: by hand, what any plan must keep, and how even it is on realistic lengths."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError
from pipelinerl.rl.packing import UNIT_COST, CostModel, pack, plan_microbatches, plan_step

QWEN_1_5B = CostModel(per_token=2.62e9, per_output_token=4.67e8, per_pair=172_032)
SQUARES = CostModel(per_token=0.0, per_pair=2.0)
"""A sequence of n tokens costs n (n + 1)."""
LENGTHS = st.lists(st.integers(1, 60), max_size=60)


def test_packing_by_hand() -> None:
    # 7 | 6 | 4 into the bin of 6 | 3 into the bin of 7 | 2 opens a third
    assert pack([4, 7, 2, 6, 3], budget=10) == [[1, 4], [3, 0], [2]]
    assert plan_microbatches([5, 4, 3, 2], budget=8) == [[0, 3], [1, 2]]
    bins = plan_microbatches([6, 4, 5, 2], budget=10)  # as few as packing, but even
    assert sorted(sum([6, 4, 5, 2][index] for index in members) for members in bins) == [8, 9]
    # An even split that bursts the budget is not taken. LPT puts 3, 3, 2 in one bin (3 | 3, then 2 and 2 level, then the last
    # 2): 3 + 2 + 2 = 7 > 6.
    assert plan_microbatches([3, 3, 2, 2, 2], budget=6) == [[0, 1], [2, 3, 4]]


@given(LENGTHS, st.integers(60, 200))
def test_every_sequence_is_packed_once_within_budget(lengths: list[int], budget: int) -> None:
    for bins in (pack(lengths, budget), plan_microbatches(lengths, budget)):
        assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in members) <= budget for members in bins)
        # Any two bins together exceed the budget, so more than half of the room is used.
        assert len(bins) <= max(1, 2 * sum(lengths) / budget)


def test_costs_by_hand() -> None:
    # 10 · 3 tokens + 100 · 2 outputs + 7 · (1 + 2 + 3) pairs
    assert CostModel(10, 100, 7).of([3], outputs=[2]).tolist() == [272]
    assert CostModel(10, 100, 7).of([3, 1]).tolist() == [372, 117]
    # 5 tokens that see 2 each at most: 1 + 2 + 2 + 2 + 2; 2 tokens are within the window: 1 + 2
    assert CostModel(0, per_windowed_pair=1, window=2).of([5, 2]).tolist() == [9, 3]
    windowed = CostModel(0, per_windowed_pair=3, window=50).of(range(1, 51))  # no sequence is longer
    assert windowed.tolist() == CostModel(0, per_pair=3).of(range(1, 51)).tolist()


OUTPUTS = CostModel(per_token=0, per_output_token=1)


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "model", "outputs", "slots", "costs"),
    [
        # Best fit: 6 + 4 | 5 + 2, one slot. LPT over two ranks: 6 | 5, 4 | then 2 on the 6.
        ([6, 4, 5, 2], 10, 2, UNIT_COST, None, [[[2, 1], [0, 3]]], [[9, 8]]),
        # Tokens would be even as 4 + 1 | 2 + 2 + 1; costs n (n + 1) are 20, 6, 6, 2, 2: 20 | 6 + 6 + 2 + 2.
        ([4, 2, 2, 1, 1], 8, 2, SQUARES, None, [[[0], [1, 2, 3, 4]]], [[20, 16]]),
        # Two long ones in two slots would let the other rank wait twice.
        ([8, 2, 8, 2, 2, 2], 8, 2, SQUARES, None, None, [[72, 72], [12, 12]]),
        # Predicted tokens count where they are known.
        ([4, 4, 4, 4], 12, 2, OUTPUTS, [3, 1, 1, 1], None, [[3, 3]]),
        # More ranks than sequences leave ranks empty.
        ([5, 5], 10, 4, UNIT_COST, None, [[[0], [1], [], []]], [[5, 5, 0, 0]]),
        ([], 10, 2, UNIT_COST, None, [], []),
        # Replicas that meet only at the end of a step wait for the largest sum: 9 + 6 and 8 + 7, not 9 + 7 and 8 + 6.
        ([9, 8, 7, 6], 10, 2, UNIT_COST, None, [[[0], [1]], [[3], [2]]], [[9, 8], [6, 7]]),
    ],
)
def test_plans_by_hand(
    lengths: list[int],
    budget: int,
    ranks: int,
    model: CostModel,
    outputs: list[int] | None,
    slots: list[list[list[int]]] | None,
    costs: list[list[float]],
) -> None:
    plan = plan_step(lengths, budget, num_ranks=ranks, cost_model=model, outputs=outputs)
    assert plan.costs == costs
    assert slots is None or plan.slots == slots
    waited = 1 - sum(map(sum, costs)) / (ranks * sum(map(max, costs))) if costs else 0.0
    assert plan.imbalance == pytest.approx(waited)
    assert [plan.of_rank(rank) for rank in range(ranks)] == [[slot[rank] for slot in plan.slots] for rank in range(ranks)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_sequence_beyond_the_budget_is_named(num_ranks: int) -> None:
    with pytest.raises(FieldError, match=r"trainer.tokens_per_microbatch = 16: a sequence of 17 tokens"):
        plan_step([4, 17], budget=16, num_ranks=num_ranks)


@given(LENGTHS, st.integers(60, 200), st.integers(1, 9), st.sampled_from([UNIT_COST, SQUARES, QWEN_1_5B]))
def test_what_every_plan_keeps(lengths: list[int], budget: int, num_ranks: int, model: CostModel) -> None:
    plan = plan_step(lengths, budget, num_ranks, model)
    ranks = [plan.of_rank(rank) for rank in range(num_ranks)]
    assert sorted(index for bins in ranks for members in bins for index in members) == list(range(len(lengths)))
    assert {len(bins) for bins in ranks} == {len(plan.slots)}
    assert len(plan.slots) == math.ceil(len(pack(lengths, budget)) / num_ranks)
    assert all(sum(lengths[index] for index in members) <= budget for bins in ranks for members in bins)
    assert all(any(bins) for bins in plan.slots), "a slot without any sequence"
    assert 0 <= plan.imbalance < 1
    for bins, costs in zip(plan.slots, plan.costs, strict=True):
        for members, cost in zip(bins, costs, strict=True):
            assert cost == pytest.approx(float(model.of([lengths[index] for index in members]).sum()))
    assert plan_step(list(lengths), budget, num_ranks, model) == plan


def test_a_prompt_is_planned_once_for_the_sequences_that_share_it() -> None:
    """Prompts of 8 tokens: together 8 + 4 + 3 + 2 are computed, and 16 copies in attention take the room of 4 more."""
    lengths, prompts = [12, 11, 10, 9], [("a", 8), ("a", 8), ("a", 8), ("b", 8)]
    one = plan_step(lengths, 21, 1, CostModel(1, 10, 0), [4, 3, 2, 1], prompts)
    assert one.slots == [[[0, 1, 2]], [[3]]]
    assert one.costs == [[17 + 10 * 9], [9 + 10]]
    assert plan_step(lengths, 18, 1, UNIT_COST, None, prompts).slots == [[[0, 1]], [[2]], [[3]]]
    # Two ranks have done after 17 with the pieces whole, and after 21 with one prompt for each: 12 + 9 and 11 + 10.
    assert plan_step(lengths, 32, 2, UNIT_COST, None, prompts).costs == [[17, 9]]
    assert plan_step(lengths, 64, 2, UNIT_COST, None, [("a", 1)] * 4).costs == [[21, 21]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=40), st.integers(60, 200), st.integers(1, 4))
def test_plans_of_shared_prompts_cost_what_they_compute(sequences: list[tuple[int, int]], budget: int, num_ranks: int) -> None:
    """Sequences of prompt p have 5 (p + 1) tokens of it."""
    prompts = [(prompt, 5 * (prompt + 1)) for prompt, _ in sequences]
    lengths = [size + more for (_, size), (_, more) in zip(prompts, sequences, strict=True)]
    plan = plan_step(lengths, budget, num_ranks, prompts=prompts)
    members = [index for bins in plan.slots for bin_ in bins for index in bin_]
    assert sorted(members) == list(range(len(sequences)))
    assert plan.cost <= plan_step(lengths, budget, num_ranks).cost
    for bins, costs in zip(plan.slots, plan.costs, strict=True):
        for bin_, cost in zip(bins, costs, strict=True):
            computed = sum(sequences[index][1] for index in bin_) + sum(size for _, size in {prompts[i] for i in bin_})
            assert computed <= cost <= budget


@given(LENGTHS, st.integers(60, 200))
def test_one_rank_gets_what_packing_gives(lengths: list[int], budget: int) -> None:
    plan = plan_step(lengths, budget, 1, QWEN_1_5B)
    assert plan.of_rank(0) == plan_microbatches(lengths, budget)
    assert plan.imbalance == 0


def reasoning_lengths(seed: int, count: int, budget: int) -> list[int]:
    """Log-normal with a long tail: the median a twelfth of the budget, some at the budget itself."""
    lengths = np.random.default_rng(seed).lognormal(math.log(budget / 12), 1.0, count)
    return np.clip(lengths, 16, budget).astype(int).tolist()


def round_robin_cost(lengths: list[int], budget: int, num_ranks: int, model: CostModel) -> float:
    shares = [lengths[rank::num_ranks] for rank in range(num_ranks)]
    costs = [[float(model.of([share[i] for i in bin_]).sum()) for bin_ in pack(share, budget)] for share in shares]
    num_slots = max(map(len, costs))
    return sum(max(rank[slot] if slot < len(rank) else 0.0 for rank in costs) for slot in range(num_slots))


@pytest.mark.parametrize("budget", [8192, 32768])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("count", [64, 256, 1024])
def test_never_slower_than_dealing_in_turn(count: int, num_ranks: int, budget: int) -> None:
    for seed in range(4):
        lengths = reasoning_lengths(seed, count, budget)
        plan = plan_step(lengths, budget, num_ranks, QWEN_1_5B)
        assert plan.cost <= round_robin_cost(lengths, budget, num_ranks, QWEN_1_5B) * (1 + 1e-9)
