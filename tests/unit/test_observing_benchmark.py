"""The benchmark of what observing costs runs to its end, and its sides differ in what is observed and in nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import observing, trainer_cases
from benchmarks.loops_in_turn import Timing, Timings
from benchmarks.observed_actor import Measured
from benchmarks.observed_actor import result as actor_result
from benchmarks.observed_trainer import Unmeasured
from benchmarks.observed_trainer import result as trainer_result
from benchmarks.trainer_cases import Case

SMALL = Case("tiny", "tiny", 0.85, 8, (10, 20), 64)


def test_trainer_and_page_in_turn_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "observing.json"
    output.write_text(json.dumps({"cases": {"actor": {"ratio": 1}, "trainer": {"ratio": 9}}}))
    monkeypatch.setitem(trainer_cases.CASES, "tiny", SMALL)
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
    actor = actor_result({"observed": [Measured(90, 10.0), Measured(80, 8.0)], "plain": [Measured(100, 9.0)] * 2})
    assert (actor["ratio"], actor["ratio_cpu_time"], actor["observed_tokens_per_s"]) == (0.85, 1.0125, 90)


def test_what_is_not_measured_takes_every_call() -> None:
    metrics = Unmeasured()
    metrics.finished.labels("length").inc()  # type: ignore[attr-defined]
    metrics.observe({})
