"""What the local runner exports to Prometheus: which processes of the run are up, and how often each was started again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry

from pipelinerl.service.metric_set import MetricSet

SERVICES = ("trainer", "actor", "verifier", "nats")


def service_of(name: str) -> str:
    """The service that a process of a local run belongs to: `actor` of `actor-0`. Pure."""
    return name.partition("-")[0]


class RunnerMetrics:
    """`living`: names of the processes that live, asked for at each scrape."""

    def __init__(self, registry: CollectorRegistry, living: Callable[[], Collection[str]] = tuple) -> None:
        metrics = MetricSet(
            "pipelinerl_runner", registry
        )  # no label `service`: the runner's targets have one, which would win
        self._processes = metrics.reading(
            "processes", "Processes of the run that live.", {"process": SERVICES}, unit="processes"
        )
        self._processes.read_each(lambda: by_service(living()))
        self._restarts = metrics.counter(
            "restarts_total", "Processes that ended and are started again.", {"process": SERVICES}, unit="processes"
        )
        self.actors_wanted = metrics.reading(
            "actors_wanted", "Actors asked for, by the recipe or `pipelinerl scale`.", unit="actors"
        )
        metrics.gauge("start_timestamp_seconds", "When this runner started.").set_to_current_time()

    def restarts(self, name: str) -> None:
        """It ended, and is to be started again."""
        self._restarts.labels(service_of(name)).inc()


def by_service(names: Collection[str]) -> dict[str, float]:
    """Processes of each of `SERVICES`. Pure."""
    services = [service_of(name) for name in names]
    return {service: float(services.count(service)) for service in SERVICES}
