"""A policy server process under random requests."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from tests.algorithms.tiny_model import save_tiny_model
from tests.security.fuzz import Grammar, fuzz
from tests.security.gateway_process import port_of, process, text_of
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
