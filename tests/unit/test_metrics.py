"""Every metric of a run has the run's name and a unit, and no series where it has no value."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.telemetry.metrics import OTHER, BoundedLabels, MetricSet, Reading, RunRegistry, short_reason


def series(registry: CollectorRegistry) -> dict[str, float]:
    """Value by `name{labels}`, as a scraper reads it."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        f"{sample.name}{dict(sorted(sample.labels.items()))}": sample.value for family in families for sample in family.samples
    }


def test_the_run_is_on_every_sample_of_every_kind() -> None:
    registry = RunRegistry("gsm")
    Gauge("g", "a gauge", ["state"], registry=registry).labels("up").set(2)
    Counter("c", "a counter", registry=registry).inc(3)
    Histogram("h", "a histogram", buckets=(1.0,), registry=registry).observe(0.5)
    reading = Reading("r", "a reading", ["lag"])
    reading.set({"0": 0.5})
    registry.register(reading)
    assert series(registry) == {
        "g{'run': 'gsm', 'state': 'up'}": 2,
        "c_total{'run': 'gsm'}": 3,
        "h_bucket{'le': '1.0', 'run': 'gsm'}": 1,
        "h_bucket{'le': '+Inf', 'run': 'gsm'}": 1,
        "h_count{'run': 'gsm'}": 1,
        "h_sum{'run': 'gsm'}": 0.5,
        "r{'lag': '0', 'run': 'gsm'}": 0.5,
    }
    assert registry.get_sample_value("c_total", {"run": "gsm"}) == 3


def test_what_has_no_value_has_no_series() -> None:
    registry, reading, by_lag = CollectorRegistry(), Reading("r", "text"), Reading("l", "text", ["lag"])
    registry.register(reading)
    registry.register(by_lag)
    assert series(registry) == {}
    reading.set(0.0)
    by_lag.set({"0": 1.0, "1": 0.5})
    by_lag.set({"1": 0.25, "2": None})
    assert series(registry) == {"r{}": 0, "l{'lag': '1'}": 0.25}
    reading.set(None)
    assert series(registry) == {"l{'lag': '1'}": 0.25}


def test_a_reading_is_read_at_each_scrape() -> None:
    registry, now = CollectorRegistry(), {"a": 1.0}
    state, count = Reading("s", "text", ["state"]), Reading("n_total", "text", ["outcome"])
    registry.register(state)
    registry.register(count)
    state.read(lambda: {"idle": float(now["a"] <= 1), "busy": float(now["a"] > 1)})
    count.read(lambda: {**now, "b": None})
    assert series(registry) == {"s{'state': 'idle'}": 1, "s{'state': 'busy'}": 0, "n_total{'outcome': 'a'}": 1}
    now["a"] = 2.0
    assert series(registry) == {"s{'state': 'idle'}": 0, "s{'state': 'busy'}": 1, "n_total{'outcome': 'a'}": 2}


def test_known_label_values_are_there_from_the_start() -> None:
    registry = RunRegistry("gsm")
    metrics = MetricSet("p", registry)
    metrics.counter("calls_total", "Calls.", {"code": ("OK", "BAD")}, unit="calls")
    metrics.counter("items_total", "Items.", {"task": "the recipe's", "code": ("OK",)})
    assert series(registry) == {"p_calls_total{'code': 'OK', 'run': 'gsm'}": 0, "p_calls_total{'code': 'BAD', 'run': 'gsm'}": 0}
    assert [(family.name, family.kind, family.unit) for family in registry.families] == [
        ("p_calls_total", "counter", "calls"),
        ("p_items_total", "counter", "items"),
    ]


def test_units_are_read_from_names_and_a_metric_without_one_is_refused() -> None:
    registry = RunRegistry("gsm")
    metrics = MetricSet("p", registry)
    for name in ("step_seconds", "tokens_per_second", "start_timestamp_seconds", "ess_ratio"):
        metrics.gauge(name, "A figure.")
    metrics.counter("busy_seconds_total", "Time.")
    units = [family.unit for family in registry.families]
    assert units == ["seconds", "per second", "seconds since 1970 (UTC)", "1 (a share)", "seconds"]
    with pytest.raises(AssertionError, match="loss: its unit is neither in the name nor given"):
        metrics.gauge("loss", "Loss.")


def test_a_reason_is_the_text_before_the_colon_and_a_counter_gets_the_first_ones() -> None:
    assert short_reason("reward_timeout: after 3 s: x") == "reward_timeout"
    assert (short_reason(": x"), len(short_reason("y" * 1000))) == ("unknown", 60)
    reasons = BoundedLabels(most=2)
    assert [reasons.of(one) for one in ("a: 1", "b: 2", "c: 3", "a: 4", "d" * 100)] == ["a", "b", OTHER, "a", OTHER]
