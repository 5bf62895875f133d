"""Time to a held-out accuracy: our pipeline against TRL's GRPOTrainer on the same machine, from the same initial weights.

    python -m benchmarks.versus_trl [--recipe arithmetic] [--sides pipeline trl trl-g4 ...] [--seeds 0 1 2] [--steps N]
                                    [--accuracy 0.9] [--problems 1024] [--every 2] [--set a.b=c ...] [--quick]

Both sides get the same problems in the same order, reward functions, batch, group size, optimizer, schedule, temperature, and
all cores. Ours is an ordinary `pipelinerl run`; TRL runs in an environment of its own (`trl_environment.py`), with the loss
that `trl_run.py` describes. Neither evaluates: both save their policy every `--every` steps, and afterwards all of them are
judged alike on the same problems (`saved_policies.py`). Time counts from the first version served, and from TRL's first step;
TRL's clock stands still while it saves, ours goes on. Times to the accuracy are interpolated between saved policies, with
bootstrap intervals over problems and seeds (`crossing.py`).

Sides: `pipeline`; `trl`, with settings of TRL appended: `g4`: one generation for four optimizer steps; `m2`: two micro-batches
a step; `eager`: attention in plain operations instead of PyTorch's fused one; `continuous`: transformers' continuous batching
instead of generate. Results of other recipes stay in the result file.
`--quick` tries it out in a few minutes and writes no result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_plot import plot
from benchmarks.crossing import CrossingEstimate, JudgedRun, crossing_estimates
from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_runs import (
    SavedRun,
    initial_policy,
    judged,
    run_figures,
    run_process,
    run_recipe,
    saved_steps,
    saving,
)
from benchmarks.table import COLUMNS, table
from benchmarks.trl_environment import pinned, trl_environment, trl_python
from pipelinerl.errors import FieldError
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_summary import read_jsonl

NAME, PIPELINE = "versus_trl", "pipeline"
RESULTS = Path(__file__).parent / "results"
SIDES = (PIPELINE, "trl", "trl-eager", "trl-eager-g4", "trl-continuous")
EQUIVALENT = {
    "algorithm.loss": "reinforce",
    "algorithm.mask": "none",
    "algorithm.kl_coefficient": 0.0,
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.filter_equal_rewards": False,
    "trainer.lora": None,
    "trainer.optimizer": "adamw",
}
"""Fields of a recipe, and the values for which `trl_run.py` has TRL do the same."""


@dataclass(frozen=True)
class TrlSettings:
    """What a side's name says of TRL."""

    steps_per_generation: int = 1
    micro_batches: int = 1
    continuous: bool = False
    eager: bool = False

    @classmethod
    def parse(cls, side: str) -> TrlSettings | None:
        """None for `pipeline`. Raises `FieldError`."""
        if side == PIPELINE:
            return None
        kind, *parts = side.split("-")
        numbers = {part[0]: int(part[1:]) for part in parts if part[:1] in ("g", "m") and part[1:].isdigit()}
        switches = {part for part in parts if part in ("continuous", "eager")}
        if kind != "trl" or len(numbers) + len(switches) != len(parts) or 0 in numbers.values():
            fix = "use pipeline, trl, or trl with settings, such as trl-g4 or trl-continuous-m2"
            raise FieldError("--sides", side, fix)
        return cls(numbers.get("g", 1), numbers.get("m", 1), "continuous" in switches, "eager" in switches)


def check_equivalent(recipe: Recipe, settings: Sequence[TrlSettings]) -> None:
    """Raises `FieldError` for a recipe, or a number of steps, for which TRL would not do the same."""
    for path, value in EQUIVALENT.items():
        section, _, name = path.partition(".")
        if (found := getattr(getattr(recipe, section), name)) != value:
            raise FieldError(path, found, f"TRL is set up for {value!r} only: give --set {path}={json.dumps(value)}")
    if recipe.algorithm.advantage == "value":
        raise FieldError("algorithm.advantage", "value", "TRL has no learned baseline: use leave_one_out or group_mean")
    for one in settings:
        if recipe.trainer.steps % one.steps_per_generation:
            fix = f"use a multiple of {one.steps_per_generation}, the steps of one generation"
            raise FieldError("--steps", recipe.trainer.steps, fix)
        if recipe.trainer.batch_size % one.micro_batches:
            fix = f"{one.micro_batches} micro-batches do not divide it: choose other --sides"
            raise FieldError("trainer.batch_size", recipe.trainer.batch_size, fix)


