"""What comparisons of whole runs share: sides and seeds run one after another, judged afterwards, summed up in rows and curves.

Runs come first, since they are timed and want a quiet machine; judging is not timed. What is finished is kept in `--work`, and
the same command goes on from there. `--minutes` bounds the runs of a call: `--minutes 0` sums up what is finished. Policies are
judged on problems that no run with a seed below `SEEDS` trains on, so that a seed added later changes no result.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.crossing import Estimate, JudgedRun, crossing_estimates
from benchmarks.saved_runs import (
    WORK,
    Run,
    SavedRun,
    from_policy,
    initial_policy,
    is_kept,
    judged,
    product_code,
    saved_run,
    work_folder,
)
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import Recipe

RESULTS = Path(__file__).parent / "results"
PIPELINE = "pipeline"
SEEDS, PROBLEMS = 8, 1024
QUICK = {"steps": 8, "every": 4, "seeds": [0], "problems": 128}


def add_arguments(parser: argparse.ArgumentParser, sides: Sequence[str], seeds: Sequence[int]) -> None:
    parser.add_argument("--recipe", default="arithmetic", help="recipe file or name")
    parser.add_argument("--sides", nargs="+", default=list(sides), help=f"default: {' '.join(sides)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds), help=f"each below {SEEDS}")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of a run; 0 = the recipe's")
    parser.add_argument("--accuracy", type=float, default=0.9, help="held-out accuracy to be reached")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="held-out problems that policies are judged on")
    parser.add_argument("--every", type=int, default=2, help="optimizer steps between two saved policies")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="as for a run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end after so many; 0: none")
    parser.add_argument("--work", type=Path, default=WORK, help="folder in which finished runs are kept")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK['steps']} steps of one seed; writes no result")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Raises `FieldError`."""
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    if max(arguments.seeds) >= SEEDS:
        fix = f"policies are judged on problems that no seed below {SEEDS} trains on: use those"
        raise FieldError("--seeds", max(arguments.seeds), fix)
    return arguments


@dataclass(frozen=True, eq=False)
class SideRun:
    """One seed of one side."""

    seed: int
    judged: JudgedRun
    figures: dict[str, Any]


MakeRun = Callable[[str, Recipe, str], Run]
"""Of a side, the recipe with its seed, and the initial policy."""


class Pace:
    """Tells how far a list of tasks is and how long the rest will take, and begins none that would end after the deadline."""

    def __init__(self, what: str, number: int, deadline_s: float) -> None:
        self._what, self._left, self._deadline_s = what, number, deadline_s
        self._took_s: list[float] = []
        self._began_s = 0.0
        if number:
            print(f"{number} {what} to do", file=sys.stderr, flush=True)

    def begin(self) -> bool:
        """Whether there is time for one more."""
        self._began_s = time.monotonic()
        return self._began_s + max(self._took_s, default=0.0) <= self._deadline_s

    def end(self, said: str) -> None:
        self._took_s.append(time.monotonic() - self._began_s)
        self._left -= 1
        minutes = self._left * statistics.fmean(self._took_s) / 60
        took = f"{self._took_s[-1]:.0f} s; {self._left} {self._what} left, about {minutes:.0f} minutes"
        print(f"{said} ({took})", file=sys.stderr, flush=True)


