"""With a proxy in the environment, calls on this machine do without it, and calls to other servers use it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import openai
import pytest

import agentlightning as agl
from agentlightning.run.proxies import bypass_proxies, find_proxy
from agentlightning_plugins.shared.scripted_model.server import Answer
from tests.algorithms.prompt_lab import Server
from tests.plugins.commands.agl_here import run_here
from tests.plugins.gateway.gateway_setup import entry, gateway

REMOTE = "http://models.example"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@contextlib.contextmanager
def company_proxy(backend: str, asked: list[str]) -> Iterator[str]:
    """Serves a proxy that reaches ``REMOTE``, which is the backend, and nothing on this machine."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.path.startswith(REMOTE):
                self.send_error(503)
                return
            url = backend.removesuffix("/v1") + urlsplit(self.path).path
            headers = {"Content-Type": "application/json", "Authorization": self.headers["Authorization"]}
            with urlopen(Request(url, body, headers)) as answer:
                said = answer.read()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            """Writes no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def set_proxy(monkeypatch: pytest.MonkeyPatch, proxy: str, no_proxy: str | None) -> None:
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first call
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    if no_proxy is not None:
        monkeypatch.setenv("NO_PROXY", no_proxy)


def agent(task: Any, llm: agl.LLM) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return float(answer.choices[0].message.content == "moo")


@pytest.mark.parametrize("no_proxy", [None, "localhost", ".corp.example"])
def test_the_agent_reaches_the_gateway_without_the_proxy_and_the_gateway_a_remote_backend_through_it(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str | None
) -> None:
    asked: list[str] = []
    with Server(lambda request: Answer("moo")) as server, company_proxy(server.endpoint, asked) as proxy:
        set_proxy(monkeypatch, proxy, no_proxy)
        proxied = agl.LLMProxy(model_list=[{"model": "m", "endpoint": f"{REMOTE}/v1", "api_key": "sk-remote-key"}])
        trainer = agl.Trainer(algorithm="baseline", strategy="shm", trackers=[], llm_proxy=proxied)
        assert trainer.fit(agent, [0, 1]).scores["reward"] == 1.0
        assert server.requests[0].headers["Authorization"] == "Bearer sk-remote-key"
    assert set(asked) == {f"{REMOTE}/v1/chat/completions"}


@pytest.mark.parametrize(
    ("no_proxy", "expected"),
    [
        (None, "127.0.0.1,localhost,::1"),
        ("localhost", "localhost,127.0.0.1,::1"),
        ("a.example, 127.0.0.1 ,", "a.example,127.0.0.1,localhost,::1"),
        ("*", "*"),
        ("::1,localhost,127.0.0.1", "::1,localhost,127.0.0.1"),
    ],
)
def test_the_addresses_of_this_machine_are_added_to_no_proxy_once(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str | None, expected: str
) -> None:
    set_proxy(monkeypatch, "http://proxy:3128", no_proxy)
    for _ in range(2):
        bypass_proxies()
        assert os.environ["NO_PROXY"] == expected


def test_without_a_proxy_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxy(monkeypatch, "", None)
    bypass_proxies()
    assert "NO_PROXY" not in os.environ


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://models.example/v1", "http://me:word@proxy:3128"),
        ("https://models.example/v1", None),
        ("http://gpu.corp.example/v1", None),
        ("http://127.0.0.1:8000/v1", None),
        ("http://localhost/v1", None),
        ("http://[::1]:8000/v1", None),
        ("", None),
    ],
)
def test_the_proxy_of_a_url_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, url: str, expected: str | None
) -> None:
    set_proxy(monkeypatch, "me:word@proxy:3128", ".corp.example")
    assert find_proxy(url) == expected
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1080")
    assert find_proxy("https://models.example/v1") is None, "the gateway speaks to HTTP proxies only"


async def test_the_error_about_an_unreachable_backend_names_the_proxy_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_proxy(monkeypatch, "http://me:pass-word@127.0.0.1:9", None)
    bypass_proxies()
    async with gateway(model_list=[entry(f"{REMOTE}/v1")], num_retries=0) as case:
        _, client = await case.start()
        with pytest.raises(openai.APIStatusError, match=r"through http://127.0.0.1:9, the proxy of the env") as error:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert "pass-word" not in str(error.value)


def test_doctor_names_the_proxy_if_the_agent_cannot_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxy(monkeypatch, "http://proxy:3128", None)
    (tmp_path / "agent.py").write_text("def agent(task, llm):\n    raise OSError('Connection error.')\n")
    said = run_here(tmp_path, "doctor", "agent.py:agent", module="agent")
    assert said.code == 1, said.stderr
    assert "the environment has a proxy" in said.stdout
    assert "NO_PROXY=127.0.0.1,localhost" in "".join(said.stdout.split())
