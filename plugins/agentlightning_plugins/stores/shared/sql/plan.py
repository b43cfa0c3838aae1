# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""Plans the backend's queries in SQL and makes pages from the rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.store.backend import KEYS, Condition, Page, Query, Row
from agentlightning.store.condition import choices, make_test, read_field, sort_by
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.stores.shared.sql.condition import TABLES, Dialect, Test
from agentlightning_plugins.stores.shared.sql.document import decode

R = TypeVar("R", bound=Record)

SEARCH_S: Final = 10.0
"""How long a search may take. A search that examines records in Python then ends with what it has found, marked as
truncated; a search in the database is cancelled and fails."""
TOO_LONG: Final = (
    "the search took too long and was stopped; search one run, by fewer conditions, or read pages (limit and cursor)"
)
_FAR: Final = 1_000
"""The offset from which on the records of skipped rows are not read."""
CURRENT: Final[dict[type[Record], str]] = {Attempt: "last_heartbeat_time", Span: "sequence_id"}
"""The field whose column is current but may be outdated in the JSON: it is set without rewriting the JSON."""


class Plan(NamedTuple):
    """How a query is answered."""

    sql: str
    parameters: Sequence[Any]
    count_sql: str | None = None
    count_parameters: Sequence[Any] = ()
    where: str = ""
    """The conditions in ``sql``, which take ``parameters``; set only if ``sql`` has no limit."""
    is_lookup: bool = False
    """Whether the query requests one record by its key."""
    is_done: bool = True
    """Whether SQL does all of the query; otherwise the rows are tested, sorted and cut in Python."""


