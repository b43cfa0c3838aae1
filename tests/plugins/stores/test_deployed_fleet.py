"""The fleet of docs/operations.md, brought up from nothing by the commands of the page and the files of deploy/."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.nginx import running_nginx
from tests.port import reserve_port
from tests.source import REPO
from tests.waiting import LIMIT_S, blocking_until

pytestmark = [pytest.mark.environment("main"), pytest.mark.slow]  # about processes, not about versions of libraries

PROGRAM = "/opt/lightning/.venv/bin/agl"
AGENT = """
import json, urllib.request
import agentlightning as agl

def agent(task, llm: agl.LLM):
    body = json.dumps({"model": llm.model, "messages": [{"role": "user", "content": task}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
    with urllib.request.urlopen(urllib.request.Request(llm.endpoint + "/chat/completions", body, headers)) as answer:
        return float(json.load(answer)["choices"][0]["message"]["content"])
"""
TRAINER = """
import asyncio, sys
import agentlightning as agl
from agentlightning_plugins.gateway.remote import RemoteGateway

async def main(url, limit_s):
    store = agl.create_store(url).with_run("mine")
    gateway = RemoteGateway(url + "/gateway")
    gateway.store = store
    await gateway.start()
    await store.add_resources({"llm": gateway.as_resource()})
    queued = await store.enqueue_rollout("a task")
    (done,) = await store.wait_for_rollouts([queued.rollout_id], timeout=float(limit_s))
    calls = await store.query_spans(done.rollout_id, name_contains="chat")
    print(done.status, done.attempt.reward, len(calls), done.attempt.error)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Machine:
    """Does what docs/operations.md says, with a folder in place of ``/`` and free ports in place of the usual ones."""

    def __init__(
        self, root: Path, own: dict[str, str], variables: dict[str, dict[str, str]], processes: contextlib.ExitStack
    ) -> None:
        self._root, self._own, self._variables, self._processes = root, own, variables, processes
        self._fine: dict[str, list[str]] = {}
        """The exit statuses of each service, besides 0, that are no failure."""
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        """The services, in the order in which they were started."""

    def adapt(self, text: str) -> str:
        """Replaces ports and paths of the deployment by those of the test."""
        names = "|".join(map(re.escape, self._own))
        return re.sub(rf"(?<!\d)(?:{names})(?!\d)", lambda match: self._own[match[0]], text)  # 443 may be in a port

    def place(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        self.place(path).parent.mkdir(parents=True, exist_ok=True)
        self.place(path).write_text(text)

    def do(self, line: str) -> None:
        match line.split():
            case ["mkdir", "-p", "/etc/lightning"]:
                for name, values in self._variables.items():
                    self.write(f"/etc/lightning/{name}", "".join(f"{key}={value}\n" for key, value in values.items()))
            case ["cp", *sources, folder]:
                for source in sources:
                    self.write(folder + Path(source).name, self.adapt((REPO / source).read_text()))
            case ["systemctl", "enable", "--now", *names]:
                for name in names:
                    self._start(name)
            case ["nginx", "-s", "reload"]:
                (site,) = self.place("/etc/nginx/sites-enabled").iterdir()
                self._processes.enter_context(running_nginx(self._root, "", site.read_text()))
            case ["curl", "--fail", *urls]:
                for url in map(self.adapt, urls):
                    blocking_until(lambda url=url: is_ok(url), why=lambda: "".join(self.logs()))
            case ["createdb", "lightning"] | ["$EDITOR", *_]:  # what the test has prepared, or has in ``variables``
                pass
            case words:
                raise AssertionError(f"the page has a command that this test does not know: {words}")

    def logs(self) -> list[str]:
        return [f"--- {path.name}\n{path.read_text()[-3000:]}\n" for path in self._root.glob("*.log")]

    def _start(self, name: str) -> None:
        """Starts a service as systemd would: its program, its environment file, after the units that it names."""
        unit, _, instance = name.partition("@")
        path = self.place(f"/etc/systemd/system/{unit}{'@' if instance else ''}.service")
        text = self.adapt(path.read_text().replace("%i", instance))
        (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        (file,) = re.findall(r"^EnvironmentFile=(.*)$", text, re.MULTILINE)
        (before,) = re.findall(r"^After=(.*)$", text, re.MULTILINE)
        self._fine[name] = re.findall(r"^SuccessExitStatus=(.*)$", text, re.MULTILINE)
        ours = {each.removesuffix(".service") for each in before.split() if each.startswith("agl-")}
        assert ours <= {self.adapt(each) for each in self.started}, name
        variables = dict(line.split("=", 1) for line in self.place(file).read_text().splitlines())
        assert all(variable in text.partition("[Unit]")[0] for variable in variables), (name, variables)
        words = [re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word) for word in line.split()]
        assert words[0] == PROGRAM
        words = [str(self.place(word)) if word.startswith("/etc/") else word for word in words[1:]]
        base = {key: value for key, value in os.environ.items() if not key.startswith("AGL_")}
        with (self._root / f"{name}.log").open("wb") as log:
            self.started[name] = self._processes.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "agentlightning", *words],
                    env={**base, **variables}, cwd=self._root, stdout=log, stderr=log,
                )
            )  # fmt: skip
        self._processes.callback(self.started[name].kill)

    def stop(self) -> None:
        """Stops the services in the reverse order; none may fail."""
        for name, process in reversed(self.started.items()):
            process.terminate()
            assert str(process.wait(LIMIT_S)) in ("0", *self._fine[name]), (name, self.logs())


def is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def test_the_commands_of_the_page_start_a_fleet_that_does_a_rollout_and_stops(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL, two stores, a gateway and runners behind nginx with TLS, all from docs/operations.md and deploy/."""
    page = (REPO / "docs" / "operations.md").read_text()
    commands = re.findall(r"^    (\S.*)$", page.partition("## Start a fleet")[2].partition("\n## ")[0], re.MULTILINE)
    certificate, port, ports = tmp_path / "fullchain.pem", reserve_port(), [reserve_port() for _ in range(3)]
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout {tmp_path}/privkey.pem"
    make += f" -out {certificate} -addext subjectAltName=IP:127.0.0.1"
    await asyncio.to_thread(subprocess.run, make.split(), check=True, capture_output=True)
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    url = f"https://127.0.0.1:{port}"
    variables = {
        "store.env": {"AGL_BACKEND": database, "AGL_TOKEN": "secret"},
        "gateway.env": {"AGL_TOKEN": "secret", "OPENAI_API_KEY": "key-of-this-test"},
        "runner.env": {"AGL_TOKEN": "secret", "AGL_STORE": url, "AGL_RUN": "mine", "AGL_AGENT": f"{agent}:agent"},
    }
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with ScriptedOpenAI(script=lambda *_: Answer("0.5")) as model:
        own = dict(zip(("4747", "4748", "4000"), map(str, ports), strict=True))
        own |= {"443": f"127.0.0.1:{port}", "/etc/ssl/lightning": str(tmp_path)}
        own |= {"http://models:8000/v1": model.endpoint, "lightning.example.com": "127.0.0.1"}
        with contextlib.ExitStack() as processes:
            machine = Machine(tmp_path, own, variables, processes)
            for command in commands:
                await asyncio.to_thread(machine.do, command)
            assert list(machine.started) == [
                *("agl-store@4747", "agl-store@4748", "agl-gateway", "agl-runner@1", "agl-runner@2")
            ]
            trainer = [sys.executable, "-c", TRAINER, url, str(LIMIT_S)]
            environment = {**os.environ, "AGL_TOKEN": "secret"}
            done = await asyncio.to_thread(subprocess.run, trainer, env=environment, capture_output=True, text=True)
            assert done.stdout == "succeeded 0.5 1 None\n", f"{done.stderr} {machine.logs()}"
            assert not is_ok(f"{url}/readyz")  # for internal machines only
            await asyncio.to_thread(machine.stop)
            (request,) = model.requests
            assert request.headers["authorization"] == "Bearer key-of-this-test"
