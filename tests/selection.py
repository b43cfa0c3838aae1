"""Prints the test files that are nearest to changed files: python -m tests.selection [FILE ...]

A changed test is itself the nearest. For a source file, the nearest tests import its module, or else a module that
imports it; of these, the tests in the folder that mirrors the file's come first. If no test imports either, the whole
folder is taken. Without arguments, the files count that git reports as changed or new.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import environments_of
from tests.source import REPO, all_test_files, source_files

ALWAYS = "tests/test_rules.py"


def changed_files() -> list[str]:
    listed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"], cwd=REPO, capture_output=True, text=True, check=True
    )
    return [line[3:].rpartition(" -> ")[2] for line in listed.stdout.splitlines() if line[:2].strip() != "D"]


def tests_of(shown: str) -> set[str]:
    """Returns the nearest test files of a file, as paths from the root of the repository."""
    path = Path(shown)
    if path.parts[0] == "tests" and path.suffix == ".py":
        return {shown} if path.name.startswith("test_") else _importing(shown.removesuffix(".py").replace("/", "."))
    if path.suffix in (".md", ".ipynb"):
        pages = {"tests/test_docs.py"}
        return pages | {"tests/test_tutorials.py"} if path.parent.name in ("tutorials", "how-to") else pages
    if shown == "pyproject.toml" or path.parts[0] == "constraints":
        return {"tests/test_packaging.py"}
    modules = {file.shown: file.module for file in source_files()}
    if shown not in modules:
        return set()
    parts = ("core",) if path.parts[0] == "core" else path.parts[:1] + path.parts[2:-1]
    folders = [Path("tests", *parts[:length]) for length in range(len(parts), 0, -1)]
    users = [file.module for file in source_files() if _imports(file.text, modules[shown])]
    for found in (_importing(modules[shown]), {test for user in users for test in _importing(user)}):
        for folder in folders:
            if near := {test for test in found if Path(test).is_relative_to(folder)}:
                return near
        if found:
            return found
    (mirror,) = [folder for folder in folders if (REPO / folder).is_dir()][:1]
    return {path.relative_to(REPO).as_posix() for path in (REPO / mirror).rglob("test_*.py")}


def _importing(module: str) -> set[str]:
    return {
        file.shown
        for file in all_test_files()
        if file.path.name.startswith("test_") and _imports(file.text, module)
        if "main" in environments_of(file.path)
    }


def _imports(text: str, module: str) -> bool:
    package, _, name = map(re.escape, module.rpartition("."))
    return bool(re.search(rf"\b(from|import) {package}(\.{name}\b| import (\([^)]*|[^(\n]*)\b{name}\b)", text))


def nearest(files: list[str]) -> list[str]:
    """Returns the nearest test files of several files, and the tests of the rules."""
    return sorted({ALWAYS}.union(*map(tests_of, files)))


if __name__ == "__main__":
    given = [str(Path(name).resolve().relative_to(REPO)) for name in sys.argv[1:]]
    print(*nearest(given or changed_files()), sep="\n")
