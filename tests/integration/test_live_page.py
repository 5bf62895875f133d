"""The live page's connection in a headless Chromium to a board that the test writes: when it is asked, and what again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.trainer.reporting.page import PageBoard
from tests.support.tools import tool
from tests.unit.test_page import record, sample, served

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

ABOUT = {
    "run": "r", "total_steps": 10, "max_lag": 1, "recipe": "name: r", "run_dir": "runs/r", "description": "a run",
}  # fmt: skip
STATE = {"phase": "training", "ended": "", "message": "", "version": 1, "members": [], "sequences": {}, "reasons": {}}
HIDE = """(hidden) => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


@asynccontextmanager
async def shown(board: PageBoard) -> AsyncIterator[tuple[Any, list[str]]]:
    """The page in a browser whose clock the test moves, and the paths that it asked for."""
    board.begin(ABOUT, [record(1)], [sample(1)])
    board.state(STATE)
    async with served(board) as client, playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        page, asked = await browser.new_page(), []
        page.on("request", lambda request: asked.append(request.url.split("?")[0].rpartition("/")[2]))
        await page.clock.install()
        await page.goto(str(client.base_url))
        yield page, asked
        await browser.close()


async def until_step(page: Any, step: int) -> None:
    await page.wait_for_function(
        "(step) => document.querySelector('[data-tile=reward] .note')?.textContent.startsWith(`step ${step};`)",
        arg=step,
    )


async def test_a_tab_that_nobody_looks_at_asks_for_nothing_and_catches_up() -> None:
    board = PageBoard()
    async with shown(board) as (page, asked):
        await until_step(page, 1)
        await page.evaluate(HIDE, True)
        await page.wait_for_load_state("networkidle")
        before = len(asked)
        await page.clock.run_for(60_000)
        assert len(asked) == before
        for step in (2, 3):
            board.step(record(step))
        await page.evaluate(HIDE, False)
        await until_step(page, 3)
        assert asked.count("history") == 1, "what it missed is told, and nothing else"


async def test_the_page_says_when_actors_idle_lag_is_bounded_probes_fail_and_how_often_gradients_are_cut() -> None:
    board = PageBoard()
    async with shown(board) as (page, _):
        await until_step(page, 1)
        lag, busy = (page.locator(f"[data-tile={name}] .note") for name in ("lag", "busy"))
        board.state({**STATE, "actors_held_back": True})
        board.step(record(2, largest_lag=1, grad_norm=9.0, clipped=True))
        await page.clock.run_for(2000)
        await until_step(page, 2)
        assert "the actors –: they outrun the trainer and idle rather than stockpile" in await busy.inner_text()
        assert (await lag.inner_text()).endswith("largest by the formula 1; bound 1")
        board.state(STATE)
        cut = {"grad_norm": 0.5, "clipped": False}
        probed = {"logprob_mismatch": 0.25, "parity_failures": 2}
        board.step(record(3, largest_lag=2, max_lag_too_small=True, **cut, **probed))
        await page.clock.run_for(2000)
        await until_step(page, 3)
        assert "stockpile" not in await busy.inner_text()
        assert (
            "largest by the formula 2; bound 1 is too small for that: generation is throttled" in await lag.inner_text()
        )
        assert (await page.locator("[data-tile=parity].warn").inner_text()).split("\n")[1:] == [
            "0.25",
            "2 PROBES FAILED: actors serve another policy",
        ]
        await page.get_by_text("Gradient norm").scroll_into_view_if_needed()
        await page.get_by_text("Before clipping, which cut 50% of the steps").wait_for()


async def test_a_page_without_an_answer_says_so_and_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    board = PageBoard()
    async with shown(board) as (page, asked):
        await until_step(page, 1)
        with monkeypatch.context() as broken:
            broken.setattr(board, "news", lambda after: 1 / 0)
            await page.clock.run_for(1000)
            await page.locator("main[data-link=lost]").wait_for()
            before = asked.count("news")
            await page.clock.run_for(60_000)
            assert 1 <= asked.count("news") - before <= 8
        board.step(record(2))
        await page.clock.run_for(20_000)
        await until_step(page, 2)
        await page.locator("main[data-link=live]").wait_for()
        assert asked.count("history") == 1
