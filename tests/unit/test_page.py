"""The live page: history and news of a run, to readers that are fast, late, or of another trainer; and its routes over
a real server on a thread of its own: what is served, how safely, and to whom not.
"""

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.page.data import LIVE_ASSETS, NEWEST, RunHistory, ThinnedSeries
from pipelinerl.run_summary import RunFiles
from pipelinerl.service.http import guard_hosts, health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.settings import TrainerSettings
from services.trainer.reporting import page as live_page
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.page import STEPS_KEPT, PageBoard
from services.trainer.reporting.recorder import Recorder
from tests.unit.builders import make_recipe

ABOUT = {"run": "r"}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "time_s": 2.0 * step, "reward_mean": 0.5, "ess_by_lag": {"0": 1.0, "1": 0.5 / step},
        "lag_histogram": {0: 10, 1: step}, "loss": 1.0, **more,
    }  # fmt: skip


def sample(step: int, heldout: bool = False) -> dict[str, Any]:
    return {"step": step, "version": step, "prompt": "p", "completion": f"c{step}", "heldout": heldout, "spans": []}


@pytest.mark.parametrize("count", [1, 3, 20, 21, 77, 1000, 1023])
def test_the_newest_are_never_thinned(count: int) -> None:
    series = ThinnedSeries(16, newest=20)
    for number in range(count):
        series.add(number)
    items = series.items()
    assert items[-20:] == list(range(count))[-20:]
    assert items == sorted(set(items))
    assert (items[0], len(items) <= 2 * 16 + 20) == (0, True)
    assert len({b - a for a, b in itertools.pairwise(items[:-20])}) <= 1, "those before are evenly spaced"


def test_history_is_the_object_that_the_views_draw() -> None:
    history = RunHistory()
    history.add(record(1, clipped=True))
    news = history.add(record(2, heldout_accuracy=0.4, heldout_accuracy_lower_bound=0.3, heldout_version=1), [sample(2)])
    assert news["heldout"] == {"step": 1, "time_s": 2.0, "accuracy": 0.4, "lower_bound": 0.3, "sets": {}}
    assert (news["lag_totals"], news["ess_by_lag"]) == ({"0": 20, "1": 3}, {"0": 1.0, "1": 0.375})
    assert [one["completion"] for one in news["samples"]] == ["c2"]
    data = history.data()
    assert [one["step"] for one in data["records"]] == [1, 2]
    assert "loss" not in data["records"][0]
    assert data["records"][0]["clipped"]
    assert (data["heldout"], data["lag_totals"]) == ([news["heldout"]], news["lag_totals"])


def test_history_of_a_long_run_is_bounded() -> None:
    history = RunHistory(limit=10)
    for step in range(1, 2000):
        history.add(record(step, heldout_accuracy=0.1), [sample(step)])
    data = history.data()
    assert len(data["records"]) <= 20 + NEWEST
    assert len(data["heldout"]) <= 20
    assert len(history._times_s) <= 256
    assert (data["records"][0]["step"], data["records"][-1]["step"], data["lag_totals"]["0"]) == (1, 1999, 10 * 1999)
    assert [one["step"] for one in data["samples"]["early"]] == [1, 2]
    assert [one["step"] for one in data["samples"]["late"]] == [1996, 1997, 1998, 1999]


def begun(*steps: int) -> PageBoard:
    board = PageBoard()
    board.begin(ABOUT, [record(step) for step in steps], [])
    return board


def position(board: PageBoard) -> str:
    return json.loads(board.history())["position"]


def news(board: PageBoard, after: str) -> dict[str, Any]:
    return json.loads(board.news(after))


def test_a_reader_hears_each_step_once_and_the_state_now() -> None:
    board = begun(1, 2)
    before = position(board)
    assert not board.is_read
    assert news(board, before) == {"position": before, "state": {"phase": "starting"}, "steps": []}
    board.state({"phase": "training"})
    board.step(record(3))
    board.step(record(4))
    told = news(board, before)
    assert ([one["record"]["step"] for one in told["steps"]], told["state"]) == ([3, 4], {"phase": "training"})
    assert told["position"] == position(board)
    assert news(board, told["position"])["steps"] == []
    assert board.is_read
    history = json.loads(board.history())
    assert ([one["step"] for one in history["records"]], history["run"]) == ([1, 2, 3, 4], "r")


def test_a_reader_that_was_away_catches_up_or_starts_anew() -> None:
    board = begun()
    before = position(board)
    for step in range(1, STEPS_KEPT + 2):
        assert len(news(board, before)["steps"]) == step - 1
        board.step(record(step))
    assert news(board, before) == {"reset": True}


def test_readers_of_no_position_or_of_the_trainer_before_start_anew() -> None:
    for strange in ("", "x", "-", "abc-", "abc-x1", "abc-\u00b2", "ffff-3", "a" * 500 + "-1", position(begun(1, 2, 3))):
        assert news(begun(1), strange) == {"reset": True}
    early = PageBoard()  # a page that was opened while the model was loading
    at = position(early)
    assert news(early, at)["state"] == {"phase": "starting"}
    early.begin(ABOUT, [], [])
    assert news(early, at) == {"reset": True}


def test_a_page_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(PageBoard):
        def begin(self, *run: Any) -> None:
            raise ValueError("a strange name")

    with RunFiles(tmp_path) as files:
        Recorder(make_recipe(), files, TrainerMetrics(CollectorRegistry()), board=Broken())
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [ValueError]


@asynccontextmanager
async def served(board: PageBoard) -> AsyncIterator[httpx.AsyncClient]:
    app = health_app(Readiness("starting"), CollectorRegistry())
    live_page.add_page(app, board)
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        yield client


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
    paths = ("/", "/page/history", "/page/news", "/page/assets/live.js", "/metrics", "/readyz")
    strange = ("elsewhere.example", "localhost.elsewhere.example", "127.0.0.1.nip.io:80", "", "[::2]:80")
    async with served(board) as client:
        for path, host in itertools.product(paths, strange):
            answer = await client.get(path, headers={"Host": host})
            assert (answer.status_code, "the Host header of this request" in answer.text) == (403, True), (path, host)
            assert (await client.get("/healthz", headers={"Host": host})).status_code == 200
        for path, host in itertools.product(paths, ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]", "[::1]:80")):
            assert (await client.get(path, headers={"Host": host})).status_code != 403, (path, host)


async def test_in_a_cluster_the_page_has_names_and_probes_take_any() -> None:
    settings = TrainerSettings(
        run="r", recipe=Path("r"), instance="t", run_dir=Path("r"), http_host="0.0.0.0", page=True,
        advertise_host="fd00::5", page_hosts="runs.example, other.example",
    )  # fmt: skip
    app = health_app(Readiness("starting"), CollectorRegistry())
    live_page.add_page(app, PageBoard())

    async def status(path: str, host: str, settings: TrainerSettings = settings) -> int:
        transport = httpx.ASGITransport(guard_hosts(app, settings.http_host, live_page.page_hosts(settings)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path, headers={"Host": host})).status_code

    for host in ("localhost:8080", "[fd00::5]:8000", "runs.example", "other.example:443"):
        assert await status("/page/history", host) == 200
    for path in ("/", "/page/history"):
        assert await status(path, "elsewhere.example") == 403
    assert [await status(path, "10.0.0.7:8000") for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 200]
    nameless = settings.model_copy(update={"advertise_host": "", "page_hosts": ""})
    assert await status("/", "elsewhere.example", nameless) == 403
