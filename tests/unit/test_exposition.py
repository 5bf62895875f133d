"""The text of /metrics is what prometheus_client itself would write."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.telemetry.exposition import CONTENT_TYPE, Exposition, RunRegistry
from pipelinerl.telemetry.metrics import MetricSet
from services.actor.metrics import ActorMetrics
from services.trainer.reporting.metrics import TrainerMetrics

VALUES = [0, -0.0, 1, -1, 0.1, 1e-9, 1e-4, 999_999.5, 1e6, 123_456_789.25, -2.5e7, 1e21, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("value", VALUES)
def test_every_number_is_written_as_the_library_does(value: float) -> None:
    registry = RunRegistry("tiny")
    Gauge("g", "A gauge.", registry=registry).set(value)
    MetricSet("p", registry).reading("r_tokens", "A reading.").set(value)
    assert Exposition(registry).text() == generate_latest(registry)


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
    text = Exposition(registry).text()
    assert text == generate_latest(registry)
    assert len(list(text_string_to_metric_families(text.decode()))) == 7
    assert CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


def test_each_scrape_has_the_series_and_values_of_its_time() -> None:
    registry = RunRegistry("tiny")
    made = MetricSet("p", registry)
    counter = made.counter("failed_total", "F.", {"reason": "why"}, unit="items")
    histogram = made.histogram("wait_seconds", "W.", (0.1, 1.0), {"phase": "of the step"})
    gauge, one = Gauge("g", "G.", ["x"], registry=registry), made.reading("a_bytes", "A.")
    each = made.reading("b_tokens", "B.", {"bucket": "of the lag"})
    exposition = Exposition(registry)

    def scraped() -> int:
        assert exposition.text() == generate_latest(registry)
        return sum(not line.startswith(b"#") for line in exposition.text().splitlines())

    assert scraped() == 0
    counter.labels("a").inc()
    histogram.labels("p").observe(0.3)
    gauge.labels("y").set(1)
    one.set(4)
    each.set_each({"0": 1.0, "1-4": None})
    assert scraped() == 1 + 5 + 1 + 1 + 1
    counter.labels("b").inc(7)
    histogram.labels("p").observe(3)
    histogram.labels("q").observe(0)
    one.set(None)
    each.set_each({"1-4": 2, "0": 3.5})
    assert scraped() == 2 + 10 + 1 + 0 + 2
    counter.remove("a")
    histogram.clear()
    one.read(lambda: 12)
    each.read_state(("idle", "busy"), lambda: "busy")
    assert scraped() == 1 + 0 + 1 + 1 + 2


def test_a_value_that_is_asked_for_is_asked_at_each_scrape() -> None:
    registry, held = RunRegistry("tiny"), [1.0]
    Gauge("one", "O.", registry=registry).set_function(lambda: sum(held))
    each, exposition = Gauge("each", "E.", ["x"], registry=registry), Exposition(registry)
    for label in ("a", "b"):
        assert exposition.text() == generate_latest(registry)
        each.labels(label).set_function(lambda: len(held))
        held.append(3.0)
    assert exposition.text() == generate_latest(registry)
    assert b'each{run="tiny",x="b"} 3.0' in exposition.text()


@pytest.mark.parametrize("metrics", [ActorMetrics, TrainerMetrics])
def test_a_services_metrics_are_written_as_the_library_does(metrics: type) -> None:
    registry = RunRegistry("tiny")
    metrics(registry)
    text = Exposition(registry).text()
    assert text == generate_latest(registry)
    assert len(text.splitlines()) > 100


def test_what_is_taken_off_the_registry_is_gone() -> None:
    registry = RunRegistry("tiny")
    counter, exposition = Counter("c", "A counter.", registry=registry), Exposition(registry)
    assert exposition.text()
    registry.unregister(counter)
    assert exposition.text() == b""


def test_a_registry_of_no_metrics_is_no_text() -> None:
    assert Exposition(CollectorRegistry()).text() == b""
