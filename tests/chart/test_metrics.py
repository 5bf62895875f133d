"""Metrics that rules and autoscalers ask for are exported by the services."""

from __future__ import annotations

import re

import pytest

from pipelinerl.recipe.loading import load_recipe
from pipelinerl.telemetry.metrics import RunRegistry
from services.actor.metrics import ActorMetrics
from services.trainer.reporting.metrics import TrainerMetrics, replica_advice
from services.verifier.metrics import VerifierMetrics
from tests.chart.conftest import rendered_case
from tests.chart.rendering import Rendered

WANTED = "pipelinerl_actor_replicas_wanted"


def exported() -> set[str]:
    """Names of all samples that some service may show."""
    registry = RunRegistry("r")
    for metrics in (ActorMetrics, TrainerMetrics, VerifierMetrics):
        metrics(registry)
    replica_advice(load_recipe("arithmetic"), registry)
    suffixes = {"counter": ("",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {f"{family.name}{suffix}" for family in registry.families for suffix in suffixes[family.kind]}


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"pipelinerl_\w+", text))


def test_alerts_ask_for_metrics_that_exist() -> None:
    (rule,) = rendered_case("everything").of_kind("PrometheusRule")
    expressions = [entry["expr"] for group in rule["spec"]["groups"] for entry in group["rules"]]
    assert expressions
    for expression in expressions:
        names = _names_in(expression)
        assert names or "up{" in expression
        assert names <= exported(), expression


def test_autoscalers_ask_for_the_replicas_wanted() -> None:
    (scaled,) = rendered_case("keda").of_kind("ScaledObject")
    (autoscaler,) = [
        item
        for item in rendered_case("hpa").of_kind("HorizontalPodAutoscaler")
        if item["metadata"]["name"] == "pipelinerl-actor"
    ]
    assert WANTED in exported()
    assert _names_in(scaled["spec"]["triggers"][0]["metadata"]["query"]) == {WANTED}
    assert autoscaler["spec"]["metrics"][0]["external"]["metric"]["name"] == WANTED
    assert scaled["spec"]["triggers"][0]["metadata"]["ignoreNullValues"] == "false"  # else no value would mean 0
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 8)


@pytest.mark.parametrize("case", ["keda", "hpa"])
def test_an_autoscaler_decides_alone(case: str) -> None:
    assert "replicas" not in rendered_case(case).one("Deployment", "pipelinerl-actor")["spec"]


def test_the_verifier_has_as_many_pods_as_its_autoscaler_says() -> None:
    assert "replicas" not in rendered_case("default").one("Deployment", "pipelinerl-verifier")["spec"]
    assert rendered_case("cpu").one("Deployment", "pipelinerl-verifier")["spec"]["replicas"] == 1
    (autoscaler,) = rendered_case("default").of_kind("HorizontalPodAutoscaler")
    assert (autoscaler["spec"]["minReplicas"], autoscaler["spec"]["maxReplicas"]) == (2, 16)


def test_monitors_tell_releases_apart_as_the_autoscaler_asks(rendered: Rendered) -> None:
    """The HPA's selector is a label that podTargetLabels puts on every sample."""
    for monitor in rendered.of_kind("PodMonitor"):
        assert "app.kubernetes.io/instance" in monitor["spec"]["podTargetLabels"]
    external = [
        metric["external"]["metric"]["selector"]["matchLabels"]
        for item in rendered.of_kind("HorizontalPodAutoscaler")
        for metric in item["spec"]["metrics"]
        if "external" in metric
    ]
    assert external in ([], [{"app_kubernetes_io_instance": "pipelinerl"}])
