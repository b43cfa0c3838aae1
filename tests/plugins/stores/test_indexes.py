"""Searches by time and by part of the id use indexes, and sorting by end time reads one page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from agentlightning.store.backend import Condition, Query
from agentlightning.store.factory import create_store
from agentlightning.types import Rollout, Span
from agentlightning_plugins.stores.postgresql import reader as postgresql
from agentlightning_plugins.stores.shared.sql.plan import Plan
from agentlightning_plugins.stores.sqlite import plan as sqlite
from agentlightning_plugins.stores.sqlite.schema import connect
from tests.many_rollouts import FAILED_OF, FIRST_TIME, fill_postgresql, fill_sqlite

NUMBER = 10_000
RUN = Condition("run_id", "eq", "default")
MIDDLE = FIRST_TIME + NUMBER * 0.01 / 2
FAILED = Condition("status", "eq", "failed")
QUERIES = {
    "a part of the id": Query(Rollout, (RUN, Condition("rollout_id", "contains", "a1f")), limit=50, count=True),
    "from a time on": Query(Rollout, (RUN, Condition("start_time", "ge", MIDDLE)), limit=50, count=True),
    "the newest between two times": Query(
        Rollout,
        (RUN, Condition("start_time", "ge", MIDDLE), Condition("start_time", "le", MIDDLE + 9)),
        descending=True,
        limit=50,
        count=True,
    ),
    "the last that ended": Query(Rollout, (RUN,), sort_by="end_time", descending=True, limit=50),
    "the first that ended": Query(Rollout, (RUN,), sort_by="end_time", limit=50),
    "the last that were enqueued": Query(Rollout, (RUN,), sort_by="start_time", descending=True, limit=50),
    "a late page": Query(Rollout, (RUN,), descending=True, limit=50, offset=NUMBER // 2),
    "the spans of a trace": Query(Span, (RUN, Condition("trace_id", "eq", "t"))),
    "spans by name": Query(Span, (RUN, Condition("name", "contains", "chat")), limit=50, count=True),
    "spans of a parent": Query(Span, (RUN, Condition("parent_id", "eq", "p")), limit=50, after=NUMBER // 2),
    "spans from a time on": Query(Span, (RUN, Condition("start_time", "ge", MIDDLE)), limit=50, offset=50),
}
INDEXES = {
    "a part of the id": ("sqlite_autoindex_rollout_1", "rollout_id"),
    "from a time on": ("rollout_start", "rollout_start"),
    "the newest between two times": ("rollout_start", "rollout_start"),
    "the last that ended": ("rollout_end", "rollout_end"),
    "the first that ended": ("rollout_end", "rollout_end"),
    "the last that were enqueued": ("rollout_start", "rollout_start"),
    "a late page": ("rollout_run", "rollout_run"),
    **dict.fromkeys(
        ("the spans of a trace", "spans by name", "spans of a parent", "spans from a time on"), ("span_run", "span_run")
    ),
}
"""The indexes that SQLite and PostgreSQL read for each query; sorted queries read the records too."""


def statements(plan: Plan) -> list[tuple[str, list[object]]]:
    counting = [] if plan.count_sql is None else [(plan.count_sql, list(plan.count_parameters))]
    return [(plan.sql, list(plan.parameters)), *counting]


async def test_sqlite_uses_an_index_for_every_search(quick_path: Path) -> None:
    path = quick_path / "store.db"
    await create_store(f"sqlite:///{path}").close()
    await asyncio.to_thread(fill_sqlite, path, NUMBER)
    connection = connect(path, 1.0)
    for name, query in QUERIES.items():
        for sql, parameters in statements(sqlite.PLANNER.plan(query)):
            steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
            covering = "" if query.sort_by else "COVERING "
            assert any(f"USING {covering}INDEX {INDEXES[name][0]}" in step for step in steps), (name, sql, steps)
            assert not {"SCAN rollout", "SCAN span"} & set(steps), (name, sql, steps)
            assert "USE TEMP B-TREE FOR ORDER BY" not in steps or not query.sort_by, (name, sql, steps)
    connection.close()


async def test_sqlite_uses_an_index_to_count_and_filter_the_rollouts_of_a_task(quick_path: Path) -> None:
    path = quick_path / "store.db"
    await create_store(f"sqlite:///{path}").close()
    await asyncio.to_thread(fill_sqlite, path, NUMBER)
    connection = connect(path, 1.0)
    task = Condition("metadata.task_id", "eq", 8)
    for conditions, after, number in (((), None, 157), ((FAILED,), None, 7), ((), NUMBER // 2, 79)):
        query = Query(Rollout, (RUN, task, *conditions), descending=True, limit=50, after=after, count=True)
        plan = sqlite.PLANNER.plan(query)
        assert plan.count_sql is not None
        for sql, parameters in statements(plan):
            steps = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
            is_count = sql == plan.count_sql
            expected = f"SEARCH rollout USING {'COVERING ' * is_count}INDEX rollout_task (task_id=?"
            assert [step.startswith(expected) for step in steps] == [True], (sql, steps)
        ((counted,),) = connection.execute(plan.count_sql, plan.count_parameters)
        assert counted == number
    connection.close()


async def test_postgresql_uses_an_index_for_every_search(database: str) -> None:
    await create_store(database).close()
    await fill_postgresql(database, NUMBER)
    connection = await asyncpg.connect(database)
    for name, query in QUERIES.items():
        for sql, parameters in statements(postgresql.PLANNER.plan(query)):
            numbered = postgresql.number_parameters(sql)
            steps = [row[0] for row in await connection.fetch(f"EXPLAIN {numbered}", *parameters)]
            kind = "Index Scan" if query.sort_by else "Index Only Scan"
            backward = (f"{kind} using {INDEXES[name][1]} on", f"{kind} Backward using {INDEXES[name][1]} on")
            assert any(step.strip(" ->").startswith(backward) for step in steps), (name, "\n".join(steps))
            assert not any("Seq Scan" in step for step in steps), (name, sql, steps)
    await connection.close()


@pytest.fixture(params=["sqlite", "postgresql"])
async def filled(request: pytest.FixtureRequest, quick_path: Path) -> str:
    """A database of 3,000 rollouts."""
    if request.param == "sqlite":
        url = f"sqlite:///{quick_path}/store.db"
        await create_store(url).close()
        await asyncio.to_thread(fill_sqlite, quick_path / "store.db", 3000, spans=2)
        return url
    make: Callable[[], str] = request.getfixturevalue("make_database")
    url = make()
    await create_store(url).close()
    await fill_postgresql(url, 3000, spans=2)
    return url


async def test_searches_find_the_same_rollouts_as_a_full_scan(filled: str) -> None:
    store = create_store(filled)
    every = list(await store.query_rollouts())
    assert len(every) == 3000
    assert sum(rollout.status == "failed" for rollout in every) == 3000 // FAILED_OF
    part = every[1234].rollout_id[5:9]
    found = await store.query_rollouts(rollout_id_contains=part, limit=50)
    expected = [rollout.rollout_id for rollout in every if part in rollout.rollout_id]
    assert [rollout.rollout_id for rollout in found] == expected[:50]
    assert found.total == len(expected)
    late = [rollout for rollout in every if every[700].start_time <= rollout.start_time <= every[2600].start_time]
    for order, ordered in (("asc", late), ("desc", late[::-1])):
        page = await store.query_rollouts(
            start_after=every[700].start_time,
            start_before=every[2600].start_time,
            sort_order=order,
            limit=9,
            offset=1500,
        )
        assert list(page) == ordered[1500:1509]
        assert page.total == 1901
    pages, cursor = [], None
    while cursor is not None or not pages:
        page = await store.query_rollouts(start_after=every[2000].start_time, limit=400, cursor=cursor)
        pages, cursor = [*pages, *page], page.cursor
    assert pages == every[2000:]
    by_end = sorted(every, key=lambda rollout: rollout.end_time or 0.0, reverse=True)
    newest = await store.query_rollouts(sort_by="end_time", sort_order="desc", limit=30, offset=1200)
    assert list(newest) == by_end[1200:1230]
    deep = await store.query_rollouts(sort_order="desc", limit=5, offset=2000)
    assert list(deep) == every[::-1][2000:2005]
    assert (await store.statistics())["spans"] == 6000
    assert len(await store.query_spans(every[5].rollout_id)) == 2
    await store.close()
