"""The live page's routes over a real server on a thread of its own: what is served, how safely, and to whom not."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.page import LIVE_ASSETS
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.settings import TrainerSettings
from services.trainer.reporting import page as routes
from services.trainer.reporting.page import PageBoard, add_page, guarded
from tests.unit.test_page_board import ABOUT, record, sample
from tests.unit.trainer_fakes import stop_during_step, training_run


@asynccontextmanager
async def served(board: PageBoard) -> AsyncIterator[httpx.AsyncClient]:
    app = health_app(Readiness("starting"), CollectorRegistry())
    add_page(app, board)
    async with serve_http(app, "127.0.0.1", 0) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            yield client
        board.close()


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, str, str]]:
    """(event, id, data) of a stream."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields.get("id", ""), fields["data"]
            fields = {}


async def test_everything_the_page_needs_is_served_and_may_load_nothing_else() -> None:
    async with served(PageBoard()) as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        for name in LIVE_ASSETS:
            assert f'"page/assets/{name}"' in page.text
            answer = await client.get(f"/page/assets/{name}")
            assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
        for name in ("live.html", "data.py", "..%2Fdata.py", "nosuch.js"):
            assert (await client.get(f"/page/assets/{name}")).status_code == 404
        for path in ("/", "/page/history"):
            headers = (await client.get(path, headers={"Origin": "http://elsewhere.example"})).headers
            assert "access-control-allow-origin" not in headers
            assert headers["cross-origin-resource-policy"] == "same-origin"
        assert (await client.post("/page/history")).status_code == 405


async def test_a_site_whose_name_leads_here_reads_nothing() -> None:
    """DNS rebinding: the browser takes the answer for the site's own, and says the site's name."""
    board = PageBoard()
    board.begin(ABOUT, [record(1)], [sample(1)])
    paths = ("/", "/page/history", "/page/events", "/page/assets/live.js", "/metrics", "/readyz")
    strange = ("elsewhere.example", "localhost.elsewhere.example", "127.0.0.1.nip.io:80", "", "[::2]:80")
    async with served(board) as client:
        for path, host in itertools.product(paths, strange):
            answer = await client.get(path, headers={"Host": host})
            assert (answer.status_code, "the Host of this request" in answer.text) == (403, True), (path, host)
            assert (await client.get("/healthz", headers={"Host": host})).status_code == 200
        for path, host in itertools.product(paths, ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]", "[::1]:80")):
            if path != "/page/events":
                assert (await client.get(path, headers={"Host": host})).status_code != 403, (path, host)


async def test_in_a_cluster_the_page_has_names_and_probes_take_any() -> None:
    settings = TrainerSettings(
        run="r", recipe=Path("r"), instance="t", verifier="v", run_dir=Path("r"), http_host="0.0.0.0", page=True,
        advertise_host="fd00::5", page_hosts="runs.example, other.example",
    )  # fmt: skip
    app = health_app(Readiness("starting"), CollectorRegistry())
    add_page(app, PageBoard())

    async def status(path: str, host: str, settings: TrainerSettings = settings) -> int:
        transport = httpx.ASGITransport(guarded(app, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path, headers={"Host": host})).status_code

    for host in ("localhost:8080", "[fd00::5]:8000", "runs.example", "other.example:443"):
        assert await status("/page/history", host) == 200
    for path in ("/", "/page/history"):
        assert await status(path, "elsewhere.example") == 403
    assert [await status(path, "10.0.0.7:8000") for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 200]
    assert await status("/", "10.0.0.7", settings.model_copy(update={"page": False})) == 200


async def test_a_page_fetches_history_and_follows_from_there() -> None:
    board = PageBoard()
    board.begin(ABOUT, [record(1)], [sample(1)])
    async with served(board) as client:
        history = (await client.get("/page/history")).json()
        assert [one["step"] for one in history["records"]] == [1]
        async with client.stream("GET", "/page/events", params={"after": history["position"]}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            heard = events(answer)
            assert (await anext(heard))[0] == "state"
            board.sample(sample(2))
            board.step(record(2))
            event, number, data = await anext(heard)
            assert (event, json.loads(data)["record"]["step"]) == ("step", 2)
        board.step(record(3))
        async with client.stream("GET", "/page/events", headers={"Last-Event-ID": number}) as answer:
            event, _, data = await anext(events(answer))
            assert (event, json.loads(data)["record"]["step"]) == ("step", 3)
        async with client.stream("GET", "/page/events", params={"after": "<script>"}) as answer:
            assert [one[0] async for one in events(answer)] == ["reset"]


async def test_connections_are_counted_and_closed_ones_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.reporting.page.MOST_READERS", 1)
    board = PageBoard()
    board.begin(ABOUT, [], [])
    async with served(board) as client:
        position = (await client.get("/page/history")).json()["position"]
        async with client.stream("GET", "/page/events", params={"after": position}) as answer:
            heard = events(answer)  # kept: the connection ends with the generator
            assert (await anext(heard))[0] == "state"
            refused = await client.get("/page/events", params={"after": position})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        async with asyncio.timeout(20):
            while board.num_readers:
                await asyncio.sleep(0.01)


async def test_a_browser_that_takes_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket is full: nothing is kept for it, its place is free again, and its connection is gone."""
    monkeypatch.setattr(routes, "SEND_TIMEOUT_S", 0.2)
    board = PageBoard()
    board.begin(ABOUT, [], [])
    async with served(board) as client:
        position = (await client.get("/page/history")).json()["position"]
        with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
            connection.sendall(f"GET /page/events?after={position} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            async with asyncio.timeout(30):
                while not board.num_readers:
                    await asyncio.sleep(0.01)
                step = 0
                while board.num_readers:
                    step += 1
                    board.step(record(step, weight_update={"x": "y" * 100_000}))
                    await asyncio.sleep(0.005)
                with suppress(ConnectionError):  # what is sent to a closed connection is answered by its reset
                    while True:
                        connection.sendall(b"x")
                        await asyncio.sleep(0.01)
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


async def test_a_trainer_tells_its_page_what_it_does(tmp_path: Path) -> None:
    board = PageBoard()
    summary_there: list[bool] = []
    async with training_run(tmp_path, board=board) as (run, policy), asyncio.timeout(60):
        show = board.state

        def state(shown: Mapping[str, Any]) -> None:
            if shown["ended"]:
                summary_there.append((tmp_path / "summary.json").exists())
            show(shown)

        board.state = state  # type: ignore[method-assign]
        assert json.loads(board.history())["state"] == {"phase": "starting"}
        running = await stop_during_step(run, policy)
        policy.may_step.set()
        await running
    assert summary_there == [True], "what counts is written first"
    data = json.loads(board.history())
    assert [one["step"] for one in data["records"]] == [2]
    state = data["state"]
    assert (state["phase"], state["ended"], state["version"]) == ("finished", "stopped", 2)
    counts = state["sequences"]
    assert counts["issued"] == counts["trained"] + counts["in_flight"]
    assert [one["tokens"] for one in data["samples"]["early"]] == [None, None], "the fake's text is another"
