"""The rules that the chart's PrometheusRule holds, as a rules file for promtool and Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import Object, render


def groups(values: Mapping[str, Any] | None = None, release: str = "pipelinerl") -> list[Object]:
    """Groups of rules; `values`: of `metrics.prometheusRule`."""
    rule = {"enabled": True} | dict(values or {})
    (found,) = render({"metrics": {"prometheusRule": rule}}, release=release).of_kind("PrometheusRule")
    return list(found["spec"]["groups"])


def alerts(values: Mapping[str, Any] | None = None, release: str = "pipelinerl") -> dict[str, Object]:
    """By name."""
    rules = [rule for group in groups(values, release) for rule in group["rules"]]
    by_name = {rule["alert"]: rule for rule in rules}
    assert len(by_name) == len(rules), "two alerts share a name"
    return by_name


@functools.cache
def shown_alerts() -> dict[str, Object]:
    """By name, of the chart's defaults."""
    return alerts()


def write_rules(path: Path) -> Path:
    path.write_text(yaml.safe_dump({"groups": groups()}, allow_unicode=True), encoding="utf-8")
    return path
