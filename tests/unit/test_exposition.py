"""The text of /metrics is what prometheus_client itself would write."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.service.exposition import CONTENT_TYPE, exposition
from pipelinerl.service.run_registry import RunRegistry
from services.actor.metrics import ActorMetrics
from services.trainer.metrics import TrainerMetrics

VALUES = [0, -0.0, 1, -1, 0.1, 1e-9, 1e-4, 999_999.5, 1e6, 123_456_789.25, -2.5e7, 1e21, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("value", VALUES)
def test_every_number_is_written_as_the_library_does(value: float) -> None:
    registry = RunRegistry("tiny")
    Gauge("g", "A gauge.", registry=registry).set(value)
    assert exposition(registry) == generate_latest(registry)


def test_names_labels_and_texts_are_written_as_the_library_does() -> None:
    registry = RunRegistry('quo"ted')
    failed = Counter("failed_total", 'A "text"\nof two \\ lines.', ["reason", "a"], registry=registry)
    failed.labels('back\\slash, "quote"\nline', "z").inc(2)
    failed.labels("", "ü").inc()
    for phase in ("wait", "compute"):
        Histogram(f"{phase}_seconds", "S.", ["phase"], buckets=(0.1, 1), registry=registry).labels(phase).observe(0.5)
    Histogram("below", "Also below 0.", buckets=(-1, 1), registry=registry).observe(-2)
    Histogram("above_tokens", "Tokens.", buckets=(4, 131_072), registry=registry).observe(9e6)
    Histogram("none_seconds", "No series.", ["phase"], registry=registry)
    Counter("empty_total", "No series.", ["reason"], registry=registry)
    for _ in range(2):
        assert exposition(registry) == generate_latest(registry)
        failed.labels("", "ü").inc()
    assert len(list(text_string_to_metric_families(exposition(registry).decode()))) == 7
    assert CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


@pytest.mark.parametrize("metrics", [ActorMetrics, TrainerMetrics])
def test_a_services_metrics_are_written_as_the_library_does(metrics: type) -> None:
    registry = RunRegistry("tiny")
    metrics(registry)
    assert exposition(registry) == generate_latest(registry)
    assert len(exposition(registry).splitlines()) > 100


def test_what_is_taken_off_the_registry_is_gone() -> None:
    registry = RunRegistry("tiny")
    gauge = Gauge("g", "A gauge.", registry=registry)
    registry.unregister(gauge)
    assert exposition(registry) == b""


def test_a_registry_of_no_metrics_is_no_text() -> None:
    assert exposition(CollectorRegistry()) == b""
