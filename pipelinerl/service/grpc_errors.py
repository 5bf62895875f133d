"""The boundary between a gRPC handler and its caller: an exception becomes a status, its traceback a log entry."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from pipelinerl.errors import UserError

log = logging.getLogger(__name__)

_SHORT = 300
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class ErrorBoundary(aio.ServerInterceptor):
    """`UserError` becomes INVALID_ARGUMENT; anything else INTERNAL, with the error's name and the start of its text.

    What a handler itself aborts with passes unchanged.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return handler and _guarded(handler, handler_call_details.method)


def _guarded(handler: Any, method: str) -> Any:
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behaviour = getattr(handler, name)
    if inspect.isasyncgenfunction(behaviour):
        behaviour = _guarded_stream(behaviour, method)
    elif inspect.iscoroutinefunction(behaviour):
        behaviour = _guarded_call(behaviour, method)
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _guarded_call(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the RPC boundary
            return await _abort(context, method, error)

    return call


def _guarded_stream(
    behaviour: Callable[..., AsyncIterator[Any]], method: str
) -> Callable[[Any, aio.ServicerContext], AsyncIterator[Any]]:
    async def stream(request: Any, context: aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the RPC boundary
            await _abort(context, method, error)

    return stream


async def _abort(context: aio.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, UserError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:_SHORT])
    log.error("%s failed", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:_SHORT])
