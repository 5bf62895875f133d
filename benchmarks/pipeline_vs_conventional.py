"""Pipeline mode against conventional mode on the same cores: throughput by lag, and time to a held-out accuracy.

    python -m benchmarks.pipeline_vs_conventional [--recipe arithmetic] [--sides pipeline pipeline-1 conventional-4 ...]
                                                  [--seeds 0 1 2 3 4] [--steps N] [--accuracy 0.9] [--problems 1024]
                                                  [--every 2] [--set a.b=c ...] [--minutes M] [--quick]

Sides: `pipeline`, with the recipe's `max_lag`; `pipeline-L`, with `max_lag` L; `conventional-G`, with G optimizer steps for
each generation phase, and so a largest lag of G - 1. Any of them with `-hN` has N sequences in progress, such as
`conventional-4-h256`: in conventional mode more of them do not cost lag. With `-tN` its engine computes on N threads.
Conventional mode generates on all cores, then trains on all cores. Everything else is the recipe's, for all sides alike.

Each run is an ordinary one of all services that saves its policy every `--every` steps instead of evaluating it; clocks stand
still meanwhile (`saved_runs.py`). Afterwards all policies answer the same problems, and times to the accuracy are interpolated
(`crossing.py`). The best of each mode are compared among all sides, and among those whose largest lag is at most that of
conventional mode with G steps. What is finished is kept, and the same command goes on from there (`side_comparison.py`): begin
with one seed of all sides, then give the others to the best ones.
`--quick` tries it out in some minutes and writes no result. Results of other recipes stay in the result files.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.accuracy_plot import plot, plot_frontier
from benchmarks.result_files import kept_rows, write_result
from benchmarks.saved_runs import Run, run_recipe
from benchmarks.side_comparison import PIPELINE, SideRun, add_arguments, compared, comparison_rows, measure, median, parsed
from benchmarks.table import COLUMNS, table
from pipelinerl.errors import FieldError
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe

NAME, AT_EQUAL_LAG = "pipeline_vs_conventional", "pipeline_at_equal_lag"
CONVENTIONAL = "conventional"
MODES = (PIPELINE, CONVENTIONAL)
SIDES = (
    PIPELINE, *(f"{PIPELINE}-{lag}" for lag in (1, 3, 7)), *(f"{CONVENTIONAL}-{steps}" for steps in (1, 2, 4, 8)),
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """What a side's name says."""

    mode: str
    number: int | None = None
    """The largest lag of pipeline mode, None for the recipe's; G of conventional mode."""
    places: int | None = None
    """H, None for the recipe's."""
    threads: int | None = None
    """Of the engine, None for the recipe's."""

    @classmethod
    def parse(cls, text: str) -> Side:
        """Raises `FieldError`."""
        found = re.fullmatch(r"(pipeline|conventional)(?:-([1-9]\d*))?(?:-h([1-9]\d*))?(?:-t([1-9]\d*))?", text)
        if found is None or (found[1] == CONVENTIONAL and found[2] is None):
            fix = "use pipeline, pipeline-L for a largest lag of L, or conventional-G for G steps in each phase, then -hN for H"
            raise FieldError("--sides", text, fix)
        return cls(found[1], *(int(number) if number else None for number in found.groups()[1:]))

    def largest_lag(self, recipe: Recipe) -> float:
        """That the mode permits, in optimizer steps; infinite without a limit."""
        if self.mode == CONVENTIONAL:
            assert self.number is not None
            return self.number - 1
        lag = recipe.algorithm.max_lag if self.number is None else self.number
        return math.inf if lag is None else lag

    def changed(self, recipe: Recipe) -> Recipe:
        """The recipe as this side runs it. Conventional mode reaches its largest lag by definition: a smaller limit would
        drop what it generates."""
        algorithm, lag = dict[str, Any](), self.largest_lag(recipe)
        if self.mode == CONVENTIONAL:
            max_lag = recipe.algorithm.max_lag
            algorithm = {"conventional_g": self.number, "max_lag": None if max_lag is None else max(max_lag, int(lag))}
        elif self.number is not None:
            algorithm = {"max_lag": self.number}
        engine = recipe.actor.engine.model_copy(update={"threads": self.threads or recipe.actor.engine.threads})
        actor = {"sequences_in_progress": self.places or recipe.actor.sequences_in_progress, "engine": engine}
        changes = {"algorithm": recipe.algorithm.model_copy(update=algorithm), "actor": recipe.actor.model_copy(update=actor)}
        return recipe.model_copy(update={"mode": self.mode, **changes})


