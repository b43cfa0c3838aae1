# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""Runs plans on SQLite, and decides which are short enough for the caller's thread."""

from __future__ import annotations

import math
import sqlite3
from typing import Final, TypeVar

import orjson

from agentlightning.store.backend import Page, Query
from agentlightning.store.condition import choices
from agentlightning.types import Attempt, Record, Span
from agentlightning_plugins.stores.shared.sql.condition import Dialect
from agentlightning_plugins.stores.shared.sql.plan import Plan, Planner


def index_key(value: object) -> str | int | float | None:
    """Returns the value itself, because columns have no types; None if it is not indexed but found by its JSON."""
    if isinstance(value, str):
        return None if any("\ud800" <= sign <= "\udfff" for sign in value) else value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


PLANNER: Final = Planner(
    Dialect(
        prefix="",
        span="CASE typeof(record) WHEN 'text' THEN record ELSE (SELECT group_concat(piece, '') FROM ("
        "SELECT CASE j.type WHEN 'integer' THEN (SELECT inflate(content) FROM part WHERE position = j.value) "
        "ELSE j.value END AS piece FROM json_each(inflate(span.record)) j ORDER BY j.key)) END",
        in_list="{} IN (SELECT value FROM json_each(?))",
        in_query="{} IN ({})",
        contains="instr({}, ?) > 0",
        contains_id="position IN (SELECT position FROM rollout WHERE instr(rollout_id, ?) > 0)",
        finds_ids_in_order=True,
        unindexed="+{}",
        json_value="json_extract(record, ?)",
        json_key=lambda key: None if '"' in key or "\\" in key else f'$.metadata."{key}"',
        compares_json=False,
        live="live = 1",
        make_list=lambda values: orjson.dumps(list(values)).decode(),
        index_key=index_key,
        no_limit=-1,
    )
)


R = TypeVar("R", bound=Record)

FEW: Final = 64


def is_short(connection: sqlite3.Connection, query: Query[R], plan: Plan) -> bool:
    """Whether answering takes microseconds, however much is stored."""
    if plan.is_lookup:
        return True
    if query.kind is Span and (query.limit >= 0 or query.offset):
        return False
    if not plan.is_done or query.count or not _is_narrow(query):
        return False
    if query.kind is not Span:
        return True
    few = f"SELECT count(*) FROM (SELECT 1 FROM span {plan.where}LIMIT {FEW})"
    number: int = connection.execute(few, plan.parameters).fetchone()[0]
    return number < FEW


def run_plan(connection: sqlite3.Connection, query: Query[R], plan: Plan) -> Page[R]:
    """Answers a query from one snapshot."""
    if not plan.is_done:
        cursor = connection.execute(plan.sql, plan.parameters)
        try:
            return PLANNER.finish(cursor, query)
        finally:
            cursor.close()
    if plan.count_sql is None:
        return PLANNER.make_page(query, connection.execute(plan.sql, plan.parameters).fetchall(), None)
    connection.execute("BEGIN")
    try:
        found = connection.execute(plan.sql, plan.parameters).fetchall()
        total = PLANNER.total_of(query, found)
        if total is None:
            total = connection.execute(plan.count_sql, plan.count_parameters).fetchone()[0] or 0
    finally:
        connection.execute("COMMIT")
    return PLANNER.make_page(query, found, total)


def _is_narrow(query: Query[R]) -> bool:
    for condition in query.where:
        if condition.field in ("rollout_id", "resources_id") and condition.op in ("eq", "in"):
            return len(choices(condition)) <= FEW
        if query.kind is Attempt and condition.field == "worker_id" and condition.op == "eq":
            return any(other.field == "status" and other.op == "in" for other in query.where)
    return query.limit == 1 and query.sort_by is None and all(c.field == "run_id" for c in query.where)
