"""The live page: history and events of a run, to readers that are fast, slow, late, or of another trainer; and its routes over
a real server on a thread of its own: what is served, how safely, and to whom not.
"""

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
from pipelinerl.page.data import NEWEST, RunHistory, ThinnedSeries
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.records import RunFiles
from services.trainer.reporting import page as live_page
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.page import MOST_READERS, STEPS_KEPT, PageBoard, PageReader
from services.trainer.reporting.recorder import Recorder
from services.trainer.weight_sync.membership import member_states
from tests.unit.builders import make_recipe
from tests.unit.trainer_fakes import stop_during_step, training_run

ABOUT = {"run": "r"}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "time_s": 2.0 * step, "reward_mean": 0.5, "ess_by_lag": {"0": 1.0, "1": 0.5 / step},
        "lag_histogram": {0: 10, 1: step}, "loss": 1.0, **more,
    }  # fmt: skip


def sample(step: int, heldout: bool = False) -> dict[str, Any]:
    return {"step": step, "version": step, "prompt": "p", "completion": f"c{step}", "heldout": heldout, "spans": []}


# History


@pytest.mark.parametrize("count", [1, 3, 20, 21, 77, 1000, 1023])
def test_the_newest_are_never_thinned(count: int) -> None:
    series: ThinnedSeries[int] = ThinnedSeries(16, newest=20)
    for number in range(count):
        series.add(number)
    items = series.items()
    assert items[-20:] == list(range(count))[-20:]
    assert items == sorted(set(items))
    assert (items[0], len(items) <= 2 * 16 + 20) == (0, True)
    assert len({b - a for a, b in itertools.pairwise(items[:-20])}) <= 1, "those before are evenly spaced"


def test_a_line_of_the_samples_without_a_step_is_left_out() -> None:
    history = RunHistory()
    history.add_samples([{**sample(1), "step": "one"}, {}, sample(2)])
    assert [one["step"] for one in history.data()["samples"]["early"]] == [2]


def test_history_is_the_object_that_the_views_draw() -> None:
    history = RunHistory()
    history.add(record(1))
    news = history.add(record(2, heldout_accuracy=0.4, heldout_version=1), [sample(2)])
    assert news["heldout"] == {"step": 1, "time_s": 2.0, "accuracy": 0.4}
    assert (news["lag_totals"], news["ess_by_lag"]) == ({"0": 20, "1": 3}, {"0": 1.0, "1": 0.375})
    assert [one["completion"] for one in news["samples"]] == ["c2"]
    data = history.data()
    assert [one["step"] for one in data["records"]] == [1, 2]
    assert "loss" not in data["records"][0]
    assert (data["heldout"], data["lag_totals"]) == ([news["heldout"]], news["lag_totals"])


def test_ess_by_lag_is_in_order_of_lag_whatever_came_first() -> None:
    history = RunHistory()
    for buckets in ({"17+": 0.1, "3-4": 0.3}, {"5-8": 0.2, "0": 1.0, "9-16": None}):
        news = history.add(record(1, ess_by_lag=buckets))
    assert list(news["ess_by_lag"]) == ["0", "3-4", "5-8", "17+"]


def test_the_first_samples_stay_and_of_the_newest_as_many_held_out_ones() -> None:
    history = RunHistory()
    history.add_samples([sample(0, heldout=True)] * 4)
    for step in range(1, 30):
        history.add(record(step), [sample(step), sample(step), *([sample(step, heldout=True)] * (step % 10 == 0))])
    samples = history.data()["samples"]
    assert [one["step"] for one in samples["early"]] == [0, 0, 0, 0, 1, 1]
    assert [one["step"] for one in samples["late"] if one["heldout"]] == [10, 20]
    assert [one["step"] for one in samples["late"] if not one["heldout"]] == [28, 28, 29, 29]


def test_history_of_a_long_run_is_bounded() -> None:
    history = RunHistory(limit=10)
    for step in range(1, 2000):
        history.add(record(step, heldout_accuracy=0.1), [sample(step)])
    data = history.data()
    assert len(data["records"]) <= 20 + NEWEST
    assert len(data["heldout"]) <= 20
    assert len(history._times_s) <= 256
    assert (data["records"][0]["step"], data["records"][-1]["step"]) == (1, 1999)
    assert data["lag_totals"]["0"] == 10 * 1999


# State


def test_members_have_the_version_that_they_serve() -> None:
    loads = dict.fromkeys(("actor-10", "actor-2"), ActorState(policy_version=4, sequences_in_progress=5))
    present = {"actor-10", "actor-9", "actor-2", "x"}
    states = member_states(present, {"actor-2", "actor-9", "actor-10"}, {"actor-10"}, {"actor-2", "y"})
    rows = live_page.member_rows(states, 7, loads)
    assert [(row["name"], row["state"], row["version"], row["in_progress"]) for row in rows] == [
        ("actor-2", "serving", 7, 5),
        ("actor-9", "serving", 7, None),
        ("actor-10", "joining", 4, 5),
        ("x", "waiting", None, None),
        ("y", "leaving", None, None),
    ]
    assert sorted(["b", "a10", "a9", "10", "9"], key=live_page.natural) == ["9", "10", "a9", "a10", "b"]


