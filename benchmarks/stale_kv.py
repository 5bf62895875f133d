"""What a stale KV cache costs: figure 7 of the paper, with the product's own in-flight weight updates in a real vLLM engine.

    python -m benchmarks.stale_kv [--recipe arithmetic] [--start 16] [--updates 8] [--between 0] [--sequences 512]
                                  [--set a.b=c ...]

A short run of the recipe saves every policy. The engine begins all sequences of a batch under policy `--start` and, in three
arms, `--updates` policies of the next optimizer steps arrive while they go on, every `--between` tokens (0: so that they cover
the length that 95 % of the sequences do not exceed):

    kept         unfinished sequences keep the KV cache of the policies that computed it (the default)
    recomputed   at each update they compute it anew (`weights.recompute_kv`)
    never        no update: all tokens are sampled from the first policy

All arms have the same prompts and random numbers, so that they differ from the first update on.

For each token, KL(sampling policy || newest policy) in nats, by its position in the completion. The sampling policy's
log-probabilities are the engine's own, of its 20 most probable tokens; the newest policy's are the trainer's forward of the
finished sequence. Everything else counts as one more token: exact for a vocabulary of at most 20, a lower bound for others.
After the last update `recomputed` samples from the newest policy itself: it shows rounding there, and `kept` the cache alone.
The run is kept and used again (`saved_runs.py`). Nothing is timed; other work on the machine does no harm.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_runs import WORK, SavedRun, from_policy, initial_policy, run_recipe, saved_run, work_folder
from benchmarks.side_comparison import RESULTS
from benchmarks.table import COLUMNS, table
from pipelinerl.errors import FieldError
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import Completion, PolicyVersion, SamplingParams, TokenIds
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe

if TYPE_CHECKING:
    from pipelinerl.transfer.group import WeightGroup
    from services.actor.vllm_engine import VllmEngine
    from services.actor.weight_sync.client import WeightUpdateClient
    from services.trainer.learn.policy import Policy

NAME = "stale_kv"
ARMS = ("never", "recomputed", "kept")
COLOURS = {"never": "#08519c", "recomputed": "#6baed6", "kept": "#d1495b"}
HOST, TIMEOUT_S, LOOK_S = "127.0.0.1", 60.0, 0.0005
CANDIDATES = 20
"""What vLLM tells of at most, unless it is started otherwise."""
ROUNDING = 1e-6
"""What is left of 1 after the sum of float32 probabilities may be this off: less is nothing."""
COVERED = 95
"""Percent of sequences that are not longer than what the updates cover."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """One finished sequence."""

    prompt_token_ids: TokenIds
    generation: Completion
    candidates: NDArray[np.int64]
    """[completion tokens, K]: the most probable tokens at each position."""
    logprobs: NDArray[np.float64]
    """[completion tokens, K]: their log-probabilities under the policy, and the KV cache, that sampled there."""


async def sample(engine: VllmEngine, name: str, prompt: TokenIds, sampling: SamplingParams, seed: int) -> Sampled:
    """As `VllmEngine.generate`, with more log-probabilities."""
    from services.actor.vllm_engine import completion_of, vllm_sampling

    parameters = vllm_sampling(sampling, seed).clone()
    parameters.logprobs = count = min(CANDIDATES, engine.vocab_size)
    final: Any = None
    request = {"prompt_token_ids": prompt.tolist(), "cache_salt": name}  # nothing is shared with other policies' samples
    async for output in engine.llm.generate(request, parameters, name):
        final = output
    completion = final.outputs[0]
    shape = len(completion.token_ids), count + 1  # the sampled token comes first, and again in its place
    candidates = np.array(completion.logprobs.token_ids, np.int64).reshape(shape)[:, 1:]
    logprobs = np.array(completion.logprobs.logprobs, np.float64).reshape(shape)[:, 1:]
    return Sampled(prompt, completion_of(completion), candidates, logprobs)


class PolicyArrivals:
    """Brings the saved policies of a run into an engine: this process sends as the trainer does, vLLM's receives."""

    def __init__(self, engine: VllmEngine, recipe: Recipe, run: SavedRun, first: int) -> None:
        from safetensors.torch import load_file

        from pipelinerl.transfer.chunks import describe
        from pipelinerl.transfer.group import GroupStore
        from pipelinerl.transfer.manifest import chunk_size
        from services.trainer.weight_sync.sender import WeightSender

        self._engine, self._run, self._first, self._load = engine, run, first, load_file
        weights = load_file(run.policy(first) / "model.safetensors")
        self._sender = WeightSender(describe(weights.items(), chunk_bytes=chunk_size(recipe.weights.chunk_mib, "gloo")))
        self._store = GroupStore(HOST)
        self._client: WeightUpdateClient | None = None
        self._group: WeightGroup | None = None
        self._groups = self._times = 0

    async def connect(self, *, recompute_kv: bool) -> None:
        """Leaves what was there before."""
        from pipelinerl.transfer.group import WeightGroup
        from pipelinerl.transfer.manifest import GroupSpec
        from services.actor.weight_sync.client import WeightUpdateClient

        await self.close()
        self._groups += 1
        spec = GroupSpec(self._store.own_address, f"epoch-{self._groups}", 0, 2, "gloo", HOST)
        self._client = WeightUpdateClient(self._engine.llm, recompute_kv=recompute_kv, bind_host=HOST)
        await self._client.prepare(self._sender.manifest)
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(WeightGroup.connect, spec, TIMEOUT_S), self._client.join_group(replace(spec, rank=1), TIMEOUT_S)
        )

    async def begin_again(self) -> None:
        """The first policy is served; nothing is in progress."""
        self._times += 1
        await self.stage(0)
        await self.commit(0)

    async def stage(self, number: int) -> None:
        """Sends the policy of `number` optimizer steps after the first one."""
        assert self._client is not None, "connect comes first"
        assert self._group is not None, "connect comes first"
        weights = self._load(self._run.policy(self._first + number) / "model.safetensors")
        version = PolicyVersion(self._times, number)
        sending = self._sender.broadcast(self._sender.snapshot(version, weights), self._group, TIMEOUT_S)
        await asyncio.gather(asyncio.wrap_future(sending), self._client.receive(version, TIMEOUT_S))

    async def commit(self, number: int) -> None:
        assert self._client is not None
        await self._client.commit(PolicyVersion(self._times, number))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._group is not None:
            self._group.close()


