"""Reads over a few connections that only read."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any, Final, TypeAlias

import asyncpg

from agentlightning.errors import StoreError
from agentlightning_plugins.stores.postgresql.connection import MAX_CANCELLED, Server, is_lost
from agentlightning_plugins.stores.postgresql.transaction import index_key
from agentlightning_plugins.stores.shared.sql.batch import Item, settle
from agentlightning_plugins.stores.shared.sql.condition import Dialect
from agentlightning_plugins.stores.shared.sql.plan import SEARCH_S, TOO_LONG, Planner

SPAN: Final = """CASE left(record, 1) WHEN '[' THEN (
    SELECT string_agg(CASE json_typeof(j.value)
        WHEN 'number' THEN (SELECT content FROM agl.part WHERE position = (j.value #>> '{}')::bigint)
        ELSE j.value #>> '{}' END, '' ORDER BY j.ordinality)
    FROM json_array_elements(span.record::json) WITH ORDINALITY j
) ELSE record END"""
"""The JSON of a span, put together from its parts."""
PLANNER: Final = Planner(
    Dialect(
        prefix="agl.",
        span=SPAN,
        in_list="{} = ANY (?)",
        # The query runs first and its few positions are then looked up, so the planner need not guess how few they are.
        in_query="{} = ANY (ARRAY({}))",
        contains="strpos({}, ?) > 0",
        contains_id="strpos(rollout_id, ?) > 0",
        finds_ids_in_order=False,
        unindexed="({} || '')",
        json_value="(record::json -> 'metadata' -> ?::text)::text",
        json_key=lambda key: key,
        compares_json=True,
        live="live",
        make_list=list,
        index_key=index_key,
        no_limit=None,
    )
)


@lru_cache(maxsize=1000)
def number_parameters(sql: str) -> str:
    """Replaces each ``?`` by PostgreSQL's ``$1``, ``$2`` and so on."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


async def explain_plan(connection: asyncpg.Connection, sql: str) -> list[str]:
    """Returns PostgreSQL's plan of a statement, in which parameters are ``$1`` and not their values."""
    nothing = ", ".join(["NULL"] * sql.count("?"))
    try:
        async with connection.transaction():
            await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            await connection.execute(f"PREPARE agl_slow AS {number_parameters(sql)}")
            rows = await connection.fetch(f"EXPLAIN EXECUTE agl_slow{nothing and f'({nothing})'}")
            await connection.execute("DEALLOCATE agl_slow")
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        connection.terminate()  # the prepared statement may remain
        return [f"none ({type(error).__name__})"]
    return [line.strip() for (line,) in rows]


Read: TypeAlias = Callable[[asyncpg.Connection], Awaitable[Any]]
"""A read, which is repeated from its beginning when the connection is lost."""


class Readers:
    """A pool of connections, for the event loop in which it was created."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._free = asyncio.Semaphore(server.connections - 1)
        self._connections: deque[asyncpg.Connection] = deque()
        """The idle connections."""
        self._tasks: dict[asyncio.Future[Any], asyncio.Task[None]] = {}
        """The reads that run, by the future of their caller."""

    def take(self, items: Iterable[Item[Read]]) -> None:
        """Accepts reads."""
        for item in items:
            if not item.future.cancelled():
                self._tasks[item.future] = asyncio.create_task(self._serve(item))

    def cancel(self, work: asyncio.Future[Any]) -> None:
        """Cancels a read, if it is not done; the server stops its statement."""
        if work in self._tasks:
            self._tasks[work].cancel()

    async def close(self) -> None:
        """Finishes the accepted reads and closes the connections."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        while self._connections:
            self._connections.pop().terminate()

    async def _serve(self, item: Item[Read]) -> None:
        try:
            async with self._free:
                item.result = await self._read(item.work)
        except Exception as error:  # isolation point: it is raised where the store was called
            item.error = self._server.explain(error)
        finally:
            del self._tasks[item.future]
        settle([item])

    async def _read(self, read: Read) -> Any:
        cancelled = 0
        deadline: float | None = None
        while True:
            connection = (
                self._connections.pop() if self._connections else await self._server.reconnect(limit_s=SEARCH_S)
            )
            began = time.monotonic()
            try:
                return await read(connection)
            except asyncpg.QueryCanceledError as error:
                if self._server.is_timed_out(began, SEARCH_S):
                    raise StoreError(f"{self._server.shown}: {TOO_LONG}") from error
                cancelled += 1
                if cancelled > MAX_CANCELLED:
                    raise
            except Exception as error:  # a lost connection is replaced; every other error is raised
                if not is_lost(connection, error):
                    raise
                for lost in (connection, *self._connections):  # the idle ones are probably lost as well
                    lost.terminate()
                self._connections.clear()
                deadline = deadline or time.monotonic() + self._server.reconnect_s
                if time.monotonic() > deadline:
                    raise
            finally:
                if not connection.is_closed():
                    if connection.is_in_transaction():  # its BEGIN or its end was cancelled
                        connection.terminate()
                    else:
                        self._connections.append(connection)
