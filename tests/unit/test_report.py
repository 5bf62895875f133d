"""report.html and `pipelinerl compare`: what they say of runs, that model output stays text, and that no run breaks them."""

import csv
import html.parser
import io
import json
import os
import re
import shutil
import stat
import subprocess
import time
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from renderers.base import build_trajectory_step

from pipelinerl.commands.compare import _POINTS, comparison, curve, differences, notes, read_run
from pipelinerl.doctor.run_records import YOUNG_S
from pipelinerl.errors import FieldError
from pipelinerl.figures import ON_PAGE
from pipelinerl.local.ending import report_html, write_report
from pipelinerl.page.data import COMPARISON_SCRIPTS, LIVE_ASSETS, REPORT_SCRIPTS, asset, report_data
from pipelinerl.recipe.loading import recipe_from_data, recipe_yaml
from pipelinerl.run_summary import jsonl_ends
from services.actor.episodes.formats import FamilyFormat
from tests.support.runs import Command
from tests.unit.test_episode_tokens import CALLS, FAMILIES, LOOK_UP, format_of
from tests.unit.test_resumable import process

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--\u2028 & {{x}} $data \ud800"


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "time_s": 2.0 * step, "reward_mean": 0.1 * step, "ess": 0.9, "ess_by_lag": {"0": 1.0, "3-4": 0.5},
        "lag": {"mean": 1.0, "p95": 2, "max": 3}, "lag_histogram": {"0": 10, "3": 30}, "loss": 1.0,
        "ended_by_length": {"16": [3, 0], "32": [3, 1]}, **more,
    }  # fmt: skip


def test_the_views_draw_figures_that_the_pages_get() -> None:
    drawn = set(re.findall(r"pick\(r, axis, \(one\) => \(*one\.(\w+)", asset("views.js")))
    assert len(drawn) > 10
    assert drawn - set(ON_PAGE) == set()


def sample(step: int, prompt: str = "p", completion: str = "c", **more: Any) -> dict[str, Any]:
    return {
        "step": step, "version": step, "prompt": prompt, "completion": completion, "reward": 1.0,
        "spans": [[step, 0, 4], [step + 1, 4, 9]], "heldout": False, **more,
    }  # fmt: skip


def data(records: list[dict[str, Any]], samples: list[dict[str, Any]], **summary: Any) -> dict[str, Any]:
    return report_data("tiny-run", "a run", summary, records, samples, "name: tiny\n")


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))


Accuracy = tuple[float, float, float]


def evaluation(version: int, **accuracies: Accuracy) -> dict[str, Any]:
    sets = {name: {"accuracy": dict(zip(("value", "low", "high"), one, strict=True))} for name, one in accuracies.items()}
    (mean, *_), *_ = accuracies.values()
    return {"version": version, "accuracy": mean, "lower_bound": 0.1, "unanswered": 0, "sets": sets}


def run_in(folder: Path, steps: int = 3, summary: Any = None, samples: Sequence[dict[str, Any]] = (), **changes: Any) -> Path:
    """Write a run's folder. `changes`: to its recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {"name": "sums"}, **changes}
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe_from_data(data, "tiny")), encoding="utf-8")
    lines = [record(step, tokens_trained=100, sequences={"trained": 8 * step}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in samples), encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelinerl: Command) -> Command:
    """`pipelinerl compare ARGUMENTS...` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(pipelinerl, "compare")


# The report


def test_heldout_stands_at_the_version_it_measured_the_last_one_included() -> None:
    evaluations = [{"version": version, "accuracy": 0.4 + 0.1 * version, "lower_bound": 0.1} for version in (0, 2, 3)]
    shown = data([record(1), record(2), record(3)], [], heldout=evaluations)
    assert shown["heldout"] == [
        {"step": 0, "time_s": 0.0, "accuracy": 0.4, "lower_bound": 0.1, "sets": {}},
        {"step": 2, "time_s": 4.0, "accuracy": pytest.approx(0.6), "lower_bound": 0.1, "sets": {}},
        {"step": 3, "time_s": 6.0, "accuracy": pytest.approx(0.7), "lower_bound": 0.1, "sets": {}},
    ]


