"""How runs are compared by the policies they saved: crossing times by hand, decoding, and what TRL is told."""

import argparse
import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import saved_policies, side_comparison
from benchmarks.crossing import JudgedRun, crossing_estimates, crossing_time
from benchmarks.pipeline_vs_conventional import Side, best_at_lags, whole_phases
from benchmarks.saved_policies import decode, heldout_problems
from benchmarks.saved_runs import BESIDE_PRODUCT, Run, judged, lags, product_code, saved_run, times_of
from benchmarks.side_comparison import SideRun, curve
from benchmarks.small_models.supervised import character_tokenizer
from benchmarks.trl_environment import pinned
from benchmarks.versus_trl import TrlSettings, check_equivalent, loss_scale
from pipelinerl.errors import FieldError
from pipelinerl.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]


def times(*values: float) -> np.ndarray:
    return np.array(values)


def test_an_accuracy_is_reached_between_two_policies_in_proportion_the_first_time_it_is() -> None:
    assert crossing_time(times(0, 10, 20), times(0.5, 0.7, 0.9), 0.8) == pytest.approx(15)
    assert crossing_time(times(0, 10, 20, 30), times(0.5, 0.9, 0.6, 0.9), 0.6) == pytest.approx(2.5)
    assert crossing_time(times(3, 10), times(0.9, 0.1), 0.8) == 3
    assert crossing_time(times(0, 10), times(0.5, 0.7), 0.8) == math.inf


def learned_at(*times_s: float) -> list[JudgedRun]:
    """Runs that answer no problem at time 0 and all four at twice the given time, so that they cross one half at it."""
    right = np.array([[False] * 4, [True] * 4])
    return [JudgedRun(np.array([0, 2]), times(0, 2 * time_s), right) for time_s in times_s]


def test_a_side_is_compared_seed_by_seed_and_its_interval_is_that_of_the_seeds() -> None:
    """All problems are alike, so only seeds scatter: of two, a sample has either twice or both."""
    found = crossing_estimates({"ours": learned_at(10, 20), "other": learned_at(20, 40)}, 0.5, base="ours", draws=200)
    assert (found["ours"].time_s.value, found["ours"].time_s.interval) == (15, "10.00 to 20.00")
    ratio = found["other"].ratio
    assert (ratio.value, ratio.low, ratio.high) == (2, 2, 2)


def test_problems_scatter_too_and_a_run_that_never_gets_there_has_no_time() -> None:
    """Two problems of four are learned. A sample of four has them less than twice (never one half), or up to four times, which
    is one half after half the time."""
    half = JudgedRun(np.array([0, 1]), times(0, 8), np.array([[False] * 4, [True, False, True, False]]))
    estimate = crossing_estimates({"ours": [half]}, 0.5, base="ours", draws=500)["ours"].time_s
    assert (estimate.value, estimate.interval) == (8, "4.00 to never")
    never = crossing_estimates({"ours": learned_at(10), "other": [half]}, 0.9, base="ours", draws=20)
    assert (never["other"].time_s.shown, never["other"].ratio and never["other"].ratio.shown) == (None, None)
    assert curve(half, 128)[1] == {"version": 1, "time_s": 8.0, "samples": 128, "accuracy": 0.5}


def test_decoding_in_shrinking_batches_gives_what_each_prompt_gives_alone() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.6,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 12, length).astype(np.int32) for length in (3, 9, 1, 5, 7, 4, 2, 8)]
    together = decode(model, prompts, max_tokens=20, temperature=0.0)
    for prompt, completion in zip(prompts, together, strict=True):
        tokens = torch.from_numpy(prompt.astype(np.int64))[None]
        alone = model.generate(tokens, max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        assert completion == alone
    assert len({len(completion) for completion in together}) > 2, "completions end at different steps"


def test_policies_are_judged_on_problems_that_no_run_trains_on() -> None:
    """Sums of two one-digit numbers: so few that a run meets some of the held-out ones."""
    changes = ["task.config={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}", "trainer.steps=1"]
    recipe = load_recipe("arithmetic", [*changes, "task.heldout_problems=1", "trainer.batch_size=16"])
    problems = heldout_problems(recipe, 64, [0, 1], character_tokenizer(64))
    assert len({problem.prompt_text for problem in problems}) == 64
    with pytest.raises(FieldError, match=r"--problems = 64.*only"):
        heldout_problems(
            load_recipe("arithmetic", [*changes, "task.heldout_problems=1"]), 64, range(6), character_tokenizer(64)
        )


def test_too_few_problems_are_told_of_before_anything_runs_and_kept_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_comparison, "initial_policy", lambda recipe: "nowhere")
    monkeypatch.setattr(saved_policies, "load_tokenizer", lambda source: character_tokenizer(64))
    parser = argparse.ArgumentParser()
    side_comparison.add_arguments(parser, ["pipeline", "trl-g4"], seeds=(3,))
    arguments = parser.parse_args(["--work", str(tmp_path), "--problems", "64"])
    recipe = load_recipe("arithmetic", ["task.config={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"])
    begun: list[str] = []

    def make_run(side: str, *_: object) -> Run:
        begun.append(side)
        return lambda folder: ({1: 2.0}, {})

    with pytest.raises(FieldError, match=r"--problems = 64.*only"):
        side_comparison.measure(recipe, arguments, make_run)
    assert not begun
    monkeypatch.setattr(side_comparison, "judged", Mock())
    monkeypatch.setattr(saved_policies, "PolicyJudge", Mock())
    side_comparison.measure(load_recipe("arithmetic"), arguments, make_run)
    assert "not run again" not in capsys.readouterr().err
    arguments.sides.append("trl-g8")
    side_comparison.measure(load_recipe("arithmetic"), arguments, make_run)
    assert "kept from earlier calls, and not run again: pipeline-s3, trl-g4-s3\n" in capsys.readouterr().err


