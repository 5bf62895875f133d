"""Runs on this machine, and what the simulator makes of their lengths and speeds: throughput, token lag, idle time.

    python -m benchmarks.simulated_runs [--recipe arithmetic] [--cases pipeline conventional-1 conventional-4]

An ordinary run is measured: how long a decode step of vLLM takes by the number of sequences in progress (`timed_actor.py`), an
optimizer step by its tokens, a weight update; and the lengths of its completions. These are the simulator's input. What it
makes of them, with queues, groups, the feeder's rules and chance, is compared with what the run did, in the second half of
its steps. There are no evaluations.

Speeds of a run are as they were in it, with actor and trainer on the same cores: only what follows from them is tested.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounded_run import run_steps
from benchmarks.pipeline_vs_conventional import PIPELINE, Side
from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_runs import from_policy, initial_policy
from pipelinerl.commands.plan import trained_lengths
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.groups import length_bucket
from pipelinerl.rl.simulator import Timing, simulate
from pipelinerl.rl.throughput import DecodeCurve
from pipelinerl.run_dir import read_json
from pipelinerl.run_summary import lag_summary, read_jsonl

RESULTS = Path(__file__).parent / "results"
NAME = "simulated_runs"
STEPS, WITHIN_S = 64, 240.0
CASES = ("pipeline", "conventional-1", "conventional-4")
SIMULATED_STEPS = 400
RARE = 0.02

Record = Mapping[str, Any]


def decode_curve(steps: Mapping[str, Sequence[float]]) -> DecodeCurve:
    """Of `timed_actor`'s file, {sequences in progress: (steps, seconds)}: mean seconds of a step, by power-of-two bucket;
    without buckets of fewer than `RARE` of the steps, such as those with a held-out sequence beside a full batch."""
    buckets: dict[int, list[float]] = {}
    for in_progress, (count, seconds) in steps.items():
        sums = buckets.setdefault(length_bucket(int(in_progress)), [0.0, 0.0, 0.0])
        for place, value in enumerate((count, int(in_progress) * count, seconds)):
            sums[place] += value
    enough = RARE * sum(count for count, _ in steps.values())
    return DecodeCurve(
        tuple((total / count, total / seconds) for _, (count, total, seconds) in sorted(buckets.items()) if count >= enough)
    )


def learned_timing(records: Sequence[Record], curve: DecodeCurve, in_progress: int) -> Timing:
    """Seconds. What a step takes beside its computation counts as a part of it; stalls are in the decode steps."""

    def mean(phase: str) -> float:
        return statistics.fmean(record["step_s"].get(phase, 0.0) for record in records)

    tokens = statistics.fmean(record["tokens_trained"] for record in records)
    phases = {name: mean(name) for name in ("total", "wait", "compute", "snapshot", "send")}
    beside = phases["total"] - sum(phases[name] for name in ("wait", "compute", "snapshot", "send"))
    updates = [record["weight_update"]["round_trip_s"] for record in records if record["weight_update"]]
    until_a_step_ends = float(curve.step_time(in_progress)) / 2
    return Timing(
        curve,
        training=phases["compute"] / tokens,
        step=max(0.0, beside),
        snapshot=phases["snapshot"],
        transfer=max(0.0, statistics.median(updates) - until_a_step_ends),
    )


def compared(run_dir: Path, decode_steps: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the second half of a run did, and what the simulator makes of it."""
    recipe = load_recipe(str(run_dir / "recipe.yaml"))
    records = read_jsonl(run_dir / "metrics.jsonl")[:-1]  # the last one comes after an evaluation
    half = records[len(records) // 2 :]
    lengths, _ = trained_lengths(run_dir, recipe.sampling.max_tokens)
    curve = decode_curve(decode_steps)
    timing = learned_timing(half, curve, recipe.actor.sequences_in_progress)
    endless = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": 10_000_000})})
    simulated = simulate(
        endless, timing, lengths,
        num_actors=recipe.actor.count, num_ranks=1, warmup_steps=40, steps=SIMULATED_STEPS,
    )  # fmt: skip
    span_s = half[-1]["time_s"] - records[len(records) // 2 - 1]["time_s"]
    lags: Counter[int] = Counter()
    for record in half:
        lags.update({int(lag): number for lag, number in record["lag_histogram"].items()})
    tokens_per_s = sum(record["tokens_trained"] for record in half) / span_s
    ended = [sum(counts) for record in half for counts in zip(*record["ended_by_length"].values(), strict=True)]
    return {
        "tokens_per_s": tokens_per_s,
        "simulated_tokens_per_s": simulated.rate,
        "measured_by_simulated": tokens_per_s / simulated.rate,
        "lag_mean": lag_summary(lags)["mean"],
        "simulated_lag_mean": lag_summary(simulated.lag_histogram)["mean"],
        "lag_max": lag_summary(lags)["max"],
        "simulated_lag_max": lag_summary(simulated.lag_histogram)["max"],
        "trainer_idle": 1 - len(half) * (timing.step + statistics.fmean(r["step_s"]["compute"] for r in half)) / span_s,
        "simulated_trainer_idle": simulated.trainer_idle,
        "dropped_stale": sum(ended[1::2]) / max(1, sum(ended)),
        "simulated_dropped_stale": simulated.stale_share,
        "decode_step_ms": 1e3 * float(curve.step_time(recipe.actor.sequences_in_progress)),
        "decode_step_ms_by_number": {round(number, 1): 1e3 * number / rate for number, rate in curve.points},
        "steps": len(half),
    }


def recipe_of(name: str, case: str, steps: int) -> Recipe:
    """Without evaluations and probes, from an initial policy that is there."""
    side = Side.parse(case)
    # In pipeline mode the run is interrupted: at its end nothing new would be issued.
    last = 10 * steps if side.mode == PIPELINE else steps
    recipe = side.changed(load_recipe(name, [f"trainer.steps={last}", "weights.probe_every=0"]))
    return from_policy(recipe, initial_policy(recipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic", help="recipe file or name")
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), help="pipeline, or conventional-G; other recipes keep their results"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    file = arguments.output / f"{NAME}.json"
    rows = kept_rows(file, "recipe", [arguments.recipe])
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            recipe, decoding = recipe_of(arguments.recipe, case, arguments.steps), Path(folder) / f"{case}.json"
            load_before = round(os.getloadavg()[0], 2)
            commands = {"actor": (sys.executable, "-m", "benchmarks.timed_actor", str(decoding))}
            run_dir, _ = run_steps(recipe, Path(folder) / case, commands, arguments.steps, WITHIN_S)
            figures = compared(run_dir.path, read_json(decoding))
            rows.append({"recipe": arguments.recipe, "case": case, **figures, "load_before": load_before})
            print(rows[-1], file=sys.stderr, flush=True)
    write_result(file, {"benchmark": NAME, "machine": {"cores": available_cores()}, "rows": rows})


if __name__ == "__main__":
    main()
