"""The pages of the documentation: their fenced blocks, and running those that are shell commands."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.source import REPO

read_page: Callable[[Path], str] = runpy.run_path(str(REPO / "docs" / "notebooks.py"))["read_page"]
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/**/*.md") for page in REPO.glob(pattern)
)
FENCED = re.compile(r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
STAYS_OPEN = "# stays open\n"
"""The first line of a block whose command serves until it is stopped, in a terminal of its own."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    mark: str
    """Text after the language."""
    line: int
    """Number of the block's first line in the page, from 1."""
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = read_page(page)
    for match in FENCED.finditer(text):
        language, _, mark = match["info"].strip().partition(" ")
        yield Block(language, mark.strip(), text.count("\n", 0, match.start("text")) + 1, match["text"])


def search_path() -> str:
    """Returns a PATH on which the programs of this environment come first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run_shell(page: Path, folder: Path, changes: Mapping[str, str], **variables: str) -> str:
    """Runs the ``sh`` blocks of a page in a folder that looks like the repository; returns their output.

    Args:
        page: the page.
        folder: where it runs; programs of this environment come first on its PATH.
        changes: texts of the page that make a test slow or disturb others, and what replaces them.
        variables: further environment variables.
    """
    for name in ("examples", "plugins"):
        (folder / name).symlink_to(REPO / name)
    shell = ["bash", "-euo", "pipefail", "-c"]
    with contextlib.ExitStack() as stack, (folder / "output.log").open("w+") as log:
        for block in blocks(page):
            if block.language != "sh":
                continue
            text = block.text
            for old, new in changes.items():
                text = text.replace(old, new)
            process = subprocess.Popen(
                [*shell, text],
                cwd=folder,
                env={**os.environ, "PATH": search_path(), "COLUMNS": "120", **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(_stop, process)
            if not text.startswith(STAYS_OPEN):
                assert process.wait() == 0, f"{page.name}, line {block.line}: {log.seek(0) or log.read()}"
        log.seek(0)
        return log.read()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
