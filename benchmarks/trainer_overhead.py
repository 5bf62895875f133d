"""What the learner costs over a bare transformers training loop: trained tokens per second of both, in one run.

Both sides step models of equal weights on the same micro-batches (same packing, same attention) with the same kind of loss,
in turn; on several ranks (`trainer_ranks.py`) both are sharded by FSDP2. The bare loop's batches are built before the clock
starts, it computes logits only where they are needed, and it measures nothing; the learner builds its batches and computes
all its metrics within its time. A second bare loop uses transformers' own block-diagonal mask instead of this project's
attention, for scale. `ratio` is the median over pairs of neighbouring steps (wall time), `ratio_best` compares the fastest
step of each, `ratio_cpu_time` CPU seconds: on a machine that does other work, trust the last two. `by_one_rank` compares
the fastest step of several ranks with that of one rank with as many threads. `packing_fill` is the step's tokens over its
micro-batches' token budgets, low where a batch is smaller than a budget; `stream_fill` is what packing reaches on a long
stream of such lengths.

`by_shared_prompts`: the learner's throughput when the sequences of a group have one prompt, as they have in a run, relative to
the bare loop, which computes as much as before. `by_zero_advantages`: the same, with an advantage of 0 in every fourth group.

Not measured here: streams, the verifier, sending weights, GPUs (`trainer_gpu.py`).

    python -m benchmarks.trainer_overhead [--pairs 7] [--threads 0] [--only CASE] [--output FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare_loop import BareLoop
from benchmarks.loops_in_turn import compared, in_turn, timed
from benchmarks.result_files import kept_cases, write_result
from benchmarks.trainer_cases import CASES, Case
from benchmarks.trainer_ranks import run_ranks
from benchmarks.training_data import VERSION, of_one_prompt, uniform_lengths
from pipelinerl.recipe.fields import AlgorithmConfig
from pipelinerl.rl.packing import pack
from services.trainer.learn.attention import VARLEN
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import SAMPLED_WEIGHTS
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner

RESULT = Path(__file__).parent / "results" / "trainer_overhead.json"
FIGURES = {
    "sequences": "sequences_trained",
    "completion_tokens": "tokens_trained",
    "tokens": "tokens_computed",
    "microbatches": "microbatches",
    "packing_fill": "packing_fill",
}
"""Names in a result of the step's metrics that it keeps."""


def run_case(case: Case, pairs: int) -> dict[str, Any]:
    """Steps both loops in turn on the ranks of `case`."""
    load = os.getloadavg()[0]
    found = run_ranks(case, pairs) if case.ranks > 1 else run_alone(case, pairs)
    metrics = found.pop("metrics")
    return {
        "goal": case.goal,
        "ranks": case.ranks,
        "threads_per_rank": 1 if case.ranks > 1 else torch.get_num_threads(),
        "load_before": round(load, 2),
        **found,
        **{name: metrics[key] for name, key in FIGURES.items()},
        "stream_fill": stream_fill(case),
    }


def run_alone(case: Case, pairs: int) -> dict[str, Any]:
    """One rank."""
    torch.manual_seed(0)
    model = case.build_model()
    groups = case.groups(model.config.vocab_size)
    trainer = case.trainer()
    learner = Learner(wrap_model(copy.deepcopy(model)), AlgorithmConfig(), trainer)
    batches = [batch.on("cpu") for batch in learner.prepare(groups, VERSION).shares[0]]
    metrics = learner.step(learner.prepare(groups, VERSION))
    del metrics[SAMPLED_WEIGHTS]
    masked = BareLoop(copy.deepcopy(model), "sdpa", batches, trainer) if case.with_mask else None
    bare = BareLoop(model, VARLEN, batches, trainer)
    bare.step()

    def against_bare(ours: list[TrainingGroup]) -> dict[str, float]:
        timings = in_turn(lambda: learner.step(learner.prepare(ours, VERSION)), bare.step, pairs)
        return compared(timings, metrics["tokens_trained"])

    alike = of_one_prompt(groups)
    telling = [replace(group, advantages=group.advantages * (index % 4 > 0)) for index, group in enumerate(alike)]
    result = {
        **against_bare(groups),
        "by_shared_prompts": against_bare(alike)["ratio"],
        "by_zero_advantages": against_bare(telling)["ratio"],
        "metrics": metrics,
    }
    return {**result, "bare_with_hf_mask_cpu_s_per_step": timed(masked.step).cpu_s} if masked else result


def stream_fill(case: Case, num_sequences: int = 4096) -> float:
    """Share of full bins of the case's token budget that a long stream of its lengths fills."""
    lengths, budget = uniform_lengths(*case.lengths, num_sequences), case.tokens_per_microbatch
    return sum(lengths) / (len(pack(lengths, budget)) * budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7, help="Steps of each loop that are timed.")
    parser.add_argument("--threads", type=int, default=0, help="Torch threads of one rank; 0 = torch's default.")
    parser.add_argument("--only", choices=list(CASES), help="One case; the results of the others are kept.")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    names = [arguments.only] if arguments.only else list(CASES)
    cases = kept_cases(arguments.output, CASES)
    for name in names:
        cases[name] = run_case(CASES[name], arguments.pairs)
        print(name, json.dumps(cases[name], indent=2), flush=True)
        write(arguments.output, cases)
        gc.collect()


def write(path: Path, cases: dict[str, Any]) -> None:
    result = {
        "benchmark": "trainer_overhead",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "cases": {name: cases[name] for name in CASES if name in cases},
    }
    write_result(path, result)


if __name__ == "__main__":
    main()
