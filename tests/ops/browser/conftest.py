"""A real Chromium, headless, and pages of it that are watched: no error in the console, no request to elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
NOT_RUN = "not run: the page's tests need Debian's package chromium (make chromium)"


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.origin):
            self.elsewhere.append(request.url)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, for all tests of a file. While it is there asyncio.run is refused in this process."""
    if CHROMIUM is None:
        pytest.skip(NOT_RUN)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # As root Chromium has no sandbox of its own; it only ever sees our page.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Any]:
    """open_page(metrics address, path="", **how the browser is): a Watched page; judged at the end of the test."""
    opened: list[Watched] = []

    def make(address: str, path: str = "", **options: Any) -> Watched:
        context = chromium.new_context(viewport=options.pop("viewport", {"width": 1280, "height": 900}), **options)
        context.set_default_timeout(20_000)
        watched = Watched(context.new_page(), f"http://{address}/")
        opened.append(watched)
        watched.page.goto(watched.origin + path)
        watched.page.get_by_text("live", exact=True).wait_for()
        return watched

    yield make
    for watched in opened:
        watched.page.context.close()
        assert watched.errors == []
        assert watched.elsewhere == []