def measure(recipe: Recipe, arguments: argparse.Namespace, make_run: MakeRun) -> dict[str, list[SideRun]]:
    """Runs, in order of seeds, and judges what is missing. Gives all that is finished, by side. Raises what a run raises."""
    from benchmarks.saved_policies import PolicyJudge, heldout_problems, load_tokenizer, with_spares

    deadline_s = time.monotonic() + 60 * arguments.minutes
    wider = recipe.task.model_copy(update={"heldout_problems": with_spares(max(arguments.problems, PROBLEMS))})
    initial = initial_policy(recipe.model_copy(update={"task": wider}))  # no demonstration of what it is judged on
    recipe, tokenizer = from_policy(recipe, initial), load_tokenizer(initial)
    # Before the runs: a task with too few problems is told of now.
    judge = PolicyJudge(recipe, heldout_problems(recipe, arguments.problems, range(SEEDS), tokenizer), tokenizer)
    work = work_folder(arguments.work, recipe, arguments.every, arguments.problems)
    cases = [(side, seed) for seed in arguments.seeds for side in arguments.sides]
    folders = {(side, seed): work / f"{side}-s{seed}" for side, seed in cases}
    runs: dict[tuple[str, int], SavedRun] = {}
    if kept := [folder.name for folder in folders.values() if is_kept(folder)]:
        print(f"kept from earlier calls, and not run again: {', '.join(kept)}", file=sys.stderr)
    pace = Pace(f"runs in {work}", len(folders) - len(kept), deadline_s)
    for (side, seed), folder in folders.items():
        known = folder.name in kept
        if known or pace.begin():
            run = saved_run(folder, make_run(side, recipe.model_copy(update={"seed": seed}), initial))
            runs[side, seed] = run
            if not known:
                pace.end(f"{side}, seed {seed}: {run.figures}")
    code = product_code()
    if others := [run.folder.name for run in runs.values() if run.code != code]:
        print(f"of older code, and run again if you remove them: {', '.join(others)}", file=sys.stderr)
    initial_right = judge.right(initial)
    found: dict[str, list[SideRun]] = {side: [] for side in arguments.sides}
    pace = Pace("curves to judge", len(runs), math.inf)
    for (side, seed), run in runs.items():
        pace.begin()
        curve_of = judged(run, initial_right, judge.right, arguments.accuracy)
        found[side].append(SideRun(seed, curve_of, run.figures))
        pace.end(f"{side}, seed {seed}: accuracy {curve_of.accuracies.round(3).tolist()}")
    return {side: of_side for side, of_side in found.items() if of_side}


def compared(runs: Sequence[SideRun], base: Sequence[SideRun], accuracy: float) -> tuple[Estimate, Estimate | None, list[int]]:
    """Seconds to the accuracy, these divided by those of `base`, and the seeds that both have, of which alone the ratio is.

    The ratio is None where they have none in common. Pure.
    """
    time_s = crossing_estimates({"side": [run.judged for run in runs]}, accuracy, "").get("side")
    assert time_s is not None
    seeds = sorted({run.seed for run in runs} & {run.seed for run in base})
    if not seeds:
        return time_s.time_s, None, seeds
    pair = {
        "base": [run.judged for seed in seeds for run in base if run.seed == seed],
        "side": [run.judged for seed in seeds for run in runs if run.seed == seed],
    }
    return time_s.time_s, crossing_estimates(pair, accuracy, "base")["side"].ratio, seeds


def side_row(runs: Sequence[SideRun], base: Sequence[SideRun], accuracy: float) -> dict[str, Any]:
    """Medians over the runs of one side, one for each seed; `base`: the pipeline's, or none. Pure."""
    time_s, ratio, _ = compared(runs, base, accuracy)
    reached = sum(bool((run.judged.accuracies >= accuracy).any()) for run in runs)
    return {
        "accuracy": accuracy,
        "reached": f"{reached}/{len(runs)}",
        "time_to_accuracy_s": time_s.shown,
        "time_interval_s": time_s.interval,
        "speed_of_pipeline": ratio.shown if ratio else None,
        "speed_interval": ratio.interval if ratio else None,
        **{key: median([run.figures[key] for run in runs]) for key in runs[0].figures},
        "accuracy_first": median([float(run.judged.accuracies[0]) for run in runs]),
        "accuracy_last": median([float(run.judged.accuracies[-1]) for run in runs]),
    }


def median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    present = [value for value in values if value is not None]
    return round(statistics.median(present), 4) if present else None


def plotted(side: str, runs: Sequence[SideRun], batch_size: int) -> list[dict[str, Any]]:
    """Each run as the plot and the result file have it."""
    return [{"mode": side, "seed": run.seed, **run.figures, "curve": curve(run.judged, batch_size)} for run in runs]


def curve(run: JudgedRun, batch_size: int) -> list[dict[str, Any]]:
    """A point for each judged policy."""
    points = zip(run.versions.tolist(), run.times_s.tolist(), run.accuracies.tolist(), strict=True)
    return [
        {"version": version, "time_s": round(time_s, 3), "samples": version * batch_size, "accuracy": round(accuracy, 4)}
        for version, time_s, accuracy in points
    ]


def comparison_rows(
    recipe: Recipe, found: Mapping[str, Sequence[SideRun]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each side, with its `runs`."""
    conditions = {"steps": recipe.trainer.steps, "problems": arguments.problems}
    return [
        {
            "recipe": recipe.name,
            "side": side,
            **side_row(runs, found.get(PIPELINE, ()), arguments.accuracy),
            **conditions,
            "runs": plotted(side, runs, recipe.trainer.batch_size),
        }
        for side, runs in found.items()
    ]