async def sample_batch(
    engine: VllmEngine,
    arrivals: PolicyArrivals,
    arm: str,
    prompts: Sequence[tuple[int, TokenIds]],
    sampling: SamplingParams,
    positions: Sequence[int],
) -> list[Sampled]:
    """Finished sequences of numbered prompts that begin together; the n-th policy arrives when the first of them has
    `positions[n - 1]` tokens."""
    await arrivals.begin_again()
    await engine.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    tasks = [
        asyncio.create_task(sample(engine, f"{arm}-{number}", prompt, sampling, seed=number + 1)) for number, prompt in prompts
    ]
    await until(lambda: len(engine.progress()) == len(prompts))  # all are in the engine's queue
    await engine.llm.resume_generation()
    generating = asyncio.gather(*tasks)
    for number, position in enumerate(positions, start=1):
        await arrivals.stage(number)
        await until(partial(is_over_or_at, generating, engine, position))
        if generating.done():
            break
        await arrivals.commit(number)
    return await generating


def is_over_or_at(generating: asyncio.Future[list[Sampled]], engine: VllmEngine, position: int) -> bool:
    return generating.done() or max(engine.progress().values(), default=0) >= position


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds. Nobody tells of what the engine generates before a sequence is finished."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def sample_arms(recipe: Recipe, initial: str, run: SavedRun, arguments: argparse.Namespace) -> dict[str, Any]:
    """`between`, and the sequences of each arm."""
    from benchmarks.saved_policies import load_tokenizer
    from services.actor.vllm_engine import start_engine
    from services.trainer.data.feeder import training_problems

    problems = training_problems(recipe.model_copy(update={"seed": recipe.seed + 1}), load_tokenizer(initial))
    prompts = [problems(number).prompt_token_ids for number in range(arguments.sequences)]
    sampling, found = problems(0).sampling, dict[str, Any]()
    at_once, between = recipe.actor.sequences_in_progress, arguments.between
    # On CPU, vLLM fails when it prefills a seeded request in parts; an update that recomputes would make it do so.
    whole = {"max_batched_tokens": at_once * recipe.model.max_context}
    actor = recipe.actor.model_copy(update={"engine": recipe.actor.engine.model_copy(update=whole)})
    recipe = recipe.model_copy(update={"actor": actor})
    async with start_engine(recipe, initial) as engine:
        arrivals = PolicyArrivals(engine, recipe, run, arguments.start)
        for arm in ARMS:
            await arrivals.connect(recompute_kv=arm == "recomputed")
            updates = 0 if arm == "never" else arguments.updates
            found[arm] = []
            positions = [between * number for number in range(1, updates + 1)]
            for first in range(0, len(prompts), at_once):
                batch = list(enumerate(prompts))[first : first + at_once]
                found[arm] += await sample_batch(engine, arrivals, arm, batch, sampling, positions)
            if not between:  # the first arm has no updates
                lengths = [len(sampled.generation.completion_token_ids) for sampled in found[arm]]
                between = max(1, round(float(np.percentile(lengths, COVERED)) / (arguments.updates + 1)))
        await arrivals.close()
    return {"between": between, **found}


