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
        self._heard = {"console": self._said, "pageerror": self._failed, "request": self._asked}
        for event, told in self._heard.items():
            page.on(event, told)

    def leave(self) -> None:
        """Watch no more; another test has the page then."""
        for event, told in self._heard.items():
            self.page.remove_listener(event, told)
        if not self.page.is_closed():
            self.page.unroute_all()

    def _said(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    def _failed(self, error: Any) -> None:
        self.errors.append(str(error))

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


@pytest.fixture(scope="module")
def pages(chromium: Any) -> dict[str, Any]:
    """A page for each kind of browser, which loads anew for each test: the first load of a page, which starts a process
    and compiles the scripts, takes five times as long as the next ones.
    """
    return {}


@pytest.fixture
def open_page(chromium: Any, pages: dict[str, Any]) -> Iterator[Any]:
    """open_page(metrics address, path="", **how the browser is): a Watched page; judged at the end of the test. It is
    one of a test at a time.
    """
    opened: list[Watched] = []

    def make(address: str, path: str = "", **options: Any) -> Watched:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        page: Any = pages.get(repr(options))
        used = page is not None and not page.is_closed()
        if not used:
            context = chromium.new_context(**options)
            context.set_default_timeout(20_000)
            page = pages[repr(options)] = context.new_page()
        if used:  # what the page of the test before still has under way ends unheard
            page.goto("about:blank")
        watched = Watched(page, f"http://{address}/")
        opened.append(watched)
        page.goto(watched.origin + path)
        page.get_by_text("live", exact=True).wait_for()
        return watched

    yield make
    for watched in opened:
        watched.leave()
        assert watched.errors == []
        assert watched.elsewhere == []
