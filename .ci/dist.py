"""Builds wheel and source distribution in dist, checks their metadata, and runs the wheel in a clean environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import REPO, Installer


def main() -> None:
    """Runs in the environment `docs`, which has hatchling and twine."""
    dist = REPO / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run = [sys.executable, "-m"]
    subprocess.run([*run, "hatchling", "build", "-d", dist], cwd=REPO, check=True)
    subprocess.run([*run, "twine", "check", "--strict", *dist.iterdir()], check=True)
    (wheel,) = dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        installer = Installer(Path(folder, "environment"))
        installer.create()
        installer.install(str(wheel))
        for arguments in (["--version"], ["demo", "--help"]):
            subprocess.run([Path(folder, "environment", "bin", "agl"), *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()
