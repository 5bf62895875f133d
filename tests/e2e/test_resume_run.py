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

from pipelinerl.run_dir import RunDir
from pipelinerl.service.address import read_address
from tests.e2e.conftest import RunningCommand
from tests.e2e.exposed import all_are_shown
from tests.e2e.test_run import PARITY_NATS, ledger_adds_up
from tests.faults.matrix import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Start = Callable[..., RunningCommand]


def starts(run: RunningCommand) -> list[int]:
    """From which version each trainer of the run began."""
    return json.loads((run.run_dir / "lineage.json").read_text())["starts"]


def test_ctrl_c_stops_everything_in_order_and_the_run_goes_on_to_a_later_end(start_run: Start) -> None:
    run = start_run("--set", "trainer.steps=100000")
    run.wait_for_steps(6)
    all_are_shown(read_address(run.run_dir / "addresses" / "runner.json").http)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(15) == 130
    assert run.processes_left() == []
    stopped, records = run.summary(), run.metrics()
    assert (stopped["interrupted"], ledger_adds_up(stopped["sequences"])) == (True, True)
    assert stopped["steps"] == len(records) >= 6
    assert (run.run_dir / "report.html").exists()
    assert (run.run_dir / "checkpoint" / "config.json").exists()
    assert f"--resume {run.run_dir}" in run.output.read_text()
    audit(RunDir(run.run_dir, ""))

    last = stopped["policy_version"] + 8
    another_recipe_is_refused_before_anything_starts(run, last)
    again = start_run("--set", f"trainer.steps={last}", resume=run.run_dir)
    assert again.wait() == 0, again.output.read_text()
    assert starts(again) == [0, stopped["policy_version"]]
    assert [record["step"] for record in again.metrics()] == list(range(1, last + 1))
    summary = again.summary()
    assert (summary["steps"], summary["interrupted"]) == (last, False)
    assert summary["sequences"]["trained"] > stopped["sequences"]["trained"]
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    audit(RunDir(run.run_dir, ""))


def another_recipe_is_refused_before_anything_starts(run: RunningCommand, steps: int) -> None:
    """Only the end may be another one."""
    began = starts(run)
    program = Path(sys.executable).with_name("pipelinerl")
    settings = ("--set", f"trainer.steps={steps}", "--set", "sampling.temperature=0.7")
    done = subprocess.run(
        [str(program), "run", "--resume", str(run.run_dir), *settings],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "sampling.temperature: 1.0 → 0.7" in done.stderr
    assert starts(run) == began


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
