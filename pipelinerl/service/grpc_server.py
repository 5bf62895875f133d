"""A grpc.aio server as an async context manager, with the standard health and reflection services beside its own.

It decides when a port is taken and what an error looks like to a caller. TLS comes in as ready credentials.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pipelinerl.errors import ServiceError
from pipelinerl.service.address import host_port
from pipelinerl.service.grpc_errors import ErrorBoundary

MAX_MESSAGE_BYTES = 256 * 1024**2
STOP_GRACE_S = 5.0
CONNECTION_AGE_S = 300.0
"""After which a client is asked to connect again, without a call being cut: it then looks its name up anew and finds servers
that were added, and both sides show renewed certificates."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a silent share of its connections
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True)
class GrpcServer:
    """A running server. `port` is the bound one."""

    port: int
    _health: health.aio.HealthServicer
    _names: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers for the whole server ("") and for each of its services."""
        answer = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, answer.SERVING if serving else answer.NOT_SERVING)


@asynccontextmanager
async def serve_grpc(
    register: Callable[[aio.Server], None],
    service_names: Sequence[str],
    host: str,
    port: int,
    *,
    stop_grace_s: float = STOP_GRACE_S,
    credentials: grpc.ServerCredentials | None = None,
    connection_age_s: float = CONNECTION_AGE_S,
) -> AsyncIterator[GrpcServer]:
    """Serves what `register` adds, on `port` (0 = any free one). Health says NOT_SERVING until told otherwise.

    At the end it says NOT_SERVING again, takes no new call, and gives those in progress `stop_grace_s`.
    `service_names`: full names (`pipelinerl.v1.VerifierService`), for health and reflection.
    Raises `ServiceError` naming the port when it cannot be bound.
    """
    age = ("grpc.max_connection_age_ms", round(connection_age_s * 1000))
    server = aio.server(interceptors=[ErrorBoundary()], options=[*_SERVER_OPTIONS, age])
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    running = GrpcServer(_bind(server, host, port, credentials), health_servicer, tuple(service_names))
    await running.set_serving(False)
    await server.start()
    try:
        yield running
    finally:
        await health_servicer.enter_graceful_shutdown()
        await asyncio.shield(server.stop(stop_grace_s))


def _bind(server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = host_port(host, port)
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:  # what grpcio raises for every failed bind
        raise ServiceError(
            f"grpc_port = {port}: cannot listen on {address}; is it in use? give another port, or 0 for any free one"
        ) from error