def test_trl_is_told_the_same_training_or_the_recipe_is_refused() -> None:
    recipe = load_recipe("arithmetic")
    assert loss_scale(recipe) == pytest.approx(64 * 8 / 7)
    assert loss_scale(load_recipe("arithmetic", ["algorithm.advantage=group_mean", "algorithm.normalization=token"])) == 1
    assert TrlSettings.parse("pipeline") is None
    assert TrlSettings.parse("trl-continuous-g4") == TrlSettings(4, 1, continuous=True)
    for wrong in ("trl-x4", "trl-g0", "trl-g", "vllm"):
        with pytest.raises(FieldError, match="--sides"):
            TrlSettings.parse(wrong)
    check_equivalent(recipe, [TrlSettings(steps_per_generation=4)])
    with pytest.raises(FieldError, match=r"--steps = 100.*multiple of 8"):
        check_equivalent(recipe, [TrlSettings(steps_per_generation=8)])
    with pytest.raises(FieldError, match=r"algorithm\.loss = 'ppo_clip'"):
        check_equivalent(load_recipe("arithmetic", ["algorithm.loss=ppo_clip"]), [])
    with pytest.raises(FieldError, match=r"model\.dtype = 'bfloat16'"):
        check_equivalent(load_recipe("arithmetic", ["model.dtype=bfloat16"]), [])


