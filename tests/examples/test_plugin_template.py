"""The example of a third-party package, built, installed and used like one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "examples" / "plugin_template"


def run(folder: Path, *command: str, site: Path | None = None) -> str:
    environment = dict(os.environ) if site is None else {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-m", *command], check=False, cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_plugin_template_can_be_built_and_installed_and_passes_its_own_tests(tmp_path: Path) -> None:
    package, site = tmp_path / "package", tmp_path / "site"
    shutil.copytree(TEMPLATE, package)  # because building writes files next to the sources
    run(package, "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", str(site), ".")
    shutil.rmtree(package / "src")  # so that the installed package runs
    plugins = {
        plugin["plugin"]: plugin
        for plugin in json.loads(run(package, "agentlightning", "plugins", "--json", site=site))
    }
    assert plugins["acme"]["origin"] == "lightning-acme 0.1.0"
    assert plugins["acme"]["state"] == "loaded"
    assert [offer["name"] for offer in plugins["acme"]["offers"]] == ["folder"]
    output = run(package, "pytest", "-p", "no:cacheprovider", "-rs", site=site)
    assert "skipped" not in output
    assert "100%" in output
