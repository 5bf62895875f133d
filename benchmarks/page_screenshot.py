"""`python -m benchmarks.page_screenshot URL FILE`: a picture of a run's live page, or of a report.html, as PNG.

Needs playwright and Chromium (`make test-tools`). Chooses nothing of the run: start one, and wait until there is much to see.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path

from playwright.async_api import async_playwright

PARTS = ("header", ".tiles", "#how-fresh-is-the-data", "#the-ledger", "#sample-completions")


async def take(url: str, file: Path, *, width: int, height: int, scheme: str, at: str) -> None:
    """Of the first `height` pixels from the element `at` on; a readout of one token is open where there are any."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        await page.goto(url)
        await page.wait_for_selector(".tile")
        tokens = page.locator(".tokens:has(.change ~ .change)").first
        if await tokens.count():
            await tokens.locator(".change").nth(1).hover()
        await page.evaluate("(at) => scrollTo(0, scrollY + document.querySelector(at).getBoundingClientRect().top - 20)", at)
        await page.screenshot(path=file)
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--at", default="header", help=f"selector to begin at, such as {', '.join(PARTS)}")
    args = parser.parse_args()
    asyncio.run(take(args.url, args.file, width=args.width, height=args.height, scheme=args.scheme, at=args.at))


if __name__ == "__main__":
    main()
