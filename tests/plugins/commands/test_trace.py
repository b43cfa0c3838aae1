"""`agl trace`: programs that know nothing of Lightning are recorded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import agentlightning as agl
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.chat_history.adapter import TraceToMessages
from agentlightning_plugins.scripted_model.server import Answer, ScriptedOpenAI

SCRIPT = """
import subprocess, sys, threading
import openai
import own_module
from concurrent.futures import ThreadPoolExecutor

def ask(text):
    client = openai.OpenAI()
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

if __name__ == "__main__":
    print(sys.argv[1:], ask("main").choices[0].message.content)
    with ThreadPoolExecutor() as pool:
        pool.submit(ask, "pool").result()
    if sys.argv[1:] == ["parent"]:
        subprocess.run([sys.executable, __file__, "child"], check=True)
    assert own_module.FROM_SITECUSTOMIZE
    sys.exit(3 if "fail" in sys.argv else 0)
"""


async def trace(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[AttemptedRollout]]:
    """Runs `agl trace` in a process of its own; returns it and the rollouts of its store."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "own_module.py").write_text("FROM_SITECUSTOMIZE = False\n")
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(
        "import sys, types\nmodule = sys.modules['own_module'] = types.ModuleType('own_module')\n"
        "module.FROM_SITECUSTOMIZE = True\n"
    )
    async with ScriptedOpenAI(lambda request: Answer("fine")) as server:
        environment = {
            **os.environ,
            "OPENAI_API_KEY": "any",
            "OPENAI_BASE_URL": server.endpoint,
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]),
        }
        start = "from agentlightning_plugins.commands.trace.command import command; command()"
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", start, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if not (folder / "agl.db").is_file():
        return done, []
    store = agl.create_store(f"sqlite:///{folder / 'agl.db'}")
    rollouts = [rollout for rollout in await store.query_rollouts() if isinstance(rollout, AttemptedRollout)]
    await store.close()
    return done, rollouts


async def asked(folder: Path, rollout: AttemptedRollout) -> list[str]:
    store = agl.create_store(f"sqlite:///{folder / 'agl.db'}")
    histories = TraceToMessages().adapt((await store.query_spans(rollout.rollout_id)).items)
    await store.close()
    return sorted(history["messages"][0]["content"] for history in histories if history["messages"][-1]["content"])


async def test_the_calls_of_an_unchanged_script_and_its_children_are_recorded(tmp_path: Path) -> None:
    done, (rollout,) = await trace(tmp_path, "--", sys.executable, "script.py", "parent")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['parent'] fine\n['child'] fine\n"
    assert rollout.status == "succeeded"
    assert rollout.input == {"command": [sys.executable, "script.py", "parent"]}
    assert await asked(tmp_path, rollout) == ["main", "main", "pool", "pool"]
    assert f"4 model calls recorded: agl rollouts show {rollout.rollout_id}" in done.stderr


async def test_the_exit_code_is_the_commands_and_fails_the_rollout(tmp_path: Path) -> None:
    done, (rollout,) = await trace(tmp_path, sys.executable, "script.py", "fail")
    assert done.returncode == 3
    assert rollout.status == "failed"
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.message == "the command exited with code 3"
    assert await asked(tmp_path, rollout) == ["main", "pool"]


async def test_a_command_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done, (rollout,) = await trace(tmp_path, "no-such-program", "--store", "x")
    assert "the command 'no-such-program' cannot be started: No such file or directory" in done.stderr
    assert rollout.status == "cancelled"
