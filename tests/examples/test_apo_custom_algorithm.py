"""The example of a custom algorithm, run as its docstring describes: in three processes, and in one."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms.prompt_lab import Server
from tests.port import reserve_port
from tests.waiting import LIMIT_S, blocking_until

REPO = Path(__file__).parents[2]
EXAMPLE = str(REPO / "examples" / "apo" / "apo_custom_algorithm.py")


def model(request: RecordedRequest) -> Answer:
    """Repeats the prompt in its answer; as a judge it prefers friendly answers."""
    asked = request.body["messages"][0]["content"]
    if "How good is this answer?" in asked:
        return Answer("9" if "friendly" in asked else "4.5")
    return Answer(f"an answer to: {asked[:30]}")


@pytest.fixture
def server() -> Iterator[ScriptedOpenAI]:
    with Server(model) as scripted:
        yield scripted


def start(folder: Path, server: ScriptedOpenAI, *command: str, store: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "OPENAI_API_KEY": "any", "OPENAI_BASE_URL": server.endpoint, "AGL_STORE": store}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # separate, because a log line must not split a printed line
        text=True,
    )


def check_output(output: str) -> None:
    assert output.count("succeeded") >= 3
    assert re.findall(r"final reward: (\S+)", output) == ["0.45", "0.45", "0.9"]
    assert re.search(r"^  span .*chat", output, re.MULTILINE)
    assert "  span agentlightning.reward" in output
    assert "best prompt: You are a friendly chatbot. {any_question} (reward 0.9)" in output


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=LIMIT_S)


@pytest.mark.slow
def test_the_custom_algorithm_finds_the_best_prompt_in_three_terminals(server: ScriptedOpenAI, tmp_path: Path) -> None:
    port = reserve_port()
    url = f"http://127.0.0.1:{port}"
    store = start(tmp_path, server, "-m", "agentlightning", "store", "--port", str(port))
    processes = [store]
    try:
        blocking_until(lambda: is_served(url, store))
        runner = start(tmp_path, server, EXAMPLE, "runner", store=url)
        processes.append(runner)
        algorithm = start(tmp_path, server, EXAMPLE, "algo", store=url)
        output, errors = algorithm.communicate(timeout=LIMIT_S)
        assert algorithm.returncode == 0, errors
        check_output(output)
        said, errors = stop(runner)
        assert "waiting for rollouts" in said
        assert "Traceback" not in errors
        assert runner.returncode == 0
    finally:
        for process in reversed(processes):
            if process.poll() is None:
                stop(process)


@pytest.mark.slow
def test_the_custom_algorithm_finds_the_best_prompt_in_one_process(server: ScriptedOpenAI, tmp_path: Path) -> None:
    process = start(tmp_path, server, EXAMPLE)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    check_output(output)


def test_an_unknown_role_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(EXAMPLE)["main"](["runer"]) == 2
    assert "apo_custom_algorithm.py runner" in capsys.readouterr().out


def is_served(url: str, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None, "the store did not start"
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/agl/health", timeout=LIMIT_S):
        return True
    return False
