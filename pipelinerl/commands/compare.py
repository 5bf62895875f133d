"""`pipelinerl compare RUN RUN ...`: compare runs on a page, or write their figures as CSV. It only reads the runs' folders.

Runs may differ in task and length, and their records may be damaged: a value that is not a finite number counts as missing.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import operator
import sys
import webbrowser
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any

from pipelinerl.commands.run_folder import one_line, table
from pipelinerl.doctor.run_records import RunRecords, number_at, records_in
from pipelinerl.doctor.runs import findings_about
from pipelinerl.errors import FieldError, as_unicode
from pipelinerl.figures import FIGURES
from pipelinerl.local.ending import report_html, reward_ends
from pipelinerl.local.processes import living_names
from pipelinerl.local.progress import number, percent
from pipelinerl.page.data import COMPARISON_SCRIPTS, Record, shown_sample
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.run_dir import RunDir, read_json, recipe_changes_of, trainer_starts, write_whole
from pipelinerl.run_summary import HELDOUT_KEYS, RunTotals, leaves, summary_from_metrics

MOST_RUNS, MOST_PROBLEMS, _POINTS, _MOST_TEXT, _CELL, _ROWS = 12, 8, 300, 2000, 36, 20
"""Limits of the page: runs (colours and dashes can tell 12 apart), problems, points of a curve, and characters of a field.
Limits of the terminal: characters of a cell, and number of differing fields."""
CURVES = ("heldout_accuracy", "reward_mean", "completion_tokens_mean", "lag.mean", "ess", "entropy", "grad_norm")
"""Figures that get a chart. `a.b` stands for key `b` of the object `a` in metrics.jsonl."""
_TOTALS = {"Sequences trained": ("sequences.trained", 0), "Mean lag": ("lag.mean", 2), "Mean ESS": ("ess.mean", 3)}
"""Key in a summary and number of decimals, by label."""
_MEASURES = ("modules/", "task.", "tasks", "reward.", "evaluation.sets", "evaluation.temperature")
"""Prefixes of names in `ComparedRun.fields`. If fields with such names differ, rewards and accuracies are hardly comparable."""
_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class ComparedRun:
    """A run, read from its folder. `fields`: recipe fields and other facts, by dotted name. `rows`: see `rows_of`. `results`:
    texts by label. `accuracies`: [value, low, high] of the last evaluation, by label. `changes`: see `recipe_changes_of`."""

    name: str
    fields: Record
    rows: Sequence[dict[str, Any]]
    results: Mapping[str, str]
    accuracies: Mapping[str, Sequence[float]]
    samples: Sequence[Record]
    changes: Sequence[str]


def compare(args: argparse.Namespace) -> int:
    """Write the page, the CSV, or both. Raises `FieldError` for fewer than two runs, a repeated run, or too many for a page."""
    folders: dict[Path, Path] = {}
    for folder in args.runs:
        if folders.setdefault(folder.resolve(), folder) is not folder:
            raise FieldError("RUN", str(folder), "is given twice; name each run once")
    page = args.out or (None if args.csv and not args.open else Path("compare.html"))
    if len(folders) < 2 or (page and len(folders) > MOST_RUNS):
        raise FieldError("RUN", f"{len(folders)} given", f"name 2 to {MOST_RUNS} runs for a page, or 2 or more for --csv alone")
    names = Counter(path.name for path in folders)
    runs = [read_run(given, path.name if names[path.name] == 1 else str(given)) for path, given in folders.items()]
    if args.csv:
        lines, text = [{"run": run.name} | row for run in runs for row in run.rows], io.StringIO()
        writer = csv.DictWriter(text, [*dict.fromkeys(name for line in lines for name in line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        _write(args.csv, "--csv", as_unicode(text.getvalue()))
    if page:
        compared = comparison(runs)
        _write(page, "--out", report_html(compared, "PrlComparison.draw", COMPARISON_SCRIPTS))
        print(f"{_as_text(compared)}\n\npage: {page}", file=sys.stderr if "-" in (str(args.csv), str(page)) else sys.stdout)
        if args.open:
            webbrowser.open(page.resolve().as_uri())
    return 0


def read_run(folder: Path, name: str) -> ComparedRun:
    """Return the run in a folder. Raises `UserError` if the folder is not a run's, or if the recipe there cannot be read."""
    run_dir = RunDir(folder, "")
    try:
        records = records_in(folder, recipe_of_run(run_dir.recipe), is_running=bool(living_names(run_dir)))
    except OSError as error:
        raise FieldError("RUN", str(folder), f"cannot be read ({error}); make its files readable") from error
    fields, steps = dict(leaves(records.recipe.model_dump(mode="json"), in_lists=True)), readable_steps(records)
    fields |= _facts(run_dir, fields)
    known = (one for one in records.evaluations if isinstance(one, Mapping) and isinstance(one.get("version"), int))
    evaluations = {one["version"]: one for one in known}
    rows, version, starts = rows_of(steps, evaluations), max(evaluations, default=0), len(trainer_starts(folder))
    sets, keys = evaluations.get(version, {}).get("sets"), ("accuracy.value", "accuracy.low", "accuracy.high")
    items = sets.items() if isinstance(sets, Mapping) else ()
    read = {name: [end for key in keys if (end := number_at(one, key)) is not None] for name, one in items}
    accuracies = {f"Held-out accuracy, {name}": ends for name, ends in read.items() if len(ends) == len(keys)}
    shown = {label: [percent(one) for one in ends] for label, ends in accuracies.items()}
    results = {label: f"{one} ({low} to {high}), version {version}" for label, (one, low, high) in shown.items()}
    results |= results_of(records, steps)
    results["Outcome"] += f"; {starts} starts of the trainer" if starts > 1 else ""
    return ComparedRun(name, fields, rows, results, accuracies, records.samples, recipe_changes_of(folder))


