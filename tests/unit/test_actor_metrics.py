"""What an actor exports, by hand: busy time, the engine's steps, what is read at a scrape."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.actor import metrics as actor_metrics
from services.actor.metrics import ActorMetrics, BusyClock


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(actor_metrics.time, "monotonic", clock)
    return clock


def test_busy_is_the_time_with_anything_in_progress(clock: Clock) -> None:
    busy = BusyClock()
    for at_s, step in ((10.0, busy.enter), (11.0, busy.enter), (13.0, busy.leave)):
        clock.now_s = at_s
        step()
    clock.now_s = 14.0
    assert busy.total_s == 4.0
    busy.leave()
    clock.now_s = 20.0
    assert busy.total_s == 4.0
    busy.enter()
    clock.now_s = 21.0
    assert busy.total_s == 5.0


def test_what_is_read_at_a_scrape() -> None:
    registry, actor = CollectorRegistry(), SimpleNamespace(version=None, ready=False, staging="idle")
    metrics, of = ActorMetrics(registry), registry.get_sample_value
    assert of("pipelinerl_actor_ready") == 0  # also of an actor whose engine never comes up
    metrics.watch(
        version=lambda: actor.version,
        ready=lambda: actor.ready,
        held_groups=lambda: 3,
        staging=lambda: actor.staging,
        most_in_progress=64,
    )
    assert (of("pipelinerl_actor_policy_version"), of("pipelinerl_actor_ready")) == (None, 0)
    actor.version, actor.ready, actor.staging = 7, True, "staged"
    assert (of("pipelinerl_actor_policy_version"), of("pipelinerl_actor_ready")) == (7, 1)
    states = {state: of("pipelinerl_actor_staging_state", {"state": state}) for state in actor_metrics.STAGING_STATES}
    assert states == {"idle": 0, "receiving": 0, "staged": 1, "committing": 0}
    assert (of("pipelinerl_actor_prompts_held_groups"), of("pipelinerl_actor_sequences_in_progress_max")) == (3, 64)


def test_steps_of_the_engine_are_timed_while_it_has_something_to_do(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM, whose import takes seconds; runs with a real engine show that it takes the logger."""
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.v1.metrics.loggers"], "PrometheusStatLogger", object, raising=False)
    from services.actor.vllm_engine import step_logger

    registry = CollectorRegistry()
    metrics = ActorMetrics(registry)
    logger = step_logger(metrics.engine_step)(None)  # type: ignore[call-arg, arg-type]
    for now_s, running, usage in ((1.0, 2, 0.5), (1.5, 1, 0.25), (2.5, 0, 0.0), (60.0, 1, 0.125)):
        clock.now_s = now_s
        logger.record(SimpleNamespace(num_running_reqs=running, kv_cache_usage=usage), None)
    of = registry.get_sample_value
    assert (of("pipelinerl_actor_decode_step_seconds_count"), of("pipelinerl_actor_decode_step_seconds_sum")) == (
        2,
        1.5,
    )
    assert of("pipelinerl_actor_kv_cache_usage_ratio") == 0.125


def test_failed_tries_of_the_verifier_have_series_from_the_start() -> None:
    registry = CollectorRegistry()
    metrics, of = ActorMetrics(registry), registry.get_sample_value
    name = "pipelinerl_actor_verify_failed_tries_total"
    assert {of(name, {"code": code}) for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")} == {0}
    metrics.verify_try_failed("UNAVAILABLE")
    assert of(name, {"code": "UNAVAILABLE"}) == 1


def test_metric_says_which_way_of_loading_is_in_use_and_no_other() -> None:
    registry = CollectorRegistry()
    metrics = ActorMetrics(registry)
    metrics.show_weight_loader("shadow")
    metrics.show_weight_loader("in_place")

    text = generate_latest(registry).decode()
    assert 'pipelinerl_actor_weight_loader{mode="in_place"} 1.0' in text
    assert 'mode="shadow"' not in text