def test_other_code_is_known_by_its_digits(tmp_path: Path) -> None:
    files = [*((name, "1") for name in BESIDE_PRODUCT), ("pipelinerl/a.py", "1"), ("services/b.py", "1")]
    known = []
    for name, text in (*files, ("services/b.py", "2"), ("requirements/trl.txt", "2"), ("docs/c.py", "1")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        known += [product_code(tmp_path)] if (tmp_path / BESIDE_PRODUCT[-1]).exists() else []
    assert len(set(known)) == len(known) - 1 == 5
    assert known[-1] == known[-2], "what does not run in it changes nothing"


def test_both_environments_have_the_same_torch_and_rewards() -> None:
    ours = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    for package in ("torch", "reasoning_gym", "mpmath", "pydantic"):
        assert f"{package}=={pinned(package)}" in ours


def test_no_clock_counts_the_saving_of_policies() -> None:
    """The first step began 2 s before its record; each of the first two records' saving is missing from all times after it.
    The last record was written 1.5 s after its step, when the policy had been evaluated."""
    records = [
        {"policy_version": 1, "time_s": 5.0, "step_s": {"total": 2.0}, "saving_s": 0.5, "lag_histogram": {"0": 30}},
        {"policy_version": 2, "time_s": 7.0, "step_s": {"total": 2.0}, "saving_s": 0.25, "lag_histogram": {"0": 10, "2": 40}},
        {"policy_version": 3, "time_s": 9.5, "step_s": {"total": 1.0}, "saving_s": 0.0, "lag_histogram": {"1": 20}},
    ]  # fmt: skip
    assert times_of(records) == {1: 1.5, 2: 3.25, 3: 4.25}
    assert lags(records) == {"lag_mean": 1.0, "lag_max": 2.0}


def test_a_comparison_that_was_stopped_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    """Ten policies, of which the third answers all problems. Goal 0.5 of 4 problems: certain from 1.25 on, so never."""
    made, seen = [], []

    def make(folder: Path) -> tuple[dict[int, float], dict[str, float]]:
        made.append(folder)
        for version in range(1, 11):
            (folder / f"step-{version}").mkdir()
            (folder / f"step-{version}" / "model.safetensors").touch()
        return {version: 2.0 * version for version in range(1, 12)}, {"step_s": 2.0}

    def judge(policy: Path) -> np.ndarray:
        if len(seen) == 4:
            raise InterruptedError
        seen.append(policy.name)
        return np.full(400, policy.name == "step-3")

    (tmp_path / "half-done").touch()
    run = saved_run(tmp_path, make)
    assert run.code == product_code()
    with pytest.raises(InterruptedError):
        judged(run, np.zeros(400, bool), judge, 0.5)
    seen.pop(0)
    curve_of = judged(saved_run(tmp_path, make), np.zeros(400, bool), judge, 0.5)
    assert made == [tmp_path]
    assert not (tmp_path / "half-done").exists()
    assert curve_of.versions.tolist() == [0, 1, 2, 3, 7, 10], "after the goal is certain, one in four and the last"
    assert curve_of.times_s.tolist() == [0, 2, 4, 6, 14, 20]
    assert curve_of.accuracies.tolist() == [0, 0, 0, 1, 0, 0]


def test_sides_of_both_modes_differ_in_the_mode_and_its_lag_alone() -> None:
    recipe = load_recipe("arithmetic")
    assert (recipe.algorithm.max_lag, recipe.mode) == (4, "pipeline")
    changed = Side.parse("conventional-8").changed(recipe)
    assert (changed.mode, changed.algorithm.conventional_g, changed.algorithm.max_lag) == ("conventional", 8, 7)
    assert Side.parse("conventional-2").changed(recipe).algorithm.max_lag == 4, "no limit below the recipe's"
    assert Side.parse("pipeline-1").changed(recipe).algorithm.max_lag == 1
    assert Side.parse("pipeline").changed(recipe) == recipe
    assert Side.parse("conventional-2-h64").changed(recipe).actor.sequences_in_progress == 64
    assert Side.parse("conventional-4-h64-t2").changed(recipe).actor.engine.threads == 2
    assert Side.parse("pipeline-h64") == Side("pipeline", None, 64)
    for wrong in ("pipeline-0", "conventional", "conventional-x", "trl"):
        with pytest.raises(FieldError, match="--sides"):
            Side.parse(wrong)
    assert whole_phases(10, [Side.parse(text) for text in ("pipeline-7", "conventional-2", "conventional-3")]) == 24


def test_the_best_of_each_mode_are_compared_at_equal_largest_lag() -> None:
    """Half of the problems are answered after `time_s`. With lag at most 1: pipeline-1 (10 and 20 s for two seeds) against
    conventional-2 (24 and 36 s), not conventional-1. With any lag conventional-4 is faster, and soonest. conventional-8 has one
    seed alone. pipeline-1 trains on shorter sequences."""

    def side(rate: float, *times_s: float, tokens: float = 50.0) -> list[SideRun]:
        figures = {"samples_per_s": rate, "completion_tokens": tokens}
        return [SideRun(seed, run, figures) for seed, run in enumerate(learned_at(*times_s))]

    found = {
        "pipeline": side(180, 12, 24),  # the recipe's limit is 4
        "pipeline-1": side(150, 10, 20, tokens=40.0),
        "conventional-1": side(80, 30, 50),
        "conventional-2": side(100, 24, 36),
        "conventional-4": side(120, 18, 27),
        "conventional-8": side(500, 1),
    }
    lag_1, lag_3, any_lag = best_at_lags(found, load_recipe("arithmetic"), 0.5)
    assert (lag_1["largest_lag"], lag_1["throughput_ratio"], lag_1["time_ratio"], lag_1["seeds"]) == (1, 1.5, 2.0, 2)
    assert (lag_1["token_ratio"], any_lag["token_ratio"]) == (1.2, 1.5)
    assert (lag_1["pipeline_fastest"], lag_1["conventional_soonest"]) == ("pipeline-1", "conventional-2")
    assert (lag_3["largest_lag"], lag_3["throughput_ratio"], lag_3["time_ratio"], lag_3["seeds"]) == (3, 1.25, 1.5, 2)
    assert (any_lag["largest_lag"], any_lag["throughput_ratio"]) == ("any", 1.5)
    assert (any_lag["pipeline_fastest"], any_lag["pipeline_soonest"]) == ("pipeline", "pipeline-1")
