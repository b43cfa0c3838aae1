# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""From a query of the backend to SQL, and from its rows to a page."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.store.backend import KEYS, Condition, Page, Query, Row
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.memory_condition import choices, make_test, read_field, sort_by
from agentlightning_plugins.sqlite_store.condition import Test, order_of, translate
from agentlightning_plugins.sqlite_store.document import decode
from agentlightning_plugins.sqlite_store.transaction import TABLES

R = TypeVar("R", bound=Record)

_CURRENT: Final[dict[type[Record], str]] = {Attempt: "last_heartbeat_time", Span: "sequence_id"}
"""The field of which the column is true and the JSON may be behind."""
_SELECT: Final[dict[type[Record], str]] = {
    kind: f"SELECT position, revision, record, {_CURRENT.get(kind, 'NULL')} AS current FROM {table} "
    for kind, table in TABLES.items()
}
_BY_KEY: Final[dict[type[Record], str]] = {
    kind: _SELECT[kind] + "WHERE " + " AND ".join(f"{field} = ?" for field in fields)
    for kind, fields in KEYS.items()
    if kind not in _CURRENT
} | {
    Attempt: _SELECT[Attempt]
    + "WHERE rollout = (SELECT position FROM rollout WHERE rollout_id = ?) AND attempt_id = ?",
    Span: _SELECT[Span]
    + "WHERE attempt = (SELECT attempt.position FROM rollout JOIN attempt ON attempt.rollout = rollout.position "
    "WHERE rollout_id = ? AND attempt_id = ?) AND span_id = ?",
}
FEW: Final = 64


class Plan(NamedTuple):
    """How a query is answered."""

    sql: str
    parameters: Sequence[Any]
    is_short: bool
    """Whether it takes microseconds, however much is stored, if there are few to count by ``few_sql``."""
    count_sql: str | None = None
    count_parameters: Sequence[Any] = ()
    few_sql: str | None = None
    """Counts the rows, but not beyond ``FEW``; for those who have few as a rule."""
    is_done: bool = True
    """Whether SQL does all of it; otherwise its rows are tested, sorted and cut in Python."""


def make_plan(query: Query[R]) -> Plan:
    """Decides how to answer a query."""
    key = _key_of(query)
    if key is not None:
        return Plan(_BY_KEY[query.kind], key, is_short=True)
    tests, is_done = _translate(query)
    where, parameters = _join(tests)
    order = "position DESC" if query.descending else "position"
    if query.sort_by is not None:
        expression = order_of(query.kind, query.sort_by)
        if expression is None:
            is_done, order = False, "position"
        else:
            order = f"{expression} {'DESC' if query.descending else 'ASC'}, position"
    sql = f"{_SELECT[query.kind]}{where}ORDER BY {order}"
    if not is_done:
        return Plan(sql, parameters, is_short=False, is_done=False)
    count, is_short = _count(query, tests), _is_short(query)
    if query.limit < 0 and not query.offset:
        few_sql = None
        if query.kind is Span and is_short:
            few_sql = f"SELECT count(*) FROM (SELECT 1 FROM span {where}LIMIT {FEW})"
        return Plan(sql, parameters, is_short, *count)._replace(few_sql=few_sql)
    status = next((condition for condition in query.where if condition.field == "status"), None)
    if query.kind is Rollout and query.sort_by is None and status is not None and len(choices(status)) > 1:
        sql, parameters = _merge_statuses(query, status, order)
    parameters = [*parameters, query.limit, query.offset]
    return Plan(f"{sql} LIMIT ? OFFSET ?", parameters, is_short, *count)


def _merge_statuses(query: Query[R], status: Condition, order: str) -> tuple[str, list[Any]]:
    """Takes the first of each status, which the index gives in order, and of these the first.

    Asked for several statuses at once, SQLite would sort all that match, or walk past all that do not.
    """
    parts: list[str] = []
    parameters: list[Any] = []
    enough = -1 if query.limit < 0 else query.limit + query.offset
    for value in dict.fromkeys(choices(status)):
        one = Condition("status", "eq", value)
        tests, _ = _translate(replace(query, where=tuple(one if c is status else c for c in query.where)))
        where, values = _join(tests)
        parts.append(f"SELECT * FROM ({_SELECT[query.kind]}{where}ORDER BY {order} LIMIT ?)")
        parameters += [*values, enough]
    return f"{' UNION ALL '.join(parts)} ORDER BY {order}", parameters


def has_few(connection: sqlite3.Connection, plan: Plan) -> bool:
    """Whether a short plan is short indeed."""
    return plan.few_sql is None or connection.execute(plan.few_sql, plan.parameters).fetchone()[0] < FEW


def run_plan(connection: sqlite3.Connection, query: Query[R], plan: Plan) -> Page[R]:
    """Answers a query from one snapshot."""
    if not plan.is_done:
        return _finish(connection.execute(plan.sql, plan.parameters), query)
    total = None
    if plan.count_sql is None:
        found = connection.execute(plan.sql, plan.parameters).fetchall()
    else:
        connection.execute("BEGIN")
        try:
            total = connection.execute(plan.count_sql, plan.count_parameters).fetchone()[0] or 0
            found = connection.execute(plan.sql, plan.parameters).fetchall()
        finally:
            connection.execute("COMMIT")
    rows = [_row(query.kind, *values) for values in found]
    if total is None and query.count:
        total = len(rows)
    return Page(rows, total, found[-1][0] if found and query.sort_by is None else None)


