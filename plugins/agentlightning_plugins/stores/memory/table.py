"""Tables of the memory backend: records in the order of insertion, with indexes that keep reading cheap.

A record has a position, its place in the order of insertion; indexes hold positions, which are plain integers and so
give the garbage collector nothing to walk. A table is changed and planned for under the backend's lock. The plan is
then carried out without it, because logs only grow at their end and a record is read in one step.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any, Generic, NamedTuple, TypeVar

from agentlightning.store.backend import KEYS, Condition, Key, Page, Query, Row
from agentlightning.types import Record
from agentlightning_plugins.stores.condition import (
    choices,
    is_hashable,
    is_lookup,
    make_reader,
    make_test,
    read_field,
    sort_by,
)

R = TypeVar("R", bound=Record)


class Log:
    """Positions in ascending order. Those of removed records stay until they are the majority."""

    __slots__ = ("_removed", "positions")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._removed = 0

    def __len__(self) -> int:
        return len(self.positions) - self._removed

    def count_removed(self, records: Collection[int]) -> None:
        """Takes note that a record of this log is no longer among ``records``."""
        self._removed += 1
        if self._removed * 2 > len(self.positions):
            self.positions = [position for position in self.positions if position in records]
            self._removed = 0

    def walk(self, after: int | None, descending: bool) -> Iterator[int]:
        """The positions there are now, after a given one; stays valid while others write."""
        positions, size = self.positions, len(self.positions)
        start = 0 if after is None else bisect.bisect_right(positions, after)
        if descending:
            return (positions[place] for place in range(size - 1, start - 1, -1))
        return islice(positions, size) if start == 0 else (positions[place] for place in range(start, size))


class Index(NamedTuple):
    """Fields of a record that may change and are looked up together.

    ``only`` keeps the index small: records with another value of the last field are left out.
    """

    fields: tuple[str, ...]
    only: frozenset[str] | None = None


class _Buckets:
    """The positions of an index, by the values of its fields."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.names = frozenset(field.partition(".")[0] for field in index.fields)
        self._read = make_reader(*index.fields)
        self._positions: dict[tuple[Any, ...], set[int]] = {}

    def values(self, record: Record) -> tuple[Any, ...] | None:
        """Where a record belongs; None: not into this index."""
        values = self._read(record)
        if self.index.only is not None and values[-1] not in self.index.only:
            return None
        return None if None in values or not is_hashable(values) else values

    def add(self, values: tuple[Any, ...] | None, position: int) -> None:
        if values is not None:
            self._positions.setdefault(values, set()).add(position)

    def discard(self, values: tuple[Any, ...] | None, position: int) -> None:
        if values is not None:
            bucket = self._positions[values]
            bucket.discard(position)
            if not bucket:
                del self._positions[values]

    def find(self, wanted: Mapping[str, Condition]) -> list[set[int]] | None:
        """The buckets of what is wanted; None if the index does not know all of it."""
        fields = self.index.fields
        if not all(field in wanted for field in fields):
            return None
        if self.index.only is not None and not self.index.only.issuperset(choices(wanted[fields[-1]])):
            return None
        return [self._positions[key] for key in _combine(wanted, fields) if key in self._positions]


class _Plan(NamedTuple):
    """Where to look for the matches of a query."""

    positions: Iterable[int]
    """In the order of insertion, or against it if the query wants that."""
    answered: Collection[Condition]
    """The conditions that hold for all of these."""
    total: int | None = None
    """How many will match, where an index knows it."""


