"""report.html of a run: one self-contained page out of the run directory's files. Needs no network to be read.

Model output is data in it, never markup: it stands in a JSON block without `<`, and the page sets it as text only.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.local.summary import jsonl_ends, kept_records, read_jsonl, read_summary, summary_from_metrics
from pipelinerl.page import REPORT_SCRIPTS, asset
from pipelinerl.page.data import report_data
from pipelinerl.run_folder import trainer_starts

SAMPLES_READ = 64
"""Of the first samples, and as many of the last: the page shows eight of each, and has a choice."""


def write_report(run_dir: Path) -> Path:
    """Writes `run_dir`/report.html and returns its path. Raises `FieldError` when the folder is not a run's."""
    report = run_dir / "report.html"
    report.write_text(report_html(read_run(run_dir)), encoding="utf-8")
    return report


def read_run(run_dir: Path) -> dict[str, Any]:
    """The page's data, from recipe.yaml, metrics.jsonl, samples.jsonl and, if it is there, summary.json."""
    from pipelinerl.config.load import load_recipe

    recipe_file = run_dir / "recipe.yaml"
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "there is no such folder"
        raise FieldError("RUN_DIR", str(run_dir), f"{what}; give the folder of a run")
    if not recipe_file.is_file():
        raise FieldError("RUN_DIR", str(run_dir), "has no recipe.yaml: give the folder of a run")
    recipe = load_recipe(recipe_file)
    records = kept_records(read_jsonl(run_dir / "metrics.jsonl"))
    summary = read_summary(run_dir / "summary.json") or {**summary_from_metrics(recipe, records)}
    samples = jsonl_ends(run_dir / "samples.jsonl", SAMPLES_READ)
    text = recipe_file.read_text(encoding="utf-8")
    data = report_data(run_dir.resolve().name, recipe.description, summary, records, samples, text)
    return {**data, "starts": trainer_starts(run_dir)}


def report_html(data: Mapping[str, Any]) -> str:
    """The page for `report_data`'s object."""
    return Template(asset("report.html")).substitute(
        title=html.escape(f"{data['run']} - PipelineRL"),
        css=asset("page.css"),
        data=script_json(data),
        scripts="".join(asset(name) for name in REPORT_SCRIPTS),
    )


def script_json(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a <script> element: nothing in it can end the element or start another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
