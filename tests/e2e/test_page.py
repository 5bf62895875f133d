"""The live page in a real headless Chromium while a real run trains: what it shows, how it follows, how it reads.

One run for all tests of this file, in their order: it trains until the last of them stops it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.service.address import read_address
from tests.e2e.conftest import RunningCommand, started_run, tiny_recipe
from tests.support.tools import tool

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

WAIT_MS = 120_000
PHONE = {"width": 360, "height": 740}
TOO_WIDE = """() => [...document.querySelectorAll('main *')]
    .filter((e) => !e.closest('.table, pre, .scroll, .hidden') && e.getBoundingClientRect().right > innerWidth + 1)
    .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCommand]:
    """A run without end, whose page is up."""
    folder = tmp_path_factory.mktemp("page")
    changes = {"trainer.steps": 100_000, "checkpoint.every_steps": 3, "evaluation.every_steps": 1000}
    options = [option for name, value in changes.items() for option in ("--set", f"{name}={value}")]
    with started_run(tiny_recipe(tiny_model, folder), folder / "run", *options) as started:
        started.wait_for_steps(2)
        yield started


def link(run: RunningCommand) -> str:
    found = re.search(r"^Live page: (http://127\.0\.0\.1:[0-9]+/)$", run.output.read_text(), re.MULTILINE)
    assert found is not None, run.output.read_text()
    return found[1]


@dataclass
class Opened:
    """A page, and everything that it complained of or asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)

    def listen(self) -> None:
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.add(request.url))

    async def tile(self, name: str) -> str:
        return await self.page.inner_text(f"[data-tile={name}] .value")

    async def until(self, condition: str, argument: Any = None) -> None:
        """Until the JavaScript `condition` is true in the page."""
        await self.page.wait_for_function(condition, arg=argument, timeout=WAIT_MS)

    async def version_above(self, version: int) -> int:
        await self.until(
            "(v) => Number(document.querySelector('[data-tile=version] .value')?.textContent) > v", version
        )
        return int(await self.tile("version"))


@asynccontextmanager
async def opened(url: str, **context: Any) -> AsyncIterator[Opened]:
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **context})
        page.set_default_timeout(WAIT_MS)
        shown = Opened(page)
        shown.listen()
        await page.goto(url)
        yield shown
        await browser.close()


def metric(text: str, name: str, **labels: str) -> float:
    """The trainer's one sample of that name with these labels, whatever others it has."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"pipelinerl_trainer_{name}" and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


async def test_it_updates_while_the_run_trains_and_asks_nobody_else(run: RunningCommand) -> None:
    async with opened(link(run)) as shown:
        version = await shown.version_above(0)
        assert await shown.version_above(version + 1) > version
        assert await shown.page.get_attribute("main", "data-link") == "live"
        await shown.until("() => document.querySelectorAll('figure svg path').length > 8")
        await shown.until("() => document.querySelector('[data-member=actor-0]')?.textContent.includes('serving')")
        assert (await shown.page.inner_text("[data-ledger=trained] td")).replace(",", "").isdigit()
        assert "name: tiny" in await shown.page.text_content("details pre")
        assert shown.problems == []
        assert all(url.startswith((link(run), "data:")) for url in shown.requests), shown.requests
        assert len(shown.requests) <= 10, "the page does not ask again and again"


async def test_samples_are_coloured_by_version_and_say_what_a_token_weighs(run: RunningCommand) -> None:
    async with opened(link(run)) as shown:
        await shown.until("() => document.querySelectorAll('.tokens .change + .token').length > 0")
        history = (await shown.page.evaluate("fetch('page/history').then((answer) => answer.json())"))["samples"]
        trained = [one for one in [*history["early"], *history["late"]] if not one["heldout"]]
        assert trained
        for one in trained:
            assert one["completion"].startswith("".join(one["tokens"]))
            assert len(one["tokens"]) == len(one["weights"]) == one["spans"][-1][2]
        text = shown.page.locator("tr:has-text('Prompt') .tokens, .samples .tokens").last
        await text.focus()
        await shown.page.keyboard.press("Home")
        await shown.page.keyboard.press("ArrowRight")
        said = await text.locator("xpath=following-sibling::*").inner_text()
        assert re.fullmatch(r"Token 2: .*, version [0-9]+(, lag [0-9]+)?(, weight w = [0-9.e+-]+)?", said), said
        await text.locator(".token").first.hover()
        assert (await text.locator("xpath=following-sibling::*").inner_text()).startswith("Token 1: ")
        assert shown.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_reads_on_a_phone_by_day_and_by_night(run: RunningCommand, scheme: str) -> None:
    async with opened(link(run), viewport=PHONE, color_scheme=scheme, has_touch=True) as shown:
        await shown.version_above(0)
        assert await shown.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert await shown.page.evaluate(TOO_WIDE) == []
        background = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(number) for number in re.findall("[0-9]+", background)[:3]) > 384
        assert bright == (scheme == "light")
        await shown.page.locator(".samples .token").first.tap()
        await shown.until(
            "() => [...document.querySelectorAll('.readout')].some((e) => e.textContent.startsWith('Token 1: '))"
        )
        assert shown.problems == []


