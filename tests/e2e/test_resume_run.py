"""Runs that end early and go on: with Ctrl-C and --resume, and with a trainer that is killed in the middle. Real services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.local.run_dir import RunDir
from tests.e2e.conftest import RunningCommand
from tests.e2e.test_run import PARITY_NATS, ledger_adds_up
from tests.faults.matrix import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Start = Callable[..., RunningCommand]


def starts(run: RunningCommand) -> list[int]:
    """From which version each trainer of the run began."""
    return json.loads((run.run_dir / "lineage.json").read_text())["starts"]


def test_a_run_that_was_interrupted_goes_on_to_a_later_end(start_run: Start) -> None:
    run = start_run("--set", "trainer.steps=60")
    run.wait_for_steps(6)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130
    stopped = run.summary()
    assert (stopped["interrupted"], ledger_adds_up(stopped["sequences"])) == (True, True)
    assert f"--resume {run.run_dir}" in run.output.read_text()
    audit(RunDir(run.run_dir, ""))

    last = stopped["policy_version"] + 8
    again = start_run("--set", f"trainer.steps={last}", resume=run.run_dir)
    assert again.wait() == 0, again.output.read_text()
    assert starts(again) == [0, stopped["policy_version"]]
    assert [record["step"] for record in again.metrics()] == list(range(1, last + 1))
    summary = again.summary()
    assert (summary["steps"], summary["interrupted"]) == (last, False)
    assert summary["sequences"]["trained"] > stopped["sequences"]["trained"]
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    audit(RunDir(run.run_dir, ""))


def test_a_recipe_that_changed_is_refused_before_anything_starts(start_run: Start) -> None:
    run = start_run("--set", "trainer.steps=1")
    assert run.wait() == 0, run.output.read_text()
    program = Path(sys.executable).with_name("pipelinerl")
    command = [
        str(program),
        "run",
        "--resume",
        str(run.run_dir),
        "--set",
        "trainer.steps=9",
        "--set",
        "sampling.temperature=0.7",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "sampling.temperature: 1.0 → 0.7" in done.stderr
    assert starts(run) == [0]


def test_a_trainer_that_is_killed_again_and_again_still_comes_to_the_end(start_run: Start) -> None:
    run = start_run("--set", "trainer.steps=24", "--set", "checkpoint.every_steps=3")
    for steps in (5, 11, 17):
        run.wait_for_steps(steps)
        os.kill(run.pids()["trainer"], signal.SIGKILL)
    assert run.wait() == 0, run.output.read_text()
    summary = run.summary()
    assert (summary["steps"], summary["restarts"]) == (24, {"trainer": 3})
    assert len(starts(run)) == 4
    assert [record["step"] for record in run.metrics()] == list(range(1, 25))
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    audit(RunDir(run.run_dir, ""))
