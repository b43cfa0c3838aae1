"""Work that takes long does not hold up others: it is sliced, ends with its caller or at a limit, and is logged."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import asyncpg
import pytest

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store import Retention
from agentlightning.store.backend import Put, Write
from agentlightning.store.engine import BackendStore
from agentlightning.store.factory import create_store
from agentlightning.types import Rollout
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.postgresql import reader
from agentlightning_plugins.stores.postgresql import store as postgresql
from agentlightning_plugins.stores.shared.sql import plan
from agentlightning_plugins.stores.sqlite import store as sqlite
from tests.plugins.stores.actions import number_deleted
from tests.waiting import until

pytestmark = pytest.mark.environment("main")  # about our own limits, not about versions of drivers
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[BackendStore]:
    """An empty store of each kind."""
    url = "memory://"
    if request.param == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('quick_path')}/store.db"
    elif request.param == "postgresql":
        make: Callable[[], str] = request.getfixturevalue("make_database")
        url = make()
    store = create_store(url)
    assert isinstance(store, BackendStore)
    yield store
    await store.close()


async def test_retention_deletes_in_slices_that_other_writers_can_wait_for(
    store: BackendStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    commit = store.backend.commit
    ended = Rollout(rollout_id="ro-", input=0, status="failed", start_time=0.5, end_time=1.0)
    await commit([Put(ended.model_copy(update={"rollout_id": f"ro-{number}"})) for number in range(100)])

    async def commit_slowly(writes: Sequence[Write], *others: Any) -> bool:
        """Deletes 200 rollouts per second at most."""
        sizes.append(len(writes))
        await asyncio.sleep(0.005 * len(writes))
        return await commit(writes, *others)

    monkeypatch.setattr(store.backend, "commit", commit_slowly)
    assert await number_deleted(Retention(max_rollouts=0), store, 2.0) == 100
    assert max(sizes) <= 10  # 50 ms; a busy machine makes slices smaller
    assert len(await store.query_rollouts()) == 0


async def test_a_search_ends_when_its_client_goes_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    reading: set[sqlite3.Connection] = set()

    def search_sqlite(connection: sqlite3.Connection, *_: Any) -> None:
        reading.add(connection)
        loop.call_soon_threadsafe(begun.set)
        try:
            connection.execute(ENDLESS).fetchall()
        finally:
            reading.discard(connection)

    async def search_postgresql(connection: asyncpg.Connection, *_: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        await connection.fetch(ENDLESS)

    async def runs() -> bool:
        if url.startswith("sqlite"):
            return bool(reading)
        active = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'WITH RECURSIVE%'"
        connection = await asyncpg.connect(url)
        try:
            return bool(await connection.fetchval(active))
        finally:
            await connection.close()

    store = create_store(url)
    async with LightningStoreServer(store, port=0) as server, aiohttp.ClientSession() as session:
        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "run_plan", search_sqlite)
            patch.setattr(postgresql, "_fetch", search_postgresql)
            search = session.post(f"{server.endpoint}/v1/agl/rollouts/search", json={"metadata": {"colour": "red"}})
            asking = asyncio.ensure_future(search)
            await begun.wait()
            await until(runs)
            asking.cancel()
            await asyncio.wait({asking})

            async def has_ended() -> bool:
                return not await runs()

            await until(has_ended)
        for _ in range(8):  # each connection can be used again
            await store.query_rollouts(metadata={"colour": "red"})
    await store.close()


async def test_a_search_in_the_database_is_cancelled_at_its_time_limit_and_not_sent_again(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[object] = []

    def search_sqlite(connection: sqlite3.Connection, *_: Any) -> None:
        begun.append(connection)
        connection.execute(ENDLESS).fetchall()

    async def search_postgresql(connection: asyncpg.Connection, *_: Any) -> None:
        begun.append(connection)
        await connection.fetch(ENDLESS)

    for module in (sqlite, reader):
        monkeypatch.setattr(module, "SEARCH_S", 0.1)
    monkeypatch.setenv("AGL_SLOW_QUERY_S", "0.05")
    store = create_store(url)
    async with LightningStoreServer(store, port=0) as server:
        client = LightningStoreClient(server.endpoint)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "run_plan", search_sqlite)
            patch.setattr(postgresql, "_fetch", search_postgresql)
            with pytest.raises(StoreError, match="the search took too long and was stopped; search one run"):
                await client.query_rollouts(metadata={"colour": "red"})
        assert len(begun) == 1
        await client.close()
    await until(lambda: "a query took" in caplog.text)
    await store.close()


async def test_a_search_in_python_ends_at_its_time_limit_and_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create_store(url)
    for number in range(3):
        await store.enqueue_rollout({"number": number})
    whole = await store.query_rollouts(sort_by="input")
    assert (len(whole), whole.truncated) == (3, False)
    moments = itertools.count(0.0, 0.4 * plan.SEARCH_S)
    monkeypatch.setattr(plan, "time", type("Clock", (), {"monotonic": lambda: next(moments)}))
    async with LightningStoreServer(store, port=0) as server:
        client = LightningStoreClient(server.endpoint)
        page = await client.query_rollouts(sort_by="input")
        assert (len(page), page.truncated) == (2, True)
        assert (await client.query_rollouts(sort_by="start_time")).truncated is False
        with pytest.raises(StoreError, match="time limit"):
            [rollout async for rollout in every(client.query_rollouts, sort_by="input")]
        await client.close()
    await store.close()


async def test_a_slow_query_is_logged_once_with_its_plan_and_without_values(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_SLOW_QUERY_S", "1e-9")
    store = create_store(url)
    await store.enqueue_rollout(1, metadata={"secret-key": "secret-value"})
    for _ in range(3):
        assert len(await store.query_rollouts(metadata={"secret-key": "secret-value"}, limit=5)) == 1
    await until(lambda: any("WHERE" in line for line in caplog.messages))
    await store.close()
    lines = [line for line in caplog.messages if "a query took" in line and '"metadata"' not in line]
    (line,) = [line for line in lines if "json_extract" in line or "::json" in line]
    assert "plan: " in line
    assert "rollout_run" in line.partition("plan: ")[2]  # the index
    assert "secret" not in caplog.text


@pytest.mark.parametrize("given", ["often", "0", "-1", "nan"])
async def test_a_threshold_of_slow_queries_that_is_no_time_is_refused(
    url: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SLOW_QUERY_S", given)
    with pytest.raises(ConfigError, match=f"AGL_SLOW_QUERY_S={given}"):
        create_store(url)
