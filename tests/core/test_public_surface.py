"""The modules and names that plugins may import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import agentlightning
import agentlightning.plugin
from tests.source import REPO

PAGE = REPO / "docs" / "plugins" / "public.md"
PUBLIC = """
    agentlightning agentlightning.plugin agentlightning.types agentlightning.errors agentlightning.event
    agentlightning.semconv
""".split()
WRITTEN_BY_AUTHORS = sorted(
    [
        *(REPO / "examples" / "plugin_template").rglob("*.py"),
        *(REPO / "tests" / "third_party" / "packages").rglob("*.py"),
        *(REPO / "plugins/agentlightning_plugins/commands/new/template").rglob("*.py.in"),
    ]
)


PAGES = [PAGE.parent.with_suffix(".md"), *sorted(PAGE.parent.glob("*.md"))]


def test_the_page_lists_the_names_of_the_module_for_authors() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## agentlightning.plugin")[2]
    listed = [name for row in re.findall(r"^\| [^|]+ \| (`.+) \|$", table, re.MULTILINE) for name in row.split()]
    assert sorted(name.strip("`") for name in listed) == sorted(agentlightning.plugin.__all__)


@pytest.mark.parametrize("name", sorted(agentlightning.plugin.__all__))
def test_a_public_name_can_be_imported(name: str) -> None:
    assert getattr(agentlightning.plugin, name) is not None


def test_an_author_s_name_that_users_need_too_is_the_same_object() -> None:
    shared = set(agentlightning.plugin.__all__) & set(agentlightning.__all__)
    assert shared == {"Component", "hookimpl"}
    assert all(getattr(agentlightning, name) is getattr(agentlightning.plugin, name) for name in shared)


def _ours(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("agentlightning")}


@pytest.mark.parametrize("file", WRITTEN_BY_AUTHORS, ids=lambda file: str(file.relative_to(REPO)))
def test_what_authors_write_imports_public_modules_only(file: Path) -> None:
    imported = _ours(re.sub("@[A-Z]+@", "placeholder", file.read_text(encoding="utf-8")))
    assert {name for name in imported if name not in PUBLIC and not name.startswith("agentlightning.testing.")} == set()


@pytest.mark.parametrize(
    "page", [REPO / "docs" / "plugins.md", *sorted(PAGE.parent.glob("*.md"))], ids=lambda page: page.stem
)
def test_pages_for_authors_import_public_modules_only(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    imported = {name for block in blocks for name in _ours(block)}
    assert {name for name in imported if name not in PUBLIC and not name.startswith("agentlightning.testing.")} == set()
