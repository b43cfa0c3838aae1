"""A plugin of each kind, as ``agl new plugin`` writes it. ``python -m tests.new_plugins`` checks their types."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from agentlightning_plugins.commands.new import PLUGIN_KINDS, new_plugin
from tests.source import REPO


def write_plugins(folder: Path) -> list[Path]:
    """Writes a package of each kind and returns their folders; ``site`` has them as if they were installed."""
    packages = []
    for kind in PLUGIN_KINDS:
        name = f"my-{kind.replace('_', '-')}"
        module = name.replace("-", "_")
        packages.append(folder / name)
        with contextlib.redirect_stdout(None):
            new_plugin.main([name, "--kind", kind, "--into", str(packages[-1])], standalone_mode=False)
        info = folder / "site" / f"{module}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[agentlightning]\n{name} = {module}.plugin\n")
        (folder / "site" / module).symlink_to(packages[-1] / "src" / module)
    return packages


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        packages = write_plugins(Path(folder))
        sources = [package / "src" for package in packages]
        command = [sys.executable, "-m", "mypy", "--no-error-summary", *sources, *(p / "tests" for p in packages)]
        paths = os.pathsep.join(map(str, sources))
        return subprocess.run(command, check=False, cwd=REPO, env={**os.environ, "MYPYPATH": paths}).returncode


if __name__ == "__main__":
    sys.exit(main())
