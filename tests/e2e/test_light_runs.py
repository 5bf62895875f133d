"""Whole runs on a light engine: real services, a small transformers model instead of vLLM, real log-probabilities.

They prove what does not depend on the engine: several trainer ranks, the learned baseline, conventional mode, and faults of
each service, which `--fault-seed N` chooses; `make soak` plays all, with vLLM.
"""

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from pipelinerl.local.services import COMMANDS
from pipelinerl.run_dir import RunDir, newest_checkpoint, resumable, trainer_starts
from pipelinerl.run_summary import read_jsonl
from services.trainer.data.recording import read_step
from tests.documents.check_documents import described
from tests.faults.matrix import RANK_1, SURVIVE_WITHIN_S, Fault, interrupt, local_run, run_under_fire, some_faults, write_recipe
from tests.support import stranger
from tests.support.odd_actor import ODD
from tests.support.runs import PARITY_NATS, audit, ledger_adds_up, pipelinerl, replay, write_tiny_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LIGHT = {**COMMANDS, "actor": (sys.executable, "-m", "benchmarks.light_actor")}
WITH_A_LIAR, WITH_A_READER = (
    {**COMMANDS, "actor": (sys.executable, "-m", "tests.support.odd_actor", what)} for what in ("lies", "reads")
)
TWO_RANKS = {"nproc": 2, "tokens_per_microbatch": 256}


def records_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """All but a line that is being written."""
    return read_jsonl(run_dir.metrics)


