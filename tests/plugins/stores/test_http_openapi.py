"""The OpenAPI document of the store server, and a fuzzer that follows it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.types import Span
from agentlightning_plugins.stores.http.server import LightningStoreServer, routes
from tests.plugins.stores.served import ask, claim, serve

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


async def test_every_route_is_described_with_its_answers() -> None:
    async with serve() as (server, _):
        status, document = await ask(server, "GET", "/openapi.json")
    assert status == 200
    assert document["openapi"].startswith("3.1")
    operations = {(method.upper(), path): op for path, ops in document["paths"].items() for method, op in ops.items()}
    table = {(route.method, "/v1/agl" + route.path) for route in routes.ROUTES}
    others = {("GET", "/v1/agl/events"), ("POST", "/v1/traces"), ("GET", "/metrics"), ("GET", "/openapi.json")}
    assert set(operations) == table | others
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for (method, path), operation in operations.items():
        assert operation["summary"], path
        assert {"401", "403", "422", "503"} <= set(operation["responses"])
        if method == "POST":
            assert {"400", "413"} <= set(operation["responses"]) or "requestBody" not in operation
    enqueue = operations["POST", "/v1/agl/queues/rollouts/enqueue"]
    assert enqueue["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/EnqueueRollouts")
    batch = document["components"]["schemas"]["EnqueueRollouts"]["properties"]["rollouts"]
    assert batch["maxItems"] == 100_000


def _fuzz(server: LightningStoreServer, folder: Path, options: list[str]) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.endpoint}/openapi.json"),
            *("--checks", CHECKS, "--exclude-path", "/v1/agl/events", "--suppress-health-check", "all", "--no-color"),
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    return done.stdout


async def _fuzz_a_store_in_use(folder: Path, options: list[str]) -> None:
    async with serve() as (server, store):
        await store.create_run("default")
        await store.add_resources({"prompt": "Say {word}"})
        rollout = await claim(store, {"question": 1})
        attempt_id = rollout.attempt.attempt_id
        await store.add_span(
            Span.from_attributes(attributes={"n": 1}, rollout_id=rollout.rollout_id, attempt_id=attempt_id)
        )
        output = await asyncio.to_thread(_fuzz, server, folder, options)
        cases = re.search(r"(\d+) generated, (\d+) passed", output)
        assert cases is not None, output
        assert int(cases[1]) == int(cases[2]) > 500, output
        assert (await store.statistics())["rollouts"] > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_fuzzer_finds_no_fault_and_no_undocumented_answer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(routes, "MAX_POLL_S", 0.01)
    await _fuzz_a_store_in_use(tmp_path, ["--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1"])


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_fuzzer_finds_nothing_in_ten_minutes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(routes, "MAX_POLL_S", 0.01)
    await _fuzz_a_store_in_use(tmp_path, ["--max-examples", "300", "--max-time", "600"])
