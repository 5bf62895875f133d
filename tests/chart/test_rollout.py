"""What replaces pods, and in what order: as a StatefulSet's or a Deployment's controller reads the manifests."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from services.trainer.launch import RENDEZVOUS_TIMEOUT_S
from tests.chart.conftest import rendered_case
from tests.chart.rendering import CHART, Object, helm


def _trainer(case: str) -> Object:
    return dict(rendered_case(case).one("StatefulSet", "pipelinerl-trainer")["spec"])


def test_nodes_of_a_trainer_change_over_together() -> None:
    """A rolling update waits for the new pod to be ready, and that one for an old pod that it can never meet."""
    assert _trainer("two-nodes")["updateStrategy"] == {"type": "OnDelete"}
    assert "updateStrategy" not in _trainer("default")


def test_a_node_is_not_killed_while_it_waits_for_the_others() -> None:
    probe = _trainer("two-nodes")["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600 + RENDEZVOUS_TIMEOUT_S
    alone = _trainer("default")["template"]["spec"]["containers"][0]["startupProbe"]
    assert alone["periodSeconds"] * alone["failureThreshold"] == 600


def test_a_newer_chart_alone_restarts_nothing(tmp_path: Path) -> None:
    newer = tmp_path / "chart"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text(encoding="utf-8"))
    text = yaml.safe_dump(chart | {"version": "9.9.9", "appVersion": "9.9.9"})
    (newer / "Chart.yaml").write_text(text, encoding="utf-8")

    def templates(chart: Path) -> list[Object]:
        rendered = yaml.safe_load_all(helm("template", "pipelinerl", chart, "--set-string", "images.tag=1"))
        return [item["spec"]["template"] for item in rendered if item and item["kind"] in ("Deployment", "StatefulSet")]

    assert len(templates(CHART)) == 4
    assert templates(newer) == templates(CHART)


def test_a_large_model_may_load_for_longer_than_a_rollout_lasts_as_a_rule() -> None:
    deployment = rendered_case("default").one("Deployment", "pipelinerl-actor")
    assert deployment["spec"]["progressDeadlineSeconds"] == 600 + 3600