async def test_two_ranks_survive_faults_of_each_service_and_a_dead_rank(
    tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--fault-seed")
    print(f"replay: .venv/bin/python -m pytest tests/e2e/test_light_runs.py --fault-seed {seed}")
    faults = [*some_faults(seed), Fault(RANK_1, "SIGKILL", "optimizer step")]
    changes = {
        "record": True,
        "actor": {"count": 2},
        "algorithm": {"advantage": "value"},
        "trainer": {**TWO_RANKS, "steps": 100_000},
        "weights": {"log": "nats", "anchor_every": 5},
    }
    recipe = write_recipe(tmp_path, tiny_model, len(faults), changes)
    run_dir, survived = await run_under_fire(tmp_path, recipe, faults, WITH_A_READER, interrupted=True)
    assert len(survived) == len(faults)
    summary, records = json.loads(run_dir.summary.read_text()), records_of(run_dir)
    assert [record["step"] for record in records] == list(range(1, summary["steps"] + 1))
    assert all(ledger_adds_up(record["sequences"]) for record in records)
    assert all(0 < record["sequences_trained"] <= 16 for record in records)
    assert all(0 <= record["imbalance"] < 1 for record in records)
    assert any(record["microbatches"] > 1 for record in records)
    assert all(record["value_loss"] >= 0 for record in records)
    of_episodes = [record for record in records if "talks" in record["tasks"]]
    assert {(record["turns_mean"], record["branches_mean"]) for record in of_episodes} == {(3, 1)}, "also those that were hit"
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["parity_failures"] == 0
    assert (run_dir.path / "checkpoint" / "value_head" / "model.safetensors").is_file()
    audit(run_dir.path)
    version, steps = await goes_on_from_a_version_without_a_checkpoint(tmp_path, recipe, run_dir)
    again = replay(run_dir.path, "--to", str(steps))
    assert f"all {steps} versions have the digests of the run" in again, "over kills, restarts and a rollback, on two ranks"
    samples = [json.loads(line) for line in run_dir.samples.read_text().splitlines()]
    said = run_dir.log("trainer").read_text()
    assert said.count(f"actor {ODD} joined and serves version") >= 2, "it followed each trainer, by the weight log alone"
    recorded = [group for step in range(1, steps + 1) for group in read_step(run_dir.path, step).groups]
    assert ODD in {sequence.actor for group in recorded for sequence in group.sequences}
    newest = len(trainer_starts(run_dir.path))
    branches = [branch for group in recorded for sequence in group.sequences for branch in sequence.all_branches]
    assert all(span.version <= version or span.incarnation == newest for branch in branches for span in branch.spans)
    updates = [record["weight_update"] or {} for record in records]
    assert {key for told in (*records, *updates) for key in told} <= described("metrics.jsonl")
    assert {key for sample in samples for key in sample} <= described("samples.jsonl")
    assert summary.keys() ^ described("summary.json") <= {"restarts", "error"}


async def goes_on_from_a_version_without_a_checkpoint(folder: Path, recipe: Path, run_dir: RunDir) -> tuple[int, int]:
    """A rollback by a step or two, which is killed and repeated, and some steps on the new branch; the version and the number
    of steps."""
    kept = resumable(run_dir.path)
    version = next(number for number in range(max(kept) - 1, 0, -1) if number not in kept)
    rollback = ("rollback", str(run_dir.path), "--to", str(version))
    killed = await asyncio.create_subprocess_exec(sys.executable, "-m", "pipelinerl.cli", *rollback, stdout=PIPE)
    while version not in resumable(run_dir.path):
        assert killed.returncode is None, "it ended without a checkpoint"
        await asyncio.sleep(0.001)
    with suppress(ProcessLookupError):
        killed.kill()
    said, _ = await killed.communicate()
    assert f"step {version:>5}" in said.decode()
    audit(run_dir.path)
    done = pipelinerl(*rollback)
    assert done.returncode == 0 or "continues anyway" in done.stderr, done.stdout + done.stderr
    assert newest_checkpoint(run_dir.path) == version
    audit(run_dir.path)
    begins = f"trains from version {version} to"
    before = run_dir.log("trainer").read_text().count(begins)
    async with local_run(folder, recipe, WITH_A_READER, run_dir) as (_, running, out), asyncio.timeout(SURVIVE_WITHIN_S):
        while run_dir.log("trainer").read_text().count(begins) == before or len(records_of(run_dir)) < version + 4:
            assert not running.done(), out.getvalue()
            await asyncio.sleep(0.1)
        ending = await interrupt(running)
    assert ending is not None, out.getvalue()
    assert ending.exit_code == 130, ending.error
    audit(run_dir.path)
    steps = [record["step"] for record in records_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert trainer_starts(run_dir.path)[-1] == version
    return version, len(steps)


LONGER = {
    "name": "longer",
    "task": {
        "name": "chain_sum",
        "config": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "prompt_style": "compact",
        "heldout_problems": 8,
    },
    "max_tokens": 8,
}


def caught(run_dir: RunDir) -> set[str]:
    """Actors in quarantine."""
    return set(re.findall(r"actor '([^']+)' is quarantined", run_dir.log("trainer").read_text()))


async def test_conventional_mode_on_two_ranks_quarantines_a_liar(tmp_path: Path, tiny_model: Path) -> None:
    changes = {
        "actor": {"count": 2},
        "algorithm": {"max_lag": None, "conventional_g": 4},
        "weights": {"chunk_mib": 0.1, "probe_every": 2, "verify_logprobs": 0.01},
        "trainer": {**TWO_RANKS, "steps": 100_000},
        "checkpoint": {"every_steps": 100_000},
        "sampling": {"stop": ["7", "no such text"]},
        "evaluation": {"samples": 2, "temperature": 1.0, "sets": [LONGER]},
    }
    recipe = write_tiny_recipe(tiny_model, tmp_path, changes, mode="conventional")
    async with local_run(tmp_path, recipe, WITH_A_LIAR) as (run_dir, running, out):
        async with asyncio.timeout(SURVIVE_WITHIN_S), AsyncExitStack() as stack:
            while len(records := records_of(run_dir)) < 9 or not (records[-1]["sequences"]["failed"] and caught(run_dir)):
                assert not running.done(), out.getvalue()
                await asyncio.sleep(0.1)
                if records_of(run_dir) and not (tmp_path / "stranger").exists():
                    await stranger.refused_everywhere(run_dir, tmp_path / "stranger")
                    stranger.nothing_is_readable_by_others(run_dir)
                    await asyncio.to_thread(stack.enter_context, stranger.another_user(run_dir, ["odd_actor lies", "trainer"]))
        await stranger.open_to_the_owner(run_dir)
        ending = await interrupt(running)
    assert ending.exit_code == 130
    records, summary = records_of(run_dir), json.loads(run_dir.summary.read_text())
    assert [record["lag"]["max"] for record in records] == [step % 4 for step in range(len(records))]
    assert all(record["lag"]["mean"] == record["lag"]["max"] for record in records)
    assert summary["sequences_multi_version_fraction"] == 0
    assert summary["interrupted"]
    assert summary["steps"] == len(records)
    evaluated = summary["heldout"][0]
    assert {name: one["unanswered"] for name, one in evaluated["sets"].items()} == {"chain_sum": 0, "longer": 0}
    assert evaluated["accuracy"] == evaluated["sets"]["chain_sum"]["accuracy"]["value"]
    assert all(set(one["pass_at"]) == {"2"} for one in evaluated["sets"].values())
    assert all(0 <= one["reported"]["answer"] <= 1 for one in evaluated["sets"].values())
    assert all(record["reported"]["chain_sum"]["answer"] == pytest.approx(record["reward_mean"]) for record in records)
    samples = [json.loads(line) for line in run_dir.samples.read_text().splitlines()]
    assert not any("7" in one["completion"] or "7" in (one["tokens"] or [])[:-1] for one in samples)
    assert (run_dir.path / "checkpoint" / "config.json").is_file()
    audit(run_dir.path)
    assert caught(run_dir) == {ODD}, "not the honest one, by 1 % of its tokens of lag 0"
    await stranger.done_to_a_copy(run_dir)


async def test_actor_and_trainer_that_share_a_gpu_in_turns_come_back_when_killed(tmp_path: Path, tiny_model: Path) -> None:
    phases = {"algorithm": {"max_lag": None, "conventional_g": 8}, "trainer": {"steps": 24}, "checkpoint": {"every_steps": 3}}
    changes = {"actor": {"count": 1, "colocate": True}, "evaluation": {"every_steps": 8}, **phases}
    recipe = write_tiny_recipe(tiny_model, tmp_path, changes, mode="conventional")
    async with local_run(tmp_path, recipe, LIGHT) as (run_dir, running, out), asyncio.timeout(SURVIVE_WITHIN_S):
        for turns, service in enumerate(("actor-0", "trainer"), start=1):
            while not run_dir.log("actor-0").exists() or run_dir.log("actor-0").read_text().count("engine sleeps") < turns:
                assert not running.done(), out.getvalue()
                await asyncio.sleep(0.02)
            os.kill(json.loads(run_dir.pids.read_text())[service], signal.SIGKILL)
        ending = await running
    assert (ending.exit_code, ending.restarts) == (0, {"actor-0": 1, "trainer": 1}), out.getvalue()
    summary = json.loads(run_dir.summary.read_text())
    assert (summary["steps"], summary["sequences_multi_version_fraction"], summary["parity_failures"]) == (24, 0, 0)
    audit(run_dir.path)
