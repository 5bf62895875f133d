"""How long /metrics takes over HTTP: of one trainer, of one actor, and of 100 actors' series in one answer.

The registries are the services' own, each with its `run`; 100 actors' are answered one behind the other, as one text. No
service has that many series by itself: Prometheus asks each actor for its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from benchmarks.observed_trainer import watch
from benchmarks.page_client import fetched
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.telemetry.exposition import Exposition, RunRegistry
from services.actor.metrics import ActorMetrics
from services.trainer.reporting.metrics import TrainerMetrics

GOAL_MS = 50.0


class Together(RunRegistry):
    """Several registries as one."""

    def __init__(self, registries: Sequence[RunRegistry]) -> None:
        super().__init__("together")
        self._registries = registries

    def sources(self) -> Iterator[tuple[str, Collector]]:
        for registry in self._registries:
            yield from registry.sources()

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()


def actor_registry(run: str) -> RunRegistry:
    """Of an actor that has done something of everything."""
    registry = RunRegistry(run)
    metrics = ActorMetrics(registry)
    metrics.watch(
        version=lambda: 3, ready=lambda: True, held_groups=lambda: 4, staging=lambda: "idle", most_in_progress=64
    )
    metrics.count_finished("length", 100)
    metrics.engine_step(0.0123, 0.25)
    for histogram in (metrics.verify_seconds, metrics.publish_seconds, metrics.receive_seconds, metrics.stall_seconds):
        histogram.observe(0.0321)
    return registry


def trainer_registry(run: str) -> RunRegistry:
    registry = RunRegistry(run)
    watch(TrainerMetrics(registry))
    return registry


async def run_scrapes(scrapes: int, actors: int = 100) -> dict[str, dict[str, Any]]:
    """By case."""
    return {
        "one trainer": await measured(trainer_registry("run"), scrapes),
        "one actor": await measured(actor_registry("run"), scrapes),
        f"{actors} actors": await measured(Together([actor_registry(f"run-{n}") for n in range(actors)]), scrapes),
    }


async def measured(registry: RunRegistry, scrapes: int) -> dict[str, Any]:
    """Over real HTTP, on a connection of its own each time; the first answer is not counted."""
    load, answers_ms = os.getloadavg()[0], []
    async with serve_http(health_app(Readiness(), registry), "127.0.0.1", 0, own_thread=True) as port:
        text = fetched(port, "/metrics")
        for _ in range(scrapes):
            began = time.perf_counter()
            fetched(port, "/metrics")
            answers_ms.append(1e3 * (time.perf_counter() - began))
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    return {
        "series": series,
        "kilobytes": round(len(text) / 1e3),
        "goal_ms": GOAL_MS,
        "median_ms": round(statistics.median(answers_ms), 2),
        "best_ms": round(min(answers_ms), 2),
        "worst_ms": round(max(answers_ms), 2),
        "cpu_ms": round(cpu_ms(Exposition(registry).text, scrapes), 2),
        "library_cpu_ms": round(cpu_ms(lambda: generate_latest(registry), scrapes), 2),
        "scrapes": scrapes,
        "load_before": round(load, 2),
    }


def cpu_ms(written: Callable[[], bytes], scrapes: int) -> float:
    """Processor time of the text alone, the median."""
    taken = []
    for _ in range(scrapes):
        began = time.thread_time()
        written()
        taken.append(time.thread_time() - began)
    return 1e3 * statistics.median(taken)
