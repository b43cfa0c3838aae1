"""Eight packages of third parties, written from the documentation: built, installed, used and uninstalled."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = sorted((HERE / "packages").iterdir())
BUILD = """
import os, sys
import hatchling.build
for package in sys.argv[2:]:
    os.chdir(package)
    hatchling.build.build_wheel(sys.argv[1])
"""
"""Builds wheels as pip does, which starts two processes for each."""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(python: Path, *arguments: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments, cwd=HERE)


def plugins(python: Path, folder: Path) -> dict[str, dict[str, Any]]:
    listed = json.loads(run(python, "-m", "agentlightning", "plugins", "--json", cwd=folder))
    return {plugin["plugin"]: plugin for plugin in listed}


def names(offers: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(offer["kind"], offer["name"]) for offer in offers}


@pytest.mark.soak
def test_packages_of_third_parties_are_installed_used_and_uninstalled(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    # The new environment sees Lightning and its dependencies in this one.
    (folder / "lightning.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    before = plugins(python, tmp_path)
    (tmp_path / "wheels").mkdir()
    run(sys.executable, "-c", BUILD, tmp_path / "wheels", *PACKAGES, cwd=tmp_path)
    pip(python, "install", "--no-index", "--no-deps", *(tmp_path / "wheels").iterdir())
    installed = plugins(python, tmp_path)
    added = {name: installed[name] for name in set(installed) - set(before)}
    assert len(added) == len(PACKAGES) == 8
    assert added["acme_lmdb"]["origin"] == "acme-lmdb 1.2.0"
    assert {(plugin["state"], plugin["interface"], plugin["error"]) for plugin in added.values()} == {("loaded", 1, "")}
    offers = [offer for plugin in added.values() for offer in plugin["offers"]]
    assert len(offers) >= 30
    assert {offer["state"] for offer in offers} == {"ready"}
    assert "used all" in run(python, HERE / "use.py", tmp_path, cwd=tmp_path)
    pip(python, "uninstall", "--yes", *(package.name for package in PACKAGES))
    after = plugins(python, tmp_path)
    assert after.keys() == before.keys()
    assert all(names(after[name]["offers"]) == names(before[name]["offers"]) for name in before)
