"""A client with the URLs of several servers of one store keeps working when one of them fails."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, StoreError
from agentlightning.types import EnqueueRolloutRequest
from agentlightning_plugins.shared.processes.supervisor import served
from agentlightning_plugins.stores.http.client import LightningStoreClient, connection
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.failures import check_messages
from tests.port import reserve_port
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries


async def start_server(database: str, port: int) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "agentlightning", "store", "--backend", database, "--port", str(port))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert b"Serving" in await process.stdout.readline()
    return process


async def test_claims_and_events_continue_when_a_server_is_killed(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    ports = [reserve_port(), reserve_port()]
    servers = await asyncio.gather(*(start_server(database, port) for port in ports))
    client = LightningStoreClient(",".join(f"http://127.0.0.1:{port}" for port in ports))
    try:
        ended: list[str] = []

        async def listen() -> None:
            async for event in client.subscribe(["rollout_finished"]):
                ended.append(getattr(event, "rollout_id", ""))

        listening = asyncio.create_task(listen())
        queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(40)])
        done: list[str] = []

        async def work(worker: LightningStoreClient, name: str) -> None:
            while (claimed := await worker.dequeue_rollout(name)) is not None:
                await worker.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
                done.append(claimed.rollout_id)
                if len(done) == 10:
                    servers[0].send_signal(signal.SIGKILL)
                    await servers[0].wait()

        names = [f"worker {number}" for number in range(3)]
        await asyncio.gather(*(work(pickle.loads(pickle.dumps(client)), name) for name in names))
        for name in names:  # a claim whose answer was lost stays with its worker until the worker ends
            await client.end_worker(name)
        await work(client, "another worker")
        rollouts = await client.wait_for_rollouts([rollout.rollout_id for rollout in queued], timeout=LIMIT_S)
        assert [rollout.status for rollout in rollouts] == ["succeeded"] * 40
        last = await client.start_rollout("after the failure")
        await client.update_attempt(last.rollout_id, last.attempt.attempt_id, status="succeeded")
        await until(lambda: last.rollout_id in ended)
        assert client.url.endswith(str(ports[1]))
        for line in caplog.messages:
            check_messages("a store server is killed", line)
        listening.cancel()
    finally:
        for server in servers:
            if server.returncode is None:
                server.kill()
                await server.wait()
        await client.close()


async def test_clients_are_spread_over_the_servers_and_return_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RETURN_S", 0.01)
    store = InMemoryLightningStore()
    servers = [LightningStoreServer(store, port=0) for _ in range(2)]
    await asyncio.gather(*(server.start() for server in servers))
    first, second = (server.endpoint for server in servers)
    clients = [LightningStoreClient(f"{first},{second}") for _ in range(40)]
    assert {client.url for client in clients} == {first, second}
    client = next(client for client in clients if client.url == first)
    await servers[0].stop()
    for _ in range(3):
        await client.statistics()
        assert client.url == second
    servers[0] = LightningStoreServer(store, port=servers[0].port)
    await servers[0].start()

    async def has_returned() -> bool:
        await client.statistics()
        return client.url == first

    await until(has_returned)
    await client.close()
    await asyncio.gather(*(server.stop() for server in servers))
    await store.close()


async def test_runner_processes_get_the_urls_of_all_servers_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "")
    client = LightningStoreClient("http://127.0.0.1:1,http://127.0.0.1:2")
    async with served(client, "127.0.0.1", 0, is_private=True) as target:
        assert (target.url, target.token) == ("http://127.0.0.1:1,http://127.0.0.1:2", None)
    await client.close()


async def test_runner_processes_read_the_token_file_if_their_parent_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text("of the file\n")
    monkeypatch.setenv("AGL_TOKEN", "")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tmp_path / "tokens"))
    for given, shared, sent in ((None, True, None), (None, False, "of the file"), ("own", True, "own")):
        client = LightningStoreClient("http://127.0.0.1:1", given)
        async with served(client, "127.0.0.1", 0, is_private=True, share_environment=shared) as target:
            assert target.token == sent
        await client.close()


async def test_a_run_serves_its_store_with_the_token_from_the_token_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text("of the file\n")
    monkeypatch.setenv("AGL_TOKEN", "")
    monkeypatch.setenv("AGL_TOKEN_FILE", str(tmp_path / "tokens"))
    store = InMemoryLightningStore()
    async with served(store, "127.0.0.1", 0, is_private=False) as target:
        assert target.token == "of the file"
        client = LightningStoreClient(target.url, "another")
        with pytest.raises(ConfigError, match="token"):
            await client.query_rollouts()
        await client.close()
    await store.close()


async def test_all_servers_are_named_when_none_can_be_reached() -> None:
    ports = [reserve_port(), reserve_port()]
    client = LightningStoreClient(",".join(f"http://127.0.0.1:{port}" for port in ports), retry_s=0.2)
    with pytest.raises(StoreError, match=f"127.0.0.1:{ports[0]}, http://127.0.0.1:{ports[1]}") as caught:
        await client.query_rollouts()
    check_messages("all store servers are away", str(caught.value))
    await client.close()


def test_each_of_several_urls_is_checked() -> None:
    with pytest.raises(ConfigError, match="there:1"):
        LightningStoreClient("http://here:1,there:1")
