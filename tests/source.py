"""The repository as data, for tests of its rules: source files, their imports, pyproject.toml."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REPO: Final = Path(__file__).resolve().parent.parent
ROOTS: Final[Mapping[str, Path]] = {
    "agentlightning": REPO / "core" / "agentlightning",
    "agentlightning_plugins": REPO / "plugins" / "agentlightning_plugins",
    "agentlightning_integrations": REPO / "integrations" / "agentlightning_integrations",
    "agentlightning_algorithms": REPO / "algorithms" / "agentlightning_algorithms",
}


@dataclass(frozen=True)
class Import:
    """An imported module or name."""

    name: str
    line: int
    at_import: bool
    """Whether it is executed when the module is imported, which excludes imports inside functions."""
    type_only: bool
    """Whether it is under ``if TYPE_CHECKING``."""

    def reaches(self, module: str) -> bool:
        return self.name == module or self.name.startswith(module + ".")


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the repository."""

    path: Path

    @property
    def shown(self) -> str:
        return self.path.relative_to(REPO).as_posix()

    @property
    def module(self) -> str:
        """Dotted name of the module, for a file of the four roots."""
        parts = self.path.relative_to(REPO).with_suffix("").parts[1:]
        return ".".join(parts).removesuffix(".__init__")

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.shown)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, at_import=True, type_only=False))


def _imports(node: ast.AST, *, at_import: bool, type_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_import, type_only)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(f"{node.module}.{alias.name}", node.lineno, at_import, type_only)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, at_import=False, type_only=True)
        for child in node.orelse:
            yield from _imports(child, at_import=at_import, type_only=type_only)
    else:
        inside = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):  # expressions contain no import
            for part in getattr(node, block, ()):
                yield from _imports(part, at_import=inside, type_only=type_only)


def python_files(folder: Path) -> list[SourceFile]:
    """Returns the Python files under a folder, in order, or an empty list if the folder does not exist."""
    return [SourceFile(path) for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


@functools.cache
def source_files() -> list[SourceFile]:
    """Returns the Python files of the four roots."""
    return [file for root in ROOTS.values() for file in python_files(root)]


@functools.cache
def all_test_files() -> list[SourceFile]:
    return python_files(REPO / "tests")


@functools.cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(*arguments: str, cwd: Path | None = None, timeout_s: float = 240) -> str:
    """Runs this Python in a new process and returns its output; fails with the output if it exits with an error."""
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
