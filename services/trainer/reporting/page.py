"""HTTP routes of the live page: the page, its assets, the run so far as JSON, and what happens as server-sent events.

Everything is read from a `PageBoard`; nothing can be changed from here. The page shows model output, so it may load scripts and
styles from here alone, and no other site may read it.
"""

from __future__ import annotations

import asyncio
import re

from fastapi import FastAPI, Header, Response
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.page import LIVE_ASSETS, asset
from pipelinerl.service.http import (
    ABORT,
    LOCAL_NAMES,
    PROBED,
    bracketed,
    guard_hosts,
    is_loopback,
)
from pipelinerl.service.settings import TrainerSettings
from services.trainer.reporting.board import PageBoard, PageReader

SEND_TIMEOUT_S = 30.0
"""For a browser to take what was sent; one that does not is let go."""
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FRESH = {**SECURITY, "Cache-Control": "no-store"}
_KINDS = {"js": "text/javascript", "css": "text/css"}
_POSITION = re.compile(r"[0-9a-f]{1,32}-[0-9]{1,12}")


def add_page(app: FastAPI, board: PageBoard) -> None:
    """Adds the page's routes to `app`."""

    @app.get("/")
    async def page() -> Response:
        return Response(asset("live.html"), media_type="text/html", headers=_FRESH)

    @app.get("/page/assets/{name}")
    async def part(name: str) -> Response:
        if name not in LIVE_ASSETS:
            return Response("no such file\n", 404, media_type="text/plain", headers=SECURITY)
        headers = {**SECURITY, "Cache-Control": "no-cache"}
        return Response(asset(name), media_type=_KINDS[name.rpartition(".")[2]], headers=headers)

    @app.get("/page/history")
    def history() -> Response:
        return Response(board.history(), media_type="application/json", headers=_FRESH)

    @app.get("/page/events")
    async def events(after: str = "", last_event_id: str = Header("")) -> Response:
        position = last_event_id or after
        reader = board.open(position if _POSITION.fullmatch(position) else "")
        if reader is None:
            text = "too many pages are open, or the trainer is ending\n"
            return Response(text, 503, media_type="text/plain", headers={**_FRESH, "Retry-After": "5"})
        return EventStream(reader)


def guarded(app: ASGIApp, settings: TrainerSettings) -> ASGIApp:
    """`app` with its page for those who call the trainer by a name of its own. A loopback interface is `serve_http`'s."""
    if not settings.page or is_loopback(settings.http_host):
        return app
    return guard_hosts(app, {*LOCAL_NAMES, bracketed(settings.advertise_host), *page_hosts(settings)}, PROBED)


def page_hosts(settings: TrainerSettings) -> list[str]:
    """The names of `settings.page_hosts`."""
    return [name.strip() for name in settings.page_hosts.split(",") if name.strip()]


class EventStream(StreamingResponse):
    """Server-sent events of one reader, which is closed however the connection ends."""

    def __init__(self, reader: PageReader) -> None:
        super().__init__(reader.frames(), media_type="text/event-stream", headers={**_FRESH, "X-Accel-Buffering": "no"})
        self._reader, self._stuck = reader, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reader.close()
        if self._stuck and ABORT in scope.get("extensions", {}):
            scope["extensions"][ABORT]()  # an orderly end would wait for the browser to take the rest
            while (await receive())["type"] != "http.disconnect":
                pass

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            self._stuck = True
