"""`pipelinerl compare`: what its page, its table and its rows say of runs, and that no run breaks it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import stat
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.commands.compare import (
    _POINTS,
    CURVES,
    MOST_PROBLEMS,
    MOST_RUNS,
    comparison,
    curve,
    differences,
    notes,
    read_run,
)
from pipelinerl.figures import FIGURES
from pipelinerl.page.data import asset
from pipelinerl.recipe.loading import recipe_from_data, recipe_yaml
from pipelinerl.run_summary import leaves
from tests.support.runs import Command
from tests.unit.test_report import EVIL, Tags, embedded, record

Accuracy = tuple[float, float, float]


def evaluation(version: int, **accuracies: Accuracy) -> dict[str, Any]:
    sets = {name: {"accuracy": dict(zip(("value", "low", "high"), one, strict=True))} for name, one in accuracies.items()}
    (mean, *_), *_ = accuracies.values()
    return {"version": version, "accuracy": mean, "lower_bound": 0.1, "unanswered": 0, "sets": sets}


def sample(version: int, prompt: str, completion: str = "c", **more: Any) -> dict[str, Any]:
    one = {"step": version, "version": version, "prompt": prompt, "completion": completion, "reward": 1.0, "heldout": False}
    return one | more


def run_in(
    folder: Path,
    steps: int = 3,
    summary: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> Path:
    """Write a run's folder. `changes`: to its recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {"name": "sums"}, **changes}
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe_from_data(data, "tiny")), encoding="utf-8")
    lines = [record(step, tokens_trained=100, sequences={"trained": 8 * step}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in samples or []), encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelinerl: Command) -> Command:
    """`pipelinerl compare ARGUMENTS...` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(pipelinerl, "compare")


# What it says


def test_only_fields_that_differ_are_shown_those_of_several_tasks_too(tmp_path: Path) -> None:
    tasks = [{"name": "one", "task": {"name": "sums"}}, {"name": "two", "task": {"name": "sums"}, "weight": 2}]
    first = read_run(run_in(tmp_path / "a", trainer={"learning_rate": 1e-4}), "a")
    second = read_run(run_in(tmp_path / "b", trainer={"learning_rate": 3e-4}), "b")
    assert differences([first, second]) == [("trainer.learning_rate", ["0.0001", "0.0003"])]
    assert differences([first, first]) == []
    several = read_run(run_in(tmp_path / "c", task=None, tasks=tasks), "c")
    shown = dict(differences([first, several]))
    assert (shown["tasks.1.weight"], shown["task.name"]) == (["-", "2.0"], ["sums", "-"])
    assert dict(leaves({"a": {"b": [], "c": {}}, "d": [{"e": 1}]}, in_lists=True)) == {"a.b": [], "a.c": {}, "d.0.e": 1}


def test_gpus_and_scaled_actors_count_as_differences(tmp_path: Path) -> None:
    first, second = (run_in(tmp_path / name) for name in "ab")
    (first / "placement.json").write_text('{"trainer": ["0"], "actors": [["1"], ["2", "3"]]}')
    (second / "scale.json").write_text('{"actors": 4}')
    (second / "placement.json").write_text('{"trainer": 3}')
    shown = dict(differences([read_run(one, one.name) for one in (first, second)]))
    assert shown == {"(GPUs of the trainer, and of each actor)": ["[1, 1, 2]", "-"], "(actors, scaled)": ["-", "4"]}


def test_another_reward_in_python_is_told_and_equal_data_at_another_place_is_not(tmp_path: Path) -> None:
    runs = []
    for name, reward, data in (("a", "return 1", "q,a"), ("b", "return 2", "q,a"), ("c", "return 1", "q,b")):
        questions = tmp_path / f"{name}.csv"
        questions.write_text(data)
        folder = run_in(tmp_path / name, task={"source": "jsonl", "path": str(questions), "name": "own"})
        (folder / "modules").mkdir()
        (folder / "modules" / "reward.py").write_text(reward)
        (folder / "modules" / "test_reward.py").write_text(name)
        runs.append(read_run(folder, name))
    assert [field for field, _ in differences(runs[:2])] == ["task.path", "modules/reward.py"]
    assert notes(runs[:2]) == ["The runs differ in modules/reward.py, so rewards and accuracies may not be comparable."]
    assert [field for field, _ in differences(runs[::2])] == ["task.path", "(content of task.path)"]
    assert notes(runs[::2]) == ["The runs differ in task.path, so rewards and accuracies may not be comparable."]
    for name in "ab":
        (tmp_path / f"{name}.csv").unlink()
    assert "task.path" in notes([read_run(tmp_path / name, name) for name in "ab"])[0], "the contents are unknown"


def test_overlapping_intervals_and_other_tasks_are_told_and_each_set_is_compared_with_itself(tmp_path: Path) -> None:
    low, near, high = (0.5, 0.4, 0.6), (0.58, 0.48, 0.68), (0.8, 0.7, 0.9)
    told = [{"heldout": [evaluation(1, sums=high), evaluation(3, **sets)]} for sets in
            ({"sums": low, "talks": low}, {"sums": near, "talks": high}, {"sums": high})]  # fmt: skip
    runs = [read_run(run_in(tmp_path / name, summary=one), name) for name, one in zip("abc", told, strict=True)]
    assert notes(runs) == [
        "Held-out accuracy, sums: the 95 % intervals of A and B overlap, so the difference may be chance.",
        "Held-out accuracy, talks: no 95 % intervals overlap, so chance hardly explains the difference.",
    ]
    shown = ["50.0% (40.0% to 60.0%), version 3", "58.0% (48.0% to 68.0%), version 3", "80.0% (70.0% to 90.0%), version 3"]
    talks = [shown[0], shown[2], "-"]
    assert comparison(runs)["results"][:2] == [("Held-out accuracy, sums", shown), ("Held-out accuracy, talks", talks)]
    same = "Held-out accuracy, sums: A and B have the same accuracy on 128 held-out problems."
    assert notes([runs[0], runs[0]])[0] == same
    assert notes([*runs[:2], runs[0]])[:2] == [
        same.replace("B have", "C have"),
        "Held-out accuracy, sums: the 95 % intervals of A and B; B and C overlap, so the difference may be chance.",
    ]
    other = run_in(tmp_path / "d", reward={"correct": 2.0}, task={"name": "words", "heldout_problems": 7})
    (other / "lineage.json").write_text('{"starts": [0, 2], "changes": {"2": ["trainer.steps: 9 → 100"]}}')
    assert notes([runs[2], read_run(other, "d")]) == [
        "The runs differ in task.name, reward.correct, so rewards and accuracies may not be comparable.",
        "The recipe of B changed at version 2: trainer.steps: 9 → 100.",
    ]


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        ({"interrupted": False, "heldout_reward_first": 0.125, "heldout_reward_last": 0.5}, "finished"),
        ({"interrupted": True}, "interrupted"),
        ({"interrupted": False, "error": "actor-0 died"}, "failed: actor-0 died"),
        (None, "ended without a summary"),
    ],
)
def test_results_are_those_of_the_records(tmp_path: Path, summary: dict[str, Any] | None, outcome: str) -> None:
    run = read_run(run_in(tmp_path / "run", summary=summary), "run")
    told = dict(run.results)
    doctor = told.pop("Doctor")
    assert told == {
        "Held-out reward": "0.125 -> 0.500" if outcome == "finished" else "-",
        "Train reward": "0.200 -> 0.200", "Optimizer steps": "3 of 100", "Seconds of training": "6.0",
        "Mean lag": "2.25", "Mean ESS": "0.900", "Tokens trained per second": "50", "Sequences trained": "24",
        "Outcome": outcome,
    }  # fmt: skip
    assert doctor == ("grave 1: The run failed" if "failed" in outcome else "nothing found")


def test_a_running_run_has_no_end_and_tells_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_in(
        tmp_path / "run", summary={"error": "of an earlier start", "heldout": [evaluation(1, sums=(0.1, 0.0, 0.2))]}
    )
    (folder / "lineage.json").write_text('{"starts": [0, 2]}')
    monkeypatch.setattr("pipelinerl.commands.compare.living_names", lambda _: ("trainer",))
    run = read_run(folder, "run")
    assert (run.results["Outcome"], run.accuracies) == ("running; 2 starts of the trainer", {})


def test_curves_are_thinned_with_their_last_step_and_an_accuracy_is_at_its_version(tmp_path: Path) -> None:
    last = evaluation(1000, sums=(0.7, 0.6, 0.8))
    run = read_run(
        run_in(tmp_path / "run", steps=1000, summary={"heldout": [evaluation(0, sums=(0.5, 0.4, 0.6)), last]}), "run"
    )
    reward = curve(run.rows, "reward_mean")
    assert _POINTS / 2 < len(reward) <= _POINTS + 1
    assert (reward[0], reward[-1]) == ([1, 2.0, 0.1], [1000, 2000.0, 100.0])
    assert curve(run.rows, "lag.mean")[0] == [1, 2.0, 1.0]
    assert curve(run.rows, "heldout_accuracy") == [[0, 0.0, 0.5], [1000, 2000.0, 0.7]]
    assert curve(run.rows, "entropy") == []


def test_samples_of_the_same_problem_stand_side_by_side_with_the_newest_version_and_held_out_ones_first(tmp_path: Path) -> None:
    common = [sample(version, f"p{number}") for version in (1, 3, 2) for number in range(MOST_PROBLEMS)]
    heldout = sample(3, "held", EVIL, heldout=True)
    first = run_in(tmp_path / "a", samples=[*common, heldout, sample(1, "alone")])
    second = run_in(tmp_path / "b", samples=[sample(1, "p1"), sample(0, "p2"), heldout])
    third = run_in(tmp_path / "c", samples=[sample(0, "p2")])
    found = comparison([read_run(one, one.name) for one in (first, second, third)])["problems"]
    shown = [[(run, one["prompt"], one["version"]) for run, one in problem] for problem in found]
    assert shown == [[(0, "p2", 3), (1, "p2", 0), (2, "p2", 0)], [(0, "held", 3), (1, "held", 3)], [(0, "p1", 3), (1, "p1", 1)]]
    fourth = run_in(tmp_path / "d", samples=[*common, heldout])
    many = comparison([read_run(one, one.name) for one in (first, fourth)])
    assert len(many["problems"]) == MOST_PROBLEMS


def test_the_rows_have_the_figures_names_and_an_evaluation_is_in_the_row_of_its_version(tmp_path: Path) -> None:
    summary = {"heldout": [evaluation(0, sums=(0.5, 0.4, 0.6)), evaluation(4, sums=(0.7, 0.6, 0.8))]}
    rows = read_run(run_in(tmp_path / "run", summary=summary), "run").rows
    assert [(row["step"], row["version"], row["seconds"]) for row in rows] == [
        (0, 0, 0.0), (1, 1, 2.0), (2, 2, 4.0), (3, 3, 6.0), (4, 4, None),
    ]  # fmt: skip
    assert [row.get("heldout_accuracy") for row in rows] == [0.5, None, None, None, 0.7]
    assert (rows[0]["heldout_sets.sums.accuracy.low"], rows[0]["heldout_accuracy_lower_bound"]) == (0.4, 0.1)
    figures = {"reward_mean": 0.1, "lag.max": 3, "sequences.trained": 8, "ess_by_lag.3-4": 0.5}
    assert figures.items() <= rows[1].items()
    known = {figure.key for figure in FIGURES} | {"seconds", "version"}
    assert {name.partition(".")[0] for row in rows for name in row} <= known
    assert all(isinstance(value, int | float | None) for row in rows for value in row.values())


# The command


def test_the_page_holds_model_output_as_text_and_its_owner_alone_reads_it(tmp_path: Path, compared: Command) -> None:
    for name in ("<b>$a", "b"):
        run_in(tmp_path / name, samples=[sample(1, EVIL, EVIL)], summary={"error": f"\ud800\x1b[31m{EVIL}"})
    code, said, _ = compared("<b>$a", "b")
    assert (code, said.splitlines()[-1], "\x1b" in said, "\ud800" in said) == (0, "page: compare.html", False, False)
    page = (tmp_path / "compare.html").read_text()
    tags = Tags()
    tags.feed(page)
    names = [name for name, _ in tags.seen]
    assert (names.count("script"), "img" in names, "b" in names) == (2, False, False)
    assert embedded(page)["runs"] == ["<b>$a", "b"]
    assert embedded(page)["problems"][0][0][1]["completion"] == EVIL
    assert stat.S_IMODE((tmp_path / "compare.html").stat().st_mode) == 0o600
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|\bimport\(", page)


DAMAGE = [
    "nonsense", "null", "[1]", '{"step": "x"}',
    '{"step": 7, "ess": "x", "lag": [1], "time_s": {"a": 1}}', '{"step": 3, "ended_by_length": {"16": 3}}',
    '{"step": 8, "reward_mean": 1e999, "time_s": 1e400}', f'{{"step": 9, "reward_mean": 1{"0" * 400}}}',
    '{"step": 10, "heldout_accuracy": 0.5, "heldout_sets": [3], "weight_update": 3}',
    '{"step": 12, "sequences": [1]}', f'{{"step": {"9" * 5000}}}', "[" * 100_000,
    '{"step": 11, "heldout_accuracy": "x", "heldout_version": [1], "heldout_sets": {"a": 3}}',
    '{"step": [1], "version": 5, "prompt": "p", "completion": [1], "spans": [3], "reward": 1e999, "heldout": {}}',
    '{"step": 1, "version": 9, "prompt": "p", "heldout": 1, "tokens": 3, "spans": "ab", "branches": [4], "terms": [1]}',
    '{"step": 4, "loss":',
]  # fmt: skip


def test_damaged_records_are_left_out_and_break_nothing(tmp_path: Path, compared: Command) -> None:
    whole = run_in(tmp_path / "whole", samples=[sample(1, "p")])
    broken = run_in(tmp_path / "broken", samples=[sample(1, "p"), sample(2, "p", reward=float("inf"))])
    for name in ("metrics.jsonl", "samples.jsonl", "metrics-undone.jsonl", "ledger.jsonl"):
        with (broken / name).open("a", encoding="utf-8") as file:
            file.write("\n".join(DAMAGE))
    (broken / "summary.json").write_text('{"heldout": 3, "sequences": [], "sequence_reasons": {}}')
    for name, text in (("lineage", '{"changes": {"5": 7}}'), ("placement", "{}"), ("scale", "3")):
        (broken / f"{name}.json").write_text(text)
    empty = run_in(tmp_path / "empty", steps=0)
    (empty / "lineage.json").write_text('{"changes": [1]}')
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(broken / "recipe.yaml", bare)
    code, _, errors = compared(str(whole), str(broken), str(empty), "bare", "--csv", "rows.csv", "--out", "page.html")
    assert (code, [line for line in errors.splitlines() if "rule" not in line]) == (0, [])
    shown = embedded((tmp_path / "page.html").read_text())
    assert dict(shown["results"])["Optimizer steps"] == ["3 of 100", "11 of 100", "0 of 100", "0 of 100"]
    assert [len(one) for one in shown["curves"]["reward_mean"]] == [3, 2, 0, 0], "of steps 2 and 3"
    assert [run for run, _ in shown["problems"][0]] == [0, 1]
    assert [row["run"] for row in csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text()))].count("whole") == 3


def test_runs_of_one_name_are_told_apart_and_rows_go_to_the_output(tmp_path: Path, compared: Command) -> None:
    for name in ("x/run", "y/run"):
        run_in(tmp_path / name)
    code, said, errors = compared("x/run", "y/run", "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(said)))
    assert (code, errors, [row["run"] for row in rows]) == (0, "", ["x/run"] * 3 + ["y/run"] * 3)
    assert (rows[1]["step"], rows[1]["seconds"]) == ("2", "4.0")
    assert not (tmp_path / "compare.html").exists()
    code, said, errors = compared("x/run", "y/run", "--csv", "-", "--out", "page.html")
    assert (code, said.splitlines()[0].split(",")[0], errors.splitlines()[-1]) == (0, "run", "page: page.html")
    code, said, errors = compared("x/run", "y/run", "--out", "-")
    assert (code, said.rstrip().endswith("</html>"), errors.splitlines()[-1]) == (0, True, "page: -")
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert compared("x/run", "y/run", "--csv", "pipe")[0] == 0
    assert (os.read(reader, 4), stat.S_ISFIFO(os.stat("pipe").st_mode)) == (b"run,", True), "a pipe is not replaced by a file"
    os.close(reader)


def test_open_shows_the_page(tmp_path: Path, compared: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert compared(str(run_in(tmp_path / "a")), str(run_in(tmp_path / "b")), "--csv", "rows.csv", "--open")[0] == 0
    assert opened == [(tmp_path / "compare.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a"], "RUN = '1 given': name 2 to 12 runs"),
        ([*map(str, range(MOST_RUNS + 1))], "RUN = '13 given': name 2 to 12 runs for a page, or 2 or more for --csv alone"),
        (["a", "b", "../there/a"], "RUN = '../there/a': is given twice; name each run once"),
        (["a", "plain"], "RUN = 'plain': has no recipe.yaml; give the folder of a run"),
        (["a", "none"], "RUN = 'none': there is no such folder"),
        (["a", "file"], "RUN = 'file': is a file"),
        (["a", "b", "--out", "plain"], "--out = 'plain': cannot be written: Is a directory; give another file"),
        (["a", "b", "--out", "."], "--out = '.': cannot be written: Is a directory; give another file"),
        (["a", "b", "--csv", "none/rows.csv"], "--csv = 'none/rows.csv': cannot be written: No such file or directory"),
    ],
)
def test_mistakes_name_the_value_and_what_to_do(
    tmp_path: Path, compared: Command, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    there = tmp_path / "there"
    for name in ("a", "b"):
        run_in(there / name)
    (there / "plain").mkdir()
    (there / "file").touch()
    monkeypatch.chdir(there)
    code, said, errors = compared(*arguments)
    assert (code, said) == (2, "")
    assert errors.startswith(f"pipelinerl: {problem}")


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_every_curve_has_a_title_and_no_two_of_twelve_runs_look_the_same() -> None:
    scripts = "".join(asset(name) for name in ("charts.js", "views.js", "comparison.js"))
    looks = f"Array.from({{length: {MOST_RUNS}}}, (_, i) => PrlComparison.look(i))"
    captions = [
        f"PrlComparison.caption({{{figure}: [new Array({points})]}})"
        for figure, points in (("ess", 59), ("heldout_accuracy", 60), ("ess", 60))
    ]
    told = f"{scripts}; console.log(JSON.stringify([PrlComparison.charts, {looks}, [{', '.join(captions)}]]))"
    done = subprocess.run(["node", "-e", told], capture_output=True, text=True, timeout=60, check=True)
    charts, found, texts = json.loads(done.stdout)
    assert charts == [*CURVES]
    assert ["moving means" in text for text in texts] == [False, False, True], "fewer than 60 points are drawn as they are"
    assert len({json.dumps(one) for one in found}) == MOST_RUNS
    assert all(one["color"] != other["color"] and one["dash"] != other["dash"] for one, other in pairwise(found))
