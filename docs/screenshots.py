"""Takes the pictures of dashboard.md: trains the demo with its dashboard open, in about a minute.

Run it after a change of the dashboard's pages: python docs/screenshots.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FLEET_STEP = 8
"""The step after which the fleet is shown at work."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(folder, "demo")
        agl = [sys.executable, "-m", "agentlightning"]
        demo = subprocess.Popen([*agl, "demo", "--run-dir", run])
        dashboard: subprocess.Popen[str] | None = None
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            while not (run / "store.db").exists():
                time.sleep(0.1)
            dashboard = subprocess.Popen(
                [*agl, "dashboard", run, "--port", "0"], stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            assert dashboard.stdout is not None
            url = next(word for word in dashboard.stdout.readline().split() if word.startswith("http")).rstrip("/")
            while (read(url, "/runs/default.json")["step"] or 0) < FLEET_STEP:
                time.sleep(0.2)
            shoot(browser, f"{url}/fleet", "fleet")
            assert demo.wait() == 0
            rollouts = read(url, "/runs/default/rollouts.json?mode=train&step=10&min=1")["rollouts"]
            rollout = rollouts[0]["rollout_id"]
            shoot(browser, f"{url}/runs/default", "run")
            shoot(browser, f"{url}/runs/default", "phone", viewport=PHONE, color_scheme="dark", device_scale_factor=1)
            shoot(browser, f"{url}/runs/default/rollouts/{rollout}", "rollout")
            shoot(browser, f"{url}/runs/default/rollouts/{rollout}/tokens", "tokens")
            shoot(browser, f"{url}/runs/default/ledger", "ledger")
        finally:
            browser.close()
            for process in (demo, dashboard):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait()


def read(url: str, page: str) -> Any:
    return httpx.get(f"{url}{page}").raise_for_status().json()


def shoot(browser: Browser, url: str, name: str, **options: Any) -> None:
    page = browser.new_page(**{"viewport": WIDE, **options})
    page.goto(url)
    page.wait_for_load_state("load")
    page.wait_for_timeout(500)  # the page connects for live updates
    picture = DOCS / f"dashboard-{name}.png"
    page.screenshot(path=picture)
    page.close()
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256).save(picture, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
