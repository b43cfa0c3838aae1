"""docs/tutorials/verl.md: its commands work where verl is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "verl.md"


def test_the_commands_of_the_tutorial_print_the_whole_configuration_of_verl(tmp_path: Path) -> None:
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(
        shell, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agl train config.yaml" in done.stdout
    assert "ppo_mini_batch_size: 4" in done.stdout
    assert "critic:" in done.stdout
