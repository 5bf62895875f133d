"""From 128 to 4,096 accelerators: what plans promise when the batch grows along, and when it does not. All times are modelled.

    python -m benchmarks.scaling

A 7B model on H100, by their data sheets, and lengths with a tail, as in docs/planning.md. Each row is a `pipelinerl plan`:
the split is the closed form's, throughput and lag are the simulator's, of a part of the system where it is large
(`simulated_share`). Beside it stands what the control channel was measured to need for a weight update of so many actors
(`results/control_channel.json`, and with weights that move over Gloo `results/membership.json`), beyond its last measurement
extended in proportion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import write_result
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.memory import ACCELERATORS, Model
from pipelinerl.rl.planner import CONTROL_S, estimated, make_plan, weight_update_s
from pipelinerl.rl.throughput import Lengths
from pipelinerl.run_summary import lag_summary

RESULTS = Path(__file__).parent / "results"
ACCELERATOR_COUNTS = (128, 256, 512, 1024, 2048, 4096)
LAG_LIMIT = 16
CASES = {
    "batch grows, lag ≤ 16": (lambda count: 8 * count, LAG_LIMIT),
    "batch 1,024, any lag": (lambda count: 1024, None),
    "batch 1,024, lag ≤ 16": (lambda count: 1024, LAG_LIMIT),
}
"""Name: (batch size by number of accelerators, lag limit)."""
MODEL = Model(parameters=7.6e9, kv_bytes=56 * 1024)
BARS = ((1, 512, 2.0), (513, 2048, 5.0), (2049, 4096, 2.0), (4097, 8192, 1.0))


def planned(case: str, num_accelerators: int) -> dict[str, Any]:
    """One row: seconds, tokens/s, optimizer steps of lag."""
    batch_of, max_lag = CASES[case]
    recipe = load_recipe(
        "gsm", [f"trainer.batch_size={batch_of(num_accelerators)}", f"algorithm.max_lag={json.dumps(max_lag)}"]
    )
    lengths = Lengths.of_bars(BARS)
    plan = make_plan(recipe, MODEL, estimated(ACCELERATORS["H100"], MODEL, recipe, lengths), lengths, num_accelerators)
    lag = lag_summary(plan.played.lag_histogram)
    return {
        "case": case,
        "accelerators": num_accelerators,
        "batch": recipe.trainer.batch_size,
        "actors": plan.split.num_generators,
        "in_progress": plan.split.sequences_in_progress,
        "tokens_per_s": plan.rate,
        "conventional_tokens_per_s": plan.conventional,
        "lag_mean": lag["mean"],
        "lag_max": lag["max"],
        "largest_lag": plan.split.largest_lag,
        "trainer_idle": plan.played.trainer_idle,
        "empty_slots": plan.played.empty_slots,
        "stale": plan.played.stale_share,
        "step_s": plan.played.duration / plan.played.steps,
        "control_s": CONTROL_S * plan.split.num_generators,
        "update_s": weight_update_s(MODEL.weights_bytes, plan.split.num_generators),
        "simulated_share": plan.share,
    }


def measured_updates(name: str) -> list[tuple[int, float]]:
    """(members, seconds of an update) of an earlier benchmark."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return [(row["members"], row["update_s"]) for row in rows if "update_s" in row]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, (speed, age, update) = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    colours = dict(zip(CASES, ("#2a9d8f", "#3182bd", "#d1495b"), strict=True))
    for case, colour in colours.items():
        of_case = [row for row in rows if row["case"] == case]
        counts = [row["accelerators"] for row in of_case]
        for axis, solid, dotted in (
            (speed, "tokens_per_s", "conventional_tokens_per_s"),
            (age, "lag_mean", "lag_max"),
            (update, "step_s", "update_s"),
        ):
            axis.plot(counts, [row[solid] for row in of_case], "o-", color=colour, markersize=4)
            axis.plot(counts, [row[dotted] for row in of_case], ":", color=colour)
    control, moved = measured_updates("control_channel"), measured_updates("membership")
    members, seconds = control[-1]
    update.plot(*zip(*control, strict=True), "ks-", markersize=4)
    update.plot([members, ACCELERATOR_COUNTS[-1]], [seconds, seconds * ACCELERATOR_COUNTS[-1] / members], "k--")
    update.plot(*zip(*moved, strict=True), "^-", color="0.5", markersize=4)
    for axis, what, solid, dotted in (
        (speed, "tokens/s", "pipeline", "conventional, same largest lag, at best"),
        (age, "token lag, optimizer steps", "mean", "largest"),
        (update, "seconds", "an optimizer step", "a weight update: weights at 100 Gbit/s, and messages"),
    ):
        handles = [Line2D([], [], color="0.2", label=solid), Line2D([], [], color="0.2", linestyle=":", label=dotted)]
        if axis is update:
            handles += [
                Line2D([], [], color="k", marker="s", markersize=4, label="measured: messages of an update, on 2 cores"),
                Line2D([], [], color="k", linestyle="--", label="extended in proportion"),
                Line2D([], [], color="0.5", marker="^", markersize=4, label="measured: a small update over Gloo, on 2 cores"),
            ]
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylabel(what)
        axis.set_xlabel("accelerators" if axis is not update else "accelerators; where measured, actors")
        axis.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
        axis.grid(alpha=0.25)
        axis.legend(handles=handles, frameon=False, fontsize=7)
    update.set_ylim(bottom=1e-4)
    cases = [Line2D([], [], color=colour, marker="o", markersize=4, label=case) for case, colour in colours.items()]
    figure.legend(handles=cases, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("A 7B model on H100. All times are modelled, except for black and grey symbols", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    rows = [planned(case, count) for case in CASES for count in ACCELERATOR_COUNTS]
    write_result(RESULTS / "scaling.json", {"benchmark": "scaling", "times": "modelled", "rows": rows})
    plot(rows, RESULTS / "scaling.svg")


if __name__ == "__main__":
    main()
