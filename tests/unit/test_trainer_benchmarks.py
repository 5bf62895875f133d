"""The trainer's benchmarks compare like with like, run to their end on a CPU, and sum up what they measured."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bare_loop, observing, trainer_cases, trainer_gpu
from benchmarks.bare_loop import BareLoop
from benchmarks.gpu_cases import PLANS, Plan
from benchmarks.gpu_loops import Measured, measure
from benchmarks.loops_in_turn import Timing, Timings, compared, in_turn, of_all_ranks
from benchmarks.observed_actor import Measured as MeasuredActor
from benchmarks.observed_actor import result as actor_result
from benchmarks.observed_trainer import result as trainer_result
from benchmarks.trainer_cases import Case
from benchmarks.trainer_gpu import figures, prepared_step
from benchmarks.trainer_ranks import run_ranks
from benchmarks.training_data import VERSION
from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.attention import VARLEN
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner

CPU = torch.device("cpu")
SMALL = Case("small", "tiny", 0.85, 16, (10, 20), 64)
ALL_GPU_CASES = {case.name: case for plan in PLANS.values() for case in plan.cases}


@pytest.mark.parametrize("most_logits", [2**31, 200], ids=["at once", "in pieces"])
def test_the_bare_loop_takes_the_learners_step(most_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_loop, "MOST_LOGITS", most_logits)
    torch.manual_seed(0)
    model = SMALL.build_model()
    groups, trainer = SMALL.groups(model.config.vocab_size), SMALL.trainer().model_copy(update={"epsilon": 1e-3})
    learner = Learner(wrap_model(copy.deepcopy(model)), AlgorithmConfig(), trainer)
    before = [weight.detach().clone() for weight in model.parameters()]
    batches = [batch.on(CPU) for batch in learner.prepare(groups, VERSION).batches]
    assert len(batches) > 1
    learner.train_step(groups, VERSION)
    BareLoop(model, VARLEN, batches, trainer).step()
    assert any(not torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    for ours, bare in zip(learner.policy.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, bare, rtol=0, atol=1e-8)


def test_loops_step_in_turn_and_meet_before_each_step() -> None:
    order: list[str] = []
    timings = in_turn(lambda: order.append("ours"), lambda: order.append("bare"), 2, lambda: order.append("|"))
    assert order == ["|", "bare", "|", "ours", "|", "ours", "|", "bare"]
    assert (len(timings.ours), len(timings.bare)) == (2, 2)


def test_a_step_of_ranks_is_that_of_the_slowest_and_ratios_are_of_pairs() -> None:
    first = Timings([Timing(1.0, 1.0), Timing(4.0, 1.0)], [Timing(2.0, 1.0), Timing(2.0, 2.0)])
    second = Timings([Timing(2.0, 1.0), Timing(3.0, 1.0)], [Timing(1.0, 1.0), Timing(2.0, 2.0)])
    together = of_all_ranks([first, second])
    assert together == Timings([Timing(2.0, 2.0), Timing(4.0, 2.0)], [Timing(2.0, 2.0), Timing(2.0, 4.0)])
    found = compared(together, tokens=30)
    assert (found["ratio"], found["ratio_best"], found["ratio_cpu_time"]) == (0.75, 1.0, 1.5)
    assert (found["learner_tokens_per_s"], found["bare_tokens_per_s"], found["pairs"]) == (10.0, 15.0, 2)


@pytest.mark.soak
def test_two_ranks_of_both_loops_run_to_their_end() -> None:
    found = run_ranks(Case("small", "tiny", 0.85, 16, (10, 20), 64, ranks=2), pairs=2)
    assert found["pairs"] == 2
    assert found["by_one_rank"] > 0
    assert found["ratio"] > 0
    assert found["metrics"]["sequences_trained"] == 16
    assert found["metrics"]["skipped"] == ""


@pytest.mark.parametrize("name", ALL_GPU_CASES)
def test_rows_of_a_gpu_case_are_as_many_and_as_full_as_it_says(name: str) -> None:
    case = ALL_GPU_CASES[name]
    prepared = prepared_step(case)
    tokens = sum(batch.num_tokens for batch in prepared.batches)
    assert len(prepared.batches) == case.rows
    assert tokens > 0.8 * case.rows * case.row_tokens  # without the last token of each sequence
    assert case.longest <= case.config().max_position_embeddings


def test_figures_of_a_step() -> None:
    assert figures(Measured(0.5, 3 * 2**30), tokens=1000, flops=1e12, peak=4e12) == {
        "step_s": 0.5,
        "tokens_per_s": 2000.0,
        "mfu": 0.5,
        "peak_gib": 3.0,
    }
    assert set(figures(Measured(), 1000, 1e12, 4e12).values()) == {None}
    assert figures(Measured(0.5), 1000, 1e12, None)["mfu"] is None


def test_a_loop_that_does_not_fit_is_a_result() -> None:
    class TooLarge:
        def step(self) -> None:
            raise torch.OutOfMemoryError("too large")

    assert measure(TooLarge, CPU, Plan((), warm_up=1, steps=1)) == Measured()


def test_the_gpu_benchmark_runs_to_its_end_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trainer_gpu.json"
    monkeypatch.setattr(sys, "argv", ["trainer_gpu", "--tiny", "--output", str(output)])
    trainer_gpu.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["model"] for row in rows] == ["tiny Llama", "tiny Qwen2"]
    assert all(row["ratio"] > 0 and row["phases_s"]["forward_backward"] > 0 for row in rows)
    assert "| tiny Qwen2 | 512 | True | False |" in capsys.readouterr().out


def test_trainer_and_page_in_turn_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "observing.json"
    output.write_text(json.dumps({"cases": {"actor": {"ratio": 1}, "trainer": {"ratio": 9}}}))
    monkeypatch.setitem(trainer_cases.CASES, "tiny", replace(SMALL, name="tiny", batch_size=8))
    arguments = ["observing", "--only", "trainer", "--pairs", "1", "--steps", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    observing.main()
    cases = json.loads(output.read_text())["cases"]
    assert list(cases) == ["trainer", "actor"]
    assert cases["actor"] == {"ratio": 1}
    assert cases["trainer"]["pairs"] == 1
    assert cases["trainer"]["step_ms"] > 0


def test_ratios_are_of_pairs_and_costs_of_processor_time() -> None:
    timings = Timings([Timing(2.0, 4.0), Timing(4.0, 2.0)], [Timing(1.0, 2.0), Timing(3.0, 2.0)])
    found = trainer_result(timings, 2, 1.0, 0.5, 0.005)
    assert (found["ratio"], found["ratio_cpu_time"], found["ratio_by_cost"]) == (0.625, 0.75, 0.99)
    assert found["ratio_quartiles"] == "0.562 to 0.688"
    actor = actor_result(
        {"observed": [MeasuredActor(90, 10.0), MeasuredActor(80, 8.0)], "plain": [MeasuredActor(100, 9.0)] * 2}
    )
    assert (actor["ratio"], actor["ratio_cpu_time"], actor["observed_tokens_per_s"]) == (0.85, 1.0125, 90)
