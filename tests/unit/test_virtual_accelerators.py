"""Virtual accelerators sample from the whole policy, in the time that their profile says; and what is made of runs on them."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulated_runs import decode_curve, learned_timing
from benchmarks.virtual_accelerators import CASES, PROFILE, Case, closed_form, compared, curve, measured, write_inputs
from benchmarks.virtual_actor import RowCache
from benchmarks.virtual_profile import Pace, Profile


def test_rows_at_different_positions_sample_from_what_whole_sequences_give(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, _ = write_inputs(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    sequences = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    rows, cache = torch.arange(2), RowCache(2, 8)
    with torch.no_grad():
        whole_BTV = model(input_ids=sequences).logits.softmax(-1)
        for step in range(5):
            if step == 2:
                cache.at_R[1] = 0  # another sequence has come into this row
            at_R = cache.at_R
            probabilities_RV = cache.next_probabilities(model, sequences[rows, at_R][:, None])
            torch.testing.assert_close(probabilities_RV, whole_BTV[rows, at_R])


def test_a_step_is_due_after_its_modelled_time_or_when_its_work_is_done(tmp_path: Path) -> None:
    pace, began_s = Pace(), time.monotonic()
    assert pace.due_s(began_s, 100.0) == began_s + 100.0
    assert pace.due_s(began_s - 7.0, 5.0) >= began_s
    assert (pace.steps, pace.overran, pace.modelled_s) == (2, 1, 105.0)
    assert pace.latest_s >= 2.0
    assert Profile.from_json(PROFILE.of(11).to_json()) == PROFILE.of(11)


def test_the_cases_are_a_quarter_of_the_paper_s_worked_one() -> None:
    """16.9 tokens per flash, and 1.57 times as fast as conventional mode at a largest lag of ⌈192 · 11 · 2 / 64⌉ = 66 steps."""
    rates = [closed_form(case, PROFILE) for case in (CASES["pipeline"], Case(g=67, warmup=0, steps=67))]
    assert rates[0] == pytest.approx(16.9 / 4, rel=0.01)
    assert rates[0] / rates[1] == pytest.approx(1.57, rel=0.01)


def record(step: int, time_s: float, reward: float = 0.0) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": step,
        "time_s": time_s,
        "step_s": {"total": 2.0, "wait": 0.5, "compute": 1.0, "snapshot": 0.1, "send": 0.2},
        "tokens_trained": 100,
        "sequences_trained": 10,
        "lag_histogram": {"1": 60, "3": 40},
        "ess": 0.5,
        "reward_mean": reward,
        "weight_update": {"round_trip_s": 0.3},
    }


def test_a_run_is_measured_after_its_warm_up_in_flashes() -> None:
    records = [record(1, 3.0), record(2, 5.0), record(3, 7.0, 0.2), record(4, 9.0, 0.4)]
    figures = measured(records, Case(0, 2, 2), flash_s=0.01)
    assert figures["tokens_per_flash"] == pytest.approx(200 / 400)
    assert (figures["step_flashes"], figures["completion_tokens"]) == (pytest.approx(200), 10)
    assert (figures["lag_mean"], figures["lag_max"], figures["trainer_waits"]) == (1.8, 3.0, pytest.approx(1 / 4))
    whole_phases = measured(records, Case(2, 0, 4), flash_s=0.01)
    assert whole_phases["step_flashes"] == pytest.approx(200)  # from when the first version was served, at 1 s
    assert curve(records, {0: 0.2, 2: 0.5, 8: 1.0}, flash_s=0.01) == [
        {"version": 0, "flashes": 0.0, "reward": 0.2},
        {"version": 2, "flashes": pytest.approx(400), "reward": 0.5},
    ]


def test_rates_and_times_to_a_reward_are_compared_with_the_pipeline_s() -> None:
    def row(case: str, rate: float, rewards: tuple[float, float]) -> dict[str, Any]:
        points = [{"flashes": 100.0 * number, "reward": reward} for number, reward in enumerate(rewards)]
        rates = dict.fromkeys(("tokens_per_flash", "simulated_tokens_per_flash", "closed_form_tokens_per_flash"), rate)
        return {"case": case, **rates, "curve": points}

    pipeline, slower, unlearned = compared(
        [row("pipeline", 4.0, (0.2, 1.0)), row("g", 2.0, (0.5, 0.6)), row("none", 1.0, (0.2, 0.3))]
    )
    assert pipeline["flashes_to_reward"] == pytest.approx(50)
    assert (slower["speed_of_pipeline"], slower["time_to_reward_by_pipeline"]) == (2.0, pytest.approx(2.0))
    assert unlearned["time_to_reward_by_pipeline"] is None


def test_timings_are_learned_from_a_run() -> None:
    """Steps of 2 s: 0.5 waiting, 1 computing 100 tokens, 0.1 + 0.2 for the update, and 0.2 for anything else."""
    rare = {"129": (1, 9.0)}
    decoding = decode_curve({"2": (10, 10.0), "16": (30, 30.0), "100": (100, 200.0), **rare})
    assert decoding.points == ((12.5, pytest.approx(12.5)), (100.0, pytest.approx(50.0)))
    timing = learned_timing([record(1, 2.0), record(2, 4.0)], decoding, in_progress=100)
    assert (timing.training, timing.step, timing.snapshot) == (0.01, pytest.approx(0.2), pytest.approx(0.1))
    assert timing.transfer == 0.0  # a decode step takes 2 s: an update of 0.3 s waits for nothing else
