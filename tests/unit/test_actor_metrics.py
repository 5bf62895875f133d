"""What an actor exports, by hand: busy time and the engine's steps."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

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
