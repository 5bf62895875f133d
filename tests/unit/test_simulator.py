"""The simulator: small runs by hand, and the closed form where both must agree."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.virtual_profile import PAPER_CURVE, PAPER_TRAINING_TIME
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.simulator import Simulation, Timing, simulate
from pipelinerl.rl.throughput import DecodeCurve, Lengths, conventional_rate, split
from tests.unit.builders import make_recipe

EVEN = DecodeCurve(((200, 200.0),))
"""Each decode step takes 1, up to 200 sequences."""
FOUR = Lengths.of_bars([(4, 4, 1.0)])


def one_at_a_time(batch_size: int = 1, slots: int = 1, group_size: int = 1, **sections: Any) -> Recipe:
    sections = {"algorithm": {"advantage": "value", "max_lag": 1}} | sections
    return make_recipe(
        sampling={"group_size": group_size, "max_tokens": 16},
        trainer={"steps": 100_000, "batch_size": batch_size, "tokens_per_microbatch": 64},
        actor={"sequences_in_progress": slots},
        **sections,
    )


def simulated(recipe: Recipe, timing: Timing, lengths: Lengths = FOUR, **numbers: int) -> Simulation:
    given = {"num_actors": 1, "num_ranks": 1, "warmup_steps": 4, "steps": 10} | numbers
    return simulate(recipe, timing, lengths, **given)


@pytest.mark.parametrize(
    ("max_lag", "timing", "step_time", "lags"),
    [
        # Nothing is issued before the step is done: 4 decode steps, then 4 of training.
        (0, Timing(EVEN, training=1.0), 8, {0: 40}),
        # Both sides work all the time; a sequence begins when the one before begins to be trained on.
        (1, Timing(EVEN, training=1.0), 4, {1: 40}),
        # Training takes 2, then the other half of the sequence is sampled by the new version.
        (1, Timing(EVEN, training=0.5), 4, {0: 20, 1: 20}),
        # The swap waits for the decode step under way, from 1.75 to 2.
        (1, Timing(EVEN, training=0.25, step=0.25, transfer=0.5), 4, {0: 20, 1: 20}),
        # Trained on in 1, copied in 3, sent in 3: the second sequence from now may begin after these 7 and ends after 11.
        (1, Timing(EVEN, training=0.25, snapshot=3.0, transfer=3.0), 11 / 2, {1: 40}),
    ],
)
def test_one_sequence_at_a_time_by_hand(max_lag: int, timing: Timing, step_time: float, lags: dict[int, int]) -> None:
    recipe = one_at_a_time(algorithm={"advantage": "value", "max_lag": max_lag})
    counted = simulated(recipe, timing)
    assert (counted.duration, counted.lag_histogram) == (pytest.approx(10 * step_time), lags)
    assert (counted.steps, counted.sequences, counted.stale_share) == (10, 10, 0.0)
    busy = timing.step + 4 * timing.training
    assert counted.trainer_idle == pytest.approx(1 - busy / step_time)
    assert counted.actor_idle == counted.empty_slots == pytest.approx(1 - 4 / step_time)


def test_actors_that_outrun_the_trainer_idle_instead_of_making_data_old() -> None:
    """A batch of 4 takes 4 to generate and 16 to train on. The bound of 8 steps alone would fill all 16 slots."""
    recipe = one_at_a_time(4, slots=16, algorithm={"advantage": "value", "max_lag": 8})
    counted = simulated(recipe, Timing(EVEN, training=1.0, transfer=0.5), warmup_steps=60, steps=100)
    assert (counted.duration, counted.trainer_idle) == (pytest.approx(1600), pytest.approx(0))
    assert counted.empty_slots == pytest.approx(15 / 16)
    assert sum(lag * tokens for lag, tokens in counted.lag_histogram.items()) / counted.lag_histogram.total() <= 1.5


def test_a_conventional_phase_by_hand() -> None:
    """G = 2 steps of 4 on 2 accelerators of 2 slots: 8 sequences of 4 tokens in 8 decode steps, then twice 16 tokens in 8."""
    algorithm = {"advantage": "value", "conventional_g": 2, "max_lag": None}
    recipe = one_at_a_time(4, slots=2, group_size=2, mode="conventional", algorithm=algorithm)
    counted = simulated(recipe, Timing(EVEN, training=1.0), num_actors=2, num_ranks=2, warmup_steps=2, steps=4)
    assert (counted.duration, counted.lag_histogram) == (pytest.approx(2 * (8 + 16)), {0: 32, 1: 32})
    assert (counted.actor_idle, counted.trainer_idle) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


@pytest.mark.parametrize("phase_steps", [1, 4])
def test_sequences_of_one_length_take_exactly_what_the_closed_form_says(phase_steps: int) -> None:
    """4 accelerators of 16 sequences for each step of a phase, and a curve that is not flat."""
    algorithm = {"advantage": "value", "conventional_g": phase_steps, "max_lag": None}
    recipe = one_at_a_time(64, slots=16 * phase_steps, group_size=4, mode="conventional", algorithm=algorithm)
    curve, steps = DecodeCurve(((1, 10.0), (16, 120.0), (64, 300.0))), 4 * phase_steps
    counted = simulated(recipe, Timing(curve, 0.5), FOUR, num_actors=4, num_ranks=4, warmup_steps=steps, steps=steps)
    assert counted.rate == pytest.approx(conventional_rate(curve, 0.5, FOUR, 64 * phase_steps, 4), rel=1e-9)


def test_what_is_overtaken_is_dropped_by_its_length_and_replaced() -> None:
    """Two slots, and one sequence in eight is 16 times as long as the others."""
    recipe = one_at_a_time(2, slots=4, algorithm={"advantage": "value", "max_lag": 2})
    lengths = Lengths.of_bars([(2, 2, 7.0), (32, 32, 1.0)])
    counted = simulated(recipe, Timing(EVEN, training=0.1), lengths, steps=400)
    assert counted == simulated(recipe, Timing(EVEN, training=0.1), lengths, steps=400)
    assert max(counted.lag_histogram) == 2
    assert set(counted.finished_by_length) == {16, 32}
    assert counted.stale_by_length[16] < counted.stale_by_length[32] <= counted.finished_by_length[32]
    assert counted.sequences > 0.9 * 800  # a step may lack what was stale, and no step lacks all
    assert counted.sequences + counted.stale_by_length.total() == pytest.approx(counted.finished_by_length.total(), abs=4)


@pytest.mark.parametrize(("num_actors", "num_ranks"), [(10, 50), (50, 20)])
def test_pipeline_agrees_with_the_closed_form_whichever_side_is_slower(num_actors: int, num_ranks: int) -> None:
    recipe = one_at_a_time(128, slots=64, algorithm={"advantage": "value", "max_lag": None})
    lengths = Lengths.of_bars([(1, 1000, 1.0)])
    numbers = {"num_actors": num_actors, "num_ranks": num_ranks, "warmup_steps": 40, "steps": 40}
    counted = simulated(recipe, Timing(PAPER_CURVE, PAPER_TRAINING_TIME), lengths, **numbers)
    closed = split(PAPER_CURVE, PAPER_TRAINING_TIME, lengths, 128, 64, num_actors, num_ranks)
    assert counted.rate == pytest.approx(closed.rate, rel=0.01)
    idle_side = counted.trainer_idle if closed.generation < closed.training else 0.0
    assert idle_side == pytest.approx(max(0.0, 1 - closed.generation / closed.training), abs=0.01)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pipeline=st.booleans(), group_size=st.integers(1, 4), slots=st.integers(1, 12))
def test_no_run_loses_anything_or_outruns_a_side(data: st.DataObject, pipeline: bool, group_size: int, slots: int) -> None:
    """Whole runs, from their first step to their last."""
    draw = data.draw
    steps = draw(st.integers(1, 12), "steps")
    max_lag = draw(st.sampled_from([None, 0, 1, 2, 3]), "max_lag") if pipeline else None
    algorithm = {"advantage": "value", "max_lag": max_lag, "conventional_g": draw(st.sampled_from([1, 3, 5]), "G")}
    batch_size, num_actors = group_size * draw(st.integers(1, 4), "groups"), draw(st.integers(1, 3), "actors")
    mode = "pipeline" if pipeline else "conventional"
    recipe = one_at_a_time(batch_size, slots, group_size, mode=mode, algorithm=algorithm)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": steps})})
    short, long = draw(st.integers(1, 4), "short"), draw(st.integers(1, 200), "long")
    lengths = Lengths.of_bars([(short, short, 3.0), (long, long, 1.0)])
    training, pause = draw(st.sampled_from([0.01, 0.1, 2.0]), "training"), st.sampled_from([0.0, 0.5, 20.0])
    timing = Timing(EVEN, training, *(draw(pause, what) for what in ("step", "snapshot", "transfer")))
    whole = simulated(recipe, timing, lengths, num_actors=num_actors, warmup_steps=0, steps=steps)
    finished, stale = whole.finished_by_length.total(), whole.stale_by_length.total()
    assert finished == whole.sequences + stale
    assert (finished - steps * batch_size) % group_size == 0, "the steps' groups, and one for each that was lost"
    assert finished == steps * batch_size if stale < group_size else finished >= steps * batch_size
    assert max(whole.lag_histogram) <= (steps if max_lag is None else max_lag)
    if not pipeline:
        assert (stale, max(whole.lag_histogram)) == (0, min(algorithm["conventional_g"], steps) - 1)
    assert whole.rate <= min(slots * num_actors, 1 / timing.training) * (1 + 1e-9)
    for share in (whole.actor_idle, whole.empty_slots, whole.trainer_idle):
        assert 0 <= share <= 1