def _facts(run_dir: RunDir, fields: Record) -> dict[str, Any]:
    """Return facts outside the recipe that may explain a difference, by name: hashes of data files and modules, for example."""
    placement, scaled = read_json(run_dir.placement), read_json(run_dir.scale)
    facts = {"(actors, scaled)": scaled["actors"]} if "actors" in scaled else {}
    with suppress(*_DAMAGED):
        facts["(GPUs of the trainer, and of each actor)"] = [len(placement["trainer"]), *map(len, placement["actors"])]
    files = {f"(content of {name})": Path(path) for name, path in fields.items() if name.endswith("task.path") and path}
    files |= {str(path.relative_to(run_dir.path)): path for path in sorted(run_dir.modules.rglob("*.py"))}
    for name, path in files.items():
        if path.is_file() and not path.name.startswith("test_"):
            with suppress(OSError), path.open("rb") as file:
                facts[name] = f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    return facts


def readable_steps(records: RunRecords) -> dict[int, Record]:
    """Return the records of steps by their number, without damaged ones."""
    steps: dict[int, Record] = {}
    for line in records.steps:
        with suppress(*_DAMAGED):
            totals, _ = RunTotals(), dict(line.get("sequences") or {})
            totals.add_step(line)
            totals.add_events(line)
            steps[operator.index(line["step"])] = line
    return dict(sorted(steps.items()))


def results_of(records: RunRecords, steps: Mapping[int, Record]) -> dict[str, str]:
    summary, found = summary_from_metrics(records.recipe, [dict(one) for one in steps.values()]), findings_about(records)
    counts = ", ".join(f"{gravity} {count}" for gravity, count in Counter(one.gravity for one in found).items())
    wall_s = max((number_at(one, "time_s") or 0.0 for one in steps.values()), default=0.0) or None
    error, interrupted = records.summary.get("error"), records.summary.get("interrupted")
    ended = f"failed: {error}" if error else "interrupted" if interrupted else "finished"
    return {
        "Optimizer steps": f"{number(max(steps, default=0))} of {number(records.recipe.trainer.steps)}",
        "Held-out reward": reward_ends(records.summary or summary, "heldout_reward") or "-",
        "Train reward": reward_ends(summary, "reward") or "-",
        "Seconds of training": number(wall_s, 1),
        "Tokens trained per second": number(wall_s and summary["tokens_trained"] / wall_s),
        **{label: number(number_at(summary, key), digits) for label, (key, digits) in _TOTALS.items()},
        "Doctor": f"{counts}: {found[0].meaning}" if found else "nothing found",
        "Outcome": "running" if records.is_running else ended if records.summary else "ended without a summary",
    }


def rows_of(steps: Mapping[int, Record], evaluations: Mapping[int, Record]) -> list[dict[str, Any]]:
    """Return a row for each version: `step`, `seconds`, `version`, and each numeric figure by name (`a.b`: key b of figure a).
    An evaluation is in the row of the version that it measured."""
    keys, rows = [one.key for one in FIGURES if one.key not in ("step", "policy_version", "time_s", "heldout_version")], []
    for version in sorted(steps.keys() | evaluations.keys()):
        measured = {f"heldout_{key}": evaluations.get(version, {}).get(name) for name, key in HELDOUT_KEYS.items()}
        told = {**steps.get(version, {}), **measured}
        figures = leaves({key: told.get(key) for key in keys}, in_lists=True)
        numbers = {name: one for name, one in figures if isinstance(one, int | float) and abs(one) <= sys.float_info.max}
        seconds = number_at(told, "time_s") if version else 0.0
        rows.append({"step": version, "seconds": seconds, "version": version, **numbers})
    return rows


