"""HTTP for every service: uvicorn serves /healthz, /readyz and /metrics inside a process that does other work.

On a loopback interface, a request must name this service in its Host header, except for /healthz. Without this rule, a web site
whose owner points its host name at this machine could read the answers through a browser here (DNS rebinding). The rule does
not replace a login: a program that reaches the port may send any Host header.

The size of a request's headers is limited. The time until they arrive is not, because uvicorn has no setting for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.errors import ServiceError
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.settings import host_port

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEALTH = "/healthz"
PROBED = (HEALTH, "/readyz", "/metrics")
"""Paths that Kubernetes and Prometheus request by a pod's address. They show no training data."""
BLOCKED_AFTER_S = 30.0
_GRACEFUL_S = 2
_MOST_HEAD_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
"""Seconds until the server closes an idle connection. Most clients close it earlier, so few send a request on a closed one."""


def guard_hosts(app: ASGIApp, host: str, names: Collection[str] = ()) -> ASGIApp:
    """Return `app` behind a guard that refuses requests whose Host header is neither `host` nor in `LOCAL_NAMES` or `names`. On
    a loopback interface, it does not check requests for `/healthz`; on others, it does not check those for the paths in
    `PROBED`, or any requests if `names` is empty."""
    is_local = host == "localhost"
    with contextlib.suppress(ValueError):  # `host` is a name
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not (is_local or names):
        return app
    known = frozenset(name.lower() for name in (*LOCAL_NAMES, bracketed(host), *names))
    open_paths, asked_for = [HEALTH] if is_local else PROBED, ", ".join(sorted(known))
    refusal = f"refused: the Host header of this request names another server; use one of these names: {asked_for}\n"

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        is_answered = scope["type"] != "http" or scope["path"] in open_paths
        if not is_answered:
            hosts = Headers(scope=scope).getlist("host")
            asked = hosts[0].strip().lower() if len(hosts) == 1 else ""
            name, colon, port = asked.rpartition(":")
            is_answered = bool(asked) and (name if colon and port.isdecimal() else asked) in known
        await (app if is_answered else PlainTextResponse(refusal, 403))(scope, receive, send)

    return guarded


def bracketed(host: str) -> str:
    """Return a host in the form of a Host header, with an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def health_app(readiness: Readiness, registry: CollectorRegistry, *, loop_watch: Callable[[], float] = lambda: 0.0) -> FastAPI:
    """Return an app with three routes. `/healthz`: 503 if `loop_watch` returns more than `BLOCKED_AFTER_S`, else 200.
    `/readyz`: 503 with the reason until the process is ready. `/metrics`: the registry in Prometheus's text format."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        silent_s = loop_watch()
        if silent_s > BLOCKED_AFTER_S:
            return Response(f"event loop blocked for {silent_s:.1f} s\n", 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = readiness.why_not
        return Response(f"{reason or 'ready'}\n", 503 if reason else 200, media_type="text/plain")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return app


@asynccontextmanager
async def serve_http(
    app: Any, host: str, port: int, *, names: Collection[str] = (), on_this_loop: bool = False
) -> AsyncIterator[int]:
    """Serve `app` and yield the bound port (`port` 0 = any free one). At the end, open requests have two seconds to finish.

    `names`: as for `guard_hosts`. `on_this_loop`: run `app` on this event loop, with which it shares data. By default, another
    thread runs it, so that it answers even while this loop is blocked. Raises `ServiceError` if the port cannot be bound or
    `app` does not start.
    """
    app = guard_hosts(app, host, names)
    with contextlib.closing(_bind(host, port)) as listener:
        # Connections inherit this option, which asyncio does not set on this socket. Without it, a response's body waits 40 ms
        # for the acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = _EmbeddedServer(app)
        if on_this_loop:
            serving = asyncio.create_task(server.serve([listener]))
        else:
            thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="http", daemon=True)
            thread.start()
            serving = asyncio.create_task(asyncio.to_thread(thread.join))
        try:
            if not await asyncio.wrap_future(server.up):
                raise ServiceError("the HTTP application did not start; its traceback is in the log")
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


def _bind(host: str, port: int) -> socket.socket:
    try:
        if ":" in host:  # `::` is for IPv4 too
            return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6())
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:  # OverflowError: the port number is out of range
        why = (getattr(error, "strerror", "") or str(error)).partition(" (while")[0]
        fix = "give another port, or 0 for any free one"
        raise ServiceError(f"http_port = {port}: cannot listen on {host_port(host, port)} ({why}); {fix}") from error


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server without signal handlers. The result of the future `up` tells whether the application has started."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                backlog=128,  # asyncio accepts so many connections at once, or logs as many errors if file descriptors run out
                timeout_graceful_shutdown=_GRACEFUL_S,
                timeout_keep_alive=_KEEP_ALIVE_S,
                ws="none",
                http="h11",  # httptools is twice as fast, but does not limit the size of headers
                h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            )
        )
        self.up = Future[bool]()
        self.up.set_running_or_notify_cancel()  # so that cancelling a waiting task does not cancel it

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # uvicorn raises it if the application's lifespan fails
            await super().startup(sockets)
        self.should_exit = self.should_exit or not self.started
        self.up.set_result(self.started)
