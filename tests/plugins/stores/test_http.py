"""The served store over HTTP; the conformance kit covers the semantics of the store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import multiprocessing
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.event import RolloutEnqueued
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Put
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.model import compare_with_model
from agentlightning.types import EnqueueRolloutRequest, Rollout, Span
from agentlightning_plugins.stores.http.client import LightningStoreClient, connection
from agentlightning_plugins.stores.http.client import client as client_module
from agentlightning_plugins.stores.http.server import LightningStoreServer, body
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from agentlightning_plugins.stores.sqlite.store import SqliteLightningStore
from tests.plugins.stores.semantics import EngineSemantics
from tests.plugins.stores.served import claim, until_gauge
from tests.source import run_python
from tests.waiting import LIMIT_S, until

TOKEN = "a-token-of-this-test"


@pytest.fixture
async def served() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore(watchdog_interval_s=0.05)
    yield store
    await store.close()


@pytest.fixture
def store(served: InMemoryLightningStore) -> LightningStore:
    """The store behind the server."""
    return served


@pytest.fixture
async def server(served: LightningStore) -> AsyncIterator[LightningStoreServer]:
    async with LightningStoreServer(served, port=0) as server:
        yield server


@pytest.fixture
async def client(server: LightningStoreServer) -> AsyncIterator[LightningStoreClient]:
    client = LightningStoreClient(server.endpoint)
    yield client
    await client.close()


class TestStoreOverHttp(EngineSemantics):
    """A served memory store has the semantics of a store."""

    @pytest.fixture
    def store(self, client: LightningStoreClient) -> LightningStoreClient:
        return client

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(self, store: LightningStore) -> None:
        await compare_with_model(store)


async def test_a_client_reads_all_spans_of_an_attempt_page_by_page(
    client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    request = client._connection.request

    async def record(method: str, path: str, body: Any, **options: Any) -> Any:
        asked.append(body["limit"])
        return await request(method, path, body, **options)

    rollout = await client.start_rollout({})
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await client.add_many_spans([Span.from_attributes(attributes={"n": n}, **ids) for n in range(1100)])
    monkeypatch.setattr(client._connection, "request", record)
    for found in (await client.query_spans(*ids.values()), await client.query_spans(None)):
        assert [span.attributes["n"] for span in found] == list(range(1100))
        assert (found.total, found.limit, found.offset) == (1100, -1, 0)
    assert asked == [500] * 6
    assert len(await client.query_spans(*ids.values(), offset=1050)) == 50


async def _ask(
    server: LightningStoreServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    content = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{server.endpoint}/v1/agl{path}", headers=headers, **content) as response,
    ):
        return response.status, await response.json()


async def test_a_body_that_cannot_be_decompressed_is_malformed(server: LightningStoreServer) -> None:
    status, answer = await _ask(server, "POST", "/rollouts", b"no gzip", {"content-encoding": "gzip"})
    assert (status, answer["code"]) == (400, "malformed")


async def test_an_unexpected_exception_is_a_500_without_a_traceback(
    store: LightningStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: LightningStore) -> dict[str, float]:
        raise RuntimeError("an internal secret")

    monkeypatch.setattr(InMemoryLightningStore, "statistics", fail)
    async with LightningStoreServer(store, port=0) as server:
        status, answer = await _ask(server, "GET", "/statistics")
    assert (status, answer["code"]) == (500, "internal")
    assert "secret" not in str(answer)
    assert "an internal secret" in caplog.text


async def test_the_error_names_a_stored_value_that_is_not_json(
    store: LightningStore, client: LightningStoreClient
) -> None:
    rollout = await store.enqueue_rollout("a")
    smuggled = rollout.model_copy(update={"input": {"picture": object()}})  # as a store plugin with a bug might
    await store._database.backend.commit([Put(smuggled)])
    with pytest.raises(StoreError, match="not JSON.*object"):
        await client.get_rollout_by_id(rollout.rollout_id)


def test_records_that_were_not_validated_can_be_serialized() -> None:
    run_python(
        "-c",
        "import agentlightning_plugins.stores.http.client\n"
        "from pydantic_core import to_json\n"
        "from agentlightning.types import Metrics\n"
        "to_json([Metrics.model_construct(step=1, time=1.0, values={})])\n",
    )


async def test_the_client_raises_the_exceptions_of_the_store(client: LightningStoreClient) -> None:
    rollout = await client.enqueue_rollout("task")
    with pytest.raises(NotFoundError, match="ro-0"):
        await client.cancel_rollout("ro-0")
    with pytest.raises(ConflictError, match=f"{rollout.rollout_id} is queuing and cannot become succeeded"):
        await client.update_rollout(rollout.rollout_id, status="succeeded")
    with pytest.raises(ConfigError, match="start_tim.* Did you mean 'start_time'"):
        await client.query_rollouts(sort_by="start_tim")
    with pytest.raises(ConfigError, match="JSON"):
        await client.enqueue_rollout(object())
    assert (await client.statistics())["rollouts"] == 1


async def test_the_error_says_when_a_url_is_not_a_store(server: LightningStoreServer) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello")
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other:
        client = LightningStoreClient(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreError, match="is it the URL of an `agl store`"):
            await client.get_rollout_by_id("ro-1")
        await client.close()
    for url in ("127.0.0.1:4747", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="http://host:port"):
            LightningStoreClient(url)


async def test_requests_need_the_token(store: LightningStore) -> None:
    async with LightningStoreServer(store, port=0, token=TOKEN) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "B\xe9"}):
            status, answer = await _ask(server, "POST", "/rollouts", {"input": 1}, headers)
            assert (status, answer["code"]) == (401, "unauthorized")
        stranger = LightningStoreClient(server.endpoint, token="wrong")
        with pytest.raises(ConfigError, match="token"):
            await stranger.enqueue_rollout("task")
        await stranger.close()
        assert (await store.statistics())["rollouts"] == 0

        friend = LightningStoreClient(server.endpoint, token=TOKEN)
        await friend.enqueue_rollout("task")
        await friend.close()
        assert (await store.statistics())["rollouts"] == 1
        assert (await _ask(server, "GET", "/health"))[0] == 200


async def test_large_bodies_are_compressed_on_their_way_to_another_machine(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings: list[tuple[str, bool]] = []
    read_body = body.web_body.read_body

    async def read(request: Any, limit: int, inflated_limit: int) -> bytes:
        content = await read_body(request, limit, inflated_limit)
        encoding = request.headers.get("content-encoding", "")
        encodings.append((encoding, (request.content_length or 0) < len(content)))
        return content

    monkeypatch.setattr(body.web_body, "read_body", read)
    for host, expected in (("127.0.0.2", [("", False), ("gzip", True)]), ("127.0.0.1", [("", False), ("", False)])):
        encodings.clear()
        server = LightningStoreServer(store, host=host, port=0, token=TOKEN)
        await server.start()
        remote = LightningStoreClient(server.endpoint, token=TOKEN)
        await remote.enqueue_rollout("short")
        queued = await remote.enqueue_rollout("long " * 10_000)
        assert queued.input == "long " * 10_000
        assert encodings == expected
        await remote.close()
        await server.stop()


async def test_a_client_takes_the_token_from_the_environment(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    async with LightningStoreServer(store, port=0, token=TOKEN) as server:
        client = LightningStoreClient(server.endpoint)
        assert (await client.statistics())["rollouts"] == 0
        await client.close()


@pytest.mark.parametrize(
    "headers", [{"origin": "http://pages.example"}, {"host": "rebound.example:4747"}, {"origin": "null"}]
)
async def test_requests_from_web_pages_are_refused_when_no_token_is_set(
    headers: dict[str, str], server: LightningStoreServer, store: LightningStore
) -> None:
    status, answer = await _ask(server, "POST", "/rollouts", {"input": 1}, headers)
    assert (status, answer["code"]) == (403, "forbidden")
    assert (await store.statistics())["rollouts"] == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "store.example"])
def test_an_address_beyond_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="AGL_TOKEN"):
        LightningStoreServer(InMemoryLightningStore(), host)
    LightningStoreServer(InMemoryLightningStore(), host, token=TOKEN)


async def test_a_port_in_use_is_an_error_that_names_the_fix(
    server: LightningStoreServer, store: LightningStore
) -> None:
    second = LightningStoreServer(store, port=server.port)
    with pytest.raises(ConfigError, match=f"port {server.port} .* in use; choose another port"):
        await second.start()
    await second.stop()
    with pytest.raises(ConflictError, match="already"):
        await server.start()


def test_a_store_that_is_not_thread_safe_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryLightningStore, "capabilities", {"thread_safe": False})
    with pytest.raises(ConfigError, match="not thread-safe"):
        LightningStoreServer(InMemoryLightningStore())


async def test_the_server_answers_while_the_loop_that_started_it_is_blocked(server: LightningStoreServer) -> None:
    answered = threading.Event()

    async def ask() -> None:
        client = LightningStoreClient(server.endpoint)
        await client.statistics()
        answered.set()
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    assert answered.wait(LIMIT_S)  # blocks this loop on purpose
    thread.join()


async def test_a_header_selects_the_run(client: LightningStoreClient) -> None:
    other = client.with_run("other")
    await other.enqueue_rollout("theirs")
    assert await client.dequeue_rollout() is None
    claimed = await other.dequeue_rollout()
    assert claimed is not None
    assert claimed.run_id == "other"


async def test_ids_may_contain_any_character(client: LightningStoreClient) -> None:
    for worker_id in ("host/1", "100% ünïcode ?#&", "a b"):
        await client.update_worker(worker_id, {"load": 1})
        worker = await client.get_worker_by_id(worker_id)
        assert worker is not None
        assert worker.worker_id == worker_id


async def test_an_absent_key_keeps_the_value_and_null_erases_it(client: LightningStoreClient) -> None:
    rollout = await client.enqueue_rollout("task", mode="train", metadata={"group": "g"})
    kept = await client.update_rollout(rollout.rollout_id, input="other")
    assert (kept.input, kept.mode, kept.metadata) == ("other", "train", {"group": "g"})
    erased = await client.update_rollout(rollout.rollout_id, mode=None, metadata=None)
    assert (erased.input, erased.mode, erased.metadata) == ("other", None, None)


async def test_a_cached_resource_version_is_read_without_a_request(store: LightningStore) -> None:
    server = LightningStoreServer(store, port=0)
    await server.start()
    client = LightningStoreClient(server.endpoint, retry_s=0)
    update = await client.add_resources({"prompt": "Say {word}"})
    await server.stop()
    assert await client.get_resources_by_id(update.resources_id, update.version) == update
    with pytest.raises(StoreError, match="agl store"):
        await client.get_resources_by_id(update.resources_id)
    await client.close()


async def test_concurrent_reads_of_a_new_resource_version_send_one_request(
    served: InMemoryLightningStore, client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = await served.add_resources({"prompt": "Say {word}"})
    asked = 0
    answer = served.get_resources_by_id

    async def count(resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        nonlocal asked
        asked += 1
        return await answer(resources_id, version)

    monkeypatch.setattr(served, "get_resources_by_id", count)
    found = await asyncio.gather(*(client.get_resources_by_id(update.version_id) for _ in range(64)))
    assert found == [update] * 64
    assert asked == 1
    assert await asyncio.to_thread(asyncio.run, client.get_resources_by_id("rs-unknown@1")) is None


async def test_reads_of_the_newest_resources_share_a_request_only_within_one_turn_of_the_event_loop(
    served: InMemoryLightningStore, client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await served.update_resources("rs-1", {"prompt": "one"})
    answer = served.get_resources_by_id
    read, published = threading.Event(), threading.Event()
    asked: list[str] = []

    async def hold_first(resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        asked.append(resources_id)
        found = await answer(resources_id, version)
        if len(asked) == 1:
            read.set()
            await asyncio.to_thread(published.wait, LIMIT_S)
        return found

    monkeypatch.setattr(served, "get_resources_by_id", hold_first)
    callers = asyncio.gather(*(client.get_resources_by_id("rs-1") for _ in range(8)))
    await asyncio.to_thread(read.wait)
    second = await served.update_resources("rs-1", {"prompt": "two"})
    later = asyncio.create_task(client.get_resources_by_id("rs-1"))
    assert await later == second
    published.set()
    assert await callers == [first] * 8
    assert asked == ["rs-1", "rs-1"]
    cancelled = [asyncio.ensure_future(client.get_resources_by_id("rs-1")) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled[0].cancel()
    assert await cancelled[1] == second
    doomed = asyncio.ensure_future(client.get_resources_by_id("rs-1"))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:  # as when the loop shuts down
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert await client.get_resources_by_id("rs-1") == second


async def test_the_client_has_the_capabilities_of_the_served_store(client: LightningStoreClient) -> None:
    await client.statistics()
    assert client.capabilities == {"thread_safe": True, "durable": False, "otlp_traces": True}
    assert client.otlp_traces_endpoint() == f"{client.url}/v1/traces"


async def test_waiting_clients_survive_a_restart_of_the_server(store: LightningStore) -> None:
    first = LightningStoreServer(store, port=0)
    await first.start()
    client = LightningStoreClient(first.endpoint)
    rollout = await client.enqueue_rollout("task")
    claimed = await client.dequeue_rollout("worker")
    assert claimed is not None
    waiting = asyncio.create_task(client.wait_for_rollouts([rollout.rollout_id], timeout=LIMIT_S))
    asking = asyncio.create_task(client.dequeue_rollout("worker", timeout=LIMIT_S))
    await until_gauge(first, "agl_store_waiting_requests", 2)

    await first.stop()
    await asyncio.sleep(0.1)
    async with LightningStoreServer(store, port=first.port):
        await client.update_attempt(rollout.rollout_id, claimed.attempt.attempt_id, "succeeded")
        further = await client.enqueue_rollout("further")
        assert [ended.status for ended in await waiting] == ["succeeded"]
        taken = await asking
        assert taken is not None
        assert taken.rollout_id == further.rollout_id
        await client.close()


@pytest.mark.parametrize("run_id", ["default", "other"])
async def test_waiting_continues_when_a_finished_rollout_is_deleted(
    run_id: str, store: LightningStore, client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_POLL_S", 0.05)
    deleted, later = await store.start_rollout(0), await store.with_run(run_id).start_rollout(1)
    answers, post = [0], client._post

    async def counted(path: str, *arguments: Any) -> Any:
        try:
            return await post(path, *arguments)
        finally:
            answers[0] += path == "/waits/rollouts"

    monkeypatch.setattr(client, "_post", counted)
    waiting = asyncio.create_task(client.wait_for_rollouts([deleted.rollout_id, later.rollout_id]))
    await until(lambda: answers[0] > 0)
    await store.update_attempt(deleted.rollout_id, "latest", status="succeeded")
    await store.delete_rollouts([deleted.rollout_id])  # as the retention policy of a server does
    known = answers[0]
    await until(lambda: answers[0] > known + 1)
    await store.update_attempt(later.rollout_id, "latest", status="succeeded")
    assert [rollout.input for rollout in await asyncio.wait_for(waiting, LIMIT_S)] == [1]
    with pytest.raises(NotFoundError):
        await client.wait_for_rollouts([deleted.rollout_id])


@pytest.mark.parametrize("is_remote", [False, True])
async def test_resources_cannot_have_the_id_latest(
    is_remote: bool, store: LightningStore, client: LightningStoreClient
) -> None:
    with pytest.raises(ConfigError, match="means the newest resources"):
        await (client if is_remote else store).update_resources("latest", {"prompt": "Hi"})


async def test_an_unreachable_server_is_an_error_after_the_retries() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await server.start()
    await server.stop()
    client = LightningStoreClient(server.endpoint, retry_s=0.1)
    for call in (client.statistics(), client.enqueue_rollout(1), client.dequeue_rollout(timeout=10 * LIMIT_S)):
        with pytest.raises(StoreError, match="is `agl store` running there"):
            await asyncio.wait_for(call, LIMIT_S)
    await client.close()


async def test_an_answer_that_takes_too_long_is_told_from_an_absent_server_and_not_requested_again(
    server: LightningStoreServer, store: LightningStore, client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def search(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        await asyncio.to_thread(enough_here.wait)

    enough_here = threading.Event()
    monkeypatch.setattr(type(store), "query_rollouts", search)
    monkeypatch.setattr(connection, "_ANSWER_S", 0.3)
    with pytest.raises(StoreError, match=r"is there, but has not answered POST /rollouts/search within 0\.3 s"):
        await client.query_rollouts()
    enough_here.set()
    assert calls == 1


async def test_many_rollouts_are_deleted_by_many_short_requests(
    store: LightningStore, client: LightningStoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_DELETED_AT_ONCE", 3)
    limits = []
    delete = type(store).delete_rollouts

    async def count(self: LightningStore, *args: Any, **conditions: Any) -> int:
        limits.append(conditions["limit"])
        return await delete(self, *args, **conditions)

    monkeypatch.setattr(type(store), "delete_rollouts", count)
    for claimed in [await claim(store) for _ in range(8)]:
        await store.update_attempt(claimed.rollout_id, "latest", status="failed")
    assert await client.delete_rollouts(status_in=["failed"], keep=1) == 7
    assert limits == [3, 3, 3, 3]  # the last one finds nothing
    assert len(await store.query_rollouts()) == 1
    with pytest.raises(ConfigError, match="one or more of"):
        await client.delete_rollouts(limit=5)


class BadConnection:
    """Forwards TCP to a server; the counters give how many requests to delay and answers to lose or hold."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests_to_delay = 0
        self.answers_to_lose = 0
        self.answers_to_hold = 0
        self.lost = 0
        self.holding = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump_requests() -> None:
            while data := await reader.read(65536):
                if self.requests_to_delay:
                    self.requests_to_delay -= 1
                    await asyncio.sleep(0.2)
                upstream_writer.write(data)
            upstream_writer.close()

        pumping = asyncio.create_task(pump_requests())
        while data := await upstream_reader.read(65536):
            if self.answers_to_lose:
                self.answers_to_lose -= 1
                self.lost += 1
                break
            if self.answers_to_hold:
                self.answers_to_hold -= 1
                self.holding.set()
                await asyncio.wait([pumping])  # until the client leaves
            writer.write(data)
        pumping.cancel()
        writer.close()
        upstream_writer.close()