def test_of_an_answer_or_an_episode_so_many_branches_turns_characters_and_tokens_are_shown() -> None:
    pieces = ["word "] * 1000
    long = {"completion": "".join(pieces), "tokens": pieces, "weights": [1.0] * 1000, "spans": [[1, 600, 1200]]}
    shown = data([], [sample(1, **long)])["samples"]["early"][0]
    assert (len(shown["tokens"]), len(shown["weights"]), shown["num_tokens"]) == (800, 800, 1200)
    assert shown["completion"] == "".join(shown["tokens"]) + " … (1000 more characters)"
    turn = {"role": "assistant", "start": 0, "end": 400, "text": "word " * 400, "tokens": ["word "] * 400, "weights": None}
    branch = {"prompt": "x" * 5000, "spans": [[0, 0, 400]], "parts": [turn] * 40}
    shown = data([], [sample(1, branches=[branch] * 6)])["samples"]["early"][0]["branches"]
    assert [(len(one["parts"]), one["num_parts"], len(one["prompt"]) < 4100) for one in shown] == [(32, 40, True)] * 4
    part = shown[0]["parts"][0]
    assert (len(part["tokens"]), part["weights"], part["text"][1490:]) == (300, None, "word word  … (500 more characters)")


def test_model_output_cannot_leave_its_json_block_and_the_page_needs_nothing_from_outside() -> None:
    shown = data([record(1, completion=EVIL)], [sample(1, prompt=EVIL, completion=EVIL)], error=EVIL)
    page = report_html({**shown, "run": "<b>$title"})
    page.encode("utf-8")
    tags = Tags()
    tags.feed(page)
    assert [name for name, _ in tags.seen].count("script") == 2
    assert "img" not in [name for name, _ in tags.seen]
    assert embedded(page)["samples"]["early"][0]["completion"] == EVIL
    assert "<title>&lt;b&gt;$title - PipelineRL</title>" in page
    assert embedded(page)["run"] == "<b>$title"
    outside = [attributes.get(key) for _, attributes in tags.seen for key in ("src", "href") if attributes.get(key)]
    assert outside == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|\bimport\(", page)


def test_scripts_never_set_html_and_get_nothing_that_is_no_json() -> None:
    for name in {*REPORT_SCRIPTS, *COMPARISON_SCRIPTS, *LIVE_ASSETS} - {"page.css"}:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", asset(name)), name
    page = report_html({"run": "x", "loss": float("nan"), "text": "</script>"})
    assert '{"run":"x","loss":null,"text":"\\u003c/script\\u003e"}' in page


def test_a_report_of_a_run_that_still_goes_on_and_of_one_without_a_single_step(tmp_path: Path) -> None:
    shown = embedded(write_report(run_in(tmp_path, steps=5)).read_text())
    assert (shown["run"], shown["summary"]["steps"]) == (tmp_path.name, 5)
    assert shown["recipe"] == (tmp_path / "recipe.yaml").read_text()
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).unlink()
    (tmp_path / "summary.json").unlink(missing_ok=True)

    def found() -> list[str]:
        return [one["id"] for one in embedded(write_report(tmp_path).read_text())["findings"]]

    assert found() == [], "it began just now"
    began = time.time() - YOUNG_S - 60
    os.utime(tmp_path / "recipe.yaml", (began, began))
    assert found() == ["run-failed"]
    with process(RECIPE=str(tmp_path / "recipe.yaml")) as trainer:
        (tmp_path / "pids.json").write_text(json.dumps({"trainer": trainer}))
        assert found() == [], "its trainer lives"
    (tmp_path / "pids.json").unlink()
    (tmp_path / "summary.json").write_text('{"error": "actor-0 died"}')
    bare = embedded(write_report(tmp_path).read_text())
    (finding, *_) = bare["findings"]
    assert (bare["records"], finding["id"], finding["evidence"]) == ([], "run-failed", "actor-0 died")


