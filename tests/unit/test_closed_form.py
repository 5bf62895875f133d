"""By hand: packing, plans of one step over ranks, costs of a model, the paper's throughput model, and accuracy of answers."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from benchmarks.virtual_profile import PAPER_CURVE, PAPER_TRAINING_TIME
from pipelinerl.errors import FieldError
from pipelinerl.rl.accuracy import Estimate, accuracy_of, pass_at
from pipelinerl.rl.memory import peak_flops
from pipelinerl.rl.packing import UNIT_COST, CostModel, pack, plan_microbatches, plan_step
from pipelinerl.rl.throughput import (
    DecodeCurve,
    Lengths,
    Split,
    conventional_rate,
    largest_lag,
    recipe_lag,
    split,
    too_small_max_lag,
)
from services.trainer.learn.meter import cost_model_of
from tests.support.learner import SHAPE
from tests.unit.builders import make_recipe

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


def test_costs_by_hand() -> None:
    # 10 · 3 tokens + 100 · 2 outputs + 7 · (1 + 2 + 3) pairs
    assert CostModel(10, 100, 7).of([3], outputs=[2]).tolist() == [272]
    assert CostModel(10, 100, 7).of([3, 1]).tolist() == [372, 117]
    # 5 tokens that see 2 each at most: 1 + 2 + 2 + 2 + 2; 2 tokens are within the window: 1 + 2
    assert CostModel(0, per_windowed_pair=1, window=2).of([5, 2]).tolist() == [9, 3]
    windowed = CostModel(0, per_windowed_pair=3, window=50).of(range(1, 51))  # no sequence is longer
    assert windowed.tolist() == CostModel(0, per_pair=3).of(range(1, 51)).tolist()


@pytest.mark.parametrize(
    ("asked", "slots", "costs"),
    [
        # Best fit: 6 + 4 | 5 + 2, one slot. LPT over two ranks: 6 | 5, 4 | then 2 on the 6.
        (([6, 4, 5, 2], 10, 2), [[[2, 1], [0, 3]]], [[9, 8]]),
        # Tokens would be even as 4 + 1 | 2 + 2 + 1; costs n (n + 1) are 20, 6, 6, 2, 2: 20 | 6 + 6 + 2 + 2.
        (([4, 2, 2, 1, 1], 8, 2, SQUARES), [[[0], [1, 2, 3, 4]]], [[20, 16]]),
        # Two long ones in two slots would let the other rank wait twice.
        (([8, 2, 8, 2, 2, 2], 8, 2, SQUARES), None, [[72, 72], [12, 12]]),
        # Predicted tokens count where they are known.
        (([4, 4, 4, 4], 12, 2, CostModel(per_token=0, per_output_token=1), [3, 1, 1, 1]), None, [[3, 3]]),
        # More ranks than sequences leave ranks empty.
        (([5, 5], 10, 4), [[[0], [1], [], []]], [[5, 5, 0, 0]]),
        (([], 10, 2), [], []),
        # Replicas that meet only at the end of a step wait for the largest sum: 9 + 6 and 8 + 7, not 9 + 7 and 8 + 6.
        (([9, 8, 7, 6], 10, 2), [[[0], [1]], [[3], [2]]], [[9, 8], [6, 7]]),
    ],
)
def test_plans_by_hand(asked: tuple[Any, ...], slots: list[list[list[int]]] | None, costs: list[list[float]]) -> None:
    plan, ranks = plan_step(*asked), asked[2]
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


# FLOPs of several architectures against torch's own count, and the share of a peak

SMALL = SHAPE | {"hidden_size": 48, "num_hidden_layers": 3, "head_dim": 16, "pad_token_id": 0}


def config_of(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**SMALL | fields)


EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((name, {}) for name in ("gemma2", "glm4", "llama", "mistral", "olmo3", "phi", "phi3", "qwen2", "qwen3")),
        ("gpt2", {"head_dim": 12}),
        ("qwen3", {"tie_word_embeddings": True}),
        *((name, EXPERTS) for name in ("gpt_oss", "mixtral", "qwen2_moe")),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    ],
)
def test_the_cost_is_that_which_torch_counts(model_type: str, fields: dict[str, Any]) -> None:
    """torch counts the products of a pass of 7 tokens. Eager attention computes all 49 pairs, not only the causal ones."""
    model = AutoModelForCausalLM.from_config(config_of(model_type, attn_implementation="eager", **fields))
    if "num_experts" in fields:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(7)[None], use_cache=False)
    cost = cost_model_of(model)
    products = 7 * (cost.per_token + cost.per_output_token)
    assert products + 49 * (cost.per_pair + cost.per_windowed_pair) == pytest.approx(counted.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize(("name", "tera_flops"), [("NVIDIA H100 80GB HBM3", 989.4), ("AMD Instinct MI250X", 191.5)])
def test_only_devices_that_are_known_exactly_have_a_peak(name: str, tera_flops: float) -> None:
    assert peak_flops(name, "bfloat16") == pytest.approx(tera_flops * 1e12)
    for unknown in (f"{name} MIG 1g.10gb", f"{name} Laptop GPU", "NVIDIA H1000", "cpu", ""):
        assert peak_flops(unknown, "bfloat16") is None
    assert peak_flops(name, "float32") is None


# The paper's throughput model, and the accuracy of answers


def test_the_papers_worked_case() -> None:
    """N = B = 128, lengths uniform on 1..L, both methods with a largest lag of at most 132; all figures within 1 %."""
    lengths, num_accelerators, batch_size = Lengths.of_bars([(1, 4096, 1.0)]), 128, 128
    num_sequences = 133 * batch_size

    def of(in_progress: int, num_generators: int) -> Split:
        num_trainers = num_accelerators - num_generators
        return split(PAPER_CURVE, PAPER_TRAINING_TIME, lengths, batch_size, in_progress, num_generators, num_trainers)

    tried = [of(h, generators) for h in (32, 64, 96, 128, 192, 256) for generators in range(1, num_accelerators)]
    best = max((one for one in tried if one.largest_lag <= 132), key=lambda one: one.rate)
    assert (best.sequences_in_progress, best.num_generators, best.largest_lag) == (192, 44, 132)
    assert best.generation == best.rate == pytest.approx(16.9, rel=0.01)
    assert best.training == pytest.approx(17.08, rel=0.01)
    generating = conventional_rate(PAPER_CURVE, 0.0, lengths, num_sequences, num_accelerators)
    conventional = conventional_rate(PAPER_CURVE, PAPER_TRAINING_TIME, lengths, num_sequences, num_accelerators)
    assert generating == pytest.approx(18.3, rel=0.01)
    assert num_accelerators / PAPER_TRAINING_TIME == pytest.approx(26.02, rel=0.01)
    assert conventional == pytest.approx(10.7, rel=0.01)
    assert best.rate / conventional == pytest.approx(1.57, rel=0.01)


def test_a_draining_batch_by_hand() -> None:
    """4 sequences on 2 generators, half of them of 1 token and half of 3: one decode step with 2 in progress takes 2 / 1.0, two
    steps with 1 take 1 / 0.8 each; 8 tokens in 4.5."""
    curve = DecodeCurve(((1, 0.8), (2, 1.0)))
    lengths = Lengths.of_bars([(3, 3, 5.0), (1, 1, 5.0)])
    assert (lengths.mean, lengths.longest) == (2.0, 3)
    assert conventional_rate(curve, 0.0, lengths, 4, 2) == pytest.approx(8 / 4.5)
    assert conventional_rate(curve, 0.5, lengths, 4, 2) == pytest.approx(1 / (4.5 / 8 + 0.5 / 2))
    # Equal lengths never drain: the generators always have 2.
    assert conventional_rate(curve, 0.0, Lengths.of_bars([(7, 7, 1.0)]), 4, 2) == pytest.approx(2 * 1.0)


def test_a_curve_between_and_beyond_its_points_and_the_largest_lag_by_hand() -> None:
    curve = DecodeCurve(((10, 5.0), (20, 8.0)))
    times = [2.0, 2.0, 2.25, 2.5, 5.0]  # below the first point, at it, between the two, at the last, at twice the last
    assert curve.step_time(np.array([1.0, 10.0, 15.0, 20.0, 40.0])).tolist() == times
    assert [curve.rate(h) for h in (1, 15, 40)] == pytest.approx([0.5, 15 / 2.25, 8.0])
    assert largest_lag(in_progress=128, batch_size=128, longest=64, mean=22) == 3  # 2.91
    assert largest_lag(in_progress=64, batch_size=128, longest=10, mean=10) == 1


def test_a_lag_limit_below_the_largest_lag_is_named_with_what_would_do() -> None:
    recipe = make_recipe(actor={"sequences_in_progress": 96}, trainer={"batch_size": 64}, algorithm={"max_lag": 8})
    assert recipe_lag(recipe, 2) == 3  # 2 · 96 / 64, of completions of one length
    assert recipe_lag(recipe, 2, longest=60, mean=20) == 9
    task = {"source": "agent", "command": "true", "path": "problems.jsonl"}
    episodes = {"actor": {"sequences_in_progress": 96, "episodes_in_progress": 300}, "task": task}
    assert recipe_lag(make_recipe(**episodes, trainer={"batch_size": 64}), 2) == 10  # 2 · 300 / 64
    assert too_small_max_lag(recipe, 8) is None
    told = str(too_small_max_lag(recipe, 9))
    assert told.startswith("algorithm.max_lag = 8: is below the largest lag with full actors")
    assert "= 9: generation is throttled, and sequences are dropped as stale; use at least 9" in told
    conventional = make_recipe(mode="conventional", algorithm={"max_lag": None, "conventional_g": 4})
    assert (recipe_lag(conventional, 2), too_small_max_lag(conventional, 3)) == (3, None)


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
