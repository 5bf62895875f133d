"""Whole runs whose trainer has two ranks: they train, they stop together, and go on together when one has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.run_dir import RunDir
from tests.e2e.conftest import RunningCommand
from tests.e2e.test_run import PARITY_NATS, checkpoint_loads_and_agrees, ledger_adds_up
from tests.faults.matrix import audit

pytestmark = pytest.mark.e2e

TWO_RANKS = ("--set", "trainer.nproc=2", "--set", "trainer.tokens_per_microbatch=256")

Start = Callable[..., RunningCommand]


def rank_pid(run: RunningCommand, rank: int) -> int:
    """Of the process that works for this run as that rank of the trainer."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = any(str(run.run_dir).encode() in variable for variable in environment)
            if ours and f"RANK={rank}".encode() in environment and b"PIPELINERL_INSTANCE=trainer" in environment:
                return int(entry.name)
    raise AssertionError(f"no rank {rank}: {run.output.read_text()}")


def test_two_ranks_train_serve_what_they_trained_and_leave_a_checkpoint(start_run: Start) -> None:
    run = start_run(*TWO_RANKS, "--set", "algorithm.advantage=value")
    assert run.wait() == 0, run.output.read_text()
    summary, records = run.summary(), run.metrics()
    assert (summary["steps"], summary["policy_version"]) == (8, 8)
    assert all(ledger_adds_up(record["sequences"]) for record in records)
    assert {record["sequences_trained"] for record in records} <= set(range(1, 17))
    assert summary["logprob_mismatch_max"] <= PARITY_NATS
    assert all(0 <= record["imbalance"] < 1 for record in records)
    assert any(record["microbatches"] > 1 for record in records)
    assert run.processes_left() == []
    assert all(record["value_loss"] >= 0 for record in records)
    assert (run.run_dir / "checkpoint" / "value_head" / "model.safetensors").is_file()
    checkpoint_loads_and_agrees(run.run_dir / "checkpoint")  # vLLM is not confused by the value head


def test_ranks_go_on_where_they_were_after_one_dies_and_leave_a_checkpoint_at_ctrl_c(start_run: Start) -> None:
    run = start_run(*TWO_RANKS, "--set", "trainer.steps=100000", "--set", "checkpoint.every_steps=2")
    run.wait_for_steps(5)
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    run.wait_for_steps(14)
    assert "trainer exited with code 1" in run.output.read_text()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(15) == 130
    assert run.processes_left() == []
    summary, steps = run.summary(), [record["step"] for record in run.metrics()]
    assert (summary["interrupted"], summary["restarts"]) == (True, {"trainer": 1})
    assert steps == list(range(1, summary["steps"] + 1))
    assert len(steps) >= 14
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    assert (run.run_dir / "checkpoint" / "config.json").exists()
    audit(RunDir(run.run_dir, ""))
