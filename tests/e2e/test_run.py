"""Whole runs with real processes: vLLM, NATS, gRPC, torch, one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import RunningCommand

pytestmark = pytest.mark.e2e

SUMMARY_KEYS = {
    "recipe",
    "mode",
    "steps",
    "policy_version",
    "wall_s",
    "heldout_accuracy_first",
    "heldout_accuracy_last",
    "tokens_generated",
    "tokens_trained",
    "sequences",
    "lag",
    "ess",
    "sequences_multi_version_fraction",
    "weight_updates",
    "logprob_mismatch_max",
    "mismatch_kl_mean",
    "actor_busy_fraction",
    "trainer_busy_fraction",
}
PARITY_NATS = 1e-4

Start = Callable[..., RunningCommand]


def ledger_adds_up(counts: dict[str, int]) -> bool:
    ended = counts["trained"] + counts["dropped_stale"] + counts["dropped_filtered"] + counts["failed"]
    return counts["issued"] == ended + counts["in_flight"]


def test_two_actors_train_and_leave_a_complete_run_directory(start_run: Start) -> None:
    run = start_run("--actors", "2")
    assert run.wait() == 0, run.output.read_text()
    summary, records = run.summary(), run.metrics()

    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["steps"], summary["policy_version"]) == (8, 8)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(ledger_adds_up(record["sequences"]) for record in records)
    assert summary["sequences"]["trained"] == sum(record["sequences_trained"] for record in records)
    assert summary["weight_updates"]["count"] == 9
    assert records[-1]["weight_update"]["members"] == 2
    assert {record["heldout_version"] for record in records} >= {0, 4, 8}
    assert summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["sequences_multi_version_fraction"] > 0
    assert summary["lag"]["max"] <= 4

    assert set(run.pids()) == {"nats", "verifier", "trainer", "actor-0", "actor-1"}
    for name in ("recipe.yaml", "samples.jsonl", "report.html", "checkpoint/config.json", "checkpoints/step-4"):
        assert (run.run_dir / name).exists(), name
    assert {path.stem for path in (run.run_dir / "logs").iterdir()} >= {"trainer", "verifier", "actor-0", "actor-1"}
    assert run.processes_left() == []
    checkpoint_loads_and_agrees(run.run_dir / "checkpoint")


def checkpoint_loads_and_agrees(folder: Path) -> None:
    """transformers and vLLM load the checkpoint and give the same log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("1+2=3;#3")["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "1+2=3;#3"
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
    # vLLM in a process of its own: its engine does not belong into the test's.
    script = (
        "import sys, json; from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], enforce_eager=True, dtype='float32', max_model_len=96, kv_cache_memory_bytes=2**28)\n"
        "    tokens = json.loads(sys.argv[2])\n"
        "    out = llm.generate({'prompt_token_ids': tokens}, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]\n"
        "    print('LOGPROBS', json.dumps([p[t].logprob for t, p in zip(tokens[1:], out.prompt_logprobs[1:])]))\n"
    )
    path = folder.parent / "score_with_vllm.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path), str(folder), str(tokens)], capture_output=True, text=True, timeout=200, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")), None)
    assert line is not None, done.stdout + done.stderr
    served = np.array(json.loads(line.removeprefix("LOGPROBS ")))
    assert np.abs(served - expected).max() <= PARITY_NATS


def test_conventional_mode_freezes_the_behaviour_policy_for_g_steps(start_run: Start) -> None:
    run = start_run(
        "--set", "mode=conventional", "--set", "algorithm.conventional_g=4", "--set", "algorithm.max_lag=null"
    )
    assert run.wait() == 0, run.output.read_text()
    records = run.metrics()
    assert [record["lag"]["max"] for record in records] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(record["lag"]["mean"] == record["lag"]["max"] for record in records)
    assert run.summary()["sequences_multi_version_fraction"] == 0
    assert run.summary()["weight_updates"]["count"] == 3