def run_trl(recipe: Recipe, initial: str, settings: TrlSettings, every: int, folder: Path) -> SavedRun:
    """Raises `ServiceError` when the run fails, `UserError` when TRL cannot be installed."""
    python, job, out = trl_python(), folder / "job.json", folder / "policies"
    out.mkdir()
    job.write_text(json.dumps(trl_job(recipe, initial, settings, every, out)), encoding="utf-8")
    run_process([str(python), "-m", "benchmarks.trl_run", str(job)], folder / "run.log", trl_environment())
    records = read_jsonl(out / "steps.jsonl")
    times_s = {record["step"]: record["time_s"] for record in records}
    lag = (settings.steps_per_generation - 1) / 2  # 0 to G - 1 optimizer steps, equally often
    return SavedRun(saved_steps(out), times_s, run_figures(records, times_s, lag, dropped_stale=0.0))


def loss_scale(recipe: Recipe) -> float:
    """The recipe's loss divided by TRL's. Its `dr_grpo` divides by max_tokens besides the number of sequences, and its
    advantages have the whole group's mean as baseline, which makes them (n - 1) / n of leave-one-out's."""
    n = recipe.sampling.group_size
    length = recipe.sampling.max_tokens if recipe.algorithm.normalization == "batch" else 1
    return length * (n / (n - 1) if recipe.algorithm.advantage == "leave_one_out" else 1.0)


def trl_job(recipe: Recipe, initial: str, settings: TrlSettings, every: int, out: Path) -> dict[str, Any]:
    """What `trl_run.py` is told: the recipe, the problems that our feeder would issue, and our schedule's learning rates."""
    from benchmarks.saved_policies import load_tokenizer
    from services.trainer.data.feeder import training_problems
    from services.trainer.learn.optimizer import learning_rate

    problems = training_problems(recipe, load_tokenizer(initial))
    number = recipe.trainer.steps * recipe.trainer.batch_size // recipe.sampling.group_size
    return {
        "recipe": recipe.model_dump_json(),
        "model": initial,
        "folder": str(out),
        "every": every,
        **vars(settings),
        "loss_scale": loss_scale(recipe),
        "learning_rates": [learning_rate(step, recipe.trainer) for step in range(recipe.trainer.steps)],
        "problems": [
            {
                "prompt": problem.prompt_text,
                "token_ids": problem.prompt_token_ids.tolist(),
                "reference": problem.reference_json,
            }
            for problem in map(problems, range(number))
        ],
    }


def side_row(
    runs: Sequence[JudgedRun], figures: Sequence[Mapping[str, Any]], accuracy: float, estimate: CrossingEstimate
) -> dict[str, Any]:
    """Medians over the runs of one side, one for each seed. Pure."""
    reached = sum(bool((run.accuracies >= accuracy).any()) for run in runs)
    return {
        "accuracy": accuracy,
        "reached": f"{reached}/{len(runs)}",
        "time_to_accuracy_s": estimate.time_s.shown,
        "time_interval_s": estimate.time_s.interval,
        "speed_of_pipeline": estimate.ratio.shown if estimate.ratio else None,
        "speed_interval": estimate.ratio.interval if estimate.ratio else None,
        **{key: _median([run[key] for run in figures]) for key in figures[0]},
        "accuracy_first": _median([float(run.accuracies[0]) for run in runs]),
        "accuracy_last": _median([float(run.accuracies[-1]) for run in runs]),
    }


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.median(present), 4) if present else None


