"""Whole runs that save their policies instead of evaluating them: prepared, run, and turned into curves of held-out accuracy.

A run whose evaluation is left out is timed without it. Its checkpoints, kept every few steps, are its curve: `judged` lets the
caller's judge (`saved_policies.py`) look at each. What a checkpoint costs, a run's time contains.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.crossing import JudgedRun
from benchmarks.learning_curve import mean_lag, served_at_s
from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import built_folder, filling, is_built, is_complete
from pipelinerl.local.processes import log_tail
from pipelinerl.local.services import cache_folder
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import RunDir
from pipelinerl.run_summary import read_jsonl

ROOT = Path(__file__).resolve().parents[1]


def initial_policy(recipe: Recipe) -> str:
    """Folder or hub id of the recipe's initial policy, which is built where the recipe says so and kept for the next time."""
    if not is_built(recipe.model):
        return recipe.model.name
    folder = built_folder(recipe, cache_folder(os.environ) / "models")
    if not is_complete(folder):
        import torch

        from services.trainer.warmstart.__main__ import THREADS
        from services.trainer.warmstart.build import build

        torch.set_num_threads(THREADS)
        with filling(folder) as beside:
            build(recipe.model, recipe.task, beside, lambda line: print(line, file=sys.stderr))
    return str(folder)


def saving(recipe: Recipe, initial: str, every: int) -> Recipe:
    """The recipe of a run from policy `initial` that keeps a checkpoint every `every` steps and evaluates one problem at its
    start and end."""
    model, checkpoint = recipe.model, recipe.checkpoint
    if is_built(model):
        model = model.model_copy(update={"source": "path", "name": initial, "warmstart": None})
    kept = {"every_steps": every, "every_minutes": 0.0, "keep": recipe.trainer.steps}
    return recipe.model_copy(
        update={
            "model": model,
            "task": recipe.task.model_copy(update={"heldout_problems": 1}),
            "evaluation": recipe.evaluation.model_copy(update={"every_steps": 0}),
            "checkpoint": checkpoint.model_copy(update=kept),
        }
    )


@dataclass(frozen=True)
class SavedRun:
    """A run that has ended."""

    policies: dict[int, Path]
    """Folders of its saved policies, by version; the initial one is not among them."""
    times_s: dict[int, float]
    """Seconds from the run's time zero to each version."""
    figures: dict[str, Any]
    """`step_s`, `lag_mean`, `completion_tokens`, `dropped_stale` (share of the issued sequences)."""


def run_recipe(recipe: Recipe, folder: Path, name: str) -> SavedRun:
    """An ordinary `pipelinerl run` in `folder`; time zero is when the first version is served. Raises `ServiceError`."""
    file, run_dir = folder / "recipe.yaml", RunDir(folder / "run", name)
    file.write_text(recipe_yaml(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "pipelinerl.cli", "run", str(file), "--run-dir", str(run_dir.path), "--name", name]
    run_process(command, folder / "run.log", dict(os.environ))
    records = read_jsonl(run_dir.metrics)
    began_s, sequences = served_at_s(records), records[-1]["sequences"]
    times_s = {record["policy_version"]: record["time_s"] - began_s for record in records}
    stale = round(sequences["dropped_stale"] / sequences["issued"], 4)
    return SavedRun(
        saved_steps(run_dir.checkpoints), times_s, run_figures(records, times_s, mean_lag(records), dropped_stale=stale)
    )


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """To its end. Raises `ServiceError` with what it said last."""
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
    if done.returncode:
        raise ServiceError(f"{' '.join(command)} exited with code {done.returncode}: {log_tail(log)}")


def saved_steps(folder: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}


def run_figures(
    records: Sequence[Mapping[str, Any]], times_s: Mapping[int, float], lag: float | None, *, dropped_stale: float
) -> dict[str, Any]:
    """`SavedRun.figures` of one record for each step."""
    return {
        "step_s": round(max(times_s.values()) / len(times_s), 4),
        "lag_mean": lag,
        "completion_tokens": round(statistics.fmean(record["completion_tokens_mean"] for record in records), 2),
        "dropped_stale": dropped_stale,
    }


Judge = Callable[[Path], NDArray[np.bool_]]
"""Of a policy's folder: which of the P held-out problems it answers, [P]."""


def judged(run: SavedRun, initial_right: NDArray[np.bool_], judge: Judge) -> JudgedRun:
    """`initial_right` [P]: of the initial policy, which was there at time zero."""
    versions = sorted(run.policies)
    right = [initial_right, *(judge(run.policies[version]) for version in versions)]
    return JudgedRun(
        np.array([0, *versions]), np.array([0.0, *(run.times_s[version] for version in versions)]), np.array(right)
    )
