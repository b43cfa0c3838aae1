"""Processes of the policy server, the dashboard and the server of agents of 0.1 under random requests."""

from __future__ import annotations

import dataclasses
import re
import secrets
from pathlib import Path

import pytest

import agentlightning as agl
from tests.algorithms.tiny_model import save_tiny_model
from tests.security.fuzz import Grammar, fuzz
from tests.security.gateway_process import port_of, process, text_of
from tests.security.store_process import TOKEN
from tests.security.test_connections import PRLIMIT, check_idle_connections, patient
from tests.security.test_gateway_fuzz import BODIES, DURATION, WANTED, check


def make_grammar(model: Path, key: str, port: int) -> Grammar:
    """Returns requests to a policy server that serves the model in a directory."""
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/statistics", "/weights", "/x"]
    bodies = [*BODIES, {"path": str(model), "version": 1}, {"path": "/nowhere", "version": 2}]
    return Grammar(paths, bodies, [f"Bearer {key}", "Bearer x"], port)


@pytest.mark.parametrize("seconds", DURATION)
async def test_a_policy_server_withstands_random_requests_and_idle_connections(seconds: float, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    save_tiny_model(tmp_path / "model")
    log = tmp_path / "log"
    arguments = ["--model", str(tmp_path / "model"), "--model-name", "m", "--threads", "1", "--prefix-cache-mb", "16"]
    async with process(
        log, *patient("agentlightning_algorithms.shared.policy.server"), *arguments, wrapper=PRLIMIT
    ) as server:
        port = await port_of(server, log, r'"port": (\d+)')
        found = re.search(r'"key": "([^"]+)"', text_of(log))
        assert found is not None
        grammar = make_grammar(tmp_path / "model", found[1], port)
        findings = await fuzz(grammar, server.pid, seconds, seed, wanted=WANTED, clients=4)
        assert server.returncode is None, text_of(log)
        assert "Traceback" not in text_of(log), text_of(log)[:4000]
        await check_idle_connections(port, log, "/statistics", found[1])
    check(findings, seed, seconds)


PAGES = Grammar(
    """/ /index.json /runs/default /runs/default/rollouts.json /runs/x/group?name=1 /fleet /compare /login /logout /x
    /runs/default/rollouts/ro-x /runs/default/rollouts/ro-x/label /static/x""".split(),
    [{"label": "good", "form_token": "x"}, {"token": "x", "next": "//evil.example"}],
    [f"Bearer {TOKEN}", "Bearer x", "Basic x"],
    0,
    health="/login",
)


@pytest.mark.parametrize("seconds", DURATION)
async def test_the_dashboard_withstands_random_requests_and_idle_connections(seconds: float, tmp_path: Path) -> None:
    url, log, seed = f"sqlite:///{tmp_path}/store.db", tmp_path / "log", secrets.randbits(32)
    store = agl.create_store(url)
    await store.enqueue_rollout("task")
    await store.add_resources({"prompt": "x"})
    await store.close()
    arguments = ["dashboard", url, "--token", TOKEN, "--port", "0"]
    async with process(log, *patient("agentlightning"), *arguments, wrapper=PRLIMIT) as server:
        port = await port_of(server, log, r"http://127\.0\.0\.1:(\d+)")
        findings = await fuzz(
            dataclasses.replace(PAGES, port=port), server.pid, seconds, seed, wanted={200, 303, 401, 404}, clients=4
        )
        assert server.returncode is None, text_of(log)
        assert "Traceback" not in text_of(log), text_of(log)[:4000]
        await check_idle_connections(port, log, "/index.json", TOKEN, probe=PAGES.health)
    check(findings, seed, seconds)
