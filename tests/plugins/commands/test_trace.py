"""`agl trace`: programs that do not use Lightning are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.commands import trace as trace_command
from agentlightning_plugins.shared.chat_history import TraceToMessages
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.waiting import LIMIT_S, until

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
"""


async def trace(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[AttemptedRollout]]:
    """Runs `agl trace` in a separate process; returns the completed process and the rollouts of its store."""
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
        start = "from agentlightning_plugins.commands.trace import command; command()"
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", start, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
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


@contextlib.asynccontextmanager
async def unreliable_store(monkeypatch: pytest.MonkeyPatch, failures: int) -> AsyncIterator[Any]:
    """A store in memory whose first writes of spans fail; `agl trace` opens it and leaves it open."""
    store: Any = agl.create_store("memory://")
    add, close = store.add_many_spans, store.close
    left = iter(range(failures))

    async def add_many_spans(spans: Sequence[Span]) -> Any:
        if next(left, None) is not None:
            raise StoreError("the store does not answer")
        return await add(spans)

    async def stay_open() -> None: ...

    monkeypatch.setattr(store, "add_many_spans", add_many_spans)
    monkeypatch.setattr(store, "close", stay_open)
    monkeypatch.setattr("agentlightning.store.factory.create_store", lambda url, run=None: store)
    yield store
    await close()


async def test_the_exit_code_of_the_command_is_returned_and_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    async with unreliable_store(monkeypatch, failures=0) as store:
        assert await trace_command._trace("memory://", None, ["sh", "-c", "exit 3"]) == 3
        (rollout,) = await store.query_rollouts()
        assert (rollout.status, rollout.attempt.error.message) == ("failed", "the command exited with code 3")


async def test_a_command_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with unreliable_store(monkeypatch, failures=0) as store:
        with pytest.raises(agl.ConfigError, match="'no-such-program' cannot be started: No such file or directory"):
            await trace_command._trace("memory://", None, ["no-such-program", "--store", "x"])
        assert [rollout.status for rollout in await store.query_rollouts()] == ["cancelled"]


WRITER = """
import os, sys, time
from agentlightning.types import Span
for number in range(3):
    ids = {"rollout_id": os.environ["AGL_ROLLOUT_ID"], "attempt_id": os.environ["AGL_ATTEMPT_ID"]}
    span = Span.from_attributes(attributes={}, name=str(number), **ids)
    with open(os.environ["AGL_TRACE_FILE"], "a") as file:
        file.write(span.model_dump_json() + "\\n" + "{broken\\n" * int(sys.argv[1]))
    time.sleep(0.1)
print("finished")
"""


async def test_spans_are_stored_later_if_the_store_fails_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_command, "_READ_EVERY_S", 0.01)
    async with unreliable_store(monkeypatch, failures=3) as store:
        assert await trace_command._trace("memory://", None, [sys.executable, "-c", WRITER, "0"]) == 0
        (rollout,) = await store.query_rollouts()
        assert (rollout.status, rollout.attempt.spans_dropped) == ("succeeded", 0)
        names = [span.name for span in await store.query_spans(rollout.rollout_id)]
        assert names[:3] == ["0", "1", "2"], "and the span of the process"


async def test_a_line_that_is_not_a_span_is_skipped_and_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async with unreliable_store(monkeypatch, failures=0) as store:
        assert await trace_command._trace("memory://", None, [sys.executable, "-c", WRITER, "1"]) == 0
        (rollout,) = await store.query_rollouts()
        assert (rollout.status, rollout.attempt.spans_dropped) == ("succeeded", 3)
        names = [span.name for span in await store.query_spans(rollout.rollout_id)]
        assert names[:3] == ["0", "1", "2"], "and the span of the process"
    said = capfd.readouterr()
    assert said.out == "finished\n"
    assert "3 spans were lost" in said.err
    assert "sitecustomize" not in said.err, "this environment has no file of this name"


async def test_a_recording_that_fails_ends_the_command_and_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any) -> bool:
        raise OSError("the disk is broken")

    monkeypatch.setattr(trace_command._SpanFile, "read", read)
    async with unreliable_store(monkeypatch, failures=0) as store:
        with pytest.raises(OSError, match="the disk is broken"):
            await trace_command._trace("memory://", None, ["sleep", "10000"])
        (rollout,) = await store.query_rollouts()
        assert (rollout.status, rollout.attempt.error.type) == ("failed", "OSError")


async def test_a_command_without_model_calls_keeps_its_lease(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace_command, "_HEARTBEAT_S", 0.01)
    wait = f"until [ -e {tmp_path / 'over'} ]; do sleep 0.1; done"
    async with unreliable_store(monkeypatch, failures=0) as store:
        tracing = asyncio.create_task(trace_command._trace("memory://", None, ["sh", "-c", wait]))
        await until(lambda: store.query_rollouts())
        beats: set[float] = set()

        async def has_beaten() -> bool:
            (rollout,) = await store.query_rollouts()
            beats.add(rollout.attempt.last_heartbeat_time)
            return len(beats) > 3

        await until(has_beaten)
        (tmp_path / "over").touch()
        assert await tracing == 0


async def test_sigterm_ends_the_command_and_the_attempt(tmp_path: Path) -> None:
    start = "from agentlightning_plugins.commands.trace import command; command()"
    tracing = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", start, "sh", "-c", "echo $$; exec sleep 10000"), cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert tracing.stdout is not None
    child = int(await tracing.stdout.readline())
    tracing.send_signal(signal.SIGTERM)
    try:
        assert await asyncio.wait_for(tracing.wait(), LIMIT_S) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    store = agl.create_store(f"sqlite:///{tmp_path / 'agl.db'}")
    (rollout,) = await store.query_rollouts()
    await store.close()
    assert isinstance(rollout, AttemptedRollout)
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.message == "the command exited with code 143"


async def test_the_password_of_the_store_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with unreliable_store(monkeypatch, failures=0):
        assert await trace_command._trace("postgresql://me:hunter2@host/db", None, ["true"]) == 0
    assert " --store postgresql://***@host/db" in capsys.readouterr().err