async def test_everything_can_be_reached_and_named_without_a_mouse(run: RunningCommand) -> None:
    async with opened(link(run)) as shown:
        await shown.version_above(0)
        nameless = """() => [...document.querySelectorAll('a, input, summary, progress, [tabindex], [role=img]')]
            .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim()))
            .map((e) => e.outerHTML.slice(0, 80))"""
        assert await shown.page.evaluate(nameless) == []
        levels = await shown.page.evaluate(
            "[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        kinds, outlines = [], set()
        for _ in range(14):
            await shown.page.keyboard.press("Tab")
            kind, outline = await shown.page.evaluate(
                "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
            )
            kinds.append(kind.lower())
            outlines.add(outline)
        assert kinds[:9] == ["a"] * 7 + ["input", "svg"], kinds
        assert outlines == {"solid"}, "focus is seen"
        chart = shown.page.locator("figure:has(.title:text-is('Train reward')) svg")
        await chart.focus()
        await shown.page.keyboard.press("Home")
        tip = shown.page.locator("figure:has(.title:text-is('Train reward')) .tip")
        assert (await tip.inner_text()).splitlines()[0] == "step 1"
        version = int(await shown.tile("version"))
        await shown.version_above(version + 1)
        assert (await tip.inner_text()).splitlines()[0] == "step 1", (
            "drawn again under the reader's eyes, it keeps what was read"
        )
        assert await shown.page.evaluate("document.activeElement.tagName") == "svg"


async def settled(shown: Opened, client: httpx.AsyncClient) -> str:
    """/metrics when the trainer waits for sequences that do not come, and the page says so."""
    version = -1
    while True:
        text = (await client.get("metrics")).text
        if metric(text, "policy_version") == version:
            return text
        version = int(metric(text, "policy_version"))
        await shown.until(
            """(v) => Number(document.querySelector('[data-tile=version] .value').textContent) >= v
                && document.querySelector('.message').textContent.includes('waiting for sequences')""",
            version,
        )


async def test_it_shows_the_numbers_of_metrics(run: RunningCommand) -> None:
    """At a moment that is settled: the verifier is held, so that the trainer has used up what there was."""
    verifier = run.pids()["verifier"]
    async with opened(link(run)) as shown, httpx.AsyncClient(base_url=link(run), trust_env=False) as client:
        await shown.version_above(0)
        os.killpg(verifier, signal.SIGSTOP)
        try:
            text = await settled(shown, client)
            version = str(int(metric(text, "policy_version")))
            await shown.until("(v) => document.querySelector('[data-tile=version] .value').textContent === v", version)
            trained = f"{int(metric(text, 'ledger_sequences', state='trained')):,}"
            await shown.until("(n) => document.querySelector('[data-ledger=trained] td').textContent === n", trained)
            await shown.until(
                "(v) => document.querySelector('[data-tile=reward] .note').textContent.startsWith(`step ${v};`)",
                version,
            )
            assert float(await shown.tile("reward")) == pytest.approx(metric(text, "reward_mean"), abs=0.005)
            assert float(await shown.tile("ess")) == pytest.approx(metric(text, "ess_ratio"), abs=0.005)
        finally:
            os.killpg(verifier, signal.SIGCONT)


async def test_it_goes_on_after_the_trainer_is_killed(run: RunningCommand) -> None:
    async with opened(link(run)) as shown:
        version = await shown.version_above(4)
        first = run.pids()["trainer"]
        address = read_address(run.run_dir / "addresses" / "trainer.json").http
        os.kill(read_address(run.run_dir / "addresses" / "trainer.json").pid, signal.SIGKILL)
        await shown.until("() => document.querySelector('main').dataset.link === 'lost'")
        assert "report.html" in await shown.page.inner_text(".link")
        await shown.until(
            "() => document.querySelector('[data-tile=time] .note').textContent.includes('trainer number 2')"
        )
        assert await shown.version_above(version) > version
        assert await shown.page.get_attribute("main", "data-link") == "live"
        assert read_address(run.run_dir / "addresses" / "trainer.json").http == address
        assert run.pids()["trainer"] != first
        steps = await shown.page.evaluate(
            "fetch('page/history').then((a) => a.json()).then((d) => d.records.map((r) => r.step))"
        )
        assert steps == list(range(1, len(steps) + 1)), "those that the restart undid are told once"
        assert [one for one in shown.problems if "ERR_" not in one] == [], "but for the connection that was lost"


async def test_after_the_end_it_points_to_the_report_which_has_the_same_views(run: RunningCommand) -> None:
    async with opened(link(run)) as shown:
        await shown.version_above(0)
        os.killpg(run.process.pid, signal.SIGINT)
        await shown.until("() => document.querySelector('main').dataset.link === 'lost'")
        assert str(run.run_dir / "report.html") in await shown.page.inner_text(".link")
        assert await asyncio.to_thread(run.wait) == 130
    async with opened((run.run_dir / "report.html").as_uri(), viewport=PHONE) as report:
        await report.until("() => document.querySelectorAll('.samples .tokens .token').length > 10")
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert await report.page.inner_text("[data-ledger=issued] td") == f"{summary['sequences']['issued']:,}"
        assert await report.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert await report.page.evaluate(TOO_WIDE) == []
        assert report.problems == []
