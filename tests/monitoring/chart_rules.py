"""The rules that the chart's PrometheusRule holds, as a rules file for promtool and Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import Object, render


def groups(
    values: Mapping[str, Any] | None = None, release: str = "pipelinerl", mode: str = "pipeline"
) -> list[Object]:
    """Groups of rules; `values`: of `metrics.prometheusRule`; `mode`: of the recipe."""
    rule = {"enabled": True} | dict(values or {})
    chosen = {"metrics": {"prometheusRule": rule}, "recipe": {"set": {"mode": mode}}}
    (found,) = render(chosen, release=release).of_kind("PrometheusRule")
    return list(found["spec"]["groups"])


def alerts(
    values: Mapping[str, Any] | None = None, release: str = "pipelinerl", mode: str = "pipeline"
) -> dict[str, Object]:
    """By name."""
    rules = [rule for group in groups(values, release, mode) for rule in group["rules"]]
    by_name = {rule["alert"]: rule for rule in rules}
    assert len(by_name) == len(rules), "two alerts share a name"
    return by_name


@functools.cache
def shown_alerts() -> dict[str, Object]:
    """By name, of the chart's defaults."""
    return alerts()


def write_rules(path: Path, mode: str = "pipeline") -> Path:
    path.write_text(yaml.safe_dump({"groups": groups(mode=mode)}, allow_unicode=True), encoding="utf-8")
    return path