def _row(kind: type[R], position: int, revision: int, text: str, current: Any) -> Row[R]:
    record = decode(kind, text)
    if kind in _CURRENT:
        record.__dict__[_CURRENT[kind]] = current  # not shared with anybody yet
    return Row(record, revision)


def _finish(cursor: sqlite3.Cursor, query: Query[R]) -> Page[R]:
    """Tests, sorts and cuts in Python what SQL only narrowed down."""
    tests = [
        make_test(condition, read_field(condition.field))
        for condition in query.where
        if translate(query.kind, condition) is None
    ]
    is_narrowed = all(translate(query.kind, condition) is not None for condition in query.any_of)
    either = [] if is_narrowed else [make_test(condition, read_field(condition.field)) for condition in query.any_of]
    stop = None if query.limit < 0 else query.offset + query.limit

    def matches() -> Iterator[tuple[int, Row[R]]]:
        for values in cursor:
            row = _row(query.kind, *values)
            if all(test(row.record) for test in tests) and (not either or any(test(row.record) for test in either)):
                yield values[0], row

    needs_all = query.sort_by is not None or query.count
    found = list(matches() if needs_all else islice(matches(), stop))
    cursor.close()
    if query.sort_by is not None:
        read = read_field(query.sort_by)
        sort_by(found, lambda match: read(match[1].record), query.descending)
    total = len(found) if query.count else None
    found = found[query.offset : stop]
    position = found[-1][0] if found and query.sort_by is None else None
    return Page([row for _, row in found], total, position)


def _key_of(query: Query[R]) -> tuple[Any, ...] | None:
    """The key that the commonest query gives, one that asks for it and nothing else."""
    fields = KEYS[query.kind]
    if len(query.where) != len(fields) or query.any_of or query.after is not None or query.offset or not query.limit:
        return None
    for condition, field in zip(query.where, fields, strict=True):
        if condition.field != field or condition.op != "eq" or type(condition.value) not in (str, int):
            return None
        if translate(query.kind, condition) is None:
            return None
    return tuple([condition.value for condition in query.where])


def _translate(query: Query[R]) -> tuple[list[Test], bool]:
    """What of a query SQL can test, and whether that is all."""
    kind = query.kind
    finds_few = any(_is_selective(kind, condition) for condition in query.where)
    tests = [
        translate(kind, condition, indexed=not (finds_few and condition.field in ("run_id", "status")))
        for condition in query.where
    ]
    known = [test for test in tests if test is not None]
    is_done = len(known) == len(tests)
    if query.any_of:
        found = [translate(kind, condition, indexed=False) for condition in query.any_of]
        either = [test for test in found if test is not None]
        if len(either) == len(found):
            parameters = [parameter for test in either for parameter in test.parameters]
            known.append(Test(f"({' OR '.join(test.sql for test in either)})", tuple(parameters)))
        else:
            is_done = False
    if query.after is not None:
        known.append(Test("position > ?", (query.after,)))
    return known, is_done


def _join(tests: Sequence[Test]) -> tuple[str, list[Any]]:
    where = f"WHERE {' AND '.join(test.sql for test in tests)} " if tests else ""
    return where, [parameter for test in tests for parameter in test.parameters]


def _is_selective(kind: type[Record], condition: Condition) -> bool:
    """Whether few records satisfy a condition, and an index finds them."""
    if condition.op not in ("eq", "in"):
        return False
    if kind is Rollout:
        return condition.field in ("rollout_id", "metadata.task_id", "metadata.group", "metadata.step")
    return kind in (Attempt, Span) and condition.field == "rollout_id"


def _is_short(query: Query[R]) -> bool:
    if query.count or (query.kind is Span and (query.limit >= 0 or query.offset)):
        return False
    for condition in query.where:
        if condition.field in ("rollout_id", "resources_id") and condition.op in ("eq", "in"):
            return len(choices(condition)) <= FEW
        if query.kind is Attempt and condition.field == "worker_id" and condition.op == "eq":
            return any(other.field == "status" and other.op == "in" for other in query.where)
    return query.limit == 1 and query.sort_by is None and all(c.field == "run_id" for c in query.where)


def _count(query: Query[R], tests: Sequence[Test]) -> tuple[str, Sequence[Any]] | tuple[()]:
    """How to count what matches: from the tally where it knows, by looking elsewhere; empty if nobody asked."""
    if not query.count:
        return ()
    name = {Rollout: "rollouts", Span: "spans"}.get(query.kind)
    where, parameters = _join(tests)
    known = ("run_id", "status") if query.kind is Rollout else ("run_id",)
    if (
        name is None
        or query.any_of
        or query.after is not None
        or any(condition.field not in known or condition.op not in ("eq", "in") for condition in query.where)
    ):
        return f"SELECT count(*) FROM {TABLES[query.kind]} {where}", parameters
    where = where.replace("WHERE", "AND", 1)
    return f"SELECT sum(number) FROM tally WHERE name = '{name}' {where}", parameters
