"""What of a LoRA update actors serve in bfloat16, with the real learner at the recommended settings and a real vLLM engine.

    python -m benchmarks.adapters [--steps 1 3 10] [--groups 5] [--output FILE]

The warm-started model of `repeated-addition` learns in bfloat16 with `trainer.lora.rank` 16 at learning rate 1e-5, each step
from the same answers, which the engine has sampled, with random rewards. After some steps the tokens of these answers are
scored by the engine, by the trainer, by the trainer with the adapters merged into bfloat16 weights, and by a float32 copy of
the adapted policy. The change of a token's log-probability since version 0 in float32 is the effect e; `effect_nats` is its
root mean square. A side that changes by d has <d, e> / |e|² of it, so that rounding that has nothing to do with the update
drops out. The errors are standard errors by bootstrap over sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import write_result
from benchmarks.saved_runs import initial_policy
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import PolicyVersion, PromptGroup, SamplingParams, Sequence, TokenIds
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe

if TYPE_CHECKING:
    from pipelinerl.transfer.group import WeightGroup
    from services.actor.vllm_engine import VllmEngine
    from services.trainer.learn.batch import TrainingGroup
    from services.trainer.learn.step import Learner

NAME = "adapters"
RESULT = Path(__file__).parent / "results" / f"{NAME}.json"
SETTINGS = [
    *("model.dtype=bfloat16", "trainer.lora.rank=16", "trainer.learning_rate=1e-5", "trainer.warmup_steps=0"),
    *("task.config.max_times=6", "sampling.max_tokens=64"),
]
"""With short answers: a CPU without bfloat16 instructions takes ten milliseconds for each of their tokens."""
HOST, TIMEOUT_S = "127.0.0.1", 60.0
RESAMPLES = 1000
SIDES = ("actor", "trainer", "merged", "exact")

Scores = list[NDArray[np.float64]]
"""Log-probabilities of the answers' tokens."""


class Updates:
    """Sends the learner's adapters into an engine: this process is the trainer, vLLM's the actor."""

    def __init__(self, engine: VllmEngine, learner: Learner, recipe: Recipe) -> None:
        from pipelinerl.transfer.group import GroupStore
        from services.trainer.loading import weight_sender

        self._weights, self._learner = engine.weights, learner
        self._store = GroupStore(HOST)
        self._sender = weight_sender(learner, recipe, "gloo", self._store)
        self._group: WeightGroup | None = None

    async def connect(self) -> None:
        from pipelinerl.transfer.group import WeightGroup
        from pipelinerl.transfer.manifest import GroupSpec

        spec = GroupSpec(self._store.own_address, "updates", 0, 2, "gloo", HOST)
        await self._weights.prepare(self._sender.manifest)
        joining = self._weights.join_group(replace(spec, rank=1), TIMEOUT_S)
        self._group, _ = await asyncio.gather(asyncio.to_thread(WeightGroup.connect, spec, TIMEOUT_S), joining)

    async def send(self, number: int) -> None:
        from services.trainer.world import ADAPTER

        assert self._group is not None, "connect comes first"
        version = PolicyVersion(1, number)
        snapshot = self._sender.snapshot(version, self._learner.gather(ADAPTER))
        sending = self._sender.broadcast(snapshot, self._group, TIMEOUT_S)
        await asyncio.gather(asyncio.wrap_future(sending), self._weights.receive(version, TIMEOUT_S))
        await self._weights.commit(version)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


async def sampled_group(engine: VllmEngine, problem: PromptGroup, recipe: Recipe) -> TrainingGroup:
    """Answers to one problem. Rewards are drawn at random, so that every group has a gradient."""
    from pipelinerl.rl.groups import group_advantages
    from services.actor.engine import GenerationRequest
    from services.trainer.learn.batch import TrainingGroup

    name, size = f"g{problem.problem_index}", recipe.sampling.group_size
    sampling = SamplingParams(max_tokens=recipe.sampling.max_tokens)
    requests = [
        GenerationRequest(f"{name}.{index}", problem.prompt_token_ids, sampling, seed=1000 * problem.problem_index + index + 1)
        for index in range(size)
    ]
    sequences, drawn = [], np.random.default_rng(problem.problem_index).normal(size=size)
    for index, made in enumerate(await asyncio.gather(*map(engine.generate, requests))):
        sequences.append(
            Sequence(
                run=NAME,
                sequence_id=f"{name}.{index}",
                group_id=name,
                sample_index=index,
                group_size=size,
                task=problem.task,
                prompt_token_ids=problem.prompt_token_ids,
                completion_token_ids=made.completion_token_ids,
                behaviour_logprobs=made.behaviour_logprobs,
                spans=made.spans,
                reward=float(drawn[index]),
            )
        )
    rewards = [sequence.reward for sequence in sequences]
    advantages = group_advantages(rewards, recipe.algorithm.advantage, recipe.algorithm.normalize_std)
    return TrainingGroup(tuple(sequences), advantages)


