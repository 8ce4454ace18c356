"""Headless Chromium, as installed on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]  # the extra `browser` is not installed

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = os.environ.get("MRL_CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert program, "there is no Chromium: apt-get install chromium, or set MRL_CHROMIUM to its path"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page, and what went wrong on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda line: self.problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message) or dialog.dismiss())

    def goto(self, address: str) -> Page:
        self.page.goto(address)
        return self.page


@pytest.fixture
def opened(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """A window that fails the test if anything is printed to the console. Its width is the test's parameter `width`."""
    width = request.node.callspec.params.get("width", 1280) if hasattr(request.node, "callspec") else 1280
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    found = Opened(page)
    yield found
    context.close()
    assert found.problems == []


@pytest.fixture(autouse=True)
def no_clusters_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("MRL_CLUSTER", "MRL_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
