"""The wheels that examples/gpu lists for a machine without a package index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.environment("main", "verl")
REPO = Path(__file__).parents[2]  # verl's environment has another package `tests`, which hides tests/source.py


@pytest.fixture
def extra(pytestconfig: pytest.Config) -> str:
    return {"main": "demo", "verl": "verl"}[pytestconfig.getoption("--environment")]


@pytest.fixture
def wheels(extra: str) -> list[Requirement]:
    file = {"demo": "wheels.txt", "verl": "wheels_verl.txt"}[extra]
    lines = (REPO / "examples" / "gpu" / file).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of requirements and of all their direct and indirect requirements in this environment."""
    todo = [Requirement(line) for line in requirements]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                found = map(Requirement, metadata.requires(name) or [])
                todo += [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def test_the_wheel_lists_for_offline_machines_have_the_tested_versions(wheels: list[Requirement]) -> None:
    wrong = [str(wheel) for wheel in wheels if not wheel.specifier.contains(metadata.version(wheel.name), True)]
    assert wrong == []


def test_the_wheel_lists_for_offline_machines_have_every_missing_requirement(
    extra: str, wheels: list[Requirement]
) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = " ".join((REPO / "examples" / "gpu" / "README.md").read_text(encoding="utf-8").split())
    present = re.search(r"without a package index needs (.*), the requirements of these,", readme)
    assert present is not None
    needed = closure([*project["dependencies"], *project["optional-dependencies"][extra]])
    has = closure(re.findall(r"`(.+?)`", present[1]))
    listed = {canonicalize_name(wheel.name) for wheel in wheels}
    assert sorted(needed - has - listed) == []
    assert sorted(listed - needed) == []
