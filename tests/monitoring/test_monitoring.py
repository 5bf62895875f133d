"""Every alert fires when it should and not otherwise (promtool), and has a section in the runbook. The committed dashboards are
those of the code, and Grafana and Prometheus can make something of them.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dashboards.__main__ import FOLDER
from deploy.dashboards.all import BOARDS
from deploy.dashboards.board import Board, json_text
from pipelinerl.recipe.fields import Recipe, dotted_paths
from tests.chart.rendering import ROOT, render
from tests.chart.test_schema import LEAVES
from tests.monitoring.catalogue import OF_PROMETHEUS, alerts, names_in, problems_of, samples, shown_alerts, write_rules
from tests.support.tools import tool

CASES = Path(__file__).parent / "rules"
CONVENTIONAL = Path(__file__).parent / "conventional" / "quiet.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_in_conventional_mode_whose_services_wait_in_turn_fires_nothing(tmp_path: Path) -> None:
    """With the rules of the other mode it would: there the same figures mean devices that idle for want of work."""
    case = CONVENTIONAL.read_text(encoding="utf-8")
    (tmp_path / "case.yaml").write_text(case, encoding="utf-8")
    write_rules(tmp_path / "rules.yaml", mode="conventional")
    promtool("test", "rules", tmp_path / "case.yaml")
    write_rules(tmp_path / "rules.yaml")
    with pytest.raises(AssertionError, match="PipelineRLTrainerStarved"):
        promtool("test", "rules", tmp_path / "case.yaml")


def cases() -> list[Path]:
    return sorted(CASES.glob("*.yaml"))


@pytest.mark.parametrize("file", cases(), ids=lambda file: file.stem)
def test_alerts_fire_when_they_should_and_not_otherwise(file: Path, tmp_path: Path) -> None:
    write_rules(tmp_path / "rules.yaml")
    shutil.copy(file, tmp_path)
    promtool("test", "rules", tmp_path / file.name)


def test_every_alert_is_tested_firing_and_silent() -> None:
    firing, silent = set(), set()
    for file in cases():
        for case in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
            for entry in case["alert_rule_test"]:
                (firing if entry["exp_alerts"] else silent).add(entry["alertname"])
    assert firing == set(shown_alerts())
    assert silent == set(shown_alerts())


def test_every_alert_tells_its_severity_and_its_section_of_the_runbook() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (PipelineRL\w+)$", text, re.MULTILINE)) == sorted(shown_alerts())
    linked = alerts({"runbook": "https://wiki.example.com/rl"})
    for name, rule in shown_alerts().items():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert linked[name]["annotations"]["runbook_url"] == f"https://wiki.example.com/rl#{name.lower()}"


def test_rules_look_at_their_own_release_alone() -> None:
    for rule in alerts(release="blue").values():
        selectors = re.findall(r"\{(.*?)\}", rule["expr"])
        assert selectors
        assert all(re.search('namespace="train", pod=~?"blue-pipelinerl-', selector) for selector in selectors)
        assert "[[" not in rule["expr"]


def test_thresholds_are_values() -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/values.yaml").read_text(encoding="utf-8"))
    thresholds = values["metrics"]["prometheusRule"]["thresholds"]
    others = {name: value / 2 if isinstance(value, float) else value + 100 for name, value in thresholds.items()}
    changed = {name for name, rule in alerts({"thresholds": others}).items() if rule["expr"] != shown_alerts()[name]["expr"]}
    fixed = {"PipelineRLTrainerDown", "PipelineRLLedgerDoesNotAddUp", "PipelineRLStepsSkipped", "PipelineRLDeadLetters"}
    fixed |= {"PipelineRLLagOverBound", "PipelineRLActorTakesNoPrompts", "PipelineRLParityFailures"}
    fixed |= {"PipelineRLVerifierAway", "PipelineRLActorsQuarantined"}
    assert changed == set(shown_alerts()) - fixed
    text = (ROOT / "deploy/helm/files/alerts.yaml").read_text(encoding="utf-8")
    assert all(f"[[{name}]]" in text for name in thresholds)


def test_the_runbook_names_metrics_fields_and_values_that_exist() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    assert [problem for problem in problems_of(text, samples()) if "no metric" in problem] == []
    sections = {path.rpartition(".")[0] for path in LEAVES}
    fields = {*dotted_paths(Recipe), *LEAVES, *sections}
    named = {name for name in re.findall(r"`([a-z][A-Za-z]*\.[\w.]+)", text) if not name.endswith((".yaml", ".jsonl", ".py"))}
    assert len(named) > 20
    assert {name for name in named if name not in fields} == set()


def test_commands_of_the_runbook_name_objects_that_exist() -> None:
    objects = {item["metadata"]["name"] for item in render().objects}
    text = RUNBOOK.read_text(encoding="utf-8")
    for name in re.findall(r"(?:deployment/|hpa |pod )(pipelinerl-\w+)", text):
        assert name.removesuffix("-0") in objects, name


RENEW = "python -m deploy.dashboards"
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def shown(board: Board) -> dict[str, Any]:
    """As it is committed."""
    return dict(json.loads((FOLDER / f"{board.name}.json").read_text(encoding="utf-8")))


def panels(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in shown(board)["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for board in BOARDS for panel in panels(board) for target in panel["targets"]]


def test_committed_dashboards_are_what_the_code_makes() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {board.name for board in BOARDS}
    for board in BOARDS:
        assert (FOLDER / f"{board.name}.json").read_text(encoding="utf-8") == json_text(board, BOARDS), RENEW


@every_board
def test_queries_go_to_the_chosen_source_namespace_and_run(board: Board) -> None:
    variables = {variable["name"]: variable for variable in shown(board)["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "run", "window"]
    assert variables["namespace"]["allValue"] == ".*"  # also of series without the label
    assert variables["run"].get("multi", False) == board.several_runs
    for panel in panels(board):
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"pipelinerl_\w+(\{.*?\})?", target["expr"])
            assert selectors
            assert all('namespace=~"$namespace", run=~"$run"' in selector for selector in selectors)
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval", "__range", "1"}


def test_runs_of_one_name_in_two_namespaces_stay_apart() -> None:
    for expression in expressions():
        for labels in re.findall(r"(?:by|on) \((.*?)\)", expression):
            assert "run" not in labels.split(", ") or "namespace" in labels.split(", "), expression


def test_queries_ask_for_metrics_labels_and_values_that_exist_and_legends_name_labels_that_they_keep() -> None:
    known = samples()
    queries = [*expressions(), *(rule["expr"] for rule in shown_alerts().values())]
    assert [problem for query in queries for problem in problems_of(query, known)] == []
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                kept = set(re.findall(r"\w+", " ".join(re.findall(r"(?:by|group_right|on) \((.*?)\)", query.expr))))
                assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept, (panel.title, query.legend)


def test_the_chart_brings_each_dashboard_as_grafanas_sidecar_takes_it() -> None:
    """With uids, titles and files of the release: Grafana keeps one dashboard of each, and its sidecar one file of a name."""
    seen: dict[str, set[str]] = {"file": set(), "uid": set(), "title": set()}
    for release in ("blue", "green"):
        found = render({"metrics": {"dashboards": {"enabled": True}}}, release=release).of_kind("ConfigMap")
        maps = [item for item in found if item["metadata"]["labels"].get("grafana_dashboard") == "1"]
        files = {name: json.loads(text) for item in maps for name, text in item["data"].items()}
        assert max(len(text.encode()) for item in maps for text in item["data"].values()) < 1_000_000  # of a ConfigMap
        uids = {board["uid"] for board in files.values()}
        for kind, values in {"file": set(files), "uid": uids, "title": {one["title"] for one in files.values()}}.items():
            assert len(values) == len(BOARDS)
            assert not seen[kind] & values
            seen[kind] |= values
        assert max(map(len, uids)) <= 40  # Grafana's limit
        of_the_release = {"uid": "", "title": "", "links": []}
        originals = [shown(board) | of_the_release for board in BOARDS]
        for board in files.values():
            assert board | of_the_release in originals
            links = {link["url"].removeprefix("/d/").partition("?")[0] for link in board["links"]}
            assert links | {board["uid"]} == uids


def test_labels_that_prometheus_adds_are_none_of_ours() -> None:
    clashes = {name: set(family.labels) & OF_PROMETHEUS for name, family in samples().items()}
    assert not {name: labels for name, labels in clashes.items() if labels}


NOT_SHOWN = {
    "pipelinerl_trainer_checkpoint_version": "its age is shown",
    "pipelinerl_trainer_checkpoint_upload_version": "how long a later one waits is shown",
    "pipelinerl_trainer_checkpoint_upload_timestamp_seconds": "the same",
    "pipelinerl_trainer_trainer_busy_ratio": "of the whole run; rates of busy seconds are shown",
    "pipelinerl_trainer_actor_busy_ratio": "the same",
    "pipelinerl_trainer_task_sequences": "the tasks' weights",
    "pipelinerl_trainer_quarantined_actors": "0 unless an alert names them",
    "pipelinerl_verifier_sandbox": "what confines untrusted code there, which does not change while a verifier runs",
}
"""Metrics without a panel, and why."""


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {name for expression in expressions() for name in names_in(expression)}
    known = samples()
    without = {family.name for family in known.values()} - {known[name].name for name in asked}
    assert without == set(NOT_SHOWN)
