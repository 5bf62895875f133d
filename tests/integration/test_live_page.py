"""The live page's connection in a headless Chromium to a board that the test writes: when it is asked, and what again."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pipelinerl.rl.ledger import MEANINGS
from services.trainer.reporting.page import PageBoard
from tests.support.browser import WAIT_MS, barriers, chromium
from tests.support.machine import until
from tests.unit.test_page import record, sample, served

ABOUT = {
    "run": "r", "total_steps": 10, "max_lag": 1, "recipe": "name: r", "run_dir": "runs/r", "description": "a run",
    "meanings": MEANINGS,
}  # fmt: skip
STATE = {"phase": "training", "ended": "", "message": "", "version": 1, "members": [], "sequences": {}, "reasons": {}}
HIDE = """(hidden) => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


@asynccontextmanager
async def shown(board: PageBoard, *samples: dict[str, Any]) -> AsyncIterator[tuple[Any, list[str]]]:
    """The page in a browser whose clock the test moves, and the paths that it asked for."""
    board.begin(ABOUT, [record(1)], [sample(1), *samples])
    board.state(STATE)
    async with served(board) as client, chromium() as browser:
        page, asked = await browser.new_page(), []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: asked.append(request.url.split("?")[0].rpartition("/")[2]))
        await page.clock.install()
        await page.goto(str(client.base_url))
        yield page, asked


async def until_step(page: Any, step: int) -> None:
    note = "document.querySelector('[data-tile=reward] .note')"
    await page.wait_for_function(f"(step) => {note}?.textContent.startsWith(`step ${{step}};`)", arg=step)


async def take_step(page: Any, board: PageBoard, taken: dict[str, Any]) -> None:
    board.step(taken)
    await page.clock.run_for(2000)
    await until_step(page, taken["step"])


async def test_a_tab_asks_for_nothing_while_nobody_looks_and_ever_less_often_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        with monkeypatch.context() as broken:
            broken.setattr(board, "news", lambda after: 1 / 0)
            await page.clock.run_for(1000)
            await page.locator("main[data-link=lost]").wait_for()
            before = asked.count("news")
            await page.clock.run_for(60_000)
            await until(lambda: asked.count("news") > before)
            assert asked.count("news") - before <= 8
        board.step(record(4))
        await page.clock.run_for(20_000)
        await until_step(page, 4)
        await page.locator("main[data-link=live]").wait_for()
        assert asked.count("history") == 1, "what it missed is told, and nothing else"


EPISODE = {
    **sample(1),
    "version": 7,
    "branches": [
        {
            "prompt": "<|system|>Add.<|user|>2 + 2?<|assistant|>",
            "spans": [[6, 0, 1], [7, 1, 2], [7, 5, 6]],
            "parts": [
                {"role": "assistant", "start": 0, "end": 2, "text": "to add", "tokens": ["to ", "add"], "weights": [1.0, 3.0]},
                {"role": "observation", "start": 2, "end": 5, "text": "<|end|><|tool|>4<b>"},
                {"role": "assistant", "start": 5, "end": 6, "text": "4", "finish_reason": "length"},
            ],
        }
    ],
}


async def test_an_episode_is_shown_turn_by_turn_with_what_it_observed() -> None:
    board = PageBoard()
    async with shown(board, EPISODE) as (page, _):
        await until_step(page, 1)
        assert await barriers(page) == []
        episode = page.locator(".episode").first
        heads = ["Turn 1 · 2 tokens", "Tool · 3 tokens", "Turn 2 · 1 token · cut at its length limit"]
        assert await episode.locator(".head").all_inner_texts() == heads
        assert await episode.locator(".text.observed").nth(1).text_content() == "<|end|><|tool|>4<b>"
        looks = [await one.get_attribute("class") for one in await episode.locator(".token").all()]
        assert looks == ["token v0 change", "token v1 change far"]
        sampled_by = page.locator(".samples tr:has(.episode) .versions").first
        assert (await sampled_by.inner_text()).split("\n") == ["v6: 1 token, lag 1", "v7: 2 tokens"]


async def test_the_page_warns_of_lost_sequences_and_failed_probes() -> None:
    board = PageBoard()
    async with shown(board) as (page, _):
        await until_step(page, 1)
        board.state({**STATE, "sequences": {"issued": 1000, "dropped_stale": 11}})
        lag, probed = {"mean": 0.9, "p95": 1.0, "max": 1}, {"logprob_mismatch": 0.25, "parity_failures": 2}
        await take_step(page, board, record(2, largest_lag=1, lag=lag, **probed))
        full = await page.locator("[data-tile=lag].warn").inner_text()
        assert full.endswith("at its bound 1: 1.1% of the sequences were dropped as too old")
        parity = await page.locator("[data-tile=parity].warn").inner_text()
        assert parity.split("\n")[1:] == ["0.25", "2 PROBES FAILED: actors serve another policy"]
