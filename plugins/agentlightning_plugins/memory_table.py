"""Tables of the memory backend: records in the order of insertion, with indexes that keep reading cheap.

A table is changed and asked under the backend's lock. What it answers with can be read without the lock: rows are
replaced as a whole, and logs only grow.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from agentlightning.store.backend import KEYS, Condition, Key, Page, Query, Row
from agentlightning.types import Record
from agentlightning_plugins.memory_condition import (
    choices,
    is_hashable,
    is_lookup,
    make_reader,
    make_test,
    read_field,
    sort_by,
)

R = TypeVar("R", bound=Record)


class Slot(Generic[R]):
    """Where a record is kept."""

    __slots__ = ("position", "row")

    def __init__(self, record: R, position: int) -> None:
        self.row: Row[R] | None = Row(record, 1)
        """None once the record was removed."""
        self.position = position
        """Place in the order of insertion, from 1."""


class FixedSlot(Slot[R]):
    """Where a record is kept that is never replaced: one object less to collect for each of very many."""

    __slots__ = ("_record",)

    def __init__(self, record: R, position: int) -> None:
        self._record: R | None = record
        self.position = position

    @property
    def row(self) -> Row[R] | None:
        return None if self._record is None else Row(self._record, 1)

    @row.setter
    def row(self, row: Row[R] | None) -> None:
        assert row is None, "a fixed record is not replaced"
        self._record = None


def _position(slot: Slot[Any]) -> int:
    return slot.position


class Log(Generic[R]):
    """Slots in the order of insertion. Removed ones stay until they are the majority."""

    __slots__ = ("_removed", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot[R]] = []
        self._removed = 0

    def __len__(self) -> int:
        return len(self.slots) - self._removed

    def count_removed(self) -> None:
        """Takes note that one of the slots was emptied."""
        self._removed += 1
        if self._removed * 2 > len(self.slots):
            self.slots = [slot for slot in self.slots if slot.row is not None]
            self._removed = 0

    def walk(self, after: int | None, descending: bool) -> Iterator[Slot[R]]:
        """The slots there are now, from a position on; stays valid while others write."""
        slots, size = self.slots, len(self.slots)
        start = 0 if after is None else bisect.bisect_right(slots, after, key=_position)
        if descending:
            return (slots[place] for place in range(size - 1, start - 1, -1))
        return islice(slots, size) if start == 0 else (slots[place] for place in range(start, size))


class Index(NamedTuple):
    """Fields of a record that may change and are looked up together.

    ``only`` keeps the index small: records with another value of the last field are left out.
    """

    fields: tuple[str, ...]
    only: frozenset[str] | None = None


class _Buckets(Generic[R]):
    """The slots of an index, by the values of its fields."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.names = frozenset(field.partition(".")[0] for field in index.fields)
        self._read = make_reader(*index.fields)
        self._slots: dict[tuple[Any, ...], dict[int, Slot[R]]] = {}

    def values(self, record: R) -> tuple[Any, ...] | None:
        """Where a record belongs; None: not into this index."""
        values = self._read(record)
        if self.index.only is not None and values[-1] not in self.index.only:
            return None
        return None if None in values or not is_hashable(values) else values

    def add(self, values: tuple[Any, ...] | None, slot: Slot[R]) -> None:
        if values is not None:
            self._slots.setdefault(values, {})[slot.position] = slot

    def discard(self, values: tuple[Any, ...] | None, slot: Slot[R]) -> None:
        if values is not None:
            bucket = self._slots[values]
            del bucket[slot.position]
            if not bucket:
                del self._slots[values]

    def find(self, wanted: Mapping[str, Condition]) -> list[dict[int, Slot[R]]] | None:
        """The buckets of what is wanted; None if the index does not know all of it."""
        fields = self.index.fields
        if not all(field in wanted for field in fields):
            return None
        if self.index.only is not None and not self.index.only.issuperset(choices(wanted[fields[-1]])):
            return None
        return [self._slots[key] for key in _combine(wanted, fields) if key in self._slots]


