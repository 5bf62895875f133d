"""The live page: what it shows, ready as text, and its HTTP routes. The event loop writes, the HTTP server's thread reads.

Bounded whatever readers do and however long the run is: records are thinned, and of the samples the first and the newest stay.
There is no queue for each reader. A reader has a position in the steps that are kept; one that is further behind, or was
connected to an earlier trainer, is told to fetch everything anew. What the keys of the page's object mean:
`pipelinerl.page.data`, which makes the same object of a finished run.

Nothing can be changed from the page. It shows model output, so it may load scripts and styles from here alone, and no other
site may read it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI, Header, Response
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelinerl.page import LIVE_ASSETS, asset
from pipelinerl.page.data import RunHistory
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.service.http import ABORT, LOCAL_NAMES, PROBED, bracketed, guard_hosts, is_loopback
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.records import to_json

MOST_PENDING = 16
"""Samples between two steps; the newest are kept."""
STEPS_KEPT = 256
"""Step events that a reader who was away can still catch up with."""
MOST_READERS = 32
HEARTBEAT_S = 15.0
RETRY_MS = 1000
"""After which a browser that lost its connection tries again."""


class PageBoard:
    """`begin` comes before `step`; all but the writing methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._about: Mapping[str, Any] = {"run": ""}
        self._history = RunHistory()
        self._anew()
        self._state: dict[str, Any] = {"phase": "starting"}
        self._state_number = 0
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MOST_PENDING)
        """Since the last step."""
        self._readers: set[PageReader] = set()
        self._closed = False
        self._cached: tuple[object, str] = (None, "")

    def _anew(self) -> None:
        self._token = secrets.token_hex(4)
        self._count = 0
        self._steps: deque[tuple[int, str]] = deque(maxlen=STEPS_KEPT)

    # --- written by the trainer --------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any], records: Iterable[Mapping[str, Any]], samples: Iterable[Any]) -> None:
        """The run is known: what does not change of it (`about`), its steps so far and their samples."""
        history = RunHistory()
        for record in records:
            history.add(record)
        history.add_samples(samples)
        with self._lock:
            self._about, self._history = dict(about), history
            self._anew()
        self._wake()

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Shown with the next step."""
        self._samples.append(sample)

    def step(self, record: Mapping[str, Any]) -> None:
        """One optimizer step, with the samples since the one before."""
        samples = list(self._samples)
        self._samples.clear()
        with self._lock:
            news = self._history.add(record, samples)
            self._count += 1
            self._steps.append((self._count, to_json(news)))
        self._wake()

    def state(self, state: Mapping[str, Any]) -> None:
        """What is true now. Readers hear of it when it has changed."""
        with self._lock:
            if state == self._state:
                return
            self._state = dict(state)
            self._state_number += 1
        self._wake()

    def close(self) -> None:
        """Every reader is told to come back later, and let go."""
        with self._lock:
            self._closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.wake()

    # --- read by the HTTP server -------------------------------------------------------------------------------------

    def history(self) -> str:
        """JSON of everything so far, and the `position` from which a reader goes on."""
        with self._lock:
            key = (self._token, self._count, self._state_number)
            if self._cached[0] == key:
                return self._cached[1]
            position = f"{self._token}-{self._count}"
            data = {**self._about, **self._history.data(), "state": self._state, "position": position}
        text = to_json(data)
        with self._lock:
            self._cached = (key, text)
        return text

    def open(self, position: str) -> PageReader | None:
        """A reader of what comes after `position`; None when there are too many, or the trainer ends. On an event loop."""
        reader = PageReader(self, position)
        with self._lock:
            if self._closed or len(self._readers) >= MOST_READERS:
                return None
            self._readers.add(reader)
        return reader

    def drop(self, reader: PageReader) -> None:
        with self._lock:
            self._readers.discard(reader)

    @property
    def num_readers(self) -> int:
        with self._lock:
            return len(self._readers)

    def news(self, reader: PageReader) -> tuple[list[str], bool]:
        """What `reader` has not heard, as server-sent events, and whether those are its last: the trainer ends, or steps are
        missing in between."""
        with self._lock:
            token, count = reader.position
            oldest = self._steps[0][0] if self._steps else self._count + 1
            if token != self._token or not oldest - 1 <= count <= self._count:
                return [frame("reset", "{}")], True
            told = [frame("step", text, f"{token}-{number}") for number, text in self._steps if number > count]
            if reader.state_number != self._state_number:
                told.append(frame("state", to_json(self._state)))
            reader.position, reader.state_number = (token, self._count), self._state_number
            return told, self._closed


class PageReader:
    """One connection. Belongs to the event loop that it was made on, but for `wake`."""

    def __init__(self, board: PageBoard, position: str) -> None:
        self._board, self.position, self.state_number = board, parsed(position), -1
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._board.drop(self)

    async def frames(self) -> AsyncIterator[str]:
        """Server-sent events, until the trainer ends or the reader has to fetch everything anew."""
        yield f"retry: {RETRY_MS}\n\n"
        while True:
            self._changed.clear()
            news, last = self._board.news(self)
            for one in news:
                yield one
            if last:
                return
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                yield ": still here\n\n"


def frame(event: str, data: str, position: str = "") -> str:
    """One server-sent event. `data` has no line breaks: JSON without indentation."""
    number = f"id: {position}\n" if position else ""
    return f"event: {event}\n{number}data: {data}\n\n"


def parsed(position: str) -> tuple[str, int]:
    """Of what a browser says; ("", -1), which nobody is at, where it is not of this shape."""
    token, _, count = position[:64].partition("-")
    return (token, int(count)) if count.isascii() and count.isdigit() else ("", -1)


def about(run: str, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """What does not change of a run while a trainer is up, for `PageBoard.begin`."""
    return {
        "run": run,
        "description": recipe.description or recipe.name,
        "mode": recipe.mode,
        "total_steps": recipe.trainer.steps,
        "max_lag": recipe.algorithm.max_lag,
        "recipe": recipe_yaml(recipe),
        "run_dir": str(run_dir),
    }


MOST_MEMBERS = 256
"""That are listed; a run with more is better watched on a dashboard."""


def member_rows(
    states: Mapping[str, str], served_version: int, loads: Mapping[str, ActorState]
) -> list[dict[str, Any]]:
    """Each registered actor in order of its name, with its state. An actor that is serving serves `served_version`;
    of the others, the version is known that they named when they were asked last."""
    rows = []
    for name, state in sorted(states.items(), key=lambda item: natural(item[0])):
        load = loads.get(name)
        known = served_version if state == "serving" else load.policy_version if load else None
        in_progress = load.sequences_in_progress if load else None
        rows.append({"name": name, "state": state, "version": known, "in_progress": in_progress})
    return rows[:MOST_MEMBERS]


def natural(name: str) -> list[str | int]:
    """Key by which actor-10 comes after actor-9."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", name))]


# --- routes -----------------------------------------------------------------------------------------------------------

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
        reader = board.open(last_event_id or after)
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
