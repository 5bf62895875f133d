"""Serves an ASGI application with uvicorn inside a process that has other things to do: no signal handlers, no logs.

In the caller's event loop, or on a thread with a loop of its own that still answers while the caller's is blocked. On a
loopback interface, requests that name another host are refused (`host_guard.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from pipelinerl.errors import ServiceError
from pipelinerl.service.address import host_port
from pipelinerl.service.host_guard import HEALTH, LOCAL_NAMES, HostGuard, bracketed, is_loopback

_GRACEFUL_S = 2
ABORT = "pipelinerl.abort"
"""Extension of a request's scope: `() -> None`, closes its connection and drops what the other side has not taken."""


@asynccontextmanager
async def serve_http(
    app: Any, host: str, port: int, *, own_thread: bool = False, names: Collection[str] = ()
) -> AsyncIterator[int]:
    """Yields the bound port (`port` 0 = any free one). Open requests get two seconds at the end.

    `names`: further hosts by which a request may call a loopback interface. Applications may end a connection by
    `scope["extensions"][ABORT]()`. Raises `ServiceError` when the port cannot be bound or the application does not start.
    """
    if is_loopback(host):
        app = HostGuard(app, {*LOCAL_NAMES, bracketed(host), *names}, {HEALTH})
    listener = _bind(host, port)
    bound_port = listener.getsockname()[1]
    with contextlib.closing(listener):
        server = _EmbeddedServer(app)
        async with server.on_thread(listener) if own_thread else server.in_loop(listener):
            yield bound_port


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # the second: no port has that number
        listener.close()
        why = error.strerror if isinstance(error, OSError) else error
        raise ServiceError(
            f"http_port = {port}: cannot listen on {host_port(host, port)} ({why}); "
            "give another port, or 0 for any free one"
        ) from error
    return listener


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone and tells the caller's loop when it is up."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                self._with_abort(app),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GRACEFUL_S,
                ws="none",
            )
        )
        self._callers_loop = asyncio.get_running_loop()
        self._up: asyncio.Future[bool] = self._callers_loop.create_future()

    def _with_abort(self, app: Any) -> Any:
        async def with_abort(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                scope["extensions"] = {**scope.get("extensions", {}), ABORT: lambda: self._abort(scope["client"])}
            await app(scope, receive, send)

        return with_abort

    def _abort(self, client: tuple[str, int] | None) -> None:
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is not None and tuple(transport.get_extra_info("peername") or ())[:2] == client:
                transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # uvicorn's way to say that the application's lifespan failed
            await super().startup(sockets)
        self.should_exit = self.should_exit or not self.started
        self._callers_loop.call_soon_threadsafe(self._up.set_result, self.started)

    async def wait_until_up(self) -> None:
        if not await self._up:
            raise ServiceError("the HTTP application did not start; its traceback is in the log")

    @asynccontextmanager
    async def in_loop(self, listener: socket.socket) -> AsyncIterator[None]:
        task = asyncio.create_task(self.serve([listener]), name="http")
        try:
            await self.wait_until_up()
            yield
        finally:
            self.should_exit = True
            await task

    @asynccontextmanager
    async def on_thread(self, listener: socket.socket) -> AsyncIterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self.serve([listener])), name="http", daemon=True)
        thread.start()
        try:
            await self.wait_until_up()
            yield
        finally:
            self.should_exit = True
            await asyncio.to_thread(thread.join)
