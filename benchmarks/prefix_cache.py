"""What samples save that share the cached keys and values of their prompt, and episodes those of their earlier turns: decoding
with the prefix cache and without, in turn.

    python -m benchmarks.prefix_cache [--pairs 5] [--only tiny|smollm2] [--output FILE]

Groups of eight samples of one random prompt, as many at a time as the recipe keeps in progress, on one engine: a round in which
requests may not read the cache, and one in which those of a group share a salt, as an actor's do. Both have the same prompts
and lengths, which are new for each pair. Of several `turns` each goes on after all that was said before and 32 tokens more.
`prompt_cached`: share of all tokens before a turn that was not computed again. `ratio`: sampled tokens per second with the
cache over those without it, median over pairs; `ratio_cpu_time`: the same of processor time per token, engine and caller. The
models are those of `actor_overhead` with random weights. Not measured here: what hashing costs a request, since both sides pay
for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.actor_cases import CASES
from benchmarks.observed_actor import cpu_s
from benchmarks.result_files import kept_rows, write_result
from pipelinerl.local.services import available_cores, plan_threads
from services.actor.vllm_engine import VllmEngine, start_engine

NAME = "prefix_cache"
RESULT = Path(__file__).parent / "results" / f"{NAME}.json"
MAX_CONTEXT = 640
GROUP_SIZE = 8
OBSERVED_TOKENS = 32
SHAPES = {
    "tiny": ((10, 96, 40, 1), (64, 48, 40, 1), (256, 16, 40, 1), (512, 8, 40, 1), (64, 16, 40, 4)),
    "smollm2": ((64, 4, 16, 1), (256, 2, 8, 1), (64, 2, 16, 4)),
}
"""Tokens of a prompt, groups, tokens of the longest turn, and turns. The shortest turn has a quarter of those tokens."""


async def round_of(engine: VllmEngine, shape: tuple[int, int, int, int], in_progress: int, seed: int, cached: bool) -> Any:
    """(sampled tokens per second, processor seconds per sampled token, share of the tokens before them from the cache)."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    prompt_tokens, groups, longest, turns = shape
    random, slots = np.random.default_rng(seed), asyncio.Semaphore(in_progress)
    lengths = random.integers(max(2, longest // 4), longest + 1, groups)
    prompts = random.integers(0, engine.vocab_size, (groups, prompt_tokens)).tolist()

    async def sample(group: int, index: int) -> tuple[int, int, int]:
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=int(lengths[group]),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not cached,
        )
        context, made, seen, from_cache = list(prompts[group]), 0, 0, 0
        observed = np.random.default_rng([seed, group, index]).integers(0, engine.vocab_size, (turns, OBSERVED_TOKENS)).tolist()
        async with slots:
            for turn in range(turns):
                prompt, name = tokens_input(context, cache_salt=f"{seed}-{cached}"), f"{seed}-{cached}-{group}-{index}-{turn}"
                async for output in engine.llm.generate(prompt, sampling, name):
                    final = output
                sampled = list(final.outputs[0].token_ids)
                made, seen, from_cache = made + len(sampled), seen + len(context), from_cache + (final.num_cached_tokens or 0)
                context = [*context, *sampled, *observed[turn]]
        return made, seen, from_cache

    def used_s() -> float:
        return time.process_time() + sum(cpu_s(child.pid) for child in multiprocessing.active_children() if child.pid)

    began_s, began_cpu_s = time.perf_counter(), used_s()
    done = await asyncio.gather(*(sample(group, index) for group in range(groups) for index in range(GROUP_SIZE)))
    elapsed_s, cpu = time.perf_counter() - began_s, used_s() - began_cpu_s
    tokens, seen, from_cache = (sum(numbers) for numbers in zip(*done, strict=True))
    return tokens / elapsed_s, cpu / tokens, from_cache / seen


async def run_case(name: str, pairs: int) -> list[dict[str, Any]]:
    case = CASES[name](True)
    model = case.recipe.model.model_copy(update={"max_context": MAX_CONTEXT})
    case = type(case)(name, case.goal, case.recipe.model_copy(update={"model": model}), 0, case.build_random)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        case = case.with_model(Path(folder))
        async with start_engine(case.recipe, folder) as engine:
            for shape in SHAPES[name]:
                rounds: dict[bool, list[Any]] = {False: [], True: []}
                for number in range(-1, pairs):
                    for cached in (False, True) if number % 2 else (True, False):
                        in_progress = case.recipe.actor.sequences_in_progress
                        done = await round_of(engine, shape, in_progress, number + 1, cached)
                        if number >= 0:
                            rounds[cached].append(done)
                rows.append({"case": name, "prompt_tokens": shape[0], "turns": shape[3]} | row_of(rounds))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def row_of(rounds: dict[bool, list[Any]]) -> dict[str, Any]:
    """Pure."""
    ratios = [on[0] / off[0] for on, off in zip(rounds[True], rounds[False], strict=True)]
    cpu = {cached: statistics.median(done[1] for done in rounds[cached]) for cached in rounds}
    return {
        "prompt_cached": round(statistics.median(done[2] for done in rounds[True]), 3),
        "tokens_per_s": round(statistics.median(done[0] for done in rounds[True]), 1),
        "uncached_tokens_per_s": round(statistics.median(done[0] for done in rounds[False]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_cpu_time": round(cpu[False] / cpu[True], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each side that are counted")
    parser.add_argument("--only", choices=sorted(SHAPES), help="one model instead of both; the other's rows are kept")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cores = available_cores()
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(plan_threads(cores, num_actors=1).actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    names = [arguments.only] if arguments.only else list(SHAPES)
    rows = [row for name in names for row in asyncio.run(run_case(name, arguments.pairs))]
    machine = {"cores": cores, "load_average_after": round(os.getloadavg()[0], 2)}
    rows = [*kept_rows(arguments.output, "case", names), *rows]
    write_result(arguments.output, {"benchmark": NAME, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
