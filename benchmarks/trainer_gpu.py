"""Tokens per second, MFU and peak memory of the learner on one GPU, beside a bare loop on the same micro-batches.

The learner as the trainer runs it: 16-bit weights with float32 masters, the next step prepared while this one computes, all
its figures. The bare loop (`bare_loop.py`): transformers with the same attention, and fused AdamW on the 16-bit weights
themselves. One after the other, so that each has the device's memory to itself. `mfu` counts model FLOPs, not those of
activations that are computed again (`services/trainer/learn/meter.py`); `phases_s` in the result file says where the
learner's time goes on the device. Compiled cases compile the layers of both sides and what the learner does to logits
(`trainer.compile`).

Not measured here: several GPUs, streams, sending weights. `--tiny` shows on any machine that it works.

    python -m benchmarks.trainer_gpu [--short | --tiny] [--only TEXT] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_cases import PLANS, GpuCase, Plan
from benchmarks.gpu_loops import Measured, measure_bare, measure_ours
from benchmarks.result_files import write_result
from benchmarks.table import COLUMNS, table
from benchmarks.training_data import VERSION
from pipelinerl.recipe.fields import AlgorithmConfig
from pipelinerl.rl.memory import peak_flops
from services.trainer.learn.attention import VARLEN
from services.trainer.learn.policy import Policy
from services.trainer.learn.step import Learner, PreparedStep

RESULT = Path(__file__).parent / "results" / "trainer_gpu.json"
NO_GPU = "no CUDA device here: run this where there is one (make gpu-check), or with --tiny to see that it works"


def run_case(case: GpuCase, device: torch.device, plan: Plan) -> dict[str, Any]:
    """One row of the result. Figures of a loop that does not fit into the device's memory are None."""
    prepared = prepared_step(case)
    ours = measure_ours(case, device, plan)
    bare = measure_bare(case, device, plan, prepared.shares[0])
    peak = device_peak(device)
    tokens = sum(len(batch.token_ids) for batch in prepared.shares[0])
    return {
        "model": case.model,
        "row_tokens": case.row_tokens,
        "recomputed": case.recomputed,
        "compiled": case.compiled,
        **figures(ours, tokens, prepared.flops, peak),
        **{f"bare_{name}": value for name, value in figures(bare, tokens, prepared.flops, peak).items()},
        "ratio": bare.seconds / ours.seconds if ours.seconds and bare.seconds else None,
        "goal_mfu": case.goal_mfu,
        "microbatches": len(prepared.shares[0]),
        "tokens": tokens,
        "tera_flops": prepared.flops / 1e12,
        "packing_fill": tokens / (len(prepared.shares[0]) * case.row_tokens),
        "phases_s": dict(ours.phases_s),
    }


def prepared_step(case: GpuCase) -> PreparedStep:
    """The step of both loops. Its FLOPs are those that the model's shape needs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config())
    learner = Learner(Policy(model, VARLEN), AlgorithmConfig(), case.trainer())
    return learner.prepare(case.groups(case.config().vocab_size), VERSION)


def figures(measured: Measured, tokens: int, flops: float, peak: float | None) -> dict[str, Any]:
    """Of a step of `tokens` and `flops` on a device of `peak` FLOP/s, where that is known."""
    seconds, peak_bytes = measured.seconds, measured.peak_bytes
    return {
        "step_s": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "mfu": flops / (seconds * peak) if seconds and peak else None,
        "peak_gib": peak_bytes / 2**30 if peak_bytes else None,
    }


def device_peak(device: torch.device) -> float | None:
    """FLOP/s in bfloat16; None where it is not known."""
    return peak_flops(torch.cuda.get_device_name(device), "bfloat16") if device.type == "cuda" else None


def cases_of(plan: Plan, only: str) -> list[GpuCase]:
    """Those whose name has `only` in it."""
    return [case for case in plan.cases if only.lower() in case.name.lower()]


def conditions(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"benchmark": "trainer_gpu", "device": name, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", action="store_true", help="Few steps: a few minutes on an H100.")
    size.add_argument("--tiny", action="store_true", help="Models of no size, on a CPU too: shows that it works.")
    parser.add_argument("--only", default="", help="Cases with this text in their name.")
    parser.add_argument("--output", type=Path, help=f"Default: {RESULT.name}; with --tiny or --only, none.")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit(NO_GPU)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = PLANS["tiny" if arguments.tiny else "short" if arguments.short else "full"]
    rows = []
    for case in cases_of(plan, arguments.only):
        print(case.name, flush=True)
        rows.append(run_case(case, device, plan))
    result = {**conditions(device), "rows": rows}
    print(table(rows, COLUMNS["trainer_gpu"]), f"\n{result['device']}", flush=True)
    output = arguments.output or (None if arguments.tiny or arguments.only else RESULT)
    if output is not None:
        write_result(output, result)


if __name__ == "__main__":
    main()