class Policies:
    """The learner's policy, a copy with the adapters merged in, and a float32 copy."""

    def __init__(self, learner: Learner) -> None:
        from services.trainer.learn.model import wrap_model

        policy = learner.policy
        self._trainer, self._merged = policy, copy.deepcopy(policy)
        self._exact = wrap_model(copy.deepcopy(policy.model).float(), policy.attention)

    def scores(self, tokens: Iterable[TokenIds]) -> dict[str, Scores]:
        """Of each side but the actor, at the learner's version."""
        import torch

        self._follow()
        with torch.no_grad():
            sides = zip(SIDES[1:], (self._trainer, self._merged, self._exact), strict=True)
            return {side: [policy.sequence_logprobs(one).astype(np.float64) for one in tokens] for side, policy in sides}

    def _follow(self) -> None:
        import torch

        from pipelinerl.transfer.chunks import add_low_rank
        from services.trainer.learn.lora import layer_adapters

        adapters = (layer_adapters(policy.model).values() for policy in (self._trainer, self._merged, self._exact))
        with torch.no_grad():
            for live, merged, exact in zip(*adapters, strict=True):
                merged.weight.copy_(add_low_rank(live.weight, live.a, live.b, live.scaling, live.transposed))
                exact.a.copy_(live.a)
                exact.b.copy_(live.b)  # that of `merged` stays 0


def shares(changes: Mapping[str, Scores]) -> dict[str, float]:
    """Share of the effect that each side has, and the actor's by the trainer's, with standard errors. Pure."""
    exact = changes["exact"]
    products = {side: np.array([d @ e for d, e in zip(changes[side], exact, strict=True)]) for side in SIDES}
    drawn = np.random.default_rng(0).integers(0, len(exact), (RESAMPLES, len(exact)))
    found: dict[str, float] = {}
    for name, above, below in (*((side, side, "exact") for side in SIDES[:3]), ("actor_by_trainer", "actor", "trainer")):
        ratios = products[above][drawn].sum(1) / products[below][drawn].sum(1)
        found[name] = round(float(products[above].sum() / products[below].sum()), 3)
        low, high = np.percentile(ratios, [15.87, 84.13])  # a ratio has wild outliers where what it is over is small
        found[f"{name}_error"] = round(float(high - low) / 2, 3)
    return found


async def measure_shares(recipe: Recipe, folder: str, steps: list[int], num_groups: int) -> list[dict[str, Any]]:
    from pipelinerl.service.settings import RankSettings
    from services.actor.vllm_engine import start_engine
    from services.trainer.data.feeder import training_problems
    from services.trainer.loading import load_learner

    rows: list[dict[str, Any]] = []
    async with start_engine(recipe, folder) as engine:
        problems = map(training_problems(recipe, engine.tokenizer), range(num_groups))
        await engine.llm.update_weight_version(str(PolicyVersion(1, 0)))
        groups = await asyncio.gather(*(sampled_group(engine, problem, recipe) for problem in problems))
        answers = [sequence for group in groups for sequence in group.sequences]
        tokens = [np.concatenate([one.prompt_token_ids, one.completion_token_ids]) for one in answers]
        learner = load_learner(recipe, folder, RankSettings())
        updates, policies = Updates(engine, learner, recipe), Policies(learner)
        await updates.connect()

        async def scored() -> dict[str, Scores]:
            scores = {"actor": [(await engine.score(one)).astype(np.float64) for one in tokens]}
            scores |= await asyncio.to_thread(policies.scores, tokens)
            sampled = [len(one.completion_token_ids) for one in answers]
            return {side: [one[-size:] for one, size in zip(of, sampled, strict=True)] for side, of in scores.items()}

        before = await scored()
        for number in range(1, max(steps) + 1):
            figures = await asyncio.to_thread(lambda at: learner.step(learner.prepare(groups, at)), number - 1)
            assert not figures["skipped"], figures["skipped"]
            if number not in steps:
                continue
            await updates.send(number)
            after = await scored()
            changes = {side: [a - b for a, b in zip(after[side], before[side], strict=True)] for side in SIDES}
            exact = np.concatenate(changes["exact"])
            row = {"step": number, "tokens": len(exact), "effect_nats": round(float(np.sqrt(np.mean(exact**2))), 5)}
            rows.append(row | shares(changes))
            print(json.dumps(rows[-1]), flush=True)
        updates.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 10], help="optimizer steps after which is measured")
    parser.add_argument("--groups", type=int, default=5, help="problems, of eight answers each")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cores = available_cores()
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(plan_threads(cores, num_actors=1).actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    folder = initial_policy(load_recipe("repeated-addition"))
    recipe = load_recipe("repeated-addition", SETTINGS)
    model = recipe.model.model_copy(update={"source": "path", "name": folder})
    recipe = recipe.model_copy(update={"model": model})
    rows = asyncio.run(measure_shares(recipe, folder, arguments.steps, arguments.groups))
    write_result(arguments.output, {"benchmark": NAME, "machine": {"cores": cores}, "rows": rows})


if __name__ == "__main__":
    main()