async def test_repeating_a_claim_whose_answer_was_lost_returns_the_same_rollout(
    server: LightningStoreServer, store: LightningStore
) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(3)])
    proxy = BadConnection(server.port)
    async with proxy.listen() as url:
        client = LightningStoreClient(url)
        proxy.answers_to_lose = 2
        claimed = await client.dequeue_rollout("worker", timeout=LIMIT_S)
        assert claimed is not None
        assert claimed.input == 0
        assert proxy.lost == 2
        assert [rollout.status for rollout in await store.query_rollouts()] == ["preparing", "queuing", "queuing"]
        following = await client.dequeue_rollout("worker", timeout=LIMIT_S)
        assert following is not None
        assert following.input == 1
        await client.close()


async def test_a_repeated_write_is_executed_once(server: LightningStoreServer, store: LightningStore) -> None:
    proxy = BadConnection(server.port)
    async with proxy.listen() as url:
        client = LightningStoreClient(url)
        proxy.answers_to_lose = 1
        await client.enqueue_rollout("task")
        claimed = await client.dequeue_rollout()
        assert claimed is not None
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        spans = [
            Span.from_attributes(attributes={"n": n}, rollout_id=rollout_id, attempt_id=attempt_id) for n in range(3)
        ]
        proxy.answers_to_lose = 1
        await client.add_many_spans(spans)
        proxy.answers_to_lose = 1
        await client.update_attempt(rollout_id, attempt_id, "succeeded")
        assert proxy.lost == 3
        statistics = await store.statistics()
        assert (statistics["rollouts"], statistics["attempts"], statistics["spans"]) == (1, 1, 3)
        attempt = await store.get_latest_attempt(claimed.rollout_id)
        assert attempt is not None
        assert (attempt.status, attempt.late_status) == ("succeeded", None)
        await client.close()


