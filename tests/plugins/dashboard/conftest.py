"""A store that is served with its dashboard, and a browser."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

from agentlightning import LightningStoreServer
from agentlightning.store.factory import create_store
from agentlightning_plugins.dashboard.dashboard import Dashboard
from tests.plugins.dashboard.filling import fill
from tests.waiting import LIMIT_S

if TYPE_CHECKING:  # its import takes a second, in each worker that collects
    from playwright.sync_api import Browser, Dialog, Page, Request

TOKEN = "a-token-of-this-test"


class Served(NamedTuple):
    """A running dashboard."""

    url: str
    read_only_url: str
    """The URL of a second dashboard of the same store, without actions."""
    ids: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = create_store(f"sqlite:///{tmp_path_factory.mktemp('dashboard') / 'store.db'}")
    dashboards = [Dashboard(store, [TOKEN], read_only=read_only) for read_only in (False, True)]
    servers = [LightningStoreServer(store, port=0, token=TOKEN, pages=[dashboard]) for dashboard in dashboards]

    async def start() -> dict[str, str]:
        for server in servers:
            await server.start()
        return await fill(store)

    async def stop() -> None:
        for server in servers:
            await server.stop()
        await store.close()

    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as executor,
    ):  # Playwright may run a loop in this thread
        patch.setattr("agentlightning_plugins.dashboard.rollouts._BUDGET_S", LIMIT_S)  # a slow machine finds everything
        ids = executor.submit(asyncio.run, start()).result()
        yield Served(servers[0].endpoint, servers[1].endpoint, ids)
        executor.submit(asyncio.run, stop()).result()


@pytest.fixture(scope="module")  # its event loop runs as long as it does, and asynchronous tests need their own loop
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def opened(served: Served, browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    """A page of a browser that has signed in, and its console messages, errors, dialogs and foreign requests."""
    context = browser.new_context(base_url=served.url)
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(LIMIT_S * 1000)
    sign_in(page)

    def refuse(dialog: Dialog) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    def check(request: Request) -> None:
        if not request.url.startswith(served.url):
            problems.append(request.url)

    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", refuse)
    page.on("request", check)
    yield page, problems
    context.close()


@pytest.fixture
def page(opened: tuple[Page, list[str]]) -> Iterator[Page]:
    """The page in its usual size; anything unusual that happens to it fails the test."""
    page, problems = opened
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light")
    problems.clear()
    yield page
    assert problems == []


def sign_in(page: Page) -> None:
    page.goto("/login")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state()