def test_of_a_long_runs_samples_the_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100_000)) + '{"step": 1', "utf-8")
    tracemalloc.start()
    found = [one["step"] for one in jsonl_ends(path, 3)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [0, 1, 2, 99_998, 99_999]
    assert most < path.stat().st_size / 4, "the file is not held as a whole"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)), "utf-8")
    assert [one["step"] for one in jsonl_ends(path, 3)] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_real_browser_draws_it(tmp_path: Path) -> None:
    evil = EVIL.replace("\ud800", "")
    pieces = {"tokens": [evil[:7], evil[7:30], evil[30:]], "weights": [1.0, 3.0, None], "spans": [[1, 0, 2], [2, 2, 3]]}
    earned = {"terms": {"answer": 0.5}, "metrics": {"said": 3.0}, "reference": 42, "answer": "41", "reason": "one too few"}
    samples = [sample(step, completion=evil, **(pieces | earned if step == 5 else {})) for step in range(1, 6)]
    report = write_report(run_in(tmp_path, steps=5, samples=samples))
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,2000", "--dump-dom", report.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = dom[dom.index("<main") : dom.index('<script type="application/json"')]
    tags = Tags()
    tags.feed(body)
    names = [name for name, _ in tags.seen]
    assert (names.count("img"), names.count("script"), names.count("svg") > 5) == (0, 0, True)
    assert body.count("&lt;img src=x onerror=alert(2)&gt;") >= 3
    notes = re.findall(r'<div class="note">([^<]+)</div>', body)
    assert notes[-5:] == ["answer 0.5", "said 3", "answer: 41", "reference: 42", "one too few"]
    assert "Token lag, whole run: 0 25%, 1 0%, 2 0%, 3 75%" in body
    tokens = [attributes for name, attributes in tags.seen if "token" in (attributes.get("class") or "").split()]
    assert [(one["data-index"], one.get("data-version")) for one in tokens] == [("0", "v1"), ("1", None), ("2", "v2")]
    assert ["far" in (one["class"] or "") for one in tokens] == [False, True, False]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("PrlCharts.scales.extent([2e-9])", [0, 4e-9]),  # one point: an axis from 0, not one around it
        ("PrlCharts.scales.extent([1], undefined, 1)", [0.9, 1]),
        ("PrlCharts.scales.across([7], 900).marks", [7]),
        ("PrlCharts.scales.across([0, 10], 400).marks", [0, 5, 10]),  # no step 2.5
        ("PrlCharts.scales.spreadEnds([[9, 50], [9, 52], [99, 51]], 90)", [50, 62, 51]),  # only neighbours are spread
        ("PrlCharts.scales.held([[2, 5], [4, 7]], [1, 4, 3, 2, 5]).flat()", [2, 5, 3, 5, 4, 7]),
        ("PrlFlow.scales.heights([997, 1, 2], 120, 10)", [94, 3, 3]),  # what is small is seen all the same
        ("PrlFlow.scales.spread([20, 22, 90], 30, 10, 100)", [20, 50, 90]),
        ("PrlFlow.scales.discrepancy({issued: 10, trained: 4, in_flight: 3, dropped_stale: 1, failed: 2})", 0),
    ],
)
def test_axes_and_the_bands_and_labels_of_the_ledger(expression: str, value: object) -> None:
    assert in_node("flow.js", expression) == pytest.approx(value)