def curve(run: JudgedRun, batch_size: int) -> list[dict[str, Any]]:
    """Each saved policy, as the plot and the result file have it."""
    points = zip(run.versions.tolist(), run.times_s.tolist(), run.accuracies.tolist(), strict=True)
    return [
        {
            "version": version,
            "time_s": round(time_s, 3),
            "samples": version * batch_size,
            "accuracy": round(accuracy, 4),
        }
        for version, time_s, accuracy in points
    ]


def compare(recipe: Recipe, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every side with every seed, one run at a time, and judges what it saved. A row for each side, with its `runs`."""
    from benchmarks.saved_policies import PolicyJudge, heldout_problems, load_tokenizer, with_spares

    wider = recipe.task.model_copy(update={"heldout_problems": with_spares(arguments.problems)})
    initial = initial_policy(recipe.model_copy(update={"task": wider}))  # no demonstration of what it is judged on
    recipe, tokenizer = saving(recipe, initial, arguments.every), load_tokenizer(initial)
    judge = PolicyJudge(recipe, heldout_problems(recipe, arguments.problems, arguments.seeds, tokenizer), tokenizer)
    initial_right = judge.right(initial)
    runs: dict[str, list[JudgedRun]] = {side: [] for side in arguments.sides}
    figures: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
    for seed in arguments.seeds:
        of_seed = recipe.model_copy(update={"seed": seed})
        for side in arguments.sides:
            settings = TrlSettings.parse(side)
            with tempfile.TemporaryDirectory() as name:
                if settings is None:
                    saved = run_recipe(of_seed, Path(name), f"versus-trl-s{seed}")
                else:
                    saved = run_trl(of_seed, initial, settings, arguments.every, Path(name))
                run = judged(saved, initial_right, judge.right)
            runs[side].append(run)
            figures[side].append(saved.figures)
            print(
                f"{side}, seed {seed}: {saved.figures}, accuracy {run.accuracies.round(3)}", file=sys.stderr, flush=True
            )
    estimates = crossing_estimates(runs, arguments.accuracy, PIPELINE)
    return [
        {
            "recipe": recipe.name,
            "side": side,
            **side_row(runs[side], figures[side], arguments.accuracy, estimates[side]),
            "runs": [
                {"mode": side, "seed": seed, **of_run, "curve": curve(run, recipe.trainer.batch_size)}
                for seed, run, of_run in zip(arguments.seeds, runs[side], figures[side], strict=True)
            ],
        }
        for side in arguments.sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic", help="recipe file or name")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), help=f"default: {' '.join(SIDES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of a run; 0 = the recipe's")
    parser.add_argument("--accuracy", type=float, default=0.9, help="held-out accuracy to be reached")
    parser.add_argument("--problems", type=int, default=1024, help="held-out problems that policies are judged on")
    parser.add_argument("--every", type=int, default=2, help="optimizer steps between two saved policies")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="as for a run")
    parser.add_argument("--quick", action="store_true", help="12 steps, one seed; writes no result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.every, arguments.seeds = 12, 4, [0]
    steps = [f"trainer.steps={arguments.steps}"] if arguments.steps else []
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *steps, "mode=pipeline"])
    check_equivalent(recipe, [one for one in map(TrlSettings.parse, arguments.sides) if one is not None])
    path, load = arguments.output / f"{NAME}.json", round(os.getloadavg()[0], 2)
    rows = compare(recipe, arguments)
    print(table(rows, COLUMNS[NAME]))
    if arguments.quick:
        return
    conditions = {"steps": recipe.trainer.steps, "problems": arguments.problems, "load_before": load}
    rows = [{**row, **conditions} for row in rows]
    machine = {"cores": available_cores(), "system": platform.machine(), "TRL": pinned("trl"), "torch": pinned("torch")}
    kept = kept_rows(path, "recipe", [recipe.name])
    write_result(path, {"benchmark": NAME, "machine": machine, "rows": [*kept, *rows]})
    runs = [run for row in rows for run in row["runs"]]
    for kind in ("svg", "png"):
        plot(runs, arguments.accuracy, arguments.output / f"{NAME}_{recipe.name}.{kind}")


if __name__ == "__main__":
    main()
