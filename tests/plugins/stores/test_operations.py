"""`agl store` as a service: probes, metrics, tokens, logs and shutdown, also while the database is unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.errors import StoreError
from agentlightning_plugins.stores.http.client import LightningStoreClient
from tests.plugins.stores.served import serve
from tests.port import reserve_port
from tests.postgresql import PostgresServer
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries


class Service:
    """A running `agl store`."""

    def __init__(self, process: asyncio.subprocess.Process, line: str, log: Path) -> None:
        self.process = process
        self.line = line
        """The first line of the output."""
        self.url = line.split()[-1]
        self.log = log

    async def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=names) as response:
            return (
                response.status,
                await response.text(),
                {key.lower(): value for key, value in response.headers.items()},
            )

    async def end(self) -> tuple[int, str]:
        """Sends SIGTERM and returns the exit status and the log."""
        self.process.terminate()
        await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, self.log.read_text()


PROGRAM = """
from agentlightning.cli import main
from agentlightning_plugins.stores.http import command
from agentlightning_plugins.shared import token
from agentlightning_plugins.stores.http.server import application, metrics

{times}
main()
"""


@contextlib.asynccontextmanager
async def serving(folder: Path, *options: str, times: str = "", **variables: str) -> AsyncIterator[Service]:
    """Runs `agl store`, with ``times`` that are shorter where the test waits for their end."""
    port, log = reserve_port(), folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM.format(times=times), "store", *options,
            env={**os.environ, "AGL_PORT": str(port), **variables}, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert b"Serving" in line, log.read_text()
        yield Service(process, line.decode(), log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_a_server_waits_for_its_database_and_probes_and_metrics_show_when_it_is_unavailable(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    async def start_database() -> None:
        log = tmp_path / "log"
        await until(lambda: log.exists() and "waiting for it for up to" in log.read_text())
        await asyncio.to_thread(own_server.start)

    own_server.kill()
    starting = asyncio.create_task(start_database())
    variables = {"AGL_BACKEND": own_server.url(), "AGL_TOKEN": "secret"}
    options = ("--wait", str(LIMIT_S))
    async with serving(tmp_path, *options, times="metrics.ANSWER_S = 0.5", **variables) as service:
        await starting

        async def is_ready() -> bool:
            ready = (await service.get("/readyz"))[:2] == (200, "ok\n")
            families = await scrape(service)
            return ready and families["agl_store_up"] == 1.0 and families["agl_store_database_seconds"] > 0

        await until(is_ready)
        assert (await service.get("/livez"))[:2] == (200, "ok\n")
        assert (await service.get("/metrics"))[0] == 401
        families = await scrape(service)
        assert families["agl_build_info"] == 1.0
        assert families["process_resident_memory_bytes"] > 1e6
        own_server.kill()
        assert (await service.get("/livez"))[0] == 200
        status, text, _ = await service.get("/readyz")
        assert (status, text) == (503, "the database cannot be used; the server's log has the reason\n")
        families = await scrape(service)
        assert families["agl_store_up"] == 0.0
        assert "agl_store_rollouts" not in families
        await asyncio.to_thread(own_server.start)
        await until(is_ready)
        status, log = await service.end()
    assert status == 0, log
    assert "requests cannot be served" in log


async def scrape(service: Service) -> dict[str, float]:
    """Returns the value of the last sample of each metric name."""
    status, text, _ = await service.get("/metrics", authorization="Bearer secret")
    assert status == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


async def test_sigterm_stops_the_server_while_the_database_is_unavailable(
    own_server: PostgresServer, tmp_path: Path
) -> None:
    times = "command._CLOSE_S = application._FINISH_S = 0.5"
    async with serving(tmp_path, times=times, AGL_BACKEND=own_server.url()) as service:
        client = LightningStoreClient(service.url, retry_s=0.1)
        await client.query_rollouts()
        own_server.kill()
        writing = [asyncio.create_task(client.enqueue_rollout(number)) for number in range(3)]
        await until(lambda: "cannot be reached" in service.log.read_text())
        status, log = await service.end()
        assert status == 1
        assert "without closing" in log
        assert "Traceback" not in log
        for result in await asyncio.gather(*writing, return_exceptions=True):
            assert isinstance(result, StoreError)
        await client.close()


async def test_a_changed_token_file_takes_effect_in_a_running_server_and_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first\nold\n")
    monkeypatch.setenv("AGL_TOKEN", "")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tokens))
    async with serving(tmp_path, times="token.READ_S = 0.1", AGL_BACKEND="memory://") as service:

        async def ask(token: str) -> int:
            return (await service.get("/v1/agl/statistics", authorization=f"Bearer {token}"))[0]

        client = LightningStoreClient(service.url)
        assert client.token == "first"
        for token in ("first", "old"):
            holder = LightningStoreClient(service.url, token)
            rollout = await holder.start_rollout("task")
            key = holder.attempt_token(rollout.rollout_id, rollout.attempt.attempt_id)
            agent = LightningStoreClient(service.url, key)
            assert await agent.get_rollout_by_id(rollout.rollout_id) is not None
            await agent.close()
            await holder.close()
        assert await ask("other") == 401
        await client.enqueue_rollout("before")
        for broken, problem in (("", "is empty"), (" blank\n", "with a blank")):  # as if read while it is being written
            tokens.write_text(broken)
            await until(lambda problem=problem: problem in service.log.read_text())
            assert await ask("first") == 200
        tokens.write_text("second\n")

        async def is_refused() -> bool:
            return await ask("first") == 401

        await until(is_refused)
        assert await ask("second") == 200
        client._connection._tokens._read_at = time.monotonic() + LIMIT_S  # as if it had read the file just before
        client._connection._tokens._tokens = ("first",)
        claimed = await client.dequeue_rollout("worker")  # refused once, sent again with the new token
        assert claimed is not None
        assert client.with_run("other").token == client.token == "second"
        events = client.subscribe(["rollout_finished"])
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # the client requests the stream before it sends the next request
        await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        assert (await asyncio.wait_for(reading, LIMIT_S)).kind == "rollout_finished"
        await events.aclose()
        await client.close()
        _, log = await service.end()
    assert "the tokens stay as they were" in log
    assert "1 are valid now" in log


async def test_a_runner_with_a_token_file_uses_the_server_that_answers_and_logs_json(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    warn = "logging.getLogger('agentlightning').warning('said by the runner')"
    (tmp_path / "agent.py").write_text(f"import logging\ndef agent(task):\n    {warn}\n    return 1.0\n")
    log = tmp_path / "log"
    async with serve("secret") as (server, store):
        queued = await store.enqueue_rollout("task")
        with log.open("wb") as output:
            runner = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentlightning", "runner", f"{tmp_path / 'agent.py'}:agent"),
                *("--store", f"http://127.0.0.1:{reserve_port()},{server.endpoint}"),
                env={
                    **os.environ,
                    "AGL_TOKEN_FILE": str(tmp_path / "tokens"),
                    "AGL_TOKEN": "",
                    "AGL_LOG_FORMAT": "json",
                },
                stdout=asyncio.subprocess.DEVNULL,
                stderr=output,
            )
        try:
            (ended,) = await store.wait_for_rollouts([queued.rollout_id], timeout=LIMIT_S)
            assert ended.status == "succeeded"
        finally:
            runner.terminate()
            await runner.wait()
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (record,) = [record for record in records if record["message"] == "said by the runner"]
    assert (record["level"], record["logger"]) == ("WARNING", "agentlightning")
    assert record["time"].endswith("+00:00")


async def test_logs_are_json_lines_with_the_request_id(tmp_path: Path) -> None:
    options = ("--log-format", "json", "--log-level", "info", "--access-log")
    async with serving(tmp_path, *options, AGL_BACKEND="memory://") as service:
        assert "memory:// (not durable" in service.line
        _, _, headers = await service.get("/v1/agl/health", x_request_id="mine-1")
        assert headers["x-request-id"] == "mine-1"
        status, _, headers = await service.get("/v1/agl/rollouts/none")
        assert (status, len(headers["x-request-id"])) == (404, 16)
        _, _, replaced = await service.get("/v1/agl/health", x_request_id="a b")
        assert len(replaced["x-request-id"]) == 16
        status, text = await service.end()
    records = [json.loads(line) for line in text.splitlines()]
    first, second, *_ = records
    assert (first["path"], first["status"], first["request_id"]) == ("/v1/agl/health", 200, "mine-1")
    assert second["request_id"] == headers["x-request-id"]
    assert all({"time", "level", "logger", "message"} <= set(record) for record in records)
