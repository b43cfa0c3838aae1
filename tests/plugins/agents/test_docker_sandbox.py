"""The sandbox ``docker``, with a scripted program of this name whose containers are processes."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.agents.command_lab import CALL_MODEL, are_gone, printed, python, run, shell, store, tracer
from tests.plugins.gateway.gateway_setup import gateway
from tests.waiting import LIMIT_S

__all__ = ["store", "tracer"]


class Docker:
    """The scripted program, in a folder of PATH."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir(parents=True)
        program = folder / "docker"
        script = Path(__file__).with_name("scripted_docker.py")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} {self.state} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def calls(self, command: str) -> list[list[str]]:
        lines = [json.loads(line) for line in (self.state / "calls").read_text().splitlines()]
        return [arguments for name, *arguments in lines if name == command]

    def containers(self) -> list[str]:
        return [path.name for path in (self.state / "containers").iterdir()]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    scripted = Docker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'docker'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "workspace").mkdir()
    return scripted


def sandbox(**settings: Any) -> dict[str, Any]:
    return {"name": "docker", "image": "tools", **settings}


async def test_a_command_runs_in_a_container_with_its_folder_its_limits_and_its_own_variables(
    store: agl.LightningStore, docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", "secret")
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("MINE", "inherited")
    limits = {"memory_mb": 300, "cpus": 1.5, "processes": 20, "open_files": 64, "options": ["--gpus=all"]}
    code = """
    import os, pathlib
    names = ("OF_THIS_MACHINE", "VIRTUAL_ENV", "MINE", "OPENAI_API_KEY", "OWN")
    print([os.environ.get(name) for name in names], pathlib.Path.home().parent == pathlib.Path.cwd().parent, input())
    pathlib.Path("changed").write_text("by the command")
    """
    agent = agl.CommandAgent(
        python(code),
        workspace=tmp_path / "workspace",
        reward=["sh", "-c", "cat changed && [ -z $OPENAI_API_KEY ]"],
        env={"OWN": "set"},
        inherit_env=["MINE"],
        sandbox=sandbox(**limits),
    )
    llm = agl.LLM(endpoint="http://model/v1", model="m", api_key="key-of-the-model")
    rollout, spans = await run(store, agent, "the task", resources={"llm": llm})
    assert (rollout.attempt.error, rollout.attempt.reward) == (None, 1.0)
    assert printed(spans) == "[None, None, 'inherited', '***', 'set'] True the task\n"
    first, second = docker.calls("run")
    assert first[0] != second[0]
    expected = {"--memory=300m", "--memory-swap=300m", "--cpus=1.5", "--pids-limit=20", "--ulimit=nofile=64"}
    expected |= {"--network=host", "--read-only", "--cap-drop=ALL", "--rm", "--gpus=all"}
    expected |= {f"--user={os.getuid()}:{os.getgid()}"}
    assert expected <= set(first)
    assert first[first.index("tools") + 1 :] == agent.command
    assert "key-of-the-model" not in str(first)
    assert docker.containers() == []
    assert not docker.calls("rm")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("sleep 100000", "timeout"),
        ("trap '' TERM; sleep 100000; sleep 100000", "timeout"),
        ("setsid sleep 100000 & (trap '' TERM HUP; exec sleep 100000) & exit 3", "exited with code 3"),
        ("head -c 40000000 /dev/zero > big; sleep 100000", "more than 30 MiB of files"),
        ("kill -9 $$", "ended by SIGKILL, as for more than 4096 MiB of memory"),
    ],
    ids=["a timeout", "sigterm is ignored", "forks", "a full disk", "killed"],
)
async def test_a_bad_command_fails_its_attempt_and_no_container_is_left(
    store: agl.LightningStore, docker: Docker, tmp_path: Path, code: str, error: str
) -> None:
    limits = sandbox(disk_mb=30)
    agent = agl.CommandAgent(shell(code), workspace=tmp_path / "workspace", sandbox=limits, kill_after_s=0.1)
    rollout, _ = await run(store, agent, timeout_s=2.0 if error == "timeout" else LIMIT_S)
    assert (rollout.attempt.status == "timeout") if error == "timeout" else (error in str(rollout.attempt.error))
    assert docker.containers() == []
    assert await are_gone(rollout.rollout_id)
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_a_container_that_does_not_start_is_no_result_of_the_command(
    store: agl.LightningStore, docker: Docker, tmp_path: Path
) -> None:
    for argv, reward, network, message in (
        (["true"], ["true"], "broken", "network broken not found"),
        (["true"], ["no-such-program"], "host", "no-such-program"),
    ):
        agent = agl.CommandAgent(argv, reward, workspace=tmp_path / "workspace", sandbox=sandbox(network=network))
        rollout, _ = await run(store, agent)
        assert rollout.attempt.reward is None
        assert "cannot be started: docker: Error response from daemon" in str(rollout.attempt.error)
        assert message in str(rollout.attempt.error)


async def test_a_container_without_a_network_reaches_its_model(tracer: agl.OtelTracer, docker: Docker) -> None:
    code = """
    import socket
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    except OSError as error:
        print(type(error).__name__)
    print(call("hello"))
    """
    async with ScriptedOpenAI([Answer("seven")]) as server, gateway(server) as case:
        resources = {"llm": case.proxy.as_resource(model="m")}
        agent = agl.CommandAgent(python(CALL_MODEL + code), task_via="env", sandbox=sandbox(network="gateway"))
        rollout, spans = await run(case.store, agent, resources=resources)
    assert rollout.attempt.error is None
    assert printed(spans) == "OSError\nseven\n"
    (arguments,) = docker.calls("run")
    assert "--network=none" in arguments
    assert arguments[arguments.index("tools") + 1 :][:4] == ["python3", "-I", "-S", "/agl-guard.py"]


def test_a_missing_daemon_program_or_image_and_a_wrong_limit_are_refused_at_once(
    docker: Docker, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"needs the image 'other' here: No such image: other.*docker pull other"):
        agl.CommandAgent(["true"], sandbox=sandbox(image="other"))
    with pytest.raises(ConfigError, match=r"cpus = -1.5: give a number above 0"):
        agl.CommandAgent(["true"], sandbox=sandbox(cpus=-1.5))
    with pytest.raises(ConfigError, match="No such file or directory: 'nerdctl'"):
        agl.CommandAgent(["true"], sandbox=sandbox(program="nerdctl"))
    daemonless = tmp_path / "podman"
    daemonless.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon. >&2\nexit 1\n")
    daemonless.chmod(0o755)
    with pytest.raises(ConfigError, match="Cannot connect to the Docker daemon. Start the daemon"):
        agl.CommandAgent(["true"], sandbox=sandbox(program=str(daemonless)))
    assert agl.CommandAgent(["codex"], sandbox=sandbox()).describe_program() == "codex of the image tools"
