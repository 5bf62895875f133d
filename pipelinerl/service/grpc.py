"""gRPC for every service: servers with health checks, reflection and an error boundary, and channels with certificates."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pipelinerl.errors import MessageError, ServiceError, UserError
from pipelinerl.service.settings import ServiceAddress, ServiceSettings, announce, host_port
from pipelinerl.service.tls import CA, CERTIFICATE, Certificates, read_certificates, server_credentials

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 1024**2
STOP_GRACE_S = 5.0
CONNECTION_AGE_S = 300.0
"""Seconds after which a client must connect again; running calls continue. With the new connection, the client finds servers
that were added under the same host name, and gets the server's renewed certificate."""
_DETAILS_CHARACTERS = 300

CHANNEL_OPTIONS = (("grpc.max_send_message_length", MAX_MESSAGE_BYTES), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES))
_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # fail if the port is taken, instead of sharing its connections with the other server
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
Options = Sequence[tuple[str, Any]]


class ErrorBoundary(aio.ServerInterceptor):
    """Convert errors of a server's handlers to statuses: `UserError` and `MessageError` to INVALID_ARGUMENT, `ServiceError` to
    FAILED_PRECONDITION, others to INTERNAL with type and text. Long texts are cut. If a handler aborts, its status is kept."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method

        async def call(request: Any, context: aio.ServicerContext) -> Any:
            async with _errors_answered(context, method):
                return await handler.unary_unary(request, context)

        async def stream(request: Any, context: aio.ServicerContext) -> AsyncIterator[Any]:
            async with _errors_answered(context, method):
                async for response in handler.unary_stream(request, context):
                    yield response

        if handler is None:
            return None
        types = handler.request_deserializer, handler.response_serializer
        if inspect.iscoroutinefunction(handler.unary_unary):
            return grpc.unary_unary_rpc_method_handler(call, *types)
        if inspect.isasyncgenfunction(handler.unary_stream):
            return grpc.unary_stream_rpc_method_handler(stream, *types)
        return handler


@asynccontextmanager
async def _errors_answered(context: aio.ServicerContext, method: str) -> AsyncIterator[None]:
    try:
        yield
    except aio.AbortError:
        raise
    except (UserError, MessageError, ServiceError) as error:
        is_later = isinstance(error, ServiceError)
        code = grpc.StatusCode.FAILED_PRECONDITION if is_later else grpc.StatusCode.INVALID_ARGUMENT
        await context.abort(code, str(error)[:_DETAILS_CHARACTERS])
    except Exception as error:
        log.exception("%s failed", method)
        await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:_DETAILS_CHARACTERS])


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
) -> AsyncIterator[int]:
    """Serve on `port` (0 = any free one) the services that `register` adds, and yield the port. At the end, health checks
    answer NOT_SERVING, new calls are refused, and calls in progress have `stop_grace_s` to finish.

    `service_names` are full names, such as `pipelinerl.v1.VerifierService`. Raises `ServiceError` if the port cannot be used.
    """
    age = ("grpc.max_connection_age_ms", round(connection_age_s * 1000))
    server = aio.server(interceptors=[ErrorBoundary()], options=[*_SERVER_OPTIONS, age])
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    address = host_port(host, port)
    try:
        bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:  # grpcio raises it for every failed bind
        fix = "is it in use? give another port, or 0 for any free one"
        raise ServiceError(f"grpc_port = {port}: cannot listen on {address}; {fix}") from error
    for name in ("", *service_names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield bound
    finally:
        await health_servicer.enter_graceful_shutdown()
        await asyncio.shield(server.stop(stop_grace_s))


@asynccontextmanager
async def serve_calls(
    settings: ServiceSettings, register: Callable[[aio.Server], None], service: str, http_port: int
) -> AsyncIterator[ServiceAddress]:
    """Serve a service's calls at the address in its settings, announce its addresses, and yield them. Raises `ServiceError` for
    an unusable port, and `FieldError` for an unusable certificate."""
    credentials = server_credentials(settings.tls_dir)
    async with serve_grpc(register, [service], settings.grpc_host, settings.grpc_port, credentials=credentials) as port:
        yield announce(settings, port, http_port)


def open_channel(target: str, tls: Path | Certificates | None, name_override: str = "", options: Options = ()) -> aio.Channel:
    """Return a channel to `target` (host:port, or dns:///name:port) that uses the certificates in `tls`; None = plain text.

    `name_override`: name in the server's certificate, if `target` is an address. Raises `FieldError` for an unusable file.
    """
    every = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0), *options]
    if tls is None:
        return aio.insecure_channel(target, options=every)
    if name_override:
        every.append(("grpc.ssl_target_name_override", name_override))
    found = read_certificates(tls, "client") if isinstance(tls, Path) else tls
    credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.certificate)
    return aio.secure_channel(target, credentials, options=every)


def explained(error: Exception, tls_dir: Path | None) -> str:
    """Return an error as text. For a failed call, give its status and details, and a hint if TLS may be the cause."""
    if not isinstance(error, aio.AioRpcError):
        return str(error)
    details, hint = error.details() or "", ""
    closed_at_once = "failed to connect" in details and "Socket closed" in details
    if tls_dir is None:
        hint = " (if the server requires TLS, set tls_dir)" if closed_at_once else ""
    elif "WRONG_VERSION_NUMBER" in details:
        hint = " (the server uses no TLS, but tls_dir is set here; set it there, too)"
    elif "Hostname Verification" in details or "does not match SSL server name" in details:
        hint = " (the server's certificate is for other names)"
    elif "CERTIFICATE_VERIFY_FAILED" in details:
        hint = f" (the server's certificate is not valid under {tls_dir / CA})"
    elif closed_at_once:
        hint = f" (the server may refuse {tls_dir / CERTIFICATE}: has it expired, or is it from another CA?)"
    return f"{error.code().name}: {details}{hint}"
