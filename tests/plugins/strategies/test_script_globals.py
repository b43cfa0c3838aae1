"""Scripts with global variables that cannot be pickled, with the strategy `cs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import LIMIT_S

_SCRIPT = """
import asyncio
import os
import threading
from openai import OpenAI
import agentlightning as agl

URL = "http://127.0.0.1:1/v1"
client: OpenAI = OpenAI(api_key=os.environ.get("NOT_SET", "any"), base_url=URL, max_retries=7)
lock = threading.Lock()
rlock = None
rlock = threading.RLock()  # which of both a runner needs is unknown

def helper():
    with lock:
        return client.max_retries

def locking_helper():
    with rlock:
        return 7

def agent(task):
    return float(helper() == 7 and client.base_url.host == "127.0.0.1")

def wrong_agent(task):
    return float(locking_helper() == 7)

store = agl.create_store("memory://")
trainer = agl.Trainer(algorithm="baseline", store=store, tracer="dummy", trackers=[])
try:
    trainer.fit(wrong_agent, [1])
except agl.ConfigError as error:
    print(error)
trainer.fit(agent, [1, 2])
print([rollout.attempt.reward for rollout in asyncio.run(store.query_rollouts(status_in=["succeeded"]))])
"""


def test_a_global_client_and_a_lock_are_recreated_in_each_runner_and_other_globals_are_named_with_the_remedies(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    error, rewards = done.stdout.splitlines()
    assert error.startswith(f"the global 'rlock' (RLock) that locking_helper in {tmp_path}")
    assert "create it in the function, or move it and the agent to a separate module" in error
    assert "strategy='shm'" in error
    assert rewards == "[1.0, 1.0]"
    assert "the global client of" in done.stderr
    assert "cannot be sent to another process; each runner creates its own: OpenAI(" in done.stderr


_GUARDED = """
import asyncio
import mimetypes
import agentlightning as agl

mimetypes.add_type("x/registered", ".registered")  # as gym.register does
LIMIT = None

def agent(task):
    return float(mimetypes.guess_type("a.registered")[0] == "x/registered" and LIMIT == 3)

if __name__ == "__main__":
    LIMIT = 3
    store = agl.create_store("memory://")
    agl.Trainer(algorithm="baseline", store=store, tracer="dummy", trackers=[]).fit(agent, [1])
    print([rollout.attempt.reward for rollout in asyncio.run(store.query_rollouts(status_in=["succeeded"]))])
"""


def test_what_a_script_does_at_its_top_happens_in_each_runner_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_GUARDED)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr
