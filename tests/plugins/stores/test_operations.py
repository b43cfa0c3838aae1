"""`agl store` as a service: probes, metrics, tokens, logs and shutdown, also while the database is unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.errors import ConfigError, StoreError
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.port import reserve_port
from tests.postgresql import PostgresServer, running_server
from tests.waiting import until

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries


@pytest.fixture
def own_server(quick_parent: Path) -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    with running_server(quick_parent) as server:
        yield server


class Service:
    """A running `agl store`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=names) as response:
            return (
                response.status,
                await response.text(),
                {key.lower(): value for key, value in response.headers.items()},
            )

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Sends a signal and returns the exit status and the log."""
        self.process.send_signal(number)
        _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def serving(*options: str, **variables: str) -> AsyncIterator[Service]:
    port = reserve_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentlightning", "store", *options,
        env={**os.environ, "AGL_PORT": str(port), **variables},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = await process.stdout.readline()
        assert b"Serving" in line, (await process.stderr.read()).decode()
        yield Service(process, f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_probes_and_metrics_show_when_the_database_is_unavailable(own_server: PostgresServer) -> None:
    async with serving(AGL_BACKEND=own_server.url(), AGL_TOKEN="secret") as service:
        assert (await service.get("/livez"))[:2] == (200, "ok\n")
        assert (await service.get("/readyz"))[:2] == (200, "ok\n")
        assert (await service.get("/metrics"))[0] == 401
        families = await scrape(service)
        assert families["agl_store_up"] == 1.0
        assert families["agl_build_info"] == 1.0
        assert families["process_resident_memory_bytes"] > 1e6
        assert families["agl_store_database_seconds"] > 0
        own_server.kill()
        begun = time.monotonic()
        assert (await service.get("/livez"))[0] == 200
        status, text, _ = await service.get("/readyz")
        assert (status, text) == (503, "the database cannot be used; the server's log has the reason\n")
        families = await scrape(service)
        assert families["agl_store_up"] == 0.0
        assert "agl_store_rollouts" not in families
        assert time.monotonic() - begun < 15  # each request waits 2 s for the database
        await asyncio.to_thread(own_server.start)

        async def is_ready() -> bool:
            return (await service.get("/readyz"))[0] == 200

        await until(is_ready)
        assert (await scrape(service))["agl_store_up"] == 1.0
        _, errors = await service.end()
        assert "requests cannot be served" in errors


async def scrape(service: Service) -> dict[str, float]:
    """Returns the value of the last sample of each metric name."""
    status, text, _ = await service.get("/metrics", authorization="Bearer secret")
    assert status == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_sigterm_stops_the_server_promptly_while_the_database_is_unavailable(own_server: PostgresServer) -> None:
    async with serving(AGL_BACKEND=own_server.url()) as service:
        client = LightningStoreClient(service.url, retry_s=0.1)
        own_server.kill()
        writing = [asyncio.create_task(client.enqueue_rollout(number)) for number in range(3)]
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        status, log = await service.end()
        assert time.monotonic() - begun < 12
        assert status == 1
        assert "without closing" in log
        assert "Traceback" not in log
        for result in await asyncio.gather(*writing, return_exceptions=True):
            assert isinstance(result, StoreError)
        await client.close()


async def test_the_server_waits_for_a_database_that_starts_later(own_server: PostgresServer) -> None:
    own_server.kill()
    starting = asyncio.create_task(start_later(own_server))
    async with serving("--wait", "60", AGL_BACKEND=own_server.url()) as service:
        await starting
        assert (await service.get("/readyz"))[0] == 200
        assert (await service.end())[0] == 0


async def start_later(server: PostgresServer) -> None:
    await asyncio.sleep(1.5)
    await asyncio.to_thread(server.start)


async def test_a_token_can_be_replaced_without_downtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("new\nold\n")
    async with serving(AGL_BACKEND="memory://", AGL_TOKEN_FILE=str(tokens), AGL_TOKEN="") as service:
        for token in ("old", "new"):
            client = LightningStoreClient(service.url, token)
            rollout = await client.start_rollout("task")
            key = client.attempt_token(rollout.rollout_id, rollout.attempt.attempt_id)
            agent = LightningStoreClient(service.url, key)
            assert (await agent.get_rollout_by_id(rollout.rollout_id)) is not None
            await agent.close()
            await client.close()
        monkeypatch.setenv("AGL_TOKEN", "")
        monkeypatch.setenv("AGL_TOKEN_FILE", str(tokens))
        assert LightningStoreClient(service.url).token == "new"
        with pytest.raises(ConfigError):
            await LightningStoreClient(service.url, "other").query_rollouts()


async def test_a_changed_token_file_takes_effect_in_a_running_server_and_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first\n")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tokens))
    async with serving(AGL_BACKEND="memory://", AGL_TOKEN_FILE=str(tokens), AGL_TOKEN="") as service:
        client = LightningStoreClient(service.url)
        await client.enqueue_rollout("before")
        for broken in ("", " blank\n"):  # as if read while it is being written: the old token stays valid
            tokens.write_text(broken)
            await asyncio.sleep(2.5)
            assert (await service.get("/v1/agl/statistics", authorization="Bearer first"))[0] == 200
        tokens.write_text("second\n")

        async def is_refused() -> bool:
            return (await service.get("/v1/agl/statistics", authorization="Bearer first"))[0] == 401

        await until(is_refused)
        assert (await service.get("/v1/agl/statistics", authorization="Bearer second"))[0] == 200
        assert client.token == "first"
        client._connection._reads_token_at = time.monotonic() + 60  # as if it had read the file just before
        claimed = await client.dequeue_rollout("worker")  # refused once, sent again with the new token
        assert claimed is not None
        assert client.with_run("other").token == client.token == "second"
        events = client.subscribe(["rollout_finished"])
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # the client requests the stream before it sends the next request
        await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        assert (await asyncio.wait_for(reading, 30)).kind == "rollout_finished"
        await events.aclose()
        await client.close()
        _, log = await service.end()
    assert "the tokens stay as they were" in log
    assert "1 are valid now" in log


async def test_a_runner_with_a_token_file_uses_the_server_that_answers(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    (tmp_path / "agent.py").write_text("def agent(task):\n    return 1.0\n")
    variables = {"AGL_TOKEN_FILE": str(tmp_path / "tokens"), "AGL_TOKEN": ""}
    async with serving(AGL_BACKEND="memory://", **variables) as service:
        client = LightningStoreClient(service.url, "secret")
        queued = await client.enqueue_rollout("task")
        runner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentlightning", "runner", f"{tmp_path / 'agent.py'}:agent"),
            *("--store", f"http://127.0.0.1:{reserve_port()},{service.url}"),
            env={**os.environ, **variables}, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            (ended,) = await client.wait_for_rollouts([queued.rollout_id], timeout=120)
            assert ended.status == "succeeded"
        finally:
            runner.send_signal(signal.SIGTERM)
            await runner.wait()
            await client.close()


async def test_logs_are_json_lines_with_the_request_id() -> None:
    options = ("--log-format", "json", "--log-level", "info", "--access-log")
    async with serving(*options, AGL_BACKEND="memory://") as service:
        _, _, headers = await service.get("/v1/agl/health", x_request_id="mine-1")
        assert headers["x-request-id"] == "mine-1"
        status, _, headers = await service.get("/v1/agl/rollouts/none")
        assert (status, len(headers["x-request-id"])) == (404, 16)
        _, _, wrong = await service.get("/v1/agl/health", x_request_id="a b")
        assert "x-request-id" not in wrong
        status, text = await service.end()
    records = [json.loads(line) for line in text.splitlines()]
    first, second, *_ = records
    assert (first["path"], first["status"], first["request_id"]) == ("/v1/agl/health", 200, "mine-1")
    assert second["request_id"] == headers["x-request-id"]
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records)
