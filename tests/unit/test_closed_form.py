"""The paper's throughput model: its worked case, and small cases by hand."""

import numpy as np
import pytest

from benchmarks.virtual_profile import PAPER_CURVE, PAPER_TRAINING_TIME
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
from tests.unit.builders import make_recipe


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