class _Plan(NamedTuple, Generic[R]):
    """Where to look for the matches of a query."""

    slots: Iterable[Slot[R]]
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
        fixed: bool = False,
    ) -> None:
        """Makes an empty table.

        Args:
            kind: the records' class.
            indexes: fields to index whose values change.
            parent: a field to index that never changes, and of which each value has few records.
            constant: other fields to index, one by one, that never change.
            derived: fields of queries that the records do not have, with how to find their values.
            fixed: whether no record is ever replaced.
        """
        self.kind = kind
        self.slots: dict[Key, Slot[R]] = {}
        self._log: Log[R] = Log()
        self._next_position = 1
        self._new_slot: Callable[[R, int], Slot[R]] = FixedSlot if fixed else Slot
        self._derived = derived or {}
        self._readers: dict[str, Callable[[R], Any]] = {}
        self._parent = parent
        self._constant: dict[str, tuple[Callable[[R], Any], dict[Any, Log[R]]]] = {
            field: (self._reader(field), {}) for field in (*constant, *([parent] if parent is not None else ()))
        }
        self._indexes: list[_Buckets[R]] = [_Buckets(index) for index in indexes]
        self._indexed = sorted(frozenset().union(*(buckets.names for buckets in self._indexes)))

    def __len__(self) -> int:
        return len(self.slots)

    def logs_of(self, record: R) -> list[Log[R]]:
        """The logs in which a record belongs; the same for all records with equal constant fields."""
        found = [self._log]
        for read, logs in self._constant.values():
            value = read(record)
            log = logs.get(value)
            if log is None:
                log = logs[value] = Log()
            found.append(log)
        return found

    def insert(self, key: Key, record: R, logs: Sequence[Log[R]] | None = None) -> Slot[R]:
        """Adds a record whose key is not there yet; ``logs`` saves looking up ``logs_of`` it."""
        slot = self._new_slot(record, self._next_position)
        self._next_position += 1
        self.slots[key] = slot
        for log in self.logs_of(record) if logs is None else logs:
            log.slots.append(slot)
        for buckets in self._indexes:
            buckets.add(buckets.values(record), slot)
        return slot

    def replace(self, slot: Slot[R], record: R) -> None:
        """Puts a new form of a record into its slot."""
        assert slot.row is not None
        before = slot.row.record
        slot.row = Row(record, slot.row.revision + 1)
        changed = [name for name in self._indexed if getattr(before, name) is not getattr(record, name)]
        for buckets in self._indexes if changed else ():
            if not buckets.names.isdisjoint(changed):
                buckets.discard(buckets.values(before), slot)
                buckets.add(buckets.values(record), slot)

    def remove(self, key: Key) -> None:
        """Takes a record out, if it is there."""
        slot = self.slots.pop(key, None)
        if slot is None or slot.row is None:
            return
        record, slot.row = slot.row.record, None
        self._log.count_removed()
        for read, logs in self._constant.values():
            value = read(record)
            logs[value].count_removed()
            if not logs[value]:
                del logs[value]
        for buckets in self._indexes:
            buckets.discard(buckets.values(record), slot)

    def log(self, field: str, value: Any) -> Log[R] | None:
        """The slots with this value of a constant field."""
        return self._constant[field][1].get(value)

    def _reader(self, field: str) -> Callable[[R], Any]:
        """Reads what a condition compares: a field, a key of a JSON field (``metadata.group``), or a derived one."""
        reader = self._derived.get(field) or self._readers.get(field)
        if reader is None:
            reader = self._readers[field] = read_field(field)
        return reader

    def find(self, query: Query[R]) -> Slot[R] | Literal["not a key"] | None:
        """Answers the commonest query, one that gives a key and nothing else, without planning."""
        fields = KEYS[self.kind]
        if (
            len(query.where) != len(fields)
            or query.any_of
            or query.after is not None
            or query.offset
            or not query.limit
        ):
            return "not a key"
        for condition, field in zip(query.where, fields, strict=True):
            if condition.field != field or condition.op != "eq":
                return "not a key"
        return self.slots.get(tuple([condition.value for condition in query.where]))

    def plan(self, query: Query[R]) -> Callable[[], Page[R]]:
        """Decides under the lock where to look; the function it returns looks, and needs no lock."""
        plan = self._plan(query)
        tests = [
            make_test(condition, self._reader(condition.field))
            for condition in query.where
            if condition not in plan.answered
        ]
        either = [make_test(condition, self._reader(condition.field)) for condition in query.any_of]

        def matches() -> Iterator[tuple[int, Row[R]]]:
            for slot in plan.slots:
                row = slot.row
                if row is None or (tests and not all(test(row.record) for test in tests)):
                    continue
                if not either or any(test(row.record) for test in either):
                    yield slot.position, row

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

    def _plan(self, query: Query[R]) -> _Plan[R]:
        backwards = query.descending and query.sort_by is None
        wanted: dict[str, Condition] = {}
        for condition in query.where:
            if condition.field == self._parent and condition.op == "eq":
                log = self._constant[self._parent][1].get(condition.value)
                return _Plan(() if log is None else log.walk(query.after, backwards), [condition])
            if condition.field not in wanted and is_lookup(condition):
                wanted[condition.field] = condition
        fields = KEYS[self.kind]
        if all(field in wanted for field in fields):
            slots = [self.slots[key] for key in _combine(wanted, fields) if key in self.slots]
            if query.after is not None:
                slots = [slot for slot in slots if slot.position > query.after]
            return _Plan(_merge(slots, backwards), [wanted[field] for field in fields])
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
                after = query.after or 0
                slots = [slot for bucket in found for slot in bucket.values() if slot.position > after]
                return _Plan(_merge(slots, backwards), [wanted[field] for field in buckets.index.fields], total)
        walks = [log.walk(query.after, backwards) for log in best]
        return _Plan(walks[0] if len(walks) == 1 else _merge(chain(*walks), backwards), answered, total)


def _combine(wanted: Mapping[str, Condition], fields: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    return product(*(dict.fromkeys(choices(wanted[field])) for field in fields))


def _merge(slots: Iterable[Slot[R]], backwards: bool) -> Iterable[Slot[R]]:
    return sorted(slots, key=_position, reverse=backwards)
