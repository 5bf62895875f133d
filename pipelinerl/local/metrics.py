"""What the local runner exports to Prometheus: which processes of the run are up, and how often each was started again.

One address of a local run for a Prometheus: the runner's own metrics, and where all others are.

`GET /targets` answers in the form of Prometheus' HTTP service discovery, so that actors that come and go need no other
configuration. It serves nothing that a service serves itself.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypedDict

from prometheus_client import CollectorRegistry

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.local.processes import living
from pipelinerl.run_dir import RunDir
from pipelinerl.service.address import ServiceAddress, host_port, read_address, write_address
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.telemetry.metrics import MetricSet, RunRegistry

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


NAME = "runner"
HOST = "127.0.0.1"


class Target(TypedDict):
    """One entry of the answer."""

    targets: list[str]
    """`host:port`."""
    labels: dict[str, str]
    """`service` and `instance`."""


@asynccontextmanager
async def runner_http(run_dir: RunDir, registry: RunRegistry, port: int) -> AsyncIterator[str]:
    """Serves /metrics, /targets and the health paths on this machine alone; the address is in the run directory meanwhile.

    Raises `FieldError` when `port` cannot be listened on; 0 is any free one.
    """
    readiness = Readiness()
    readiness.set_ready()
    app = health_app(readiness, registry)

    @app.get("/targets", response_model=None)
    def targets() -> list[Target]:
        return targets_of(run_dir, {NAME, *living_names(run_dir)})

    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(serve_http(app, HOST, port, own_thread=True))
        except ServiceError as error:
            raise FieldError("--metrics-port", port, "cannot be listened on; give another, or leave it out") from error
        address = host_port(HOST, bound)
        write_address(run_dir.address(NAME), ServiceAddress(grpc="", http=address, pid=os.getpid()))
        stack.callback(run_dir.address(NAME).unlink, missing_ok=True)
        yield address


def living_names(run_dir: RunDir) -> Collection[str]:
    """Of the run's processes, the runner left out; none while there is no list of them."""
    try:
        return living(run_dir)
    except (OSError, ValueError):
        return ()


def targets_of(run_dir: RunDir, names: Collection[str]) -> list[Target]:
    """Those of the processes `names` that say where they answer: not NATS, and none that is still starting."""
    found: list[Target] = []
    for name in sorted(names):
        try:
            address = read_address(run_dir.address(name)).http
        except ServiceError:
            continue
        if address:
            found.append({"targets": [address], "labels": {"service": service_of(name), "instance": name}})
    return found
