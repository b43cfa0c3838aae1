"""Packaging: extras, version bounds, pins, and the content of the wheel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import environments
from tests.source import REPO, ROOTS, pyproject, run_python

# These need a separate environment.
NOT_IN_ALL = {"agentops", "docs", "dspy", "google-adk", "poml", "pydantic-ai", "strands-agents", "verl"}
STRICTER = {"openai>=2.8", "openai>=3.31"}
"""Requirements of one extra that are stricter than those of other extras."""
SECURE = {
    # Before 3.13.3, requests inflate without a limit (GHSA-6mq8-rvhq-8wgg); before 3.14.4, members of gzip files cost
    # quadratic time (GHSA-h4cc-hm5h-fmm9); before 3.14.5, a connection may send nothing forever (GHSA-5wr8-gcqf-gqf3).
    "aiohttp": "3.14.5",
    "jinja2": "3.1.6",  # a template could leave the sandbox (GHSA-cpwx-vrp4-4pq7)
    "orjson": "3.11.6",  # deeply nested values overflow the stack when they are written (GHSA-hx9q-6w63-j58v)
}
"""The first versions of libraries that read from the network with all security fixes of 2025 and 2026 that we know."""


def _project() -> Mapping[str, Any]:
    project: Mapping[str, Any] = pyproject()["project"]
    return project


def _requirements() -> list[Requirement]:
    extras = _project()["optional-dependencies"].values()
    return [Requirement(line) for lines in (_project()["dependencies"], *extras) for line in lines]


def test_the_extra_all_is_the_union_of_all_compatible_extras() -> None:
    extras: dict[str, list[str]] = dict(_project()["optional-dependencies"])
    parts = [lines for name, lines in extras.items() if name not in NOT_IN_ALL | {"all"}]
    assert len(extras["all"]) == len(set(extras["all"]))
    assert set(extras["all"]) == {line for lines in parts for line in lines}


def test_the_extra_demo_has_the_requirements_of_its_algorithm_and_agent() -> None:
    extras = _project()["optional-dependencies"]
    assert set(extras["demo"]) >= {*extras["grpo"], *extras["openai"]}


def test_every_requirement_has_only_a_lower_bound() -> None:
    wrong = [str(r) for r in _requirements() if [clause.operator for clause in r.specifier] != [">="]]
    assert wrong == []


def test_libraries_that_read_from_the_network_are_required_with_their_security_fixes() -> None:
    required = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in _requirements()}
    assert {name: required[name] for name, fixed in SECURE.items() if Version(required[name]) < Version(fixed)} == {}


def test_no_package_is_required_with_two_different_bounds() -> None:
    bounds: dict[str, set[str]] = {}
    for requirement in _requirements():
        if str(requirement) not in STRICTER:
            bounds.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert {name: both for name, both in bounds.items() if len(both) > 1} == {}


ENVIRONMENTS = "coding docs frameworks lint main newest oldest openenv verifiers verl verl-vllm".split()


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_constraints_pin_every_requirement_of_an_environment(environment: str) -> None:
    described = environments.ENVIRONMENTS[environment]
    lines = (REPO / "constraints" / f"{described.constraints or environment}.txt").read_text("utf-8").splitlines()
    pins = {r.name: r.specifier for r in map(Requirement, filter(lambda line: not line.startswith("#"), lines))}
    assert lines[1:] == sorted(lines[1:])
    for requirement in map(Requirement, environments.requirements(described)):
        if requirement.name == "torch":  # pinned in .ci/environments.py, because its build depends on the machine
            continue
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} against {requirement.name}{pin}"


def test_agentops_and_verl_are_said_to_need_separate_environments_as_long_as_they_do() -> None:
    """agentops requires packaging<25, and a library of verl's tensordict packaging>=25."""
    found = {
        name: next(
            Version(line.partition("==")[2])
            for line in (REPO / "constraints" / f"{name}.txt").read_text("utf-8").splitlines()
            if line.startswith("packaging==")
        )
        for name in ("newest", "verl")
    }
    assert found["newest"] < Version("25") <= found["verl"], "remove the sentences about it from the documentation"
    for page in ("tracing.md", "verl.md"):
        assert "packaging<25" in (REPO / "docs" / page).read_text("utf-8")


def test_no_extra_requires_lightning_from_the_package_index() -> None:
    assert "lightning" not in {canonicalize_name(requirement.name) for requirement in _requirements()}


def _content(*roots: Path) -> set[str]:
    """Returns the files of the roots, with their paths in a wheel."""
    return {
        path.relative_to(root.parent).as_posix()
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_base_install_stays_within_60_mb_and_40_packages() -> None:
    size_bytes = sum((root.parent / name).stat().st_size for root in ROOTS.values() for name in _content(root))
    seen: set[str] = set()
    missing = [Requirement(line) for line in _project()["dependencies"]]
    while missing:
        requirement = missing.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        missing += [Requirement(line) for line in distribution.requires or []]
        paths = [Path(str(file.locate())) for file in distribution.files or []]
        size_bytes += sum(path.stat().st_size for path in paths if path.exists())
    assert len(seen) <= 40
    assert size_bytes <= 60e6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel and the source distribution of this checkout and returns their folder."""
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "hatchling", "build", "-d", str(folder))
    return folder


def test_the_wheel_contains_exactly_the_files_of_the_four_roots(built: Path) -> None:
    (wheel,) = built.glob("lightning-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == _content(*ROOTS.values())
    assert {f"{package}/py.typed" for package in ROOTS} <= names


def test_a_wheel_can_be_built_from_the_source_distribution(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("lightning-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.iterdir()
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=checkout)
    (wheel,) = tmp_path.glob("lightning-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert _content(*ROOTS.values()) <= set(archive.namelist())


def test_the_unpacked_wheel_runs_from_its_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("lightning-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    where = run("-c", "import agentlightning, agentlightning_plugins as p; print(agentlightning.__file__, p.__file__)")
    assert [path.startswith(str(tmp_path)) for path in where.split()] == [True, True]
    assert re.fullmatch(r"agl, version \d+\.\d+\.\d+", run("-m", "agentlightning", "--version").strip())
    plugins = json.loads(run("-m", "agentlightning", "plugins", "--json"))
    assert {plugin["plugin"] for plugin in plugins} == set(_project()["entry-points"]["agentlightning"])
    assert {plugin["state"] for plugin in plugins} == {"loaded"}
