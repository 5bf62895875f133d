"""Time to held-out accuracy 0.9: pipeline mode against conventional mode with G = 1, 2, 4, 8 optimizer steps per phase.

    python -m benchmarks.pipeline_vs_conventional [--recipe arithmetic] [--modes pipeline conventional-4 ...]
                                                  [--seeds 0 1 ...] [--steps N] [--set a.b=c ...]

Each run is an ordinary `pipelinerl run` of the same recipe and seed, one after another, and ends early once the threshold
was reached twice. Time counts from the first policy version served. Evaluations are the same in all modes: every
`--every` steps, a multiple of every G, because a conventional run sends a version only every G steps. Results: a JSON
file, a table (Markdown) and a plot (PNG, SVG) of held-out accuracy over time and over training samples.

It tunes nothing: all modes have the recipe's learning rate. On a machine where actor and trainer share the cores, the
time that pipelining saves is what either would have waited, not what separate accelerators would save.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy_plot import plot
from benchmarks.learning_curve import figures, times_reached
from benchmarks.result_files import write_result
from benchmarks.table import table
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.local.processes import log_tail
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_summary import read_jsonl

RESULTS = Path(__file__).parent / "results"
NAME = "pipeline_vs_conventional"
GENERATION_PHASES = (1, 2, 4, 8)
THRESHOLD, TIMES = 0.9, 2
LOOK_S, STOP_S = 0.5, 30.0
COLUMNS = (
    "mode", "seeds", "reached", "time_to_threshold_s", "speed_of_pipeline", "samples_to_threshold", "tokens_to_threshold",
    "steps", "step_s", "samples_per_s", "lag_mean", "ess_mean", "actor_busy", "trainer_busy", "heldout_last",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """`g` = 0: pipeline; else conventional with that G."""

    g: int = 0

    @classmethod
    def parse(cls, text: str) -> Mode:
        """`pipeline` or `conventional-G`. Raises `FieldError`."""
        kind, _, g = text.partition("-")
        if text == "pipeline":
            return cls()
        if kind == "conventional" and g.isdigit() and int(g) > 0:
            return cls(int(g))
        raise FieldError("--modes", text, "use pipeline or conventional-G, such as conventional-4")

    def __str__(self) -> str:
        return f"conventional-{self.g}" if self.g else "pipeline"

    def overrides(self, recipe: Recipe) -> list[str]:
        """Conventional mode reaches lag G - 1 by definition: a smaller bound would drop what it generates."""
        if not self.g:
            return ["mode=pipeline"]
        max_lag = recipe.algorithm.max_lag
        enough = [] if max_lag is None else [f"algorithm.max_lag={max(max_lag, self.g - 1)}"]
        return ["mode=conventional", f"algorithm.conventional_g={self.g}", *enough]


def overrides_of(mode: Mode, seed: int, recipe: Recipe, steps: int, every: int, extra: Sequence[str]) -> list[str]:
    return [
        *extra,
        *mode.overrides(recipe),
        f"seed={seed}",
        f"trainer.steps={steps}",
        f"evaluation.every_steps={every}",
    ]


def steps_of(recipe: Recipe, asked: int, modes: Sequence[Mode], every: int) -> int:
    """Steps of every run: whole phases of every G, at least what was asked for. Raises `FieldError` for `--every`."""
    wrong = [mode.g for mode in modes if mode.g and every % mode.g]
    if wrong:
        raise FieldError("--every", every, f"a version is sent every {wrong[0]} steps: give a multiple of it")
    steps = asked or recipe.trainer.steps
    longest = max((mode.g for mode in modes), default=0) or 1
    return -(-steps // longest) * longest


def run(name: str, recipe: str, overrides: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """The records of one run, ended early when the threshold was reached often enough. Raises `ServiceError`."""
    settings = [argument for override in overrides for argument in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "pipelinerl.cli",
        "run",
        recipe,
        "--run-dir",
        str(folder),
        "--name",
        name,
        *settings,
    ]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        early = follow(process, folder / "metrics.jsonl")
    finally:
        stop(process)
    if not early and process.returncode != 0:
        raise ServiceError(f"run {name} exited with code {process.returncode}: {log_tail(log)}")
    return read_jsonl(folder / "metrics.jsonl")


def follow(process: subprocess.Popen[bytes], metrics: Path) -> bool:
    """Returns when the process ended (False) or the threshold was reached often enough (True)."""
    while True:
        try:
            process.wait(LOOK_S)
            return False
        except subprocess.TimeoutExpired:
            if times_reached(read_jsonl(metrics), THRESHOLD) >= TIMES:
                return True


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C to a run that is under way, which ends every process of it in order."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # the second kills what is left
            process.wait(STOP_S)


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each mode: medians over its seeds. A median over seeds that did not all arrive is None. Pure."""
    modes = dict.fromkeys(run["mode"] for run in runs)
    found = [_row(mode, [run for run in runs if run["mode"] == mode]) for mode in modes]
    pipeline = next((row["time_to_threshold_s"] for row in found if row["mode"] == "pipeline"), None)
    for row in found:
        own = row["time_to_threshold_s"]
        row["speed_of_pipeline"] = round(own / pipeline, 2) if own and pipeline else None
    return found


def _row(mode: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    reached = sum(run["time_to_threshold_s"] is not None for run in runs)
    numbers = [key for key in COLUMNS if all(key in run for run in runs) and key != "mode"]
    return {
        "mode": mode,
        "seeds": len(runs),
        "reached": f"{reached}/{len(runs)}",
        **{key: _median([run[key] for run in runs]) for key in numbers},
    }


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.median(present), 3) if len(present) == len(values) else None


def write(results: dict[str, Any], folder: Path) -> None:
    write_result(folder / f"{NAME}.json", results)
    (folder / f"{NAME}.md").write_text(table(results["rows"], COLUMNS) + "\n", encoding="utf-8")
    for kind in ("svg", "png"):
        plot(results["runs"], THRESHOLD, folder / f"{NAME}.{kind}")


def main() -> None:
    everything = ["pipeline", *(f"conventional-{g}" for g in GENERATION_PHASES)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic", help="recipe file or name")
    parser.add_argument("--modes", nargs="+", default=everything, help=f"of {', '.join(everything)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of a run at most; 0 = the recipe's")
    parser.add_argument("--every", type=int, default=8, help="optimizer steps between two evaluations")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="as for a run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    modes = [Mode.parse(text) for text in arguments.modes]
    steps = steps_of(recipe, arguments.steps, modes, arguments.every)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for mode in modes:
                settings = overrides_of(mode, seed, recipe, steps, arguments.every, arguments.overrides)
                name = f"{mode}-s{seed}"
                records = run(name, arguments.recipe, settings, Path(folder) / name)
                runs.append({"mode": str(mode), "seed": seed, **figures(records, THRESHOLD)})
                print({key: value for key, value in runs[-1].items() if key != "curve"}, file=sys.stderr, flush=True)
    machine = {
        "cores": available_cores(),
        "system": platform.machine(),
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    results = {
        "benchmark": NAME, "recipe": recipe.name, "threshold": THRESHOLD, "steps_at_most": steps,
        "evaluation_every_steps": arguments.every, "machine": machine, "rows": rows(runs), "runs": runs,
    }  # fmt: skip
    write(results, arguments.output)
    print(table(results["rows"], COLUMNS))


if __name__ == "__main__":
    main()
