"""The site: it builds without a warning, is complete, small, and asks no other machine for anything."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentlightning as agl
from tests.source import REPO

MAX_BYTES, MAX_PAGE_BYTES = 15e6, 1e6


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site. Sphinx's warnings, such as a link that leads nowhere, end the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "docs/build.py", folder]
    built = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def _links(page: Path) -> Iterator[str]:
    """Yields the addresses that a browser loads or opens."""
    text = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from map(html.unescape, re.findall(r'\b(?:href|src|srcset)="([^"]*)"', text))


def test_every_page_of_the_repository_has_its_place_and_a_twin_in_markdown(site: Path) -> None:
    written = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *(REPO / "examples").rglob("*.md")]
    pages = sorted(page.relative_to(site) for page in site.rglob("*.html") if page.name != "search.html")
    assert len(pages) > len(written) - 1  # AGENTS.md is for those who change Lightning
    twins = [page for page in pages if (site / page).with_suffix(".md").exists()]
    assert [page.as_posix() for page in pages if page not in twins] == []
    listed = re.findall(r"\]\(([^)]+)\): \S", (site / "llms.txt").read_text(encoding="utf-8"))
    assert {page.with_suffix(".md").as_posix() for page in twins} == {*listed, "docs.md", "index.md"}
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    assert [name for name in listed if (site / name).read_text(encoding="utf-8") not in full] == []


def test_every_link_inside_the_site_leads_to_a_file_and_an_anchor(site: Path) -> None:
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text("utf-8"))) for page in site.rglob("*.html")}
    broken = []
    for page in anchors:
        for link in _links(page):
            target, _, anchor = link.partition("#")
            path = (page.parent / target.partition("?")[0]).resolve() if target else page
            if re.match(r"[a-z]+:", link) or (anchor == "" and link.endswith("#")):
                continue
            if not path.exists() or (anchor and path.suffix == ".html" and anchor not in anchors[path]):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_a_page_loads_nothing_from_another_machine(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//|@import|url\(["\']?(?:https?:)?//'
    )
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert [path.name for path in files if loaded.search(path.read_text(encoding="utf-8"))] == []


def test_the_site_and_its_pages_are_small(site: Path) -> None:
    sizes = {path.relative_to(site).as_posix(): path.stat().st_size for path in site.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < MAX_BYTES
    assert {name: size for name, size in sizes.items() if name.endswith(".html") and size > MAX_PAGE_BYTES} == {}


def test_the_reference_has_every_public_name_with_an_explanation(site: Path) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (site / "reference" / "python").glob("*.md"))
    parts = dict(re.findall(r"^## agl\.(\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert {*parts} == {*agl.__all__} - {"__version__"}
    assert [name for name, part in parts.items() if not part.strip()] == []


def test_the_search_finds_a_page_without_a_server(site: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "this test needs Chromium: apt-get install chromium"
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    address = f"{(site / 'search.html').as_uri()}?q=watchdog_interval_s"
    shown = subprocess.run([chromium, *options, address], capture_output=True, text=True, check=True).stdout
    assert re.search(r'<a href="reference/python/store\.html[^"]*"', shown), shown
