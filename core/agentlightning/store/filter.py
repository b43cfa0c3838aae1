"""Turns the arguments of query methods into a ``Query``, and its ``Page`` into the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from agentlightning.errors import ConfigError, suggest
from agentlightning.records import FilterLogic, PaginatedResult, Record, SortOrder
from agentlightning.store.backend import Backend, Condition, Operator, Query
from agentlightning.store.check import check_int

R = TypeVar("R", bound=Record)


def make_query(
    kind: type[R],
    scope: Sequence[Condition] = (),
    *,
    filter_logic: FilterLogic = "and",
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
    cursor: str | None = None,
    start_after: float | None = None,
    start_before: float | None = None,
    **filters: Any,
) -> Query[R]:
    """Makes a query from arguments of a query method; raises ConfigError, or TypeError for an unknown filter.

    ``scope`` and the times must always match. ``filter_logic`` combines the ``filters``, which are called ``<field>``,
    ``<field>_in`` or ``<field>_contains``; filters of None are ignored.
    """
    always = list(scope)
    if start_after is not None:
        always.append(Condition("start_time", "ge", start_after))
    if start_before is not None:
        always.append(Condition("start_time", "le", start_before))
    tests = [test for name, value in filters.items() if (test := _read_filter(kind, name, value)) is not None]
    if sort_by is not None and sort_by not in kind.model_fields:
        fields = ", ".join(kind.model_fields)
        near = suggest(sort_by, kind.model_fields)
        raise ConfigError(f"a {kind.__name__} cannot be sorted by {sort_by!r}.{near} Fields: {fields}.")
    if cursor is not None and (sort_by is not None or sort_order != "asc" or offset):
        raise ConfigError("a cursor continues the stored order; leave out sort_by, sort_order and offset")
    is_or = filter_logic == "or"
    return Query(
        kind,
        where=tuple(always if is_or else always + tests),
        any_of=tuple(tests) if is_or else (),
        sort_by=sort_by,
        descending=sort_order == "desc",
        limit=limit,
        offset=offset,
        after=None if cursor is None else read_cursor(cursor)[0],
        count=cursor is None and (limit >= 0 or offset > 0),
    )


def _read_filter(kind: type[Record], name: str, value: Any) -> Condition | None:
    field, operator = name, "eq"
    for suffix in ("in", "contains"):
        if name.endswith(f"_{suffix}"):
            field, operator = name.removesuffix(f"_{suffix}"), suffix
    if field not in kind.model_fields:
        raise TypeError(f"unexpected keyword argument {name!r}")
    if value is None:
        return None
    return Condition(field, cast(Operator, operator), tuple(value) if operator == "in" else value)


async def find(backend: Backend, query: Query[R], cursor: str | None = None) -> PaginatedResult[R]:
    """Runs a query that was made with ``cursor``.

    The cursor contains the total that the first page counted. So each further page costs the same, and reading ends
    after this total even if other writers keep adding records.
    """
    page = await backend.select(query)
    if cursor is not None:
        _, total, seen = read_cursor(cursor)
    else:
        total, seen = len(page.rows) if page.total is None else page.total, query.offset
    seen += len(page.rows)
    more = seen < total and 0 < query.limit == len(page.rows) and page.position is not None and not query.descending
    return PaginatedResult.model_construct(
        items=[row.record for row in page.rows],
        limit=query.limit,
        offset=query.offset,
        total=total,
        cursor=f"{page.position}.{total}.{seen}" if more else None,
        truncated=page.truncated,
    )


def read_cursor(cursor: str) -> tuple[int, int, int]:
    """Splits a cursor into its numbers: the position, the total and how many records were read.

    Raises:
        ConfigError: it is not a cursor.
    """
    numbers = cursor.split(".")
    if len(numbers) != 3 or not all(number.isdecimal() and len(number) < 19 for number in numbers):
        raise ConfigError(f"cursor={cursor!r} is not from this store; pass on PaginatedResult.cursor unchanged")
    position, total, seen = [check_int("cursor", int(number), 0) for number in numbers]
    return position, total, seen