def in_node(name: str, expression: str) -> Any:
    """What it is where the script `name` is loaded."""
    script = f"{asset('charts.js')}{asset(name)}; console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_whose_words_are_observed_and_what_is_called_is_read_as_each_chat_format_writes_it() -> None:
    call = {"type": "function", "id": "functions.look_up:0", "function": {"name": "look_up", "arguments": {"word": "ab"}}}
    asked: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin."}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = [*asked, said, {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": "4 2"}]
    texts: dict[str, tuple[str, str, str]] = {}
    for name in (*FAMILIES, "template"):
        chat, tokenizer = format_of(name)
        first, whole = (tokenizer.decode(chat.render(messages, [LOOK_UP])) for messages in (asked, told))
        sampled = CALLS["hermes"].replace("ẞ\\n", "ab")
        if isinstance(chat, FamilyFormat):
            sampled = tokenizer.decode(build_trajectory_step(chat.renderer, asked, [said], tools=[LOOK_UP])["completion_ids"])
        texts[name] = (first, whole, sampled)

    def read(function: str, texts: list[str]) -> Any:
        return in_node("samples.js", f"{json.dumps(texts)}.map(PrlSamples.parts.{function})")

    seen = read("messages", [text for one in texts.values() for text in one[:2]])
    roles = {name: [{part["role"] for part in seen[2 * n + which]} for which in (0, 1)] for n, name in enumerate(texts)}
    assert ["".join(part["text"] for part in parts) for parts in seen] == [text for one in texts.values() for text in one[:2]]
    without_a_header = {name for name in texts if name.startswith(("deepseek", "hy3", "laguna"))}  # of what the system says
    for name, (first, whole) in roles.items():
        assert ("tool" in first, "tool" in whole) == (False, True), name
        assert {"system", "user"} <= first or name in without_a_header, name
    called = dict(zip(texts, read("calls", [sampled for *_, sampled in texts.values()]), strict=True))
    assert {name for name, one in called.items() if one != [["look_up", {"word": "ab"}]]} == {"gemma4", "inkling"}
    no_calls = [CALLS["broken"], "null", "<tool_call>[null, 7]</tool_call>", "<tool_call>some prose</tool_call>"]
    assert read("calls", no_calls) == [[]] * 4
    (one,), (other,) = read("messages", ["+2=", "<|im_start|>user\nhi"])
    assert (one["role"], other["role"]) == ("", "user")


# A comparison


def test_only_fields_that_differ_are_shown_those_of_several_tasks_too(tmp_path: Path) -> None:
    tasks = [{"name": "one", "task": {"name": "sums"}}, {"name": "two", "task": {"name": "sums"}, "weight": 2}]
    first = read_run(run_in(tmp_path / "a", trainer={"learning_rate": 1e-4}), "a")
    second = read_run(run_in(tmp_path / "b", trainer={"learning_rate": 3e-4}), "b")
    assert differences([first, second]) == [("trainer.learning_rate", ["0.0001", "0.0003"])]
    assert differences([first, first]) == []
    several = read_run(run_in(tmp_path / "c", task=None, tasks=tasks), "c")
    shown = dict(differences([first, several]))
    assert (shown["tasks.1.weight"], shown["task.name"]) == (["-", "2.0"], ["sums", "-"])
    (tmp_path / "a" / "placement.json").write_text('{"trainer": ["0"], "actors": [["1"], ["2", "3"]]}')
    (tmp_path / "b" / "scale.json").write_text('{"actors": 4}')
    shown = dict(differences([read_run(tmp_path / name, name) for name in "ab"]))
    assert shown["(GPUs of the trainer, and of each actor)"] == ["[1, 1, 2]", "-"]
    assert shown["(actors, scaled)"] == ["-", "4"]


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
    rows = read_run(run_in(tmp_path / "long", steps=1000, summary=summary), "long").rows
    assert curve(rows, "heldout_accuracy") == [[0, 0.0, 0.5], [4, 8.0, 0.7]]
    reward = curve(rows, "reward_mean")
    assert _POINTS / 2 < len(reward) <= _POINTS + 1
    assert (reward[0], reward[-1]) == ([1, 2.0, 0.1], [1000, 2000.0, 100.0])


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
    with pytest.raises(FieldError, match=r"summary\.json has a value of a wrong type \("):
        write_report(broken)
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
    code, said, errors = compared("x/run", "y/run", "--out", "-")
    assert (code, said.rstrip().endswith("</html>"), errors.splitlines()[-1]) == (0, True, "page: -")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a"], "RUN = '1 given': name 2 to 12 runs"),
        (["a", "b", "../there/a"], "RUN = '../there/a': is given twice; name each run once"),
        (["a", "plain"], "RUN = 'plain': has no recipe.yaml; give the folder of a run"),
        (["a", "b", "--out", "plain"], "--out = 'plain': cannot be written: Is a directory; give another file"),
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
    monkeypatch.chdir(there)
    code, said, errors = compared(*arguments)
    assert (code, said) == (2, "")
    assert errors.startswith(f"pipelinerl: {problem}")