async def test_a_write_that_is_not_idempotent_is_not_repeated(
    server: LightningStoreServer, store: LightningStore
) -> None:
    proxy = BadConnection(server.port)
    async with proxy.listen() as url:
        client = LightningStoreClient(url)
        proxy.answers_to_lose = 1
        with pytest.raises(StoreError, match="not known"):
            await client.start_rollout("task")
        assert (await store.statistics())["rollouts"] == 1
        await client.close()


async def test_a_client_that_dies_while_waiting_claims_nothing(
    server: LightningStoreServer, client: LightningStoreClient
) -> None:
    _, dying = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"timeout": 30}'
    dying.write(
        b"POST /v1/agl/queues/rollouts/dequeue HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )
    await until_gauge(server, "agl_store_waiting_requests", 1)
    dying.close()
    await until_gauge(server, "agl_store_waiting_requests", 0)
    await client.enqueue_rollout("task")
    claimed = await client.dequeue_rollout("staying", timeout=LIMIT_S)
    assert claimed is not None
    assert claimed.attempt.sequence_id == 1


async def test_a_claim_of_a_cancelled_caller_is_released_immediately(
    server: LightningStoreServer, store: LightningStore
) -> None:
    await store.enqueue_rollout("task")
    proxy = BadConnection(server.port)
    async with proxy.listen() as url:
        client = LightningStoreClient(url)
        proxy.answers_to_hold = 1
        asking = asyncio.create_task(client.dequeue_rollout(timeout=LIMIT_S))
        await proxy.holding.wait()
        assert [rollout.status for rollout in await store.query_rollouts()] == ["preparing"]
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert [rollout.status for rollout in await store.query_rollouts()] == ["requeuing"]
        await client.close()


async def test_stopping_the_server_answers_waiting_requests_immediately(store: LightningStore) -> None:
    """Another client's event stream does not prevent this, although that client no longer reads its full connection."""
    server = LightningStoreServer(store, port=0)
    await server.start()
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(b"GET /v1/agl/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        asking = asyncio.create_task(_ask(server, "POST", "/queues/rollouts/dequeue", {"timeout": 30}))
        listening = asyncio.create_task(_read_events(server))
        await until_gauge(server, "agl_store_waiting_requests", 1)
        await until_gauge(server, "agl_store_event_subscribers", 2)
        large = {f"{'a long name' * 100} {number}": 1.0 for number in range(1000)}
        for step in range(8):  # of 1 MB each
            await store.add_metrics(step, large)
        await asyncio.sleep(0.2)
        await server.stop()
        assert await asking == (200, [])
        assert (await listening).count(b"event: step_finished") == 8


async def test_stopping_the_server_finishes_requests_in_flight(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def take_long(self: LightningStore) -> dict[str, float]:
        loop.call_soon_threadsafe(begun.set)
        await asyncio.sleep(0.3)
        return {"rollouts": 7.0}

    monkeypatch.setattr(InMemoryLightningStore, "statistics", take_long)
    server = LightningStoreServer(store, port=0)
    await server.start()
    asking = asyncio.create_task(_ask(server, "GET", "/statistics"))
    await begun.wait()
    await server.stop()
    assert await asking == (200, {"rollouts": 7.0})


async def _read_events(server: LightningStoreServer) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(f"{server.endpoint}/v1/agl/events") as response:
        return await response.read()


async def test_a_subscriber_gets_the_events_of_later_calls_by_the_same_client(server: LightningStoreServer) -> None:
    proxy = BadConnection(server.port)
    async with proxy.listen() as url:
        client = LightningStoreClient(url)
        events = client.subscribe()
        proxy.requests_to_delay = 1
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await client.enqueue_rollout("task")
        assert (await asyncio.wait_for(coming, LIMIT_S)).kind == "rollout_enqueued"
        await events.aclose()
        await client.close()


async def test_a_subscription_survives_a_restart_of_the_server(store: LightningStore) -> None:
    first = LightningStoreServer(store, port=0)
    await first.start()
    client = LightningStoreClient(first.endpoint)
    events = client.subscribe(["rollout_enqueued"])
    for server in (first, LightningStoreServer(store, port=first.port)):
        if server is not first:
            await first.stop()
            await server.start()
        coming = asyncio.ensure_future(anext(events))
        while not coming.done():  # events arrive once the subscription is open
            rollout = await client.enqueue_rollout("task")
            await asyncio.wait([coming], timeout=0.05)
        event = coming.result()
        assert isinstance(event, RolloutEnqueued)
        assert event.run_id == rollout.run_id
    await events.aclose()
    await client.close()
    await server.stop()


def test_one_client_works_from_many_threads_and_loops() -> None:
    claims: list[str] = []

    async def take(client: LightningStoreClient) -> None:
        while claimed := await client.dequeue_rollout(timeout=0):
            claims.append(claimed.rollout_id)

    async def serve() -> None:
        async with LightningStoreServer(InMemoryLightningStore(), port=0) as server:
            client = LightningStoreClient(server.endpoint)
            queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=1) for _ in range(60)])
            await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(take(client))) for _ in range(6)))
            assert sorted(claims) == sorted(rollout.rollout_id for rollout in queued)
            await client.close()

    asyncio.run(serve())


