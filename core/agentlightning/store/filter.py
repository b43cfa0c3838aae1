"""From the arguments of the query methods to a ``Query``, and from a ``Page`` to the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from agentlightning.errors import ConfigError, suggest
from agentlightning.store.backend import Backend, Condition, Query
from agentlightning.types import FilterLogic, PaginatedResult, Record, SortOrder

C = TypeVar("C", bound=str)
R = TypeVar("R", bound=Record)


class Filter:
    """Collects the tests of a query. An argument that is None asks for nothing."""

    def __init__(self, logic: FilterLogic = "and") -> None:
        self._logic = check_choice("filter_logic", logic, get_args(FilterLogic))
        self._scope: list[Condition] = []
        self._tests: list[Condition] = []

    def scope(self, **fields: Any) -> Filter:
        """Tests that hold whatever the filter logic says: ``field=value``."""
        self._scope += [Condition(name, "eq", value) for name, value in fields.items() if value is not None]
        return self

    def having(self, field: str, entries: Mapping[str, Any] | None) -> Filter:
        """Entries that a JSON field must have whatever the filter logic says; None: the entry is null or missing."""
        self._scope += [Condition(f"{field}.{key}", "eq", value) for key, value in (entries or {}).items()]
        return self

    def between(self, field: str, at_least: float | None, at_most: float | None) -> Filter:
        """A range that holds whatever the filter logic says; both ends belong to it."""
        if at_least is not None:
            self._scope.append(Condition(field, "ge", at_least))
        if at_most is not None:
            self._scope.append(Condition(field, "le", at_most))
        return self

    def equal(self, **fields: Any) -> Filter:
        self._tests += [Condition(name, "eq", value) for name, value in fields.items() if value is not None]
        return self

    def contain(self, **fields: str | None) -> Filter:
        self._tests += [Condition(name, "contains", value) for name, value in fields.items() if value is not None]
        return self

    def among(self, **fields: Sequence[Any] | None) -> Filter:
        for name, values in fields.items():
            if isinstance(values, str):
                raise ConfigError(f"{name}_in={values!r} is a str; give a list of values")
            if values is not None:
                self._tests.append(Condition(name, "in", tuple(values)))
        return self

    def query(
        self,
        kind: type[R],
        *,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        cursor: str | None = None,
    ) -> Query[R]:
        """The query, after checking what does not depend on the stored data.

        Raises:
            ConfigError: an unknown sort field or order, a negative limit or offset, or a cursor that does not fit.
        """
        if sort_by is not None and sort_by not in kind.model_fields:
            fields = ", ".join(kind.model_fields)
            near = suggest(sort_by, kind.model_fields)
            raise ConfigError(f"a {kind.__name__} cannot be sorted by {sort_by!r}.{near} Fields: {fields}.")
        check_choice("sort_order", sort_order, get_args(SortOrder))
        if limit < -1:
            raise ConfigError(f"limit={limit}; it can be -1 (all), 0 or more")
        if offset < 0:
            raise ConfigError(f"offset={offset}; it can be 0 or more")
        after = None
        if cursor is not None:
            if sort_by is not None or sort_order != "asc" or offset:
                raise ConfigError("a cursor goes on in the stored order; leave out sort_by, sort_order and offset")
            after, _, _ = _read_cursor(cursor)
        either = self._logic == "or"
        return Query(
            kind,
            where=tuple(self._scope if either else self._scope + self._tests),
            any_of=tuple(self._tests) if either else (),
            sort_by=sort_by,
            descending=sort_order == "desc",
            limit=limit,
            offset=offset,
            after=after,
            count=cursor is None and (limit >= 0 or offset > 0),
        )


def check_choice(name: str, value: C, choices: Sequence[C]) -> C:
    """Returns ``value`` if it is one of the choices.

    Raises:
        ConfigError: it is not.
    """
    if value not in choices:
        raise ConfigError(
            f"{name}={value!r} is unknown.{suggest(str(value), map(str, choices))} "
            f"It can be: {', '.join(map(str, choices))}."
        )
    return value


async def find(backend: Backend, query: Query[R], cursor: str | None = None) -> PaginatedResult[R]:
    """Runs a query; ``cursor`` is the one it was made with.

    What the first page counted travels in the cursor: reading on costs the same on every page, and ends where the first
    page saw the end even if others keep adding.
    """
    page = await backend.select(query)
    if cursor is not None:
        _, total, seen = _read_cursor(cursor)
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
    )


def _read_cursor(cursor: str) -> tuple[int, int, int]:
    """Where to read on, how many there are in all, and how many of them were read."""
    numbers = cursor.split(".")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"cursor={cursor!r} was not given by this store; use PaginatedResult.cursor as it is")
    position, total, seen = map(int, numbers)
    return position, total, seen
