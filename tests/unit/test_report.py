"""report.html: what goes into it, that model output stays text, and that a browser, where there is one, draws it."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from renderers.base import build_trajectory_step

from pipelinerl.doctor.run_records import YOUNG_S
from pipelinerl.figures import ON_PAGE
from pipelinerl.local.ending import report_html, write_report
from pipelinerl.page.data import COMPARISON_SCRIPTS, LIVE_ASSETS, REPORT_SCRIPTS, asset, report_data
from pipelinerl.recipe.loading import recipe_from_data, recipe_yaml
from pipelinerl.run_summary import jsonl_ends
from services.actor.episodes.formats import FamilyFormat
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


def sample(step: int, index: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "version": step, "prompt": f"p{index}", "completion": f"c{step}.{index}", "reward": 1.0,
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


def test_heldout_stands_at_the_version_it_measured_the_last_one_included() -> None:
    evaluations = [{"version": version, "accuracy": 0.4 + 0.1 * version, "lower_bound": 0.1} for version in (0, 2, 3)]
    shown = data([record(1), record(2), record(3)], [], heldout=evaluations)
    assert shown["heldout"] == [
        {"step": 0, "time_s": 0.0, "accuracy": 0.4, "lower_bound": 0.1, "sets": {}},
        {"step": 2, "time_s": 4.0, "accuracy": pytest.approx(0.6), "lower_bound": 0.1, "sets": {}},
        {"step": 3, "time_s": 6.0, "accuracy": pytest.approx(0.7), "lower_bound": 0.1, "sets": {}},
    ]


def test_few_samples_are_shown_once() -> None:
    assert data([], [])["samples"] == {"early": [], "late": []}
    shown = data([], [sample(step) for step in (1, 2, 3, 4, 5)])["samples"]
    assert ([one["step"] for one in shown["early"]], [one["step"] for one in shown["late"]]) == ([1, 2], [3, 4, 5])


def test_very_long_completions_are_clipped_with_their_length_and_their_tokens() -> None:
    shown = data([], [sample(1, completion="x" * 5000)])["samples"]["early"][0]["completion"]
    assert shown.endswith("… (1000 more characters)")
    assert len(shown) < 4100
    pieces = ["word " for _ in range(1000)]
    long = {"completion": "word " * 1000, "tokens": pieces, "weights": [1.0] * 1000, "spans": [[0, 0, 600], [1, 600, 1200]]}
    shown = data([], [sample(1, **long)])["samples"]["early"][0]
    assert (len(shown["tokens"]), len(shown["weights"]), shown["num_tokens"]) == (800, 800, 1200)
    text = shown["completion"]
    assert text.startswith("".join(shown["tokens"]))
    assert text[len("".join(shown["tokens"])) :] == " … (1000 more characters)"
    short = data([], [sample(1, completion="ab", tokens=["a", "b"], weights=None, spans=[])])["samples"]["early"][0]
    assert (short["tokens"], short["weights"], short["num_tokens"]) == (["a", "b"], None, 2)


def test_of_an_episode_so_many_branches_turns_and_characters_are_shown() -> None:
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


def run_folder(folder: Path) -> Path:
    recipe = recipe_from_data({"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {}}, "tiny")
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe))
    steps = [record(step, heldout_accuracy=0.1 * step if step % 2 else None) for step in range(1, 6)]
    steps[-1] |= {"heldout_unanswered": 9, "heldout_accuracy_lower_bound": 0.4, "multi_version_fraction": 0.5}
    reported = {"sum": {"answer": 0.5, "turns": 3.0}}
    sets = {"sum": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}, "pass_at": {}, "reported": {"turns": 2.5}}}
    steps = [one | {"truncated_fraction": 0.25, "reported": reported, "heldout_sets": sets} for one in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    evil = EVIL.replace("\ud800", "")
    pieces = {"tokens": [evil[:7], evil[7:30], evil[30:]], "weights": [1.0, 3.0, None], "spans": [[1, 0, 2], [2, 2, 3]]}
    earned = {"terms": {"answer": 0.5}, "metrics": {"said": 3.0}, "reference": 42, "answer": "41", "reason": "one too few"}
    samples = [sample(step, completion=evil, **(pieces | earned if step == 5 else {})) for step in range(1, 6)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return folder


def test_a_report_of_a_run_that_still_goes_on_and_of_one_without_a_single_step(tmp_path: Path) -> None:
    shown = embedded(write_report(run_folder(tmp_path)).read_text())
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
    assert jsonl_ends(path, 3) == []
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(100_000)) + '{"step": 1', "utf-8")
    tracemalloc.start()
    found = [one["step"] for one in jsonl_ends(path, 3)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [0, 1, 2, 99_998, 99_999]
    assert most < path.stat().st_size / 4, "the file is not held as a whole"
    wide = [json.dumps({"step": step, "text": "x" * 400_000}) + "\n" for step in range(9)]
    path.write_text("".join(wide), "utf-8")
    assert [one["step"] for one in jsonl_ends(path, 9)] == [0, 1, 7, 8], "a MiB of each end"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)), "utf-8")
    assert [one["step"] for one in jsonl_ends(path, 3)] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_real_browser_draws_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "metrics-undone.jsonl").write_text('{"step": 6}\n')
    report = write_report(folder)
    command = [
        "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,2000", "--dump-dom", report.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = dom[dom.index("<main") : dom.index('<script type="application/json"')]
    tags = Tags()
    tags.feed(body)
    names = [name for name, _ in tags.seen]
    assert (names.count("figure"), names.count("img"), names.count("script")) == (21, 0, 0)
    assert names.count("svg") == 12, "those that have data"
    assert re.search(r'data-finding="steps-lost"><strong>note: A restart undid optimizer steps</strong>', body)
    assert "40% if unanswered problems count as wrong" in body
    notes = re.findall(r'<div class="note">([^<]+)</div>', body)
    assert notes[-5:] == ["answer 0.5", "said 3", "answer: 41", "reference: 42", "one too few"]
    assert re.search("Train reward.{0,60}0.3.{0,60}from 0.3; means", body)
    assert re.search(r"Cut short.{0,60}25%", body), "the tile"
    assert re.search("– (tokens/s|GiB)", body) is None, "no unit without a number"
    assert names.count("path") >= 7
    assert "Token lag, whole run: 0 25%, 1 0%, 2 0%, 3 75%" in body
    assert "Effective sample size by lag: 0 1, 1 –, 2 –, 3-4 0.5" in body
    assert body.count("&lt;img src=x onerror=alert(2)&gt;") >= 3
    tokens = [attributes for name, attributes in tags.seen if "token" in (attributes.get("class") or "").split()]
    assert [(one["data-index"], one.get("data-version")) for one in tokens] == [("0", "v1"), ("1", None), ("2", "v2")]
    assert ["far" in (one["class"] or "") for one in tokens] == [False, True, False]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("PrlCharts.scales.extent([2e-9])", [0, 4e-9]),  # one point: an axis from 0, not one around it
        ("PrlCharts.scales.extent([0, 0])", [0, 1]),
        ("PrlCharts.scales.extent([-3])", [-6, 0]),
        ("PrlCharts.scales.extent([1], undefined, 1)", [0.9, 1]),
        ("PrlCharts.scales.extent([0], 0)", [0, 0.1]),
        ("PrlCharts.scales.extent([3, 1], 0)", [0, 3]),
        ("PrlCharts.scales.extent([0.37, 0.83])", [0, 1]),
        ("PrlCharts.scales.extent([98, 99])", [96, 101]),  # labels of three digits stay apart
        ("PrlCharts.scales.extent([0.99, 0.995], undefined, 1)", [0.97, 1]),
        ("PrlCharts.scales.across([7], 900).marks", [7]),
        ("PrlCharts.scales.across([7], 900).low", 6.5),
        ("PrlCharts.scales.across([1, 3], 900).marks", [1, 2, 3]),
        ("PrlCharts.scales.across([0.5, 1], 360).marks", [0.5, 0.6, 0.8, 1]),
        ("PrlCharts.scales.across([0, 10], 400).marks", [0, 5, 10]),  # no step 2.5
        ("PrlCharts.scales.across([1, 100], 450).marks", [1, 20, 40, 60, 80, 100]),
        ("PrlCharts.scales.spreadEnds([[9, 50], [9, 52], [99, 51]], 90)", [50, 62, 51]),  # only neighbours are spread
        ("PrlCharts.scales.spreadEnds([[9, 88], [9, 90]], 90)", [78, 90]),  # and none leaves the drawing
        ("PrlCharts.scales.held([[2, 5], [4, 7]], [1, 4, 3, 2, 5]).flat()", [2, 5, 3, 5, 4, 7]),
        ("PrlFlow.scales.heights([90, 10], 110, 10)", [90, 10]),
        ("PrlFlow.scales.heights([997, 1, 2], 120, 10)", [94, 3, 3]),  # what is small is seen all the same
        ("PrlFlow.scales.heights([5], 50, 10)", [50]),
        ("PrlFlow.scales.spread([20, 22, 90], 30, 10, 100)", [20, 50, 90]),
        ("PrlFlow.scales.spread([80, 90, 95], 30, 10, 100)", [40, 70, 100]),
        ("PrlFlow.scales.discrepancy({issued: 10, trained: 4, in_flight: 3, dropped_stale: 1, failed: 2})", 0),
        ("PrlFlow.scales.discrepancy({issued: 10, trained: 4})", 6),
    ],
)
def test_axes_and_the_bands_and_labels_of_the_ledger(expression: str, value: object) -> None:
    assert in_node("flow.js", expression) == pytest.approx(value)


def in_node(name: str, expression: str) -> Any:
    """What it is where the script `name` is loaded."""
    script = f"{asset('charts.js')}{asset(name)}; console.log(JSON.stringify({expression}))"
    return json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True).stdout)


def read_by_the_page(function: str, texts: list[str]) -> Any:
    return in_node("samples.js", f"{json.dumps(texts)}.map(PrlSamples.parts.{function})")


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
    seen = read_by_the_page("messages", [text for one in texts.values() for text in one[:2]])
    roles = {name: [{part["role"] for part in seen[2 * n + which]} for which in (0, 1)] for n, name in enumerate(texts)}
    assert ["".join(part["text"] for part in parts) for parts in seen] == [text for one in texts.values() for text in one[:2]]
    without_a_header = {name for name in texts if name.startswith(("deepseek", "hy3", "laguna"))}  # of what the system says
    for name, (first, whole) in roles.items():
        assert ("tool" in first, "tool" in whole) == (False, True), name
        assert {"system", "user"} <= first or name in without_a_header, name
    called = dict(zip(texts, read_by_the_page("calls", [sampled for *_, sampled in texts.values()]), strict=True))
    assert {name for name, one in called.items() if one != [["look_up", {"word": "ab"}]]} == {"gemma4", "inkling"}


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_texts_that_tell_no_role_or_no_call_are_left_as_they_are() -> None:
    texts = {
        "+2=": [["", "+2="]],
        "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n": [["user", ...]],
        "a<|im_start|>user\nb<|im_start|>assistant\nc<|im_start|>tool\nd": [
            ["", "a"],
            ["user", "<|im_start|>user\nb"],
            ["assistant", "<|im_start|>assistant\nc"],
            ["tool", "<|im_start|>tool\nd"],
        ],
        "<|im_start|>user\nresults are in <tool_response> tags": [["user", ...]],
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>": [
            ["tool", "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"],
            ["tool", "<tool_response>\n2\n</tool_response>"],
        ],
        "<|im_start|>constructor\na": [["constructor", ...]],
        "[INST] a [/INST]": [["user", ...]],
        "<|assistant|>": [["", ...]],
        "": [["", ""]],
    }  # fmt: skip
    expected = [[[role, text if words is ... else words] for role, words in parts] for text, parts in texts.items()]
    assert [[[part["role"], part["text"]] for part in one] for one in read_by_the_page("messages", list(texts))] == expected
    one, two = '{"name": "f", "arguments": {"a": [1]}}', '{"name": "g", "arguments": {}}'
    calls: dict[str, list[Any]] = {
        f"<tool_call>{one}</tool_call>\n<tool_call>\n{two}\n</tool_call><|im_end|>": [["f", {"a": [1]}], ["g", {}]],
        f"[TOOL_CALLS][{one}, {two}]</s>": [["f", {"a": [1]}], ["g", {}]],
        '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}</s>': [["f", {"a": {"b": 1}}]],
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>': [["f", {"a": 1}]],
        '{"name": "f", "parameters": {"a": 1}}<|eot_id|>': [["f", {"a": 1}]],
        CALLS["broken"]: [],
        one: [],
        "null": [],
        "<tool_call>[null, 7]</tool_call>": [],
        "<tool_call>some prose</tool_call>": [],
    }
    assert read_by_the_page("calls", list(calls)) == list(calls.values())


ESTIMATE = {"value": 0.7, "low": 0.61, "high": 0.79}
ONE_SET = {"accuracy": ESTIMATE, "pass_at": {"2": ESTIMATE, "8": {"value": 0.9}}}


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize(
    ("sets", "note"),
    [
        ({}, ""),
        ({"sums": ONE_SET}, "; 95 % interval 61% to 79%, pass@8 90%"),
        ({"sums": ONE_SET, "spell": {"accuracy": {"value": 0.5}, "pass_at": {}}}, "; sums 70%, pass@8 90%; spell 50%"),
    ],
)
def test_what_is_said_of_the_sets_of_an_evaluation(sets: dict[str, Any], note: str) -> None:
    point = json.dumps({"accuracy": 0.7, "lower_bound": 0.7, "sets": sets})
    assert in_node("views.js", f"PrlViews.heldoutNote({point})") == note
