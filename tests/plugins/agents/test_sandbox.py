"""The sandbox of command agents: a bad command fails its own attempt and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning_plugins.shared.sandbox import sandbox
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.agents.command_lab import CALL_MODEL, are_gone, printed, python, run, shell, store, tracer
from tests.plugins.gateway.gateway_setup import gateway
from tests.waiting import LIMIT_S

__all__ = ["store", "tracer"]
DAEMON = "setsid sleep 100000 & (trap '' TERM HUP; exec sleep 100000) & sleep 0.1"


@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        (
            "import os, time\nfor _ in range(30): os.fork() or time.sleep(100)\ntime.sleep(100)",
            {"processes": 20},
            "more than 20 processes",
        ),
        ("import time; data = b'x' * 300 * 2**20; time.sleep(100)", {"memory_mb": 200}, "more than 200 MiB of memory"),
        (
            "import time\nfor i in range(40): open(str(i), 'wb').write(b'x' * 2**20)\ntime.sleep(100)",
            {"disk_mb": 30},
            "more than 30 MiB of files",
        ),
        ("open('big', 'wb').write(b'x' * 2**24)", {"disk_mb": 8}, "File too large"),
        ("files = [open('/dev/null') for _ in range(100)]", {"open_files": 64}, "Too many open files"),
    ],
    ids=["processes", "memory", "files", "one file", "open files"],
)
async def test_a_command_that_exceeds_a_limit_fails_its_attempt(
    store: agl.LightningStore, tmp_path: Path, code: str, limits: dict[str, int], message: str
) -> None:
    agent = agl.CommandAgent(python(code), workspace=tmp_path, sandbox={"name": "subprocess", **limits})
    rollout, _ = await run(store, agent, timeout_s=LIMIT_S)
    assert rollout.attempt.error is not None
    assert message in rollout.attempt.error.message
    assert await are_gone(rollout.rollout_id)


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "sleep 100000", "kill -9 $$"])
async def test_nothing_is_left_of_an_attempt(
    store: agl.LightningStore, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    code = f"{DAEMON}; mkdir closed; touch closed/file; chmod 000 closed; {end}"
    agent = agl.CommandAgent(shell(code), workspace=tmp_path / "empty", kill_after_s=0.1)
    (tmp_path / "empty").mkdir()
    rollout, _ = await run(store, agent, timeout_s=3.0 if end == "sleep 100000" else LIMIT_S)
    assert rollout.status == ("succeeded" if end == "exit 0" else "failed")
    assert await are_gone(rollout.rollout_id)
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_the_signal_that_ended_a_command_is_named(store: agl.LightningStore) -> None:
    rollout, _ = await run(store, agl.CommandAgent(shell("kill -SEGV $$")))
    assert rollout.attempt.error is not None
    assert "was ended by SIGSEGV" in rollout.attempt.error.message


async def test_a_command_may_reach_its_model_and_nothing_else(tracer: agl.OtelTracer, tmp_path: Path) -> None:
    code = """
    import socket
    for host, port in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80)):
        try:
            socket.create_connection((host, port), timeout=5)
            print("reached", host)
        except OSError as error:
            print(type(error).__name__)
    print(call("hello"))
    """
    async with ScriptedOpenAI([Answer("seven")]) as server, gateway(server) as case:
        other_port = server.endpoint.rpartition(":")[2].removesuffix("/v1")
        limits = {"name": "subprocess", "network": "gateway"}
        check = python(f"import socket; print(float(socket.socket().connect_ex(('127.0.0.1', {other_port})) != 0))")
        command, place = python(CALL_MODEL + code, other_port), {"workspace": tmp_path, "reward": check}
        agent = agl.CommandAgent(command, task_via="env", sandbox=limits, **place)
        rollout, spans = await run(case.store, agent, resources={"llm": case.proxy.as_resource(model="m")})
        assert (rollout.attempt.error, rollout.attempt.reward) == (None, 1.0)
        assert printed(spans) == "ConnectionRefusedError\nOSError\nseven\n"
        assert len(agl.TraceToTriplet().adapt(await case.spans(rollout))) == 1


async def test_a_network_with_the_gateway_only_needs_a_gateway_on_this_machine(store: agl.LightningStore) -> None:
    limits = {"name": "subprocess", "network": "gateway"}
    llm = agl.LLM(endpoint="https://models.example/v1", model="m")
    rollout, _ = await run(store, agl.CommandAgent(shell("true"), sandbox=limits), resources={"llm": llm})
    assert rollout.attempt.error is not None
    assert "the model endpoint is 'https://models.example/v1'" in rollout.attempt.error.message


async def test_where_namespaces_are_forbidden_the_rest_is_enforced_and_the_gap_is_logged(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "find_namespaces", list)
    sandbox._log_once.cache_clear()
    limits = {"name": "subprocess", "open_files": 64}
    for _ in range(2):
        code = "files = [open('/dev/null') for _ in range(100)]"
        rollout, _ = await run(store, agl.CommandAgent(python(code), sandbox=limits))
        assert "Too many open files" in str(rollout.attempt.error)
    assert caplog.text.count("this machine allows no namespaces") == 1
    rollout, spans = await run(store, agl.CommandAgent(shell(f"{DAEMON}; echo 7")))
    assert printed(spans) == "7\n"
    assert await are_gone(rollout.rollout_id)


async def test_a_sandbox_of_others_runs_the_command(store: agl.LightningStore) -> None:
    class Pretends:
        async def run(self, job: sandbox.Job) -> int:
            job.stdout.data_received(f"{job.arguments[0]} in {job.cwd}".encode())
            return 0

    _, spans = await run(store, agl.CommandAgent(["rm", "-rf", "/"], cwd="/tmp", sandbox=Pretends()))
    assert printed(spans) == "rm in /tmp"