def _enqueue_elsewhere(client: LightningStoreClient) -> None:
    async def enqueue() -> None:
        await client.enqueue_rollout("from elsewhere")
        await client.close()

    asyncio.run(enqueue())


async def test_a_client_works_in_a_spawned_process(server: LightningStoreServer, store: LightningStore) -> None:
    client = LightningStoreClient(server.endpoint, TOKEN, run_id="some-run")
    process = multiprocessing.get_context("spawn").Process(target=_enqueue_elsewhere, args=(client,))
    process.start()
    rollouts: list[Rollout] = []
    while not rollouts and process.is_alive():
        await asyncio.sleep(0.02)
        rollouts = list(await store.query_rollouts(run_id="some-run"))
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0
    assert [rollout.input for rollout in await store.query_rollouts(run_id="some-run")] == ["from elsewhere"]
    assert pickle.loads(pickle.dumps(client)).run_id == "some-run"


FORKING_PROGRAM = """
import asyncio, os, sys, threading
from agentlightning.store import LightningStoreClient
from agentlightning_plugins.stores.http.client import connection

connection._CONNECT_S = 1e6  # to wait for the parent's connections would take this long

def enqueue(client):
    async def run():
        await client.enqueue_rollout("from elsewhere")
        await client.close()
    asyncio.run(run())
    os._exit(0)

async def main():
    client = LightningStoreClient(sys.argv[1])
    await client.statistics()  # opens a connection that the child must not share
    child = os.fork()
    if child == 0:  # its only thread is still marked as running the parent's event loop
        thread = threading.Thread(target=enqueue, args=(client,))
        thread.start()
        thread.join()
        os._exit(1)
    _, status = await asyncio.wait_for(asyncio.to_thread(os.waitpid, child, 0), 200)
    assert status == 0, status
    assert (await client.statistics())["rollouts"] == 1
    await client.close()

asyncio.run(main())
"""


