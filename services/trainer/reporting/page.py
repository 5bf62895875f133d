"""The live page: its content as JSON, and its HTTP routes. The event loop writes; the HTTP server's thread reads.

Memory is bounded: records are thinned, and only the first and the newest samples are kept. A reader asks about once a second
for the steps after its position. If these are no longer kept, the answer says to fetch everything again.

The page is read-only. Because it shows model output, it may load scripts and styles only from this server, and no other site
may read it. With a key, only clients that know the key can read the page.
"""

from __future__ import annotations

import hmac
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import FastAPI, Response
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.page.data import LIVE_ASSETS, RunHistory, asset
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.rl.ledger import MEANINGS
from pipelinerl.run_dir import recipe_changes_of
from pipelinerl.run_summary import to_json
from pipelinerl.service.http import LOCAL_NAMES, PROBED, bracketed
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.v1.actor_pb2 import ActorState

MOST_PENDING = 16
"""Maximum number of samples kept between two steps; the newest are kept."""
STEPS_KEPT = 256
"""A reader that is behind by more than this number of steps must fetch everything again."""
ASKED_WITHIN_S = 1.5


class PageBoard:
    """Content of the page. Call `begin` before `step`. Any thread may call `history` and `news`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._about: Mapping[str, Any] = {"run": ""}
        self._history = RunHistory()
        self._token, self._count = secrets.token_hex(4), 0
        self._steps: deque[tuple[int, str]] = deque(maxlen=STEPS_KEPT)
        self._state: dict[str, Any] = {"phase": "starting"}
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MOST_PENDING)
        """Samples since the last step."""
        self._asked_at = -math.inf

    def begin(self, about: Mapping[str, Any], records: Iterable[Mapping[str, Any]], samples: Iterable[Any]) -> None:
        history = RunHistory()
        for record in records:
            history.add(record)
        history.add_samples(samples)
        with self._lock:
            self._about, self._history, self._token = dict(about), history, secrets.token_hex(4)

    def sample(self, sample: Mapping[str, Any]) -> None:
        self._samples.append(sample)

    def step(self, record: Mapping[str, Any]) -> None:
        """Add one optimizer step, with the samples added since the previous step."""
        samples = list(self._samples)
        self._samples.clear()
        with self._lock:
            news = self._history.add(record, samples)
            self._count += 1
            self._steps.append((self._count, to_json(news)))

    def state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._state = dict(state)

    def history(self) -> str:
        """Return the whole content of the page as JSON, including the `position` from which the reader continues."""
        with self._lock:
            data = {**self._about, **self._history.data(), "state": self._state, "position": self._position()}
        return to_json(data)

    def news(self, after: str) -> str:
        """Return JSON: the `steps` since position `after`, the current `state` and the new `position`. Return `{"reset": true}`
        if some of these steps are no longer kept, or `after` is invalid."""
        self._asked_at = time.monotonic()
        token, _, number = after[:64].partition("-")
        with self._lock:
            oldest = self._steps[0][0] if self._steps else self._count + 1
            count = int(number) if number.isascii() and number.isdigit() else -1
            if token != self._token or not oldest - 1 <= count <= self._count:
                return '{"reset": true}'
            steps = ",".join(text for at, text in self._steps if at > count)
            return f'{{"position": "{self._position()}", "state": {to_json(self._state)}, "steps": [{steps}]}}'

    @property
    def is_read(self) -> bool:
        """Return whether a page asked for news so recently that it is probably still open."""
        return time.monotonic() - self._asked_at < 2 * ASKED_WITHIN_S

    def _position(self) -> str:
        return f"{self._token}-{self._count}"


def about(run: str, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    return {
        "run": run,
        "description": recipe.description or recipe.name,
        "mode": recipe.mode,
        "total_steps": recipe.trainer.steps,
        "max_lag": recipe.algorithm.max_lag,
        "recipe": recipe_yaml(recipe),
        "changes": recipe_changes_of(run_dir),
        "run_dir": str(run_dir),
        "meanings": MEANINGS,
    }


MOST_MEMBERS = 256
"""Maximum number of actors that the page lists. For larger runs, use a dashboard."""


def member_rows(states: dict[str, str], versions: dict[str, int], loads: Mapping[str, ActorState]) -> list[dict[str, Any]]:
    """Return the first `MOST_MEMBERS` actors by name, each with its state and the version that it is known to serve.
    `versions`: the known versions by name. `loads`: the sequences in progress, and the version of actors not in `versions`."""
    rows = []
    for name, state in sorted(states.items(), key=lambda item: natural(item[0])):
        load = loads.get(name)
        known = versions.get(name, load.policy_version if load else None)
        in_progress = load.sequences_in_progress if load else None
        rows.append({"name": name, "state": state, "version": known, "in_progress": in_progress})
    return rows[:MOST_MEMBERS]


def natural(name: str) -> list[str | int]:
    """Return a sort key that puts actor-10 after actor-9."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", name))]


SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors http://127.0.0.1:* http://localhost:*",  # a notebook on this machine shows the page in a cell
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FRESH = {**SECURITY, "Cache-Control": "no-store"}
_KINDS = {"js": "text/javascript", "css": "text/css"}


def add_page(app: FastAPI, board: PageBoard) -> None:
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

    @app.get("/page/news")
    def news(after: str = "") -> Response:
        return Response(board.news(after), media_type="application/json", headers=_FRESH)


def behind_key(app: ASGIApp, key_file: Path | None) -> ASGIApp:
    """Return an app that serves `app` below the path `/KEY/`, where KEY is the content of `key_file`. Without the key, only the
    paths in `PROBED` work. Return `app` itself if `key_file` is None."""
    if key_file is None:
        return app
    key = key_file.read_bytes()

    async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBED:
            given, slash, path = scope["path"][1:].partition("/")
            if not (hmac.compare_digest(given.encode(), key) and slash):
                refusal = "refused: open the page with the link that `pipelinerl run` printed\n"
                await PlainTextResponse(refusal, 403)(scope, receive, send)
                return
            scope = {**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}
        await app(scope, receive, send)

    return keyed


def page_hosts(settings: TrainerSettings) -> list[str]:
    """Return the host names by which browsers may open the live page, besides `http_host`; none if there is no page."""
    names = [*LOCAL_NAMES, bracketed(settings.advertise_host), *(name.strip() for name in settings.page_hosts.split(","))]
    return list(filter(None, names)) if settings.page else []
