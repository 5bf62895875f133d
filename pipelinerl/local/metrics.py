"""The local runner's HTTP server for Prometheus. `/metrics` gives the runner's metrics. `/targets` lists the run's metrics
endpoints for Prometheus's HTTP service discovery."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import living_names, service_of
from pipelinerl.run_dir import RunDir, write_json
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.settings import host_port, read_address
from pipelinerl.telemetry.metrics import MetricSet

NAME = "runner"
HOST = "127.0.0.1"
SERVICES = ("trainer", "actor", "verifier", "nats")


class RunnerMetrics:
    """The runner's metrics. `living` returns the names of the living processes. It is called at each scrape."""

    def __init__(self, registry: CollectorRegistry, living: Callable[[], Collection[str]] = tuple) -> None:
        metrics = MetricSet("pipelinerl_runner", registry)  # The label `service` is not used, because /targets sets it.

        def processes() -> dict[str, float]:
            services = Counter(service_of(name) for name in living())
            return {service: float(services[service]) for service in SERVICES}

        metrics.reading("processes", "Running processes of the run.", {"process": SERVICES}, unit="processes").read(processes)
        restarted = {"process": SERVICES}
        self.restarts = metrics.counter("restarts_total", "Restarts of processes that died.", restarted, unit="processes")
        wanted = "Number of actors that the recipe or `pipelinerl scale` asks for, limited by the GPUs."
        self.actors_wanted = metrics.reading("actors_wanted", wanted, unit="actors")
        metrics.gauge("start_timestamp_seconds", "Unix time at which this runner started.").set_to_current_time()


@asynccontextmanager
async def runner_http(run_dir: RunDir, registry: CollectorRegistry, port: int) -> AsyncIterator[None]:
    """Serve /metrics, /targets and the health paths on loopback; port 0 means any free port. While the server runs, an
    address file in the run directory names its port. Raises `ServiceError` if the port cannot be used."""
    app = health_app(Readiness(""), registry)

    @app.get("/targets", response_model=None)
    def targets() -> list[dict[str, object]]:
        return targets_of(run_dir, {NAME, *living_names(run_dir)})

    async with serve_http(app, HOST, port) as bound:
        write_json(run_dir.address(NAME), {"grpc": "", "http": host_port(HOST, bound), "pid": os.getpid()})
        try:
            yield
        finally:
            run_dir.address(NAME).unlink(missing_ok=True)


def targets_of(run_dir: RunDir, names: Collection[str]) -> list[dict[str, object]]:
    """Return a Prometheus target for each process in `names` whose address file has an HTTP address."""
    found: list[dict[str, object]] = []
    for name in sorted(names):
        try:
            address = read_address(run_dir.address(name)).http
        except ServiceError:
            continue
        if address:
            found.append({"targets": [address], "labels": {"service": service_of(name), "instance": name}})
    return found
