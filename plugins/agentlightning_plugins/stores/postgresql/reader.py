"""Reads over a few connections that only read; small reads with the same statement share a round trip."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import asyncpg

from agentlightning_plugins.stores.postgresql.condition import number_parameters
from agentlightning_plugins.stores.postgresql.connection import MAX_CANCELLED, Server, is_lost
from agentlightning_plugins.stores.sql.batch import Item, settle
from agentlightning_plugins.stores.sql.plan import Plan

Function: TypeAlias = Callable[[asyncpg.Connection], Awaitable[Any]]
"""A read that runs on its own; it is repeated from its beginning when the connection is lost."""

_TYPES: Final = {str: "text", int: "bigint", float: "float8"}
_CUT: Final = " LIMIT ? OFFSET ?"


class Lookup(NamedTuple):
    """A read of few rows. Lookups with the same statement run together, because each call releases the GIL."""

    sql: str
    """The statement, with a ``?`` for each parameter."""
    parameters: tuple[Any, ...]


Read: TypeAlias = Lookup | Function


def make_lookup(plan: Plan) -> Lookup | None:
    """Returns the plan as a lookup; None if it has to run on its own."""
    sql, parameters = plan.sql, tuple(plan.parameters)
    if "LIMIT" in sql.removesuffix(_CUT):
        return None
    if sql.endswith(_CUT):
        *others, limit, offset = parameters
        limit_sql = "ALL" if limit is None else int(limit)
        sql, parameters = f"{sql.removesuffix(_CUT)} LIMIT {limit_sql} OFFSET {int(offset)}", tuple(others)
    is_plain = all(type(value) in _TYPES for value in parameters)
    return Lookup(sql, parameters) if parameters and is_plain else None


class Readers:
    """Runs reads, a few at a time, for the event loop in which it was created."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._items: deque[Item[Read]] = deque()
        self._lookups: dict[str, list[Item[Read]]] = {}
        """The waiting lookups of each statement; the first of each list is in ``_items``."""
        self._done: list[Item[Read]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: deque[asyncpg.Connection] = deque()

    def take(self, items: Iterable[Item[Read]]) -> None:
        """Accepts reads."""
        for item in items:
            if isinstance(item.work, Lookup):
                waiting = self._lookups.get(item.work.sql)
                if waiting is not None:
                    waiting.append(item)
                    continue
                self._lookups[item.work.sql] = [item]
            self._items.append(item)
        while len(self._tasks) < self._server.connections - 1 and len(self._tasks) < len(self._items):
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finishes the accepted reads and closes the connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        while self._connections:
            self._connections.pop().terminate()

    async def _work(self) -> None:
        while self._items:
            item = self._items.popleft()
            together = self._lookups.pop(item.work.sql) if isinstance(item.work, Lookup) else [item]
            try:
                await self._read(together)
            except Exception as error:  # isolation point: it is raised where the store was called
                for one in together:
                    one.error = self._server.explain(error)
            self._settle_soon(together)

    async def _read(self, items: Sequence[Item[Read]]) -> None:
        cancelled = 0
        deadline: float | None = None
        while True:
            connection = self._connections.pop() if self._connections else await self._server.reconnect()
            try:
                await _answer(connection, items)
            except asyncpg.QueryCanceledError:  # by an administrator, or the statement timeout
                self._connections.append(connection)
                cancelled += 1
                if cancelled > MAX_CANCELLED:
                    raise
            except Exception as error:  # a lost connection is replaced; every other error is raised
                if not is_lost(connection, error):
                    self._connections.append(connection)
                    raise
                for lost in (connection, *self._connections):  # the idle ones are probably lost as well
                    lost.terminate()
                self._connections.clear()
                deadline = deadline or time.monotonic() + self._server.reconnect_s
                if time.monotonic() > deadline:
                    raise
            else:
                self._connections.append(connection)
                return

    def _settle_soon(self, items: Sequence[Item[Read]]) -> None:
        """Wakes the callers of all reads that end in one iteration of the loop together."""
        if not self._done:
            asyncio.get_running_loop().call_soon(self._settle)
        self._done += items

    def _settle(self) -> None:
        done, self._done = self._done, []
        settle(done)


async def _answer(connection: asyncpg.Connection, items: Sequence[Item[Read]]) -> None:
    """Runs one read, or several lookups with the same statement."""
    (first, *others), work = items, items[0].work
    if not isinstance(work, Lookup):
        first.result = await work(connection)
    elif not others:
        first.result = await connection.fetch(number_parameters(work.sql), *work.parameters)
    else:
        given = [item.work.parameters for item in items if isinstance(item.work, Lookup)]
        sql = _join(work.sql, tuple(map(type, work.parameters)))
        for item in items:
            item.result = []
        for number, *values in await connection.fetch(sql, *map(list, zip(*given, strict=True))):
            items[number - 1].result.append(values)


@lru_cache(maxsize=1000)
def _join(sql: str, types: tuple[type, ...]) -> str:
    """Returns a statement that runs another statement for several sets of parameters at once.

    OFFSET keeps the planner from merging the inner query with the outer one, so that the index is used for each set.
    """
    first, *rest = sql.split("?")
    inner = first + "".join(f"given.p{number}{part}" for number, part in enumerate(rest, 1))
    if "OFFSET" not in inner:
        inner += " OFFSET 0"
    arrays = ", ".join(f"${number}::{_TYPES[kind]}[]" for number, kind in enumerate(types, 1))
    names = ", ".join(f"p{number}" for number in range(1, len(types) + 1))
    return (
        f"SELECT given.number, found.* FROM unnest({arrays}) WITH ORDINALITY AS given ({names}, number) "  # noqa: S608 # names of ours
        f"CROSS JOIN LATERAL ({inner}) AS found ORDER BY given.number"
    )
