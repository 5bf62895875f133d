"""Environments of the package verifiers: a whole run on the example's, and the package's own clients at the episodes' endpoint.

Run by `make test-verifiers`, with both packages in a folder of the environment (docs/development.md). No network.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.preflight import VERIFIERS, examine
from tests.integration.test_episodes import episode, run
from tests.support.chat_endpoint import endpoint, refuses, says
from tests.support.runs import PARITY_NATS, RUN_TIMEOUT_S, audit, ledger_adds_up, started_run, write_tiny_recipe
from tests.support.verifier import ROOT, verifier
from tests.unit.builders import make_recipe
from tests.unit.test_episode_endpoint import TOKENIZER, stage

pytestmark = pytest.mark.skipif(
    not (VERIFIERS / "say_digits.py").is_file(), reason="no package verifiers: make test-verifiers has it"
)

TURNS, STEPS = 3, 6


@pytest.mark.e2e
def test_a_policy_is_trained_on_an_environment_and_every_reward_is_that_of_its_tokens(tiny_model: Path, tmp_path: Path) -> None:
    example = yaml.safe_load((ROOT / "examples/verifiers/recipe.yaml").read_text())
    changes = {
        "task": example["task"] | {"prompt_style": "plain", "heldout_problems": 4},
        "reward": example["reward"] | {"answer_pattern": "", "timeout_s": 5},
        "sampling": {"max_tokens": 12},
        "actor": {"sequences_in_progress": 8, "engine": {"kv_cache_gib": 0.25}},
        "trainer": {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3, "tokens_per_microbatch": 4096},
        "evaluation": {"every_steps": STEPS, "temperature": 1.0},
    }
    recipe, run_dir = write_tiny_recipe(tiny_model, tmp_path, changes), tmp_path / "run"
    with started_run(recipe, run_dir) as run:
        assert run.process.wait(RUN_TIMEOUT_S) == 0, run.said
    audit(run_dir)
    records, summary = run.metrics(), run.summary()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(ledger_adds_up(record["sequences"]) and not record["sequences"]["failed"] for record in records)
    assert all((record["turns_mean"], record["branches_mean"]) == (TURNS, 1.0) for record in records)
    assert summary["logprob_mismatch_max"] <= PARITY_NATS
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if not sample["heldout"]]
    assert {sample["reward"] * 4 % 1 for sample in samples if sample["heldout"]} == {0.0}
    assert len({sample["reward"] for sample in trained}) > 1
    for sample in trained:
        (branch,) = sample["branches"]
        said = [part for part in branch["parts"] if part["role"] == "assistant"]
        seen = [part for part in branch["parts"] if part["role"] == "observation"]
        digits = [sum(character.isdigit() for character in part["text"]) for part in said]
        assert sample["reward"] == sum(digits) / 4
        told = [f"+{sum(digits[:turn])}=" for turn in range(1, TURNS)]
        assert [part["text"].removeprefix("<eos>") for part in seen] == told
        sampled = {position for part in said for position in range(part["start"], part["end"])}
        assert sampled == {position for _, start, end in branch["spans"] for position in range(start, end)}
        assert all(version <= sample["version"] for version, _, _ in branch["spans"])
    assert any(len({version for version, _, _ in sample["branches"][0]["spans"]}) > 1 for sample in trained)


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_either_client_of_the_package_makes_one_branch_of_the_recorded_tokens(kind: str, tmp_path: Path) -> None:
    vf = pytest.importorskip("verifiers.v1", reason="the package is not on PYTHONPATH: make test-verifiers")
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    TOKENIZER.save_pretrained(tmp_path)
    config = {"taskset": {"id": "say-digits", "turns": TURNS}, "player": {"runtime": {"type": "subprocess"}}}
    env = load_environment(resolve_env_config(config))
    async with stage("1a", "", "23") as one, env.serving():
        with one.episodes.running(one.episode) as key:
            url = f"{one.address}/episodes/{key}/v1"
            train = vf.TrainClientConfig(base_url=url, renderer_model_name=str(tmp_path))
            client = train if kind == "train" else vf.EvalClientConfig(base_url=url)
            (slot,) = env.slots(next(iter(env.taskset)))
            episode = await env.run_slot(slot, vf.ModelContext(model="org/model", client=client))
        assert (episode.ok, [trace.reward for trace in episode.traces]) == (True, [0.75])
        (branch,) = one.episode.result()
        assert [turn.end - turn.start for turn in branch.turns] == [3, 1, 3]
        if kind == "train":  # what the package would train on is what was recorded
            (theirs,) = episode.traces[0].branches
            assert theirs.token_ids == [*branch.prompt_token_ids, *branch.completion_token_ids]
            assert sum(theirs.sampled_mask) == len(branch.behaviour_logprobs)


async def test_an_environment_of_the_package_itself_and_its_failures(tmp_path: Path) -> None:
    """Of two attempts, the package's `best-of-n` says which is better."""
    task = {"source": "verifiers", "name": "say-digits", "config": {"id": "best-of-n", "n": 2, "threshold": 0.5}}
    answers = iter([says("1a"), says("23"), *[refuses("max_turns_exceeded")] * 2, *[refuses("gone", 404)] * 2])
    data = {"name": "t", "model": {"source": "path", "name": "x"}, "task": {**task, "heldout_problems": 4}}
    with endpoint(lambda _: next(answers)) as policy, verifier(tmp_path, data) as one:
        address = one.wait_until_serving().address.grpc
        requests = [
            episode(policy, {"split": split, "index": index}, number, task="say-digits")
            for number, (split, index) in enumerate([("train", 0), ("heldout", 3), ("train", 1)])
        ]
        good, refused, gone = [(await run(address, request))[0] for request in requests]
    assert (status_name(good.status), good.reward, dict(good.components)) == ("ok", 0.375, {"answer": 0.375})
    assert dict(good.metrics) == {"digits": 0.375, "asked": 1.0, "best": 0.5, "pass_at_n": 1.0}
    assert (good.answer, len(policy.requests)) == ("23", 6)
    prompts = [request["messages"][0]["content"] for request in policy.requests]
    assert (prompts[::2], len(set(prompts))) == (prompts[1::2], 3)
    assert [status_name(result.status) for result in (refused, gone)] == ["crashed"] * 2
    assert "max_turns_exceeded" in refused.message
    assert "gone" in gone.message


def test_an_environment_that_cannot_be_loaded_is_named_before_a_run() -> None:
    def said(name: str) -> list[str]:
        return [str(problem) for problem in examine(make_recipe(task={"source": "verifiers", "name": name})).problems]

    assert [problem for problem in said("say-digits") if "task." in problem] == []
    assert any("task.name = 'no-such': taskset 'no-such' not found" in problem for problem in said("no-such"))
    assert any("task.name = 'json': " in problem and "Taskset" in problem for problem in said("json"))
