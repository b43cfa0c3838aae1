"""Scripts with global variables that cannot be pickled, with the strategy `cs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os
import threading
from openai import OpenAI
import agentlightning as agl

URL = "http://127.0.0.1:1/v1"
client: OpenAI = OpenAI(api_key=os.environ.get("NOT_SET", "any"), base_url=URL, max_retries=7)
lock = threading.Lock()

def helper():
    with lock:
        return client.max_retries

def agent(task):
    return float(helper() == 7 and client.base_url.host == "127.0.0.1")

CHANGES
store = agl.create_store("memory://")
agl.Trainer(algorithm="baseline", store=store, tracer="dummy", trackers=[]).fit(agent, [1, 2])
import asyncio
print([rollout.attempt.reward for rollout in asyncio.run(store.query_rollouts())])
"""


def run_script(folder: Path, changes: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(_SCRIPT.replace("CHANGES", changes))
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_global_client_and_a_lock_are_recreated_in_each_runner(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.stdout.splitlines()[-1:] == ["[1.0, 1.0]"], done.stderr
    assert "the global client of" in done.stderr
    assert "cannot be sent to another process; each runner creates its own: OpenAI(" in done.stderr


def test_a_global_that_cannot_be_recreated_is_named_with_its_file_and_the_remedies(tmp_path: Path) -> None:
    done = run_script(tmp_path, changes="lock = threading.RLock()")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"agentlightning.errors.ConfigError: the global 'lock' (RLock) that helper in {tmp_path}")
    assert "create it in the function, or move it and the agent to a separate module" in error
    assert "strategy='shm'" in error
