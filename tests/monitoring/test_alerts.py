"""Every alert fires when it should and not otherwise (promtool), and has a section in the runbook."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelinerl.recipe.fields import Recipe, dotted_paths
from tests.chart.rendering import ROOT
from tests.chart.test_schema import LEAVES
from tests.monitoring.catalogue import alerts, problems_of, samples, shown_alerts, write_rules
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
    text = (ROOT / "deploy/helm/files/alerts.yaml").read_text(encoding="utf-8")
    assert all(f"[[{name}]]" in text for name in thresholds)
    assert len(changed) > len(thresholds) / 2


def test_the_runbook_names_metrics_fields_and_values_that_exist() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    assert [problem for problem in problems_of(text, samples()) if "no metric" in problem] == []
    sections = {path.rpartition(".")[0] for path in LEAVES}
    fields = {*dotted_paths(Recipe), *LEAVES, *sections}
    named = {name for name in re.findall(r"`([a-z][A-Za-z]*\.[\w.]+)", text) if not name.endswith((".yaml", ".jsonl", ".py"))}
    assert len(named) > 20
    assert {name for name in named if name not in fields} == set()
