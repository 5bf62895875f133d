"""The recorded picture of the Freshness dashboard: what is kept of Prometheus' answers, and where panels stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.freshness_dashboard import PICTURE, RECORDING, answered, bucket_names, draw, rows
from deploy.dashboards.freshness import FRESHNESS
from deploy.dashboards.panels import Panel, Query


class Answering:
    """Stands for a Prometheus: one series, whatever is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        self.asked.append(f"{expression} from {start_s} to {end_s} by {step_s}")
        return [{"metric": {"actor": "a"}, "values": [[100.0, "0.123456"], [110.0, "2"]]}]


def panel(width: int = 8) -> Panel:
    queries = (Query('rate(x{run=~"$run", namespace=~"$namespace"}[$window])', "{{actor}} {{gone}}"),)
    return Panel("t", "s", "g", "b", queries, width=width)


def test_a_panel_is_asked_as_grafana_would_and_kept_on_a_grid_of_times() -> None:
    server = Answering()
    curves = answered(panel(), server, 100.0, 5.0, 4)  # type: ignore[arg-type]
    assert server.asked == ['rate(x{run=~".*", namespace=~".*"}[8s]) from 100.0 to 115.0 by 5.0']
    assert curves == [{"legend": "a", "values": [0.1235, None, 2.0, None]}]


def test_panels_fill_rows_of_24_cells() -> None:
    laid_out = list(rows([panel(24), panel(12), panel(12), panel(8), panel(8), panel(8), panel(8)]))
    assert [[one.width for one in row] for row in laid_out] == [[24], [12, 12], [8, 8, 8], [8]]


def test_buckets_are_called_by_the_lags_they_hold() -> None:
    assert bucket_names(["0.0", "1.0", "2.0", "4.0", "+Inf"]) == ["0", "1", "2", "3–4", "5+"]


def test_the_recording_has_every_panel_and_makes_a_picture(tmp_path: Path) -> None:
    recording = json.loads(RECORDING.read_text(encoding="utf-8"))
    assert list(recording["panels"]) == [one.title for one in FRESHNESS.panels]
    assert all(recording["panels"].values())
    draw(recording, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    assert PICTURE.exists()