def whole_phases(steps: int, sides: Sequence[Side]) -> int:
    """At least `steps`: so many that every conventional side ends with a whole phase, the default ones always among them, so
    that runs of a few sides belong to the same comparison. Pure."""
    phase = math.lcm(*(side.number or 1 for side in (*map(Side.parse, SIDES), *sides) if side.mode == CONVENTIONAL))
    return -(-steps // phase) * phase


def tokens_per_s(run: SideRun) -> float:
    """Completion tokens trained on."""
    return float(run.figures["samples_per_s"] * run.figures["completion_tokens"])


def best_at_lags(found: Mapping[str, Sequence[SideRun]], recipe: Recipe, accuracy: float) -> list[dict[str, Any]]:
    """The best of both modes among sides whose largest lag is at most that of each conventional side, and among all. Pure.

    `_fastest`: the side of most samples per second; `throughput_ratio`: the pipeline's to the other's; `token_ratio`:
    the same by trained tokens per second, where a side gains nothing by dropping long sequences as stale.
    `_soonest`: the side with the shortest median time to the accuracy; `time_ratio`: the conventional one's to the pipeline's,
    over seeds that both have. Above 1 the pipeline is better. Of each mode only the sides with the most seeds are asked.
    """
    most_of = {mode: max((len(found[name]) for name in found if name.startswith(mode)), default=0) for mode in MODES}
    of_all = [name for mode in MODES for name in found if name.startswith(mode) and len(found[name]) == most_of[mode]]
    lag_of = {name: Side.parse(name).largest_lag(recipe) for name in of_all}
    bounds = sorted({lag for name, lag in lag_of.items() if name.startswith(CONVENTIONAL) and lag > 0})
    throughput = {name: median([run.figures["samples_per_s"] for run in runs]) or 0.0 for name, runs in found.items()}
    time_s = {name: compared(runs, (), accuracy)[0].value for name, runs in found.items()}
    rows = []
    for bound in [*bounds, math.inf]:
        of_mode = {mode: [name for name, lag in lag_of.items() if name.startswith(mode) and lag <= bound] for mode in MODES}
        if not all(of_mode.values()):
            continue
        fastest = {mode: max(names, key=throughput.__getitem__) for mode, names in of_mode.items()}
        tokens = {mode: median(list(map(tokens_per_s, found[name]))) or 0.0 for mode, name in fastest.items()}
        soonest = {mode: min(names, key=time_s.__getitem__) for mode, names in of_mode.items()}
        arrived = {mode: name for mode, name in soonest.items() if math.isfinite(time_s[name])}
        ratio, seeds = compared(found[soonest[CONVENTIONAL]], found[soonest[PIPELINE]], accuracy)[1:]
        rows.append(
            {
                "recipe": recipe.name,
                "largest_lag": "any" if math.isinf(bound) else int(bound),
                "pipeline_fastest": fastest[PIPELINE],
                "conventional_fastest": fastest[CONVENTIONAL],
                "throughput_ratio": round(throughput[fastest[PIPELINE]] / throughput[fastest[CONVENTIONAL]], 3),
                "token_ratio": round(tokens[PIPELINE] / tokens[CONVENTIONAL], 3),
                "pipeline_soonest": arrived.get(PIPELINE),
                "conventional_soonest": arrived.get(CONVENTIONAL),
                "time_ratio": ratio.shown if ratio else None,
                "time_ratio_interval": ratio.interval if ratio else None,
                "seeds": len(seeds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, SIDES, seeds=(0, 1, 2, 3, 4))
    arguments = parsed(parser)
    sides = {name: Side.parse(name) for name in arguments.sides}
    recipe = load_recipe(arguments.recipe, [*arguments.overrides, "mode=pipeline"])
    steps = whole_phases(arguments.steps or recipe.trainer.steps, list(sides.values()))
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": steps})})

    def make_run(side: str, of_seed: Recipe, initial: str) -> Run:
        return partial(run_recipe, sides[side].changed(of_seed), arguments.every)

    found = measure(recipe, arguments, make_run)
    rows, best = comparison_rows(recipe, found, arguments), best_at_lags(found, recipe, arguments.accuracy)
    print(table(rows, COLUMNS[NAME]), table(best, COLUMNS[AT_EQUAL_LAG]), sep="\n\n")
    if arguments.quick:
        return
    machine = {"cores": available_cores(), "system": platform.machine()}
    for name, measured in ((NAME, rows), (AT_EQUAL_LAG, best)):
        path = arguments.output / f"{name}.json"
        kept = kept_rows(path, "recipe", [recipe.name])
        write_result(path, {"benchmark": name, "machine": machine, "rows": [*kept, *measured]})
    runs = [run for row in rows for run in row["runs"]]
    plot(runs, arguments.accuracy, arguments.output / f"{NAME}_{recipe.name}.svg")
    plot_frontier(rows, arguments.output / f"frontier_{recipe.name}.svg")


if __name__ == "__main__":
    main()
