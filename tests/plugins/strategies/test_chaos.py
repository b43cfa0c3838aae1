"""All processes of a run are killed repeatedly, and the run ends with the same result as without kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.plugins.strategies.chaos_agent import N_TASKS, undisturbed
from tests.port import reserve_port

AGENT = Path(__file__).with_name("chaos_agent.py")


class Service:
    """A process that is started again whenever it ends, as a process manager would."""

    def __init__(self, name: str, command: Callable[[], list[str]], folder: Path) -> None:
        self.name = name
        self._command = command
        self._folder = folder
        self._log = (folder / f"{name}.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None

    def keep_alive(self) -> None:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "agentlightning", *self._command()]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(AGENT.parents[3]), str(self._folder)])}
            self.process = subprocess.Popen(
                command, cwd=self._folder, stdout=self._log, stderr=self._log, env=environment
            )

    def pids(self) -> list[int]:
        """Returns the ids of the process and of its children."""
        if self.process is None or self.process.poll() is not None:
            return []
        found = [self.process.pid]
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            found += [int(pid) for pid in task.read_text().split()]
        return found

    def stop(self) -> None:
        for pid in self.pids():
            kill(pid)
        if self.process is not None:
            self.process.wait()
        self._log.close()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


PLUGIN = """
from agentlightning import Component, hookimpl

@hookimpl
def components():
    return [Component("algorithm", "accumulator", "tests.plugins.strategies.chaos_agent:Accumulator")]
"""


def write_project(folder: Path, url: str, steps: int) -> None:
    (folder / "chaos_plugin.py").write_text(PLUGIN)
    info = folder / "chaos-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[agentlightning]\nchaos = chaos_plugin\n")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(N_TASKS)))
    config = {
        "agent": "tests.plugins.strategies.chaos_agent:agent",
        "data": {"train": "tasks.jsonl"},
        "algorithm": {"name": "accumulator", "steps": steps},
        "store": url,
        "strategy": {"name": "cs", "role": "algorithm"},
        "trackers": ["jsonl"],
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML


def train_command(folder: Path) -> list[str]:
    if (folder / "run" / "run.json").exists():
        return ["train", "--resume", "run"]
    return ["train", "config.yaml", "--run-dir", "run"]


def run_chaos(folder: Path, *, steps: int, steps_between: int, seed: int) -> int:
    """Runs to the end; returns how many processes were killed.

    Shortly after every ``steps_between`` steps a process is killed, and in a third of these cases another one while the
    run recovers.
    """
    port = reserve_port()
    url = f"http://127.0.0.1:{port}"
    write_project(folder, url, steps)
    store = Service("store", lambda: ["store", "--port", str(port), "--backend", "sqlite:///store.db"], folder)
    runner = [
        "runner",
        "tests.plugins.strategies.chaos_agent:agent",
        "--store",
        url,
        "--run",
        "run",
        "--max-concurrency",
        "2",
    ]
    runners = [Service(f"runner-{index}", lambda: runner, folder) for index in range(3)]
    trainer = Service("train", lambda: train_command(folder), folder)
    draw, log, kills = random.Random(seed), (folder / "kills.log").open("w"), 0
    began = time.monotonic()
    due: list[float] = []
    next_step = 1
    services = [store, *runners, trainer]
    try:
        while not is_finished(folder):
            for service in services:
                service.keep_alive()
            now = time.monotonic()
            step = steps_done(folder)
            if step >= next_step:
                next_step = step + steps_between
                due.append(now + draw.uniform(0.0, 0.2))
                if draw.random() < 1 / 3:
                    due.append(now + draw.uniform(0.5, 3.0))
            for moment in [moment for moment in due if moment <= now]:
                victim = draw.choice([store, trainer, *runners])
                pids = victim.pids()
                if pids:
                    due.remove(moment)
                    pid = draw.choice(pids) if victim in runners else pids[0]  # a runner's parent or child process
                    kill(pid)
                    kills += 1
                    print(f"{now - began:6.1f} s: killed {pid} of {victim.name}", file=log, flush=True)
            time.sleep(0.02)
    finally:
        for service in reversed(services):
            service.stop()
        log.close()
    return kills


def steps_done(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # there is none yet, or it is being replaced
        return int(json.loads((folder / "run" / "checkpoint" / "state.json").read_text())["step"])
    return 0


def is_finished(folder: Path) -> bool:
    file = folder / "run" / "metrics.jsonl"
    return file.exists() and '"status":"succeeded"' in file.read_text()


async def check(folder: Path, steps: int) -> None:
    store = agl.create_store(f"sqlite:///{folder / 'store.db'}", run="run")
    rollouts: list[Any] = list((await store.query_rollouts()).items)
    assert len(rollouts) == steps * N_TASKS
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    for rollout in rollouts:
        attempts = (await store.query_attempts(rollout.rollout_id)).items
        assert [attempt.status for attempt in attempts].count("succeeded") == 1
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        assert len({span.span_id for span in spans}) == len(spans)
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources["prompt"] == agl.PromptTemplate(undisturbed(steps))
    await store.close()


@pytest.mark.soak
def test_a_run_whose_processes_are_killed_ends_with_the_same_result_as_without_kills(tmp_path: Path) -> None:
    kills = run_chaos(tmp_path, steps=8, steps_between=2, seed=1)
    assert kills >= 3
    asyncio.run(check(tmp_path, 8))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_a_run_whose_processes_are_killed_for_minutes_ends_with_the_same_result_as_without_kills(
    tmp_path: Path, seed: int
) -> None:
    kills = run_chaos(tmp_path, steps=450, steps_between=5, seed=seed)
    assert kills >= 80
    asyncio.run(check(tmp_path, 450))
