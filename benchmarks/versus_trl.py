"""Time to a held-out accuracy: our pipeline against TRL's GRPOTrainer on the same machine, from the same initial weights.

    python -m benchmarks.versus_trl [--recipe arithmetic] [--sides pipeline trl trl-g4 ...] [--seeds 0 1 2] [--steps N]
                                    [--accuracy 0.9] [--problems 1024] [--every 2] [--set a.b=c ...] [--minutes M] [--quick]

Both sides get the same problems in the same order, reward functions, batch, group size, optimizer, schedule, temperature, and
all cores. Ours is an ordinary `pipelinerl run`; TRL runs in an environment of its own (`trl_environment.py`), with the loss
that `trl_run.py` describes. Neither evaluates: both save their policy every `--every` steps, and afterwards they are judged
alike on the same problems (`saved_policies.py`). Time counts from the first version served, and from TRL's first step; both
clocks stand still while a policy is saved. Times to the accuracy are interpolated between saved policies, with bootstrap
intervals over problems and seeds (`crossing.py`). What is finished is kept, and the same command goes on from there
(`side_comparison.py`).

Sides: `pipeline`; `trl`, with settings of TRL appended: `g4`: one generation for four optimizer steps; `m2`: two micro-batches
a step; `eager`: attention in plain operations instead of PyTorch's fused one; `continuous`: transformers' continuous batching
instead of generate. Results of other recipes stay in the result file.
`--quick` tries it out in a few minutes and writes no result.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy_plot import plot
from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_runs import Run, run_figures, run_recipe
from benchmarks.side_comparison import PIPELINE, add_arguments, comparison_rows, measure, parsed
from benchmarks.table import COLUMNS, table
from benchmarks.trl_environment import ROOT, pinned, trl_environment, trl_python
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.local.processes import log_tail
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_summary import read_jsonl

NAME = "versus_trl"
SIDES = (PIPELINE, "trl", "trl-eager", "trl-eager-g4", "trl-continuous-m8")
EQUIVALENT = {
    "model.dtype": "float32",
    "algorithm.loss": "reinforce",
    "algorithm.mask": "none",
    "algorithm.kl_coefficient": 0.0,
    "algorithm.entropy_coefficient": 0.0,
    "algorithm.filter_equal_rewards": False,
    "trainer.lora": None,
    "trainer.optimizer": "adamw",
}
"""Fields of a recipe, and the values for which `trl_run.py` has TRL do the same. In 16 bit, TRL would step the weights
themselves, which lose small steps, and we step float32 copies of them."""


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


def run_trl(
    recipe: Recipe, initial: str, settings: TrlSettings, every: int, folder: Path
) -> tuple[dict[int, float], dict[str, Any]]:
    """Raises `ServiceError` when the run fails, `UserError` when TRL cannot be installed."""
    python, job = trl_python(), folder / "job.json"
    job.write_text(json.dumps(trl_job(recipe, initial, settings, every, folder.resolve())), encoding="utf-8")
    run_process([str(python), "-m", "benchmarks.trl_run", str(job.resolve())], folder / "run.log", trl_environment())
    records = read_jsonl(folder / "steps.jsonl")
    times_s = {record["step"]: record["time_s"] for record in records}
    trained, most = recipe.trainer.steps * recipe.trainer.batch_size, settings.steps_per_generation - 1
    lags = {"lag_mean": most / 2, "lag_max": most}  # 0 to G - 1 optimizer steps, equally often
    return times_s, {**run_figures(records, times_s, trained, folder), **lags, "dropped_stale": 0.0}


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """To its end. Raises `ServiceError` with what it said last."""
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    if done.returncode:
        raise ServiceError(f"{' '.join(command)} exited with code {done.returncode}: {log_tail(log)}")


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
            {"prompt": problem.prompt_text, "token_ids": problem.prompt_token_ids.tolist(), "reference": problem.reference_json}
            for problem in map(problems, range(number))
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, SIDES, seeds=(0, 1, 2))
    arguments = parsed(parser)
    steps = [f"trainer.steps={arguments.steps}"] if arguments.steps else []
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, *steps, "mode=pipeline"])
    check_equivalent(recipe, [one for one in map(TrlSettings.parse, arguments.sides) if one is not None])
    path = arguments.output / f"{NAME}.json"

    def make_run(side: str, of_seed: Recipe, initial: str) -> Run:
        settings = TrlSettings.parse(side)
        if settings is None:
            return partial(run_recipe, of_seed, arguments.every)
        return partial(run_trl, of_seed, initial, settings, arguments.every)

    rows = comparison_rows(recipe, measure(recipe, arguments, make_run), arguments)
    print(table(rows, COLUMNS[NAME]))
    if arguments.quick:
        return
    machine = {"cores": available_cores(), "system": platform.machine(), "TRL": pinned("trl"), "torch": pinned("torch")}
    kept = kept_rows(path, "recipe", [recipe.name])
    write_result(path, {"benchmark": NAME, "machine": machine, "rows": [*kept, *rows]})
    runs = [run for row in rows for run in row["runs"]]
    plot(runs, arguments.accuracy, arguments.output / f"{NAME}_{recipe.name}.svg")


if __name__ == "__main__":
    main()
