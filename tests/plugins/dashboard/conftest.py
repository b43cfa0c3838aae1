"""A store that `agl store` serves with its dashboard, and a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, Request, sync_playwright

from agentlightning.store.factory import create_store
from tests.plugins.dashboard.filling import fill
from tests.port import reserve_port
from tests.process import wait_for
from tests.source import REPO

TOKEN = "a-token-of-this-test"


class Served(NamedTuple):
    """A running dashboard."""

    url: str
    ids: dict[str, str]
    store: str
    """The URL of the store behind the dashboard."""


@contextlib.contextmanager
def serve(folder: Path, *arguments: str, token: str | None = TOKEN) -> Iterator[str]:
    """Runs a command of `agl` with a server; yields its URL."""
    port, log = reserve_port(), folder / f"{arguments[0]}.log"
    environment = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
    environment |= {"AGL_TOKEN": token} if token else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *arguments, "--port", str(port)],
            cwd=REPO, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/static/icon.svg", timeout=30):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    try:
        wait_for(answers, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dashboard")
    store_url = f"sqlite:///{folder / 'store.db'}"

    async def prepare() -> dict[str, str]:
        store = create_store(store_url)
        try:
            return await fill(store)
        finally:
            await store.close()

    with ThreadPoolExecutor(1) as executor:  # Playwright may run a loop in this thread
        ids = executor.submit(asyncio.run, prepare()).result()
    with serve(folder, "store", "--backend", store_url) as url:
        yield Served(url, ids, store_url)


@pytest.fixture(scope="module")  # its event loop runs as long as it does, and asynchronous tests need their own loop
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def context(served: Served, browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has signed in."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=served.url)
    page = context.new_page()
    sign_in(page, served.url)
    page.close()
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, served: Served) -> Iterator[Page]:
    """A page that fails its test on a console message, an error, a dialog or a request to another server."""
    page = context.new_page()
    problems: list[str] = []

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
    yield page
    assert problems == []
    page.close()


def sign_in(page: Page, url: str, token: str = TOKEN) -> None:
    page.goto(f"{url}/login")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state()
