"""Pictures of comparisons of whole runs: held-out accuracy over time and over training samples, and throughput over lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (("time_s", "seconds since the first version was served"), ("samples", "sequences trained on"))
LAG_PANELS = (("lag_mean", "mean lag of a token, optimizer steps"), ("lag_max", "largest lag, optimizer steps"))
OUR_SHADES = ("#d1495b", "#e07a5f", "#edae49", "#8d0801")
OTHER_SHADES = ("#9ecae1", "#6baed6", "#3182bd", "#08519c")


def plot(runs: Sequence[Mapping[str, Any]], threshold: float, path: Path) -> None:
    """Writes a PNG or an SVG, by the name's end. One line a run; runs of one mode share a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = list(dict.fromkeys(run["mode"] for run in runs))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, PANELS, strict=True):
        axis.axhline(threshold, color="0.7", linewidth=0.8, linestyle="--")
        for run in runs:
            first = next(other for other in runs if other["mode"] == run["mode"]) is run
            axis.plot(
                [point[key] for point in run["curve"]],
                [point["accuracy"] for point in run["curve"]],
                label=_label(run["mode"]) if first else None,
                marker="o",
                markersize=3,
                **_style(run["mode"], modes),
            )
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out accuracy")
    axes[0].set_ylim(0, 1)
    axes[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def plot_frontier(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Sequences per second over mean and over largest lag, a line for each mode.

    `rows` have `side`, `samples_per_s`, `lag_mean` and `lag_max`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = [row["side"] for row in rows]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, LAG_PANELS, strict=True):
        for mode in dict.fromkeys(side.partition("-")[0] for side in sides):
            points = sorted(
                (row[key], row["samples_per_s"], row["side"]) for row in rows if row["side"].partition("-")[0] == mode
            )
            colour = OUR_SHADES[0] if mode == "pipeline" else OTHER_SHADES[-1]
            axis.plot([lag for lag, *_ in points], [rate for _, rate, _ in points], marker="o", label=mode, color=colour)
            for lag, rate, side in points:
                text = _label(side).rpartition(", ")[2] if "-" in side else "recipe"
                axis.annotate(text, (lag, rate), (3, 4), textcoords="offset points", fontsize=7)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("sequences trained on per second")
    axes[0].set_ylim(0, 1.1 * max(row["samples_per_s"] for row in rows))
    axes[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _label(mode: str) -> str:
    kind, _, number = mode.partition("-")
    if not number.isdigit():
        return mode
    return f"{kind}, lag \N{LESS-THAN OR EQUAL TO} {number}" if kind == "pipeline" else f"{kind}, G = {number}"


def _style(mode: str, modes: Sequence[str]) -> dict[str, Any]:
    """The pipeline stands out in red; other sides go from light to dark with their place in the list."""
    ours = mode.startswith("pipeline")
    alike = [other for other in modes if other.startswith("pipeline") == ours]
    place = alike.index(mode) if mode in alike else 0
    if ours:
        return {"color": OUR_SHADES[place % len(OUR_SHADES)], "linewidth": 2.2 if place == 0 else 1.4, "zorder": 3}
    return {"color": OTHER_SHADES[place % len(OTHER_SHADES)], "linewidth": 1.4}
