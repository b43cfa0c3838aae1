"""The tests of stores with the oldest aiohttp, pydantic, orjson and asyncpg: a served PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import agentlightning as agl
from agentlightning.store import LightningStoreServer
from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore
from tests.plugins.stores.queueing import QueueingTests
from tests.plugins.stores.reading import ReadingTests
from tests.plugins.stores.waiting import WaitingTests
from tests.postgresql import PostgresServer, running_server


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    with running_server(max_connections=60) as server:
        yield server


class TestServedPostgresLightningStore(QueueingTests, WaitingTests, ReadingTests):
    @pytest.fixture
    async def store(self, postgresql: PostgresServer) -> AsyncIterator[agl.LightningStoreClient]:
        database = postgresql.lend_database(durable=False)
        served = PostgresLightningStore(postgresql.url(database), watchdog_interval_s=0.05)
        async with LightningStoreServer(served, port=0) as server:
            client = agl.LightningStoreClient(server.endpoint)
            yield client
            await client.close()
        await served.close()
        postgresql.take_back(database)
