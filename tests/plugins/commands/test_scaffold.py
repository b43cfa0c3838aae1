"""`agl new`: what it writes works, and passes its own test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.commands.agl_here import run_here


def run(folder: Path, *command: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_new_agent_trains_as_it_is(tmp_path: Path) -> None:
    assert run_here(tmp_path, "new", "agent", "word-adder").code == 0
    assert "run succeeded" in run(tmp_path / "word-adder", "agentlightning", "train", "config.yaml", "strategy=shm")
    assert "@" not in (tmp_path / "word-adder" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_new_plugin_installs_is_listed_and_passes_its_own_test(tmp_path: Path) -> None:
    assert run_here(tmp_path, "new", "plugin", "reward-file").code == 0
    folder = tmp_path / "reward-file"
    run(
        folder,
        "pip",
        "install",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        ".",
    )
    site = {"PYTHONPATH": str(tmp_path / "site")}
    assert "reward-file" in run(tmp_path, "agentlightning", "plugins", "--json", **site)
    run(folder, "pytest", "-q", "-p", "no:cacheprovider", **site)
    run(folder, "ruff", "check", "--isolated", "--line-length", "120", ".")


@pytest.mark.parametrize("name", ["Upper", "1st", "a b", "../up", "a--b", ""])
def test_an_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    refused = run_here(tmp_path, "new", "agent", name)
    assert (refused.code, "a name consists of lower-case letters" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["class", "json"])
def test_a_name_that_python_uses_is_refused(tmp_path: Path, name: str) -> None:
    refused = run_here(tmp_path, "new", "plugin", name)
    assert (refused.code, f"choose another, as in my-{name}" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text("precious")
    refused = run_here(tmp_path, "new", "agent", "mine")
    assert (refused.code, "already exists" in refused.stderr) == (2, True)
    assert (tmp_path / "mine" / "agent.py").read_text() == "precious"


def test_completion_is_for_each_shell(tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_AGL_COMPLETE={shell}_complete" in run_here(tmp_path, "completion", shell).stdout
    words = {"_AGL_COMPLETE": "bash_complete", "COMP_WORDS": "agl roll", "COMP_CWORD": "1"}
    assert "rollouts" in run(tmp_path, "agentlightning", **words)