class Planner:
    """Plans the queries of one database.

    Tables have the columns ``position``, ``revision`` and ``record`` (the JSON), and the columns that records are found
    by. Attempts refer to rollouts, and spans to attempts, by position.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        tables = {kind: dialect.table(kind) for kind in TABLES}
        self._select = {
            kind: f"SELECT position, revision, {dialect.span if kind is Span else 'record'} AS record, "
            f"{CURRENT.get(kind, 'NULL')} AS current FROM {table} "
            for kind, table in tables.items()
        }
        rollout, attempt = tables[Rollout], tables[Attempt]
        self._by_key = {
            kind: self._select[kind] + "WHERE " + " AND ".join(f"{field} = ?" for field in fields)
            for kind, fields in KEYS.items()
            if kind not in CURRENT
        } | {
            Attempt: self._select[Attempt]
            + f"WHERE rollout = (SELECT position FROM {rollout} WHERE rollout_id = ?) AND attempt_id = ?",
            Span: self._select[Span]
            + f"WHERE attempt = (SELECT a.position FROM {rollout} r JOIN {attempt} a ON a.rollout = r.position "
            "WHERE r.rollout_id = ? AND a.attempt_id = ?) AND span_id = ?",
        }

    def plan(self, query: Query[R]) -> Plan:
        """Decides how to answer a query."""
        key = self._key_of(query)
        if key is not None:
            return Plan(self._by_key[query.kind], key, is_lookup=True)
        tests, is_done = self._translate(query)
        where, parameters = _join(tests)
        order = "position DESC" if query.descending else "position"
        if query.sort_by is not None:
            expression = self._dialect.order_of(query.kind, query.sort_by)
            if expression is None:
                is_done, order = False, "position"
            else:
                order = f"{expression} {'DESC NULLS LAST' if query.descending else 'ASC NULLS FIRST'}, position"
        sql = f"{self._select[query.kind]}{where}ORDER BY {order}"
        if not is_done:
            return Plan(sql, parameters, is_done=False)
        count = self._count(query, tests)
        if count and not query.limit:
            return Plan(*count)
        is_found = _is_found(query)
        if query.limit < 0 and not query.offset and not is_found:
            return Plan(sql, parameters, *count)._replace(where=where)
        status = next((condition for condition in query.where if condition.field == "status"), None)
        can_merge = query.kind is Rollout and query.sort_by is None and _has_run(query) and not _is_searched(query)
        limit = self._dialect.no_limit if query.limit < 0 else query.limit
        if can_merge and status is not None and len(choices(status)) > 1:
            sql, parameters = self._merge_statuses(query, status, order)
        elif is_found or (query.kind is Rollout and query.after is None):
            found = order
            is_sorted = self._dialect.finds_ids_in_order and any(map(_finds_id, query.where))
            if _is_searched(query) and query.sort_by is None and not is_sorted:
                # The index has another order. By position, all records before the first match would be read.
                found = "position + 0 DESC" if query.descending else "position + 0"
            if is_found or found != order or query.offset >= _FAR:
                # Finds the positions of a page in an index, then the records: skipped records are not read.
                positions = f"SELECT position FROM {self._dialect.table(query.kind)} {where}"
                page = f"{positions}ORDER BY {found} LIMIT ? OFFSET ?"
                sql = f"{self._select[query.kind]}WHERE position IN ({page}) ORDER BY {order}"
                return Plan(sql, [*parameters, limit, query.offset], *count)
        return Plan(f"{sql} LIMIT ? OFFSET ?", [*parameters, limit, query.offset], *count)

    def total_of(self, query: Query[R], rows: Sequence[Any]) -> int | None:
        """Returns the number of matches if the rows of the page tell it, so that they need not be counted."""
        is_last = len(rows) < query.limit and (rows or not query.offset)
        return query.offset + len(rows) if is_last and query.after is None else None

    def make_page(self, query: Query[R], rows: Sequence[Sequence[Any]], total: int | None) -> Page[R]:
        """Makes the page of a query that SQL does completely."""
        if query.count and not query.limit:
            return Page([], int(rows[0][0] or 0), None)
        found = [self._row(query.kind, *values) for values in rows]
        if total is None and query.count:
            total = len(found)
        return Page(found, total, rows[-1][0] if rows and query.sort_by is None else None)

    def finish(self, rows: Iterable[Sequence[Any]], query: Query[R]) -> Page[R]:
        """Filters, sorts and cuts rows in Python where SQL cannot."""
        translate = self._dialect.translate
        tests = [
            make_test(condition, read_field(condition.field))
            for condition in query.where
            if translate(query.kind, condition) is None
        ]
        is_narrowed = all(translate(query.kind, condition) is not None for condition in query.any_of)
        either = [] if is_narrowed else [make_test(item, read_field(item.field)) for item in query.any_of]
        stop = None if query.limit < 0 else query.offset + query.limit
        ends_at = time.monotonic() + SEARCH_S
        truncated = False

        def matches() -> Iterator[tuple[int, Row[R]]]:
            nonlocal truncated
            for values in rows:
                if time.monotonic() > ends_at:
                    truncated = True
                    return
                row = self._row(query.kind, *values)
                if all(test(row.record) for test in tests) and (not either or any(test(row.record) for test in either)):
                    yield values[0], row

        needs_all = query.sort_by is not None or query.count
        found = list(matches() if needs_all else islice(matches(), stop))
        if query.sort_by is not None:
            read = read_field(query.sort_by)
            sort_by(found, lambda match: read(match[1].record), query.descending)
        total = len(found) if query.count else None
        found = found[query.offset : stop]
        position = found[-1][0] if found and query.sort_by is None else None
        return Page([row for _, row in found], total, position, truncated)

    def _row(self, kind: type[R], position: int, revision: int, text: str, current: Any) -> Row[R]:
        record = decode(kind, text)
        if kind in CURRENT:
            record.__dict__[CURRENT[kind]] = current  # not shared yet
        return Row(record, revision)

    def _merge_statuses(self, query: Query[R], status: Condition, order: str) -> tuple[str, list[Any]]:
        """Merges the first rows of each status, which the index gives in order.

        With several statuses in one condition, a database would sort all matches or scan past all others.
        """
        parts: list[str] = []
        parameters: list[Any] = []
        enough = self._dialect.no_limit if query.limit < 0 else query.limit + query.offset
        for number, value in enumerate(dict.fromkeys(choices(status))):
            one = Condition("status", "eq", value)
            tests, _ = self._translate(replace(query, where=tuple(one if c is status else c for c in query.where)))
            where, values = _join(tests)
            part = f"SELECT * FROM ({self._select[query.kind]}{where}ORDER BY {order} LIMIT ?)"
            parts.append(f"{part} AS part{number}")
            parameters += [*values, enough]
        return f"{' UNION ALL '.join(parts)} ORDER BY {order}", parameters

    def _key_of(self, query: Query[R]) -> tuple[Any, ...] | None:
        """Returns the key of a query that only requests one record by its key; None for any other query."""
        fields = KEYS[query.kind]
        if len(query.where) != len(fields) or query.any_of or query.after is not None or query.offset:
            return None
        if not query.limit:
            return None
        for condition, field in zip(query.where, fields, strict=True):
            value = condition.value
            if condition.field != field or condition.op != "eq" or type(value) not in (str, int):
                return None
            if type(value) is str and value.isascii() and "\0" not in value:
                continue  # every database finds it without a translation
            test = self._dialect.translate(query.kind, condition)
            if test is None or test.parameters != (value,):
                return None
        return tuple([condition.value for condition in query.where])

    def _translate(self, query: Query[R]) -> tuple[list[Test], bool]:
        """Returns the conditions that SQL can test, and whether these are all of the conditions."""
        kind, translate = query.kind, self._dialect.translate
        unindexed: tuple[str, ...] = ()
        if any(_is_selective(kind, condition) for condition in query.where):
            unindexed = ("run_id", "status")
        elif not _has_run(query):
            unindexed = ("status",)
        elif _is_searched(query):  # the next page continues from a position
            unindexed = ("status",) if query.after is None else ("start_time",)
        tests = [translate(kind, condition, indexed=condition.field not in unindexed) for condition in query.where]
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

    def _count(self, query: Query[R], tests: Sequence[Test]) -> tuple[str, Sequence[Any]] | tuple[()]:
        """Returns how to count the matches, from the stored counts if possible; empty if the query needs no total."""
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
            return f"SELECT count(*) FROM {self._dialect.table(query.kind)} {where}", parameters
        where = where.replace("WHERE", "AND", 1)
        return f"SELECT sum(number) FROM {self._dialect.prefix}tally WHERE name = '{name}' {where}", parameters


def _join(tests: Sequence[Test]) -> tuple[str, list[Any]]:
    where = f"WHERE {' AND '.join(test.sql for test in tests)} " if tests else ""
    return where, [parameter for test in tests for parameter in test.parameters]


def _has_run(query: Query[Any]) -> bool:
    """Whether a query is about one run: the index of statuses begins with the run."""
    return any(condition.field == "run_id" for condition in query.where)


def _is_searched(query: Query[Any]) -> bool:
    """Whether a query searches for rollouts by time or by a part of their ids."""
    return query.kind is Rollout and any(
        condition.field == "start_time" or _finds_id(condition) for condition in query.where
    )


def _is_found(query: Query[Any]) -> bool:
    """Whether a query is answered by the index of a run's records, which has the fields that it needs."""
    if query.kind is Span:
        return _has_run(query) and not any(_is_selective(Span, condition) for condition in query.where)
    return query.kind is Rollout and query.sort_by in ("mode", "resources_id")


def _finds_id(condition: Condition) -> bool:
    return condition.field == "rollout_id" and condition.op == "contains"


def _is_selective(kind: type[Record], condition: Condition) -> bool:
    """Whether an index finds the few records that satisfy a condition."""
    if condition.op not in ("eq", "in"):
        return kind is Rollout and _finds_id(condition)
    if kind is Rollout:
        return condition.field in ("rollout_id", "metadata.task_id", "metadata.group", "metadata.step")
    return kind in (Attempt, Span) and condition.field == "rollout_id"
