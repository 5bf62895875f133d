"""One address of a local run for a Prometheus: the runner's own metrics, and where all others are.

`GET /targets` answers in the form of Prometheus' HTTP service discovery, so that actors that come and go need no other
configuration. It serves nothing that a service serves itself.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypedDict

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.local.living import living
from pipelinerl.local.run_dir import RunDir
from pipelinerl.local.runner_metrics import service_of
from pipelinerl.service.address import ServiceAddress, host_port, read_address, write_address
from pipelinerl.service.health_app import health_app
from pipelinerl.service.http import serve_http
from pipelinerl.service.readiness import Readiness
from pipelinerl.service.run_registry import RunRegistry

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
