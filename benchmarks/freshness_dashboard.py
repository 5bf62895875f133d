"""What the Freshness dashboard shows of a real run, as a picture.

    python -m benchmarks.freshness_dashboard record       # train the arithmetic recipe with 2 actors, and keep what was seen
    python -m benchmarks.freshness_dashboard              # draw what was kept into docs/freshness-dashboard.png

A real Prometheus scrapes the run; the panels' own queries are put to it, as Grafana would. It is no Grafana: lines and heat map
are matplotlib's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.prometheus_server import Prometheus, Series, prometheus_server, run_targets
from deploy.dashboards.freshness import FRESHNESS
from deploy.dashboards.panels import Panel

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "docs" / "freshness-dashboard.json"
PICTURE = ROOT / "docs" / "freshness-dashboard.png"
SCRAPE_S, POINTS, GRID = 2, 160, 24
_DIGITS = 4

Curve = dict[str, Any]
"""`{"legend": text, "values": [number or None, ...]}`, one value for each point in time."""
Recording = dict[str, Any]
"""`{"recipe", "actors", "step_s", "panels": {title: [curve, ...]}}`."""


def answered(panel: Panel, server: Prometheus, start_s: float, step_s: float, points: int) -> list[Curve]:
    """The panel's curves: its queries with all runs chosen."""
    window = f"{round(max(4 * SCRAPE_S, step_s + SCRAPE_S))}s"
    curves = []
    for query in panel.queries:
        expression = query.expr.replace("$namespace", ".*").replace("$run", ".*").replace("$window", window)
        for series in server.query_range(expression, start_s, start_s + (points - 1) * step_s, step_s):
            values = _on_grid(series, start_s, step_s, points)
            curves.append({"legend": _legend(query.legend, series), "values": values})
    return curves


def _on_grid(series: Series, start_s: float, step_s: float, points: int) -> list[float | None]:
    values: list[float | None] = [None] * points
    for at_s, text in series["values"]:
        values[round((at_s - start_s) / step_s)] = float(f"{float(text):.{_DIGITS}g}")
    return values


def _legend(template: str, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: series["metric"].get(label[1], ""), template).strip()


def record(recipe: str, actors: int, further: Sequence[str], prometheus: str) -> Recording:
    """Trains, scraped all the time. Raises `RuntimeError` when the run fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [Path(sys.executable).with_name("pipelinerl"), "run", recipe, "--actors", str(actors)]
        with subprocess.Popen([*command, "--run-dir", str(folder / "run"), *further]) as run:
            targets = run_targets(folder / "run", run)
            scrape = [{"job_name": "pipelinerl", **targets}]
            with prometheus_server(prometheus, folder, scrape, every=f"{SCRAPE_S}s") as server:
                if run.wait() != 0:
                    raise RuntimeError(f"the run ended with exit code {run.returncode}")
                return {"recipe": recipe, "actors": actors, **_recorded(server, time.time())}


def _recorded(server: Prometheus, end_s: float) -> dict[str, Any]:
    """From the first optimizer step on."""
    trained = server.query_range("pipelinerl_trainer_token_lag_max_steps", end_s - 7200, end_s, SCRAPE_S)
    start_s = min(series["values"][0][0] for series in trained)
    step_s = max(SCRAPE_S, (end_s - start_s) / POINTS)
    points = int((end_s - start_s) / step_s)
    panels = {panel.title: answered(panel, server, start_s, step_s, points) for panel in FRESHNESS.panels}
    return {"step_s": round(step_s, 3), "panels": panels}


def rows(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Panels as they stand beside each other. Pure."""
    row: list[Panel] = []
    for panel in panels:
        if sum(other.width for other in row) + panel.width > GRID:
            yield row
            row = []
        row.append(panel)
    yield row


def draw(recording: Recording, path: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    laid_out = list(rows(list(FRESHNESS.panels)))
    figure = pyplot.figure(figsize=(15, 2.9 * len(laid_out)), layout="constrained")
    grid = figure.add_gridspec(len(laid_out), 1)
    figure.suptitle(
        f"PipelineRL / {FRESHNESS.title}: recipe {recording['recipe']}, {recording['actors']} actors, "
        "by the dashboard's queries to a real Prometheus",
        fontsize=12,
    )
    for number, row in enumerate(laid_out):
        cells = grid[number].subgridspec(1, len(row), width_ratios=[panel.width for panel in row])
        for cell, panel in zip(cells, row, strict=True):
            _draw_panel(figure.add_subplot(cell), panel, recording["panels"][panel.title], recording["step_s"])
    figure.savefig(path, dpi=80)


def _draw_panel(axes: Any, panel: Panel, curves: list[Curve], step_s: float) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left", weight="bold")
    axes.tick_params(labelsize=8)
    if panel.kind == "heatmap":
        _draw_heatmap(axes, curves, step_s)
        return
    for curve in curves:
        known = [(number * step_s / 60, value) for number, value in enumerate(curve["values"]) if value is not None]
        axes.plot(*zip(*known, strict=True), label=curve["legend"], linewidth=1.3)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.set_ylim(panel.low, panel.high)
    axes.grid(alpha=0.25)
    if curves:
        axes.legend(fontsize=7, loc="best", framealpha=0.7)


def bucket_names(edges: Sequence[str]) -> list[str]:
    """What the buckets hold whose inclusive upper edges these are, of whole numbers from 0 on. Pure."""
    numbers = [-1, *(int(float(edge)) for edge in edges if edge != "+Inf")]
    names = [f"{low + 1}" if high == low + 1 else f"{low + 1}–{high}" for low, high in pairwise(numbers)]
    return [*names, f"{numbers[-1] + 1}+"] if "+Inf" in edges else names


def _draw_heatmap(axes: Any, curves: list[Curve], step_s: float) -> None:
    """Cumulative counts by upper edge become one row for each bucket."""
    import numpy as np

    ordered = sorted(curves, key=lambda curve: float(curve["legend"].replace("+Inf", "inf")))
    cumulative = np.array([[value or 0.0 for value in curve["values"]] for curve in ordered])
    cells = np.diff(cumulative, axis=0, prepend=0.0)
    highest = max(np.flatnonzero(cells.max(axis=1) > 0).max(), 4) + 1
    minutes = np.arange(cells.shape[1] + 1) * step_s / 60
    shown = np.ma.masked_less_equal(cells[:highest], 0)
    mesh = axes.pcolormesh(minutes, np.arange(highest + 1), shown, cmap="viridis", vmin=0)
    axes.set_yticks(np.arange(highest) + 0.5, bucket_names([curve["legend"] for curve in ordered])[:highest])
    axes.set_ylabel("token lag, steps", fontsize=8)
    axes.set_xlabel("minutes", fontsize=8)
    axes.figure.colorbar(mesh, ax=axes, pad=0.01).set_label("tokens per second", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("draw", "record"), default="draw")
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as of pipelinerl run")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    given = parser.parse_args()
    if given.what == "record":
        further = [part for value in given.set for part in ("--set", value)]
        recording = record(given.recipe, given.actors, further, given.prometheus)
        RECORDING.write_text(json.dumps(recording, separators=(",", ":")) + "\n", encoding="utf-8")
    draw(json.loads(RECORDING.read_text(encoding="utf-8")), PICTURE)


if __name__ == "__main__":
    main()
