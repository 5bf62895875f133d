"""Figures of a step's use of its devices: by hand, and measured on a real learner."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from pipelinerl.figures import FIGURES
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.run_summary import RunTotals
from services.trainer.learn.meter import LAG_0_TOKENS, SAMPLED_WEIGHTS, PhaseTimer
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from tests.support.learner import group_of, model_of, sequences_of


def step(compute_s: float, trained: int, computed: int, **more: Any) -> dict[str, Any]:
    return {"step_s": {"compute": compute_s}, "tokens_trained": trained, "tokens_computed": computed, **more}


def test_totals_of_a_checkpoint_are_those_that_were_saved() -> None:
    totals = RunTotals()
    record = step(2.0, 4, 6, mfu=0.5, lag_histogram={"0": 3, "2": 1}, heldout_accuracy=0.5)
    totals.add_step(record)
    totals.add_events(record)
    assert RunTotals.from_state(json.loads(json.dumps(asdict(totals)))) == totals


class DeviceMark:
    """A mark of a device that is behind: passed once `at_s` has come to it."""

    queued_s = at_s = 0.0

    def record(self) -> None:
        self.due_s = DeviceMark.queued_s

    def query(self) -> bool:
        return self.at_s >= self.due_s

    def elapsed_time(self, end: Any, /) -> float:
        assert min(self.query(), end.query()), "the host would wait"
        return 1000 * (end.due_s - self.due_s)


def test_what_the_device_has_not_finished_is_counted_with_the_next_step() -> None:
    timer = PhaseTimer(DeviceMark)
    for phase, seconds in (("forward_backward", 4), ("optimizer", 1)):
        with timer.measure(phase):
            DeviceMark.queued_s += seconds
    DeviceMark.at_s = 4.0
    assert timer.take() == {"forward_backward": 4.0}
    DeviceMark.at_s = 5.0
    assert timer.take() == {"optimizer": 1.0}


def test_a_step_of_the_learner_tells_its_phases_and_flops() -> None:
    """A layer has q and o 2 · 32 · 32, k and v 2 · 32 · 16, three of 32 · 48: 7680 weights; head 32 · 23; 4 · 32 a pair.

    A sequence's last token predicts nothing and is not computed.
    """
    learner = Learner(wrap_model(model_of("llama-tied")), AlgorithmConfig(), TrainerConfig(tokens_per_microbatch=64))
    group = group_of(sequences_of([(3, 2), (3, 2)]))
    assert learner.prepare([group], 2).flops == 3 * 2 * (4 * 2 * 2 * 7680 + 2 * 2 * 32 * 23 + 10 * 2 * 4 * 32)
    assert learner.peak_flops is None
    assert learner.step(learner.prepare([group], version=2))["mfu"] is None
    learner.peak_flops = 1e12
    for _ in range(2):
        figures = learner.step(learner.prepare([group], version=2))
        assert set(figures["compute_s"]) == {"plan", "build", "to_device", "forward_backward", "totals", "optimizer"}
        assert all(0 < seconds < math.inf for seconds in figures["compute_s"].values())
        assert figures["imbalance"] == 0
        assert figures.keys() - {figure.key for figure in FIGURES} == {LAG_0_TOKENS, SAMPLED_WEIGHTS}
        seconds = 4 / figures["tokens_per_s"]["trained"]
        inside = figures["compute_s"].keys() - {"plan", "build"}  # which run before the step
        assert sum(figures["compute_s"][phase] for phase in inside) < seconds < 600
        assert figures["tokens_per_s"]["computed"] == pytest.approx(8 / seconds)
        assert figures["mfu"] == pytest.approx(learner.prepare([group], 2).flops / (seconds * 1e12))
