"""What every test may rely on: no key, no download, one thread of arithmetic, a GPU where it says so.

A test runs in the environment ``main``, unless it lies in ``tests/newest`` or ``tests/verl``, which name environments
that cannot live together with it. ``pytest.mark.environment("main", "newest")`` on a module makes it run in several.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.integrations.team")

for name in [name for name in os.environ if name.startswith(("AGL_", "OPENAI_"))]:
    del os.environ[name]  # a developer's own settings and keys must not reach a test
# Set before anything imports them, and inherited by the processes that tests start.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


ENVIRONMENTS = ("main", "newest", "verl")
_FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Undoes what a test, or a command in it, sets up of our log: else the next one's ``caplog`` stays empty."""
    logger = logging.getLogger("agentlightning")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--environment", choices=ENVIRONMENTS, default="main", help="whose tests to run; see the Makefile")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of other environments: importing them needs what is not installed here."""
    return None if config.getoption("--environment") in environments_of(collection_path) else True


def environments_of(path: Path) -> set[str]:
    """Where the tests of a file run; for a folder, where any of its tests may."""
    place = path.relative_to(_FOLDER).parts[:1]
    if place and place[0] in ENVIRONMENTS:
        return {place[0]}
    if path.is_dir():
        return set().union(*map(environments_of, path.rglob("test_*.py")))
    mark = re.search(r"pytest\.mark\.environment\(([^)]*)\)", path.read_text(encoding="utf-8"))
    return set(re.findall(r"\w+", mark[1])) if mark else {"main"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out GPU tests where there is no GPU: the only tests that may be skipped."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
