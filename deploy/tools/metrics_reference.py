"""The tables of metrics in docs/metrics.md, generated from what the services register so that they cannot drift from it.

    python -m deploy.tools.metrics_reference                    # print them
    python -m deploy.tools.metrics_reference docs/metrics.md    # replace what stands between the file's two marks

It starts no service: it makes each one's metrics on an empty registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.tools.generated import GeneratedPart, row
from pipelinerl.local.metrics import RunnerMetrics
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.telemetry.metrics import Family, RunRegistry
from services.actor.metrics import ActorMetrics
from services.trainer.reporting.metrics import TrainerMetrics, rank_orders, replica_advice
from services.verifier.metrics import VerifierMetrics

ROOT = Path(__file__).resolve().parents[2]
_HEAD = "| metric | type | labels | unit | meaning |\n|---|---|---|---|---|"

SERVICES: dict[str, tuple[Callable[..., Any], ...]] = {
    "trainer": (TrainerMetrics, replica_advice, rank_orders),
    "actor": (ActorMetrics,),
    "verifier": (VerifierMetrics,),
    "runner": (RunnerMetrics,),
}
"""What makes each service's metrics."""


def catalogue() -> dict[str, list[Family]]:
    """All metrics, by the service that exports them."""
    found: dict[str, list[Family]] = {service: [] for service in SERVICES}
    recipe = load_recipe("arithmetic")
    more = {replica_advice: {"recipe": recipe}, VerifierMetrics: {"tasks": recipe.problem_sets}}
    for service, makers in SERVICES.items():
        for make in makers:
            registry = RunRegistry("")
            make(registry=registry, **more.get(make, {}))
            found[service] += registry.families
    return found


def sources(service: str) -> list[str]:
    """Paths, from the root, of the files that name a service's metrics."""
    makers = [Path(inspect.getfile(make)).resolve().relative_to(ROOT).as_posix() for make in SERVICES[service]]
    parts = ["pipelinerl/figures.py"] if service == "trainer" else []
    return sorted({*makers, *parts})


def reference(metrics: Mapping[str, Sequence[Family]]) -> str:
    """Markdown: one table for each service. Pure."""
    tables = []
    for service, families in metrics.items():
        links = ", ".join(f"[{path}](../{path})" for path in sources(service))
        tables.append(f"### {service.capitalize()}\n\nSource: {links}\n\n" + "\n".join([_HEAD, *map(_row, families)]))
    return "\n\n".join(tables)


def _row(family: Family) -> str:
    edges = f" Buckets: {', '.join(f'{edge:g}' for edge in family.buckets)}." if family.buckets else ""
    labels = "; ".join(f"`{name}`: {_values(values)}" for name, values in family.labels.items())
    return row((f"`{family.name}`", family.kind, labels, family.unit, f"{family.text}{edges}"))


def _values(values: Sequence[str] | str) -> str:
    return values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values)


PART = GeneratedPart("metrics", "python -m deploy.tools.metrics_reference docs/metrics.md", lambda: reference(catalogue()))

if __name__ == "__main__":
    PART.main()
