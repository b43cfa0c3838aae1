"""Measures workspaces of 5,000 files, against the bare command and against `cp` and `rm` of these files.

Set TMPDIR to choose the file system: on a busy disk, `cp` takes most of the time.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from pathlib import Path

import agentlightning as agl
from agentlightning_plugins.agents.command.agent import CommandAgent

N_ATTEMPTS = 20
N_FILES = 5000
N_COPIES = 5


def cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


async def measure(agent: CommandAgent) -> tuple[float, float]:
    """Returns seconds of CPU, of this process and the commands, and of time, per attempt."""
    started, cpu = time.monotonic(), cpu_s()
    for number in range(N_ATTEMPTS):
        await agent.rollout_async("", {}, agl.Rollout(rollout_id=f"ro-{number}", input="", start_time=0.0))
    return (cpu_s() - cpu) / N_ATTEMPTS, (time.monotonic() - started) / N_ATTEMPTS


def main() -> None:
    command = ["sh", "-c", "echo 1 > changed"]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(N_FILES):
            path = Path(folder, f"{number // 100}", f"{number}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text("x = 1\n" * (number % 400))
        bare = asyncio.run(measure(CommandAgent(["sh", "-c", "true"])))
        full = asyncio.run(measure(CommandAgent(command, workspace=folder)))
        cpu, started = cpu_s(), time.monotonic()
        for _ in range(N_COPIES):
            subprocess.run(["cp", "-a", folder, f"{folder}.copy"], check=True)
            subprocess.run(["rm", "-r", f"{folder}.copy"], check=True)
        copy = (cpu_s() - cpu) / N_COPIES, (time.monotonic() - started) / N_COPIES
    print(f"{N_ATTEMPTS} attempts, {N_FILES} files")
    for name, (cpu, elapsed) in (("without a workspace", bare), ("with a workspace", full), ("cp and rm", copy)):
        print(f"{name:20}  {cpu:.3f} s of CPU, {elapsed:.3f} s")
    print(f"a workspace costs {full[1] - bare[1]:.3f} s, {(full[1] - bare[1]) / copy[1]:.2f} times cp and rm")


if __name__ == "__main__":
    main()