def comparison(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the object that comparison.js draws."""
    curves = {key: [curve(run.rows, key) for run in runs] for key in CURVES}
    labels = dict.fromkeys([*(label for run in runs for label in run.accuracies), *runs[0].results])
    results = [(label, [run.results.get(label, "-") for run in runs]) for label in labels]
    tables = {"differences": differences(runs), "results": results, "notes": notes(runs)}
    names = [run.name for run in runs]
    return {"run": f"{len(runs)} runs", "runs": names, **tables, "curves": curves, "problems": problems(runs)}


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the fields and facts that are not equal in all runs, each with its value in each run."""
    told = [
        {name: one if isinstance(one, str) and one else json.dumps(one, ensure_ascii=False) for name, one in run.fields.items()}
        for run in runs
    ]
    rows = [(name, [one.get(name, "-") for one in told]) for name in dict.fromkeys(name for one in told for name in one)]
    return [(name, [text[:_MOST_TEXT] for text in texts]) for name, texts in rows if len(set(texts)) > 1]


def notes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return remarks on the comparison: tasks that differ, intervals that do or do not overlap, recipes that changed."""
    fields = [field for field, _ in differences(runs) if field.startswith(_MEASURES) and "heldout_problems" not in field]
    differing = [one for one in fields if len({run.fields.get(f"(content of {one})", run.name) for run in runs}) > 1]
    named, lettered = ", ".join(differing[:4]) + (", …" if differing[4:] else ""), list(zip(LETTERS, runs, strict=False))
    told = [f"The runs differ in {named}, so rewards and accuracies may not be comparable."] if differing else []
    for label in dict.fromkeys(label for run in runs for label in run.accuracies):
        pairs = list(combinations([(letter, run.accuracies[label]) for letter, run in lettered if label in run.accuracies], 2))
        equal = [f"{a} and {b}" for (a, one), (b, other) in pairs if one == other]
        overlap = [f"{a} and {b}" for (a, x), (b, y) in pairs if x != y and x[1] <= y[2] and y[1] <= x[2]]
        if equal:
            known = {run.fields.get("task.name"): run.fields.get("task.heldout_problems") for run in runs}
            count = known.get(label.removeprefix("Held-out accuracy, "), "all")
            told.append(f"{label}: {'; '.join(equal)} have the same accuracy on {count} held-out problems.")
        if overlap:
            told.append(f"{label}: the 95 % intervals of {'; '.join(overlap)} overlap, so the difference may be chance.")
        elif pairs and not equal:
            told.append(f"{label}: no 95 % intervals overlap, so chance hardly explains the difference.")
    return told + [f"The recipe of {letter} changed at {change}." for letter, run in lettered for change in run.changes]


def curve(rows: Sequence[dict[str, Any]], key: str) -> list[list[float]]:
    """Return [step, seconds, value] of at most `_POINTS` + 1 rows that have `key`: every k-th one, and the last one."""
    known = (row for row in rows if key in row and row["seconds"] is not None)
    points = [[row["step"], round(row["seconds"], 1), float(f"{row[key]:.4g}")] for row in known]
    return points[: -1 : len(points) // _POINTS + 1] + points[-1:]


def problems(runs: Sequence[ComparedRun]) -> list[list[tuple[int, dict[str, Any]]]]:
    """Return up to `MOST_PROBLEMS` prompts that several runs recorded, each as pairs of a run's position in `runs` and the
    run's newest sample of this prompt. Prompts that more runs share come first, and among equals the held-out ones."""
    by_prompt: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for position, run in enumerate(runs):
        for sample in run.samples:
            with suppress(*_DAMAGED):
                known, shown = by_prompt[sample["prompt"]], shown_sample(sample)
                if shown["version"] >= known.get(position, shown)["version"]:
                    known[position] = shown
    shared = [found for found in by_prompt.values() if len(found) > 1]
    shared.sort(key=lambda found: (-len(found), not any(one["heldout"] for one in found.values())))
    return [sorted(found.items()) for found in shared[:MOST_PROBLEMS]]


def _as_text(compared: Mapping[str, Any]) -> str:
    """Return the comparison for a terminal: names, the first differing fields, results, and notes."""
    names, fields = compared["runs"], compared["differences"]
    letters, blank = LETTERS[: len(names)], [""] * len(names)
    more = [(f"({len(fields) - _ROWS} more fields)", blank)] if len(fields) > _ROWS else []
    rows = [("", [*letters]), *fields[:_ROWS], *more, ("", blank), *compared["results"]]
    cells = table([tuple(one_line(cell, _CELL) for cell in (label, *texts)) for label, texts in rows])
    named = (f"{letter}  {one_line(name, 100)}" for letter, name in zip(letters, names, strict=True))
    return as_unicode("\n".join([*named, "", cells, "", *(one_line(note, 500) for note in compared["notes"])]))


def _write(path: Path, option: str, text: str) -> None:
    """Write a file that only its owner can read. A device or pipe, such as /dev/null, is written to and not replaced."""
    if str(path) in ("-", "/dev/stdout"):
        sys.stdout.write(text)
        return
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path, text, mode=0o600)
    except OSError as error:
        raise FieldError(option, str(path), f"cannot be written: {error.strerror}; give another file") from error
