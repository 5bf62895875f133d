"""Held-out accuracy of several runs, over time and over training samples: how fast, and how much is learnt of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (("time_s", "seconds since the first version was served"), ("samples", "sequences trained on"))


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


def _label(mode: str) -> str:
    kind, _, g = mode.partition("-")
    return f"{kind}, G = {g}" if g.isdigit() else mode


def _style(mode: str, modes: Sequence[str]) -> dict[str, Any]:
    """The pipeline stands out; conventional runs go from light to dark with their place in the list."""
    if mode == "pipeline":
        return {"color": "#d1495b", "linewidth": 2.2, "zorder": 3}
    others = [other for other in modes if other != "pipeline"]
    shades = ("#9ecae1", "#6baed6", "#3182bd", "#08519c")
    return {"color": shades[others.index(mode) % len(shades)], "linewidth": 1.4}
