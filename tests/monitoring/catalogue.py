"""Which metrics and labels the services export, what a query asks for, and the rules of the chart's PrometheusRule."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.tools.metrics_reference import catalogue
from pipelinerl.telemetry.metrics import Family
from tests.chart.rendering import Object, render

OF_PROMETHEUS = {"namespace", "pod", "instance", "run"}
_ENDINGS = {"counter": ("",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_SELECTOR = re.compile(r"(pipelinerl_\w+)(?:\{(.*?)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"(.*?)"')


def samples() -> dict[str, Family]:
    """Families by the names of their samples."""
    families = [family for service in catalogue().values() for family in service]
    return {f"{family.name}{end}": family for family in families for end in _ENDINGS[family.kind]}


def names_in(query: str) -> set[str]:
    return {name for name, _ in _SELECTOR.findall(query)}


def problems_of(query: str, known: dict[str, Family]) -> Iterator[str]:
    """Metrics, labels and label values that no service exports."""
    for name, matchers in _SELECTOR.findall(query):
        if name not in known:
            yield f"no metric {name}"
            continue
        for label, operator, value in _MATCHER.findall(matchers):
            values = known[name].labels.get(label)
            if values is None and label not in OF_PROMETHEUS:
                yield f"{name} has no label {label}"
            elif operator == "=" and values is not None and not isinstance(values, str) and value not in values:
                yield f"{name}: {label} is never {value}"
            elif operator == "=~" and values is not None and not isinstance(values, str):
                yield from (
                    f"{name}: {label} is never {choice}"
                    for choice in value.split("|")
                    if not any(re.fullmatch(choice, one) for one in values)
                )


def groups(values: Mapping[str, Any] | None = None, release: str = "pipelinerl", mode: str = "pipeline") -> list[Object]:
    """Groups of rules; `values`: of `metrics.prometheusRule`; `mode`: of the recipe."""
    rule = {"enabled": True} | dict(values or {})
    chosen = {"metrics": {"prometheusRule": rule}, "recipe": {"set": {"mode": mode}}}
    (found,) = render(chosen, release=release).of_kind("PrometheusRule")
    return list(found["spec"]["groups"])


def alerts(values: Mapping[str, Any] | None = None, release: str = "pipelinerl", mode: str = "pipeline") -> dict[str, Object]:
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