def newest_logprobs(policy: Policy, sampled: Sampled, temperature: float) -> NDArray[np.float64]:
    """[completion tokens, K]: of the candidates, by the trainer's forward of the whole sequence."""
    import torch

    from services.trainer.learn.batch import token_row

    tokens = np.concatenate([sampled.prompt_token_ids, sampled.generation.completion_token_ids]).astype(np.int64)
    row = token_row(tokens, np.array([len(tokens)]), policy.row_multiple, policy.device)
    number, each = sampled.candidates.shape
    predictors = torch.arange(len(tokens) - number - 1, len(tokens) - 1).repeat_interleave(each)
    with torch.no_grad():
        scores = policy.scores(row, predictors, torch.from_numpy(sampled.candidates.reshape(-1)), temperature)
    return scores.logprobs.numpy().astype(np.float64).reshape(number, each)


def divergence(sampling: NDArray[np.float64], newest: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(sampling || newest), nats, at each position, from the log-probabilities [positions, K] of the same K tokens; all other
    tokens count as one. Pure."""
    others = [np.maximum(1 - np.exp(logprobs).sum(-1), ROUNDING) for logprobs in (sampling, newest)]
    of_others = others[0] * np.log(others[0] / others[1])
    found: NDArray[np.float64] = (np.exp(sampling) * (sampling - newest)).sum(-1) + of_others
    return found


def mean_by_position(divergences: Sequence[NDArray[np.float64]], between: int, buckets: int) -> list[tuple[float, float, int]]:
    """(mean, standard error, tokens) of each bucket of `between` positions; the last one has all positions after it. Pure.

    `divergences`: of each sequence, by token. Sequences are independent, tokens of one sequence are not: the error is that of a
    ratio of sums over sequences.
    """
    sums, counts = np.zeros((len(divergences), buckets)), np.zeros((len(divergences), buckets))
    for row, values in enumerate(divergences):
        bucket = np.minimum(np.arange(len(values)) // between, buckets - 1)
        sums[row] = np.bincount(bucket, weights=values, minlength=buckets)
        counts[row] = np.bincount(bucket, minlength=buckets)
    tokens = counts.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums.sum(0) / tokens
        errors = np.sqrt(((sums - means * counts) ** 2).sum(0)) / tokens
    return [(float(m), float(e), int(n)) for m, e, n in zip(means, errors, tokens, strict=True)]


def mean_lags(sampled: Sequence[Sampled], updates: int, between: int, buckets: int) -> list[float]:
    """Optimizer steps from the policy that sampled a token to the newest one, by position as in `mean_by_position`. Pure."""
    lags = []
    for one in sampled:
        versions = [np.full(span.end - span.start, span.version) for span in one.generation.spans]
        lags.append(updates - np.concatenate(versions).astype(np.float64))
    return [mean for mean, *_ in mean_by_position(lags, between, buckets)]


def rows_of(
    recipe: str, arms: Mapping[str, Sequence[Sampled]], divergences: Mapping[str, Any], between: int, updates: int
) -> list[dict[str, Any]]:
    """A row for each bucket of positions, and one for all tokens; divergences in thousandths of a nat. Pure."""
    rows = []
    for buckets, width in ((updates + 1, between), (1, 1)):
        lags = mean_lags(arms["kept"], updates, width, buckets)
        means = {arm: mean_by_position(divergences[arm], width, buckets) for arm in ARMS}
        for bucket in range(buckets):
            end = "" if bucket == buckets - 1 else (bucket + 1) * width - 1
            row: dict[str, Any] = {"recipe": recipe, "updates": updates}
            row |= {"positions": f"{bucket * width}-{end}" if buckets > 1 else "all"}
            row |= {"lag": round(lags[bucket], 2), "tokens": means["kept"][bucket][2]}
            for arm in ARMS:
                mean, error, _ = means[arm][bucket]
                row |= {arm: round(1000 * mean, 4), f"{arm}_error": round(1000 * error, 4)}
            rows.append(row)
    return rows


def plot(rows: Sequence[Mapping[str, Any]], between: int, path: Path) -> None:
    """KL by position on a logarithmic scale, a line for each arm, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["positions"] != "all"]
    middle = [(bucket + 0.5) * between for bucket in range(len(shown))]
    figure, axis = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for arm in ARMS:
        means, errors = [row[arm] for row in shown], [row[f"{arm}_error"] for row in shown]
        axis.errorbar(middle, means, errors, label=arm, color=COLOURS[arm], marker="o", markersize=3, capsize=2)
    for number in range(1, len(shown)):
        axis.axvline(number * between, color="0.85", linewidth=0.8, zorder=0)
    axis.set_yscale("log")
    axis.set_xlabel("position in the completion (lines: weight updates)")
    axis.set_ylabel("KL per token to the newest policy, 0.001 nats")
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic", help="recipe file or name")
    parser.add_argument("--start", type=int, default=16, help="optimizer steps of the first policy, at least 1")
    parser.add_argument("--updates", type=int, default=8, help="policies that arrive while sequences go on")
    parser.add_argument("--between", type=int, default=0, help="tokens between two updates; 0 = spread over the lengths")
    parser.add_argument("--sequences", type=int, default=512, help="of each arm")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="as for a run")
    parser.add_argument("--work", type=Path, default=WORK, help="folder in which the run is kept")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.start < 1:
        raise FieldError("--start", arguments.start, "the run saves policies from its first step on: give 1 or more")
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(plan_threads(available_cores(), 1, take_turns=True).actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    steps = arguments.start + arguments.updates
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, f"trainer.steps={steps}", "mode=pipeline"])
    initial = initial_policy(recipe)
    recipe = from_policy(recipe, initial)
    run = saved_run(work_folder(arguments.work, recipe, 1, 0) / "every-policy", partial(run_recipe, recipe, 1))
    found = asyncio.run(sample_arms(recipe, initial, run, arguments))
    gc.collect()  # of vLLM's engine, which complains of being left to the end of the interpreter
    between, arms = found["between"], {arm: found[arm] for arm in ARMS}

    from services.trainer.learn.model import load_policy

    policy, temperature = load_policy(str(run.policy(steps)), recipe.model), recipe.sampling.temperature
    divergences = {
        arm: [divergence(one.logprobs, newest_logprobs(policy, one, temperature)) for one in sampled]
        for arm, sampled in arms.items()
    }
    rows = rows_of(recipe.name, arms, divergences, between, arguments.updates)
    print(table(rows, COLUMNS[NAME]))
    machine = {"system": platform.machine(), "start": arguments.start}
    path = arguments.output / f"{NAME}.json"
    kept = kept_rows(path, "recipe", [recipe.name])
    write_result(path, {"benchmark": NAME, "machine": machine, "rows": [*kept, *rows]})
    plot(rows, between, arguments.output / f"{NAME}_{recipe.name}.svg")


if __name__ == "__main__":
    main()
