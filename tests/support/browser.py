"""A headless Chromium, and what the run's page shows in it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright

from tests.support.tools import tool

WAIT_MS = 300_000


async def barriers(page: Page) -> list[str]:
    """The rules of accessibility that the page breaks in light or dark colours, by axe-core."""
    found = []
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        found += [f"{scheme}: {one['id']}: {one['nodes'][0]['html']}" for one in (await Axe().run(page)).response["violations"]]
    return found


_TOO_WIDE = """() => {
    const pageWidth = () => document.documentElement.scrollWidth;
    if (pageWidth() > innerWidth) return [`the page is ${pageWidth()} pixels wide`];
    const found = [...document.querySelectorAll('main *')]
        .filter((e) => !e.closest('.table, pre, .scroll, .hidden') && e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 80));
    const texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT), all = [];
    while (texts.nextNode()) all.push(texts.currentNode);
    for (const text of all.filter((one) => one.data.trim() && !one.parentElement.closest('svg, noscript, .tip'))) {
        const shown = text.data;
        text.data = 'W'.repeat(200);
        if (pageWidth() > innerWidth) found.push(`a long word in the place of: ${shown.slice(0, 80)}`);
        text.data = shown;
    }
    return found;
}"""


async def too_wide(page: Page) -> list[str]:
    """Return what is wider than the page's window, and the texts that would be if they were one long word. A chart's
    readout is left out: its place follows from its width."""
    return list(await page.evaluate(_TOO_WIDE))


@dataclass
class OpenPage:
    """A page, the complaints in its console, and the URLs it asked for."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    async def tile(self, name: str) -> str:
        return await self.page.inner_text(f"[data-tile={name}] .value")

    async def until(self, condition: str, argument: Any = None) -> None:
        await self.page.wait_for_function(condition, arg=argument, timeout=WAIT_MS)

    async def version_above(self, version: int) -> int:
        await self.until("(v) => Number(document.querySelector('[data-tile=version] .value')?.textContent) > v", version)
        return int(await self.tile("version"))


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[OpenPage]:
    page = await browser.new_page(**{"viewport": {"width": 1200, "height": 900}, **context})
    page.set_default_timeout(WAIT_MS)
    shown = OpenPage(page)
    await page.goto(url)
    try:
        yield shown
    finally:
        await page.close()
