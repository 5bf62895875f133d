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


ADD = '<tool_call>{"name": "add", "arguments": {"terms": [2, 2]}}</tool_call>'
EPISODE = {
    **sample(1),
    "version": 7,
    "branches": [
        {
            "prompt": "<|system|>Add.<|user|>2 + 2?<|assistant|>",
            "spans": [[6, 0, 1], [7, 1, 2], [7, 5, 6]],
            "parts": [
                {"role": "assistant", "start": 0, "end": 2, "text": ADD, "tokens": ["<tool_call>", ADD[11:]],
                 "weights": [1.0, 3.0], "finish_reason": "stop"},
                {"role": "observation", "start": 2, "end": 5, "text": "<|end|><|tool|>4<b>"},
                {"role": "assistant", "start": 5, "end": 6, "text": "4", "finish_reason": "length"},
            ],
        },
        {"prompt": "again", "spans": [[7, 0, 1]], "parts": [{"role": "assistant", "start": 0, "end": 1, "text": "5"}]},
    ],
}  # fmt: skip


async def test_an_episode_is_shown_turn_by_turn_with_what_it_observed_in_grey() -> None:
    board = PageBoard()
    async with shown(board, EPISODE) as (page, _):
        await until_step(page, 1)
        assert await barriers(page) == []
        episode = page.locator(".episode").first
        assert await episode.locator(".head").all_inner_texts() == [
            'Turn 1 · 2 tokens · calls add {"terms":[2,2]}',
            "Tool · 3 tokens",
            "Turn 2 · 1 token · cut at its length limit",
            "Turn 1 · 1 token",
        ]
        assert await episode.locator("summary").all_inner_texts() == [
            "Branch 1 of 2: context of its first turn · system, user",
            "Branch 2 of 2: context of its first turn",
        ]
        assert await episode.locator(".text.observed").nth(1).text_content() == "<|end|><|tool|>4<b>"
        messages = await episode.locator(".message").all()
        said = [[await one.get_attribute("data-role"), await one.text_content()] for one in messages]
        assert said == [["system", "<|system|>Add."], ["user", "<|user|>2 + 2?<|assistant|>"]]
        looks = [await one.get_attribute("class") for one in await episode.locator(".token").all()]
        assert looks == ["token v0 change", "token v1 change far"]
        sampled_by = page.locator(".samples tr:has(.episode) .versions").first
        assert (await sampled_by.inner_text()).split("\n") == ["v6: 1 token, lag 1", "v7: 3 tokens"]


async def test_the_page_says_when_actors_idle_lag_is_bounded_probes_fail_and_how_often_gradients_are_cut() -> None:
    board = PageBoard()
    async with shown(board) as (page, _):
        await until_step(page, 1)
        lag, busy = (page.locator(f"[data-tile={name}] .note") for name in ("lag", "busy"))
        board.state({**STATE, "actors_held_back": True})
        await take_step(page, board, record(2, largest_lag=1, grad_norm=9.0, clipped=True))
        assert "the actors –: they wait, since they generate more than the trainer can use" in await busy.inner_text()
        assert (await lag.inner_text()).endswith("predicted max 1; bound 1")
        losses = {"sequences": {"issued": 1000, "dropped_stale": 11, "failed": 2}, "reasons": {"failed": {"engine": 2}}}
        board.state({**STATE, **losses})
        await take_step(page, board, record(3, lag={"mean": 0.9, "p95": 1.0, "max": 1}))
        full = await page.locator("[data-tile=lag].warn").inner_text()
        assert full.endswith("at its bound 1: 1.1% of the sequences were dropped as too old")
        reason = page.locator("tr.part:has-text('engine')")
        assert "vLLM refused or failed this request" in await reason.inner_text()
        board.state(STATE)
        tasks = {name: {"reward_mean": reward} for name, reward in (("sums", 0.75), ("words", 0.25))}
        cut = {"grad_norm": 0.5, "clipped": False, "tasks": tasks}
        probed = {"logprob_mismatch": 0.25, "parity_failures": 2}
        await take_step(page, board, record(4, largest_lag=2, max_lag_too_small=True, **cut, **probed))
        assert "stockpile" not in await busy.inner_text()
        assert "predicted max 2; bound 1 is too small for that: generation is throttled" in await lag.inner_text()
        parity = await page.locator("[data-tile=parity].warn").inner_text()
        assert parity.split("\n")[1:] == ["0.25", "2 PROBES FAILED: actors serve another policy"]
        chart = "figure:has(.title:text-is('{}'))"
        legend = page.locator(f"{chart.format('Train reward')} .legend")
        assert [name in await legend.inner_text() for name in ("sums", "words")] == [True, True]
        reported = page.locator(chart.format("Reported in training"))
        assert await reported.count() == 0, "nothing is reported"
        await page.get_by_text("Gradient norm").scroll_into_view_if_needed()
        await page.get_by_text("Before clipping; 50% of the steps were clipped").wait_for()


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
            await until(lambda: asked.count("news") > before)
            assert asked.count("news") - before <= 8
        board.step(record(2))
        await page.clock.run_for(20_000)
        await until_step(page, 2)
        await page.locator("main[data-link=live]").wait_for()
        assert asked.count("history") == 1