class Table(Generic[R]):
    """The records of one kind."""

    def __init__(
        self,
        kind: type[R],
        *indexes: Index,
        parent: str | None = None,
        constant: Sequence[str] = (),
        derived: Mapping[str, Callable[[R], Any]] | None = None,
    ) -> None:
        """Makes an empty table.

        Args:
            kind: the records' class.
            indexes: fields to index whose values change.
            parent: a field to index that never changes, and of which each value has few records.
            constant: other fields to index, one by one, that never change.
            derived: fields of queries that the records do not have, with how to find their values.
        """
        self.kind = kind
        self.positions: dict[Key, int] = {}
        self._records: dict[int, R] = {}
        self._revisions: dict[int, int] = {}
        """Of the records that were replaced; the others are at revision 1."""
        self._log = Log()
        self._last_position = 0
        self._derived = derived or {}
        self._readers: dict[str, Callable[[R], Any]] = {}
        self._parent = parent
        self._constant: dict[str, tuple[Callable[[R], Any], dict[Any, Log]]] = {
            field: (self._reader(field), {}) for field in (*constant, *([parent] if parent is not None else ()))
        }
        self._indexes = [_Buckets(index) for index in indexes]
        self._indexed = sorted(frozenset[str]().union(*(buckets.names for buckets in self._indexes)))

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: Key) -> R | None:
        """The record with a key."""
        return self._records.get(self.positions.get(key, 0))

    def row(self, position: int) -> Row[R] | None:
        """What is at a position, now.

        The revision is read first: who meets a writer halfway gets one that is too old, and the guard made of it fails.
        """
        revision = self._revisions.get(position, 1)
        record = self._records.get(position)
        return None if record is None else Row(record, revision)

    def revision(self, key: Key) -> int:
        """The revision that a guard compares; 0 where there is no record."""
        position = self.positions.get(key)
        return 0 if position is None else self._revisions.get(position, 1)

    def logs_of(self, record: R) -> list[Log]:
        """The logs in which a record belongs; the same for all records with equal constant fields."""
        found = [self._log]
        for read, logs in self._constant.values():
            value = read(record)
            log = logs.get(value)
            if log is None:
                log = logs[value] = Log()
            found.append(log)
        return found

    def insert(self, key: Key, record: R, logs: Sequence[Log] | None = None) -> None:
        """Adds a record whose key is not there yet; ``logs`` saves looking up ``logs_of`` it."""
        self._last_position = position = self._last_position + 1
        self._records[position] = record
        self.positions[key] = position
        for log in self.logs_of(record) if logs is None else logs:
            log.positions.append(position)
        for buckets in self._indexes:
            buckets.add(buckets.values(record), position)

    def replace(self, key: Key, record: R) -> None:
        """Puts a new form of a record in the place of the old one."""
        position = self.positions[key]
        before = self._records[position]
        self._records[position] = record  # before the revision: see `row`
        self._revisions[position] = self._revisions.get(position, 1) + 1
        changed = [name for name in self._indexed if getattr(before, name) is not getattr(record, name)]
        for buckets in self._indexes if changed else ():
            if not buckets.names.isdisjoint(changed):
                buckets.discard(buckets.values(before), position)
                buckets.add(buckets.values(record), position)

    def amend(self, key: Key, record: R) -> None:
        """Replaces a record, in no indexed field, without a new revision."""
        self._records[self.positions[key]] = record

    def remove(self, key: Key) -> None:
        """Takes a record out, if it is there."""
        position = self.positions.pop(key, None)
        if position is None:
            return
        record = self._records.pop(position)
        self._revisions.pop(position, None)
        self._log.count_removed(self._records)
        for read, logs in self._constant.values():
            value = read(record)
            logs[value].count_removed(self._records)
            if not logs[value]:
                del logs[value]
        for buckets in self._indexes:
            buckets.discard(buckets.values(record), position)

    def children(self, parent: Any) -> list[R]:
        """The records with this value of the parent field."""
        assert self._parent is not None
        log = self._constant[self._parent][1].get(parent)
        return [] if log is None else [self._records[at] for at in log.positions if at in self._records]

    def count_children(self, parent: Any) -> int:
        """How many they are."""
        assert self._parent is not None
        log = self._constant[self._parent][1].get(parent)
        return 0 if log is None else len(log)

    def find(self, query: Query[R]) -> Page[R] | None:
        """Answers the commonest queries without planning; None if it is another.

        They are for a key and nothing else, or for one constant field in the order of insertion or against it.
        """
        where = query.where
        if not where or query.any_of or query.after is not None or query.offset or query.count:
            return None
        fields = KEYS[self.kind]
        if len(where) == len(fields) and query.limit:
            for condition, field in zip(where, fields, strict=True):
                if condition.field != field or condition.op != "eq":
                    break
            else:
                position = self.positions.get(tuple([condition.value for condition in where]), 0)
                row = self.row(position)
                return Page([], None, None) if row is None else Page([row], None, position)
        if len(where) > 1 or where[0].op != "eq" or query.sort_by is not None or where[0].field not in self._constant:
            return None
        log = self._constant[where[0].field][1].get(where[0].value)
        if log is None:
            return Page([], None, None)
        found = ((row, at) for at in log.walk(None, query.descending) if (row := self.row(at)) is not None)
        matches = list(found if query.limit < 0 else islice(found, query.limit))
        return Page([row for row, _ in matches], None, matches[-1][1] if matches else None)

    def plan(self, query: Query[R]) -> Callable[[], Page[R]]:
        """Decides under the lock where to look; the function it returns looks, and needs no lock."""
        plan = self._plan(query)
        tests = [make_test(c, self._reader(c.field)) for c in query.where if c not in plan.answered]
        either = [make_test(condition, self._reader(condition.field)) for condition in query.any_of]

        def matches() -> Iterator[tuple[int, Row[R]]]:
            for position in plan.positions:
                row = self.row(position)
                if row is None or (tests and not all(test(row.record) for test in tests)):
                    continue
                if not either or any(test(row.record) for test in either):
                    yield position, row

        def look() -> Page[R]:
            stop = None if query.limit < 0 else query.offset + query.limit
            if query.sort_by is None and stop is not None and (plan.total is not None or not query.count):
                found, total = list(islice(matches(), stop)), plan.total
            else:
                found = list(matches())
                total = len(found)
            if query.sort_by is not None and len(found) > 1:
                read = self._reader(query.sort_by)
                sort_by(found, lambda match: read(match[1].record), query.descending)
            found = found[query.offset : stop]
            position = found[-1][0] if found and query.sort_by is None else None
            return Page([row for _, row in found], total if query.count else None, position)

        return look

    def _reader(self, field: str) -> Callable[[R], Any]:
        reader = self._derived.get(field) or self._readers.get(field)
        if reader is None:
            reader = self._readers[field] = read_field(field)
        return reader

    def _plan(self, query: Query[R]) -> _Plan:
        backwards = query.descending and query.sort_by is None
        wanted: dict[str, Condition] = {}
        for condition in query.where:
            if condition.field == self._parent and condition.op == "eq":
                log = self._constant[self._parent][1].get(condition.value)
                return _Plan(() if log is None else log.walk(query.after, backwards), [condition])
            if condition.field not in wanted and is_lookup(condition):
                wanted[condition.field] = condition
        after, fields = query.after or 0, KEYS[self.kind]
        if all(field in wanted for field in fields):
            keys = _combine(wanted, fields)
            at = sorted(self.positions[key] for key in keys if self.positions.get(key, 0) > after)
            return _Plan(reversed(at) if backwards else at, [wanted[field] for field in fields])
        best, size, answered = [self._log], len(self._log), []
        for field, (_, logs) in self._constant.items():
            if field in wanted:
                chosen = [logs[value] for value in dict.fromkeys(choices(wanted[field])) if value in logs]
                if sum(map(len, chosen)) <= size:
                    best, size, answered = chosen, sum(map(len, chosen)), [wanted[field]]
        total = size if len(answered) == len(query.where) and not query.any_of else None
        for buckets in self._indexes:
            found = buckets.find(wanted)
            if found is None:
                continue
            count = sum(map(len, found))
            if len(buckets.index.fields) == len(query.where) and not query.any_of:
                total = count
            # A limited read of a frequent value meets enough of them sooner by walking a log than by sorting the index.
            reads_all = query.sort_by is not None or query.limit < 0
            if count <= size and (reads_all or (query.limit + query.offset) * size > count**2):
                at = sorted(position for position in chain(*found) if position > after)
                answered = [wanted[field] for field in buckets.index.fields]
                return _Plan(reversed(at) if backwards else at, answered, total)
        walks = [log.walk(query.after, backwards) for log in best]
        positions = walks[0] if len(walks) == 1 else sorted(chain(*walks), reverse=backwards)
        return _Plan(positions, answered, total)


def _combine(wanted: Mapping[str, Condition], fields: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    return product(*(dict.fromkeys(choices(wanted[field])) for field in fields))