async def test_a_client_works_in_a_forked_process(server: LightningStoreServer, store: LightningStore) -> None:
    """The parent is a separate process, because a process with threads should not fork."""
    await asyncio.to_thread(run_python, "-c", FORKING_PROGRAM, server.endpoint)
    assert [rollout.input for rollout in await store.query_rollouts()] == ["from elsewhere"]


@contextlib.contextmanager
def agl_store(folder: Path, *options: str) -> Iterator[str]:
    """Runs ``agl store`` in a working directory, yields its first line of output and stops it with SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentlightning", "store", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "Stopping" in output
    assert errors == ""


async def test_agl_store_serves_a_file_in_its_working_directory_and_applies_retention(tmp_path: Path) -> None:
    now, day = time.time(), 86_400
    puts = [Put(Rollout(rollout_id="ro-queued", input=0, start_time=now - 3 * day))]
    for number, age_s in enumerate([2 * day, 2 * day, 3600, 3600, 60, 60]):
        end_time = now - age_s
        ended = Rollout(
            rollout_id=f"ro-{number}", input=number, status="succeeded", start_time=end_time - 1, end_time=end_time
        )
        puts.append(Put(ended))
    file = SqliteLightningStore(tmp_path / "agl.db")
    await file._database.backend.commit(puts)
    await file.close()
    with agl_store(tmp_path, "--keep-days", "1", "--keep-rollouts", "4") as line:
        client = LightningStoreClient(line.split()[-1])

        async def ids() -> list[str]:
            return [rollout.rollout_id for rollout in await client.query_rollouts()]

        async def are_few() -> bool:
            return len(await ids()) <= 4

        await until(are_few)
        left = await ids()
        await client.close()
    assert "sqlite:///agl.db" in line
    assert left == ["ro-queued", "ro-3", "ro-4", "ro-5"]


async def test_a_store_is_freed_after_its_server_has_stopped() -> None:
    store = InMemoryLightningStore()
    gone = weakref.ref(store)
    async with LightningStoreServer(store, port=0) as server:
        client = LightningStoreClient(server.endpoint)
        await client.enqueue_rollout("t")
        await client.close()
    await store.close()
    del store, server, client

    def is_freed() -> bool:
        gc.collect()
        return gone() is None

    await until(is_freed)  # a thread may still be ending