# Board and readers


class Follower:
    """What one reader is told, event by event."""

    def __init__(self, reader: PageReader | None) -> None:
        assert reader is not None
        self.reader, self.frames = reader, reader.frames()

    async def next(self) -> tuple[str, Any]:
        async with asyncio.timeout(10):
            text = await anext(self.frames)
        fields = dict(line.split(": ", 1) for line in text.strip().splitlines() if not line.startswith(":"))
        return fields.get("event", "-"), fields.get("id") or json.loads(fields.get("data", "null"))


def begun(*steps: int) -> PageBoard:
    board = PageBoard()
    board.begin(ABOUT, [record(step) for step in steps], [])
    return board


def position(board: PageBoard) -> str:
    return json.loads(board.history())["position"]


async def test_a_reader_hears_each_step_once_and_the_state_when_it_changes() -> None:
    board = begun(1, 2)
    follower = Follower(board.open(position(board)))
    assert await follower.next() == ("-", None)
    assert await follower.next() == ("state", {"phase": "starting"})
    board.step(record(3))
    event, number = await follower.next()
    assert (event, number) == ("step", position(board))
    board.state({"phase": "training"})
    assert await follower.next() == ("state", {"phase": "training"})
    board.state({"phase": "training"})  # nothing new
    board.step(record(4))
    assert (await follower.next())[0] == "step"
    history = json.loads(board.history())
    assert ([one["step"] for one in history["records"]], history["run"]) == ([1, 2, 3, 4], "r")


async def test_a_reader_that_was_away_catches_up_or_starts_anew() -> None:
    board = begun()
    before = position(board)
    for step in range(1, STEPS_KEPT + 1):
        board.step(record(step))
    follower = Follower(board.open(before))
    told = [(await follower.next())[0] for _ in range(STEPS_KEPT + 1)]
    assert told == ["-", *["step"] * STEPS_KEPT]
    board.step(record(STEPS_KEPT + 1))
    late = Follower(board.open(before))
    assert [(await late.next())[0] for _ in range(2)] == ["-", "reset"]
    with pytest.raises(StopAsyncIteration):
        await late.next()


@pytest.mark.parametrize("strange", ["", "x", "-", "abc-", "abc-x1", "abc-\u00b2", "ffff-3", "a" * 500 + "-1"])
async def test_who_is_at_no_position_starts_anew(strange: str) -> None:
    follower = Follower(begun(1).open(strange))
    assert [(await follower.next())[0] for _ in range(2)] == ["-", "reset"]
    assert live_page.parsed(strange)[1] in (-1, 3)


async def test_readers_of_the_trainer_before_start_anew() -> None:
    old, new = begun(1, 2, 3), begun(1)
    assert [(await one.next())[0] for one in [Follower(new.open(position(old)))] for _ in range(2)] == ["-", "reset"]
    early = PageBoard()  # a page that was opened while the model was loading
    follower = Follower(early.open(position(early)))
    assert [(await follower.next())[0] for _ in range(2)] == ["-", "state"]
    early.begin(ABOUT, [], [])
    assert (await follower.next())[0] == "reset"


async def test_readers_are_bounded_and_let_go() -> None:
    board = begun()
    readers = [board.open("") for _ in range(MOST_READERS)]
    assert board.open("") is None
    assert readers[0] is not None
    readers[0].close()
    last = Follower(board.open(position(board)))
    for _ in range(2):
        await last.next()
    board.close()
    with pytest.raises(StopAsyncIteration):
        await last.next()
    assert board.open("") is None, "the trainer ends"


async def test_silence_is_broken_by_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "HEARTBEAT_S", 0.01)
    board = begun()
    follower = Follower(board.open(position(board)))
    for _ in range(2):
        await follower.next()
    async with asyncio.timeout(10):
        assert await anext(follower.frames) == ": still here\n\n"


# The recorder's side


def test_samples_go_with_the_next_step() -> None:
    board = PageBoard()
    board.begin(live_page.about("r", make_recipe(), Path("nowhere")), [], [])
    for step in range(100):
        board.sample(sample(step))
    board.step(record(1))
    board.step(record(2))
    data = json.loads(board.history())
    assert (data["total_steps"], data["max_lag"]) == (4, 1)
    assert "name: unit" in data["recipe"]
    assert [one["step"] for one in data["samples"]["late"]] == [96, 97, 98, 99]


def test_a_page_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PageBoard):
        def begin(self, *run: Any) -> None:
            raise ValueError("a strange name")

    with RunFiles(tmp_path) as files:
        Recorder(make_recipe(), files, TrainerMetrics(CollectorRegistry()), board=Broken())
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [ValueError]


# Routes


@asynccontextmanager
async def served(board: PageBoard) -> AsyncIterator[httpx.AsyncClient]:
    app = health_app(Readiness("starting"), CollectorRegistry())
    live_page.add_page(app, board)
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
    live_page.add_page(app, PageBoard())

    async def status(path: str, host: str, settings: TrainerSettings = settings) -> int:
        transport = httpx.ASGITransport(live_page.guarded(app, settings))
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
    monkeypatch.setattr(live_page, "SEND_TIMEOUT_S", 0.2)
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
