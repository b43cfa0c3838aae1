"""Tables of the memory backend: records in the order of insertion, and indexes.

A record has a position, its place in the order of insertion. Indexes hold positions, which are plain integers that the
garbage collector does not visit. The lock of the backend is held for each write and for each chunk of a read, so a long
read does not delay writers; it may see records that were written while it runs. A read of less than a chunk is atomic.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, product
from math import inf
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from agentlightning.store.backend import KEYS, Condition, Key, Page, Query, Row
from agentlightning.store.condition import lookup_values, make_test, read_field, sort_by
from agentlightning.types import Record

R = TypeVar("R", bound=Record)

_CHUNK: Final = 256


class Positions:
    """Ascending positions. Removed positions stay until they are the majority, so readers check what they find."""

    __slots__ = ("_removed", "_sorted")

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self._removed = 0

    def __len__(self) -> int:
        return len(self._sorted) - self._removed

    def __iter__(self) -> Iterator[int]:
        return iter(self._sorted)

    def add(self, position: int) -> None:
        if not self._sorted or position > self._sorted[-1]:
            self._sorted.append(position)
            return
        place = bisect_left(self._sorted, position)
        if self._sorted[place] == position:
            self._removed -= 1  # it was removed and comes back
        else:
            self._sorted.insert(place, position)

    def remove(self) -> bool:
        """Counts a removed position; returns whether it is time to ``keep`` only the rest."""
        self._removed += 1
        return self._removed * 2 > len(self._sorted) > _CHUNK

    def keep(self, positions: list[int]) -> None:
        """Replaces all positions by the remaining ones."""
        self._sorted = positions
        self._removed = 0

    def chunk(self, start: float, descending: bool) -> list[int]:
        """Returns the next positions after ``start``, or before it if descending."""
        if descending:
            end = bisect_left(self._sorted, start)
            return self._sorted[max(0, end - _CHUNK) : end][::-1]
        place = bisect_right(self._sorted, start)
        return self._sorted[place : place + _CHUNK]


class Index:
    """Positions of records by the values of some fields; records with None or an unhashable value are not indexed."""

    def __init__(self, *fields: str, only: frozenset[str] | None = None, constant: bool = False) -> None:
        """Makes an empty index.

        Args:
            fields: fields of the records, which are looked up together.
            only: the values of the last field that are indexed, to keep the index small; None: all.
            constant: the fields of a record never change.
        """
        self.fields = fields
        self.only = only
        self.constant = constant
        self._fields = frozenset(fields)
        self.names = frozenset(field.partition(".")[0] for field in fields)
        self._positions: dict[Key, Positions] = {}

    def bind(self, read: Callable[[str], Callable[[Any], Any]]) -> None:
        """Sets how fields are read."""
        if len(self.fields) > 1:
            self._read: Callable[[Any], Key] = attrgetter(*self.fields)
        else:
            read_one = read(self.fields[0])
            self._read = lambda record: (read_one(record),)

    def key(self, record: Record) -> Key | None:
        """Returns the indexed values of a record; None if the record is not indexed."""
        key = self._read(record)
        if None in key or (self.only is not None and key[-1] not in self.only):
            return None
        try:
            hash(key)
        except TypeError:  # a list in the metadata
            return None
        return key

    def place(self, record: Record) -> Positions | None:
        """Returns the positions of the records with the same values; None if the record is not indexed."""
        key = self.key(record)
        if key is None:
            return None
        found = self._positions.get(key)
        if found is None:
            found = self._positions[key] = Positions()
        return found

    def remove(self, record: Record, records: Mapping[int, Record]) -> None:
        """Removes a record that is no longer in ``records``, or has other values there."""
        key = self.key(record)
        if key is not None:
            positions = self._positions[key]
            if len(positions) == 1:
                del self._positions[key]
            elif positions.remove():
                positions.keep([at for at in positions if at in records and self.key(records[at]) == key])

    def get(self, *key: Any) -> Positions:
        """Returns the positions of the records with these values."""
        return self._positions.get(key) or Positions()

    def find(self, wanted: Mapping[str, Collection[Any]]) -> list[Positions] | None:
        """Returns the positions of the records with a wanted value in each field; None if the index does not apply."""
        if not wanted.keys() >= self._fields:
            return None
        if self.only is not None and not self.only.issuperset(wanted[self.fields[-1]]):
            return None
        keys = product(*[wanted[field] for field in self.fields])
        return [self._positions[key] for key in keys if key in self._positions]


_NO_INDEX: Final = Index(constant=True)


class Table(Generic[R]):
    """The records of one kind."""

    def __init__(
        self,
        kind: type[R],
        lock: threading.Lock,
        *indexes: Index,
        readers: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        """Makes an empty table.

        Args:
            kind: the records' class.
            lock: the callers of all methods but ``select`` hold it.
            indexes: a query uses the first index whose fields it looks up, so the most selective ones come first.
            readers: functions that read fields of queries that the records do not have.
        """
        self.records: dict[int, R] = {}
        self._revisions: dict[int, int] = {}
        """Revisions of the records that were replaced; all other records are at revision 1."""
        self.positions: dict[Key, int] = {}
        self._keys = KEYS[kind]
        self._key_fields = frozenset(self._keys)
        self._key_conditions = [("eq", field) for field in self._keys]
        self._lock = lock
        self._all = Positions()
        self._last_position = 0
        self._readers = dict(readers or {})
        self._indexes = indexes
        self._changing = [index for index in indexes if not index.constant]
        self._names = sorted(frozenset[str]().union(*[index.names for index in self._changing]))
        for index in indexes:
            index.bind(self._reader)

    def __len__(self) -> int:
        return len(self.records)

    def get(self, key: Key) -> R | None:
        """Returns the record with a key."""
        return self.records.get(self.positions.get(key, 0))

    def row(self, position: int) -> Row[R] | None:
        """Returns the record at a position, with its revision.

        The revision is read first: if the record is replaced in between, the revision is too old and its guard fails.
        """
        revision = self._revisions.get(position, 1)
        record = self.records.get(position)
        return None if record is None else Row(record, revision)

    def revision(self, key: Key) -> int:
        """Returns the revision that a guard compares; 0 if there is no record."""
        position = self.positions.get(key)
        return 0 if position is None else self._revisions.get(position, 1)

    def places(self, record: R) -> list[Positions]:
        """Returns the index entry of a record; it is the same for all records with equal indexed fields."""
        found = [index.place(record) for index in self._indexes]
        return [self._all, *[positions for positions in found if positions is not None]]

    def insert(self, key: Key, record: R, places: Sequence[Positions]) -> None:
        """Adds a record with a new key; ``places`` is the index entry of a record with the same indexed fields."""
        self._last_position = position = self._last_position + 1
        self.records[position] = record
        self.positions[key] = position
        for positions in places:
            positions.add(position)

    def replace(self, key: Key, record: R) -> None:
        """Replaces the record that has the same key."""
        position = self.positions[key]
        before = self.records[position]
        self.records[position] = record  # before the revision: see `row`
        self._revisions[position] = self._revisions.get(position, 1) + 1
        changed = [name for name in self._names if getattr(before, name) is not getattr(record, name)]
        for index in self._changing if changed else ():
            if not index.names.isdisjoint(changed):
                index.remove(before, self.records)
                positions = index.place(record)
                if positions is not None:
                    positions.add(position)

    def update_in_place(self, key: Key, record: R) -> None:
        """Replaces a record without a new revision; its indexed fields stay the same."""
        self.records[self.positions[key]] = record

    def remove(self, key: Key) -> None:
        """Removes a record, if it exists."""
        position = self.positions.pop(key, None)
        if position is not None:
            record = self.records.pop(position)
            self._revisions.pop(position, None)
            if self._all.remove():
                self._all.keep([at for at in self._all if at in self.records])
            for index in self._indexes:
                index.remove(record, self.records)

    def found(self, positions: Positions) -> list[R]:
        """Returns the records at the positions of a constant index."""
        return [self.records[position] for position in positions if position in self.records]

    def select(self, query: Query[R]) -> Page[R]:
        """Answers a query by key, from the first index that applies, or by a scan."""
        is_plain = not (query.any_of or query.after or query.offset or query.count) and query.limit
        if is_plain and [(condition.op, condition.field) for condition in query.where] == self._key_conditions:
            position = self.positions.get(tuple([condition.value for condition in query.where]), 0)
            row = self.row(position)
            return Page([], None, None) if row is None else Page([row], None, position)
        with self._lock:
            candidates, total, conditions = self._candidates(query)
            if isinstance(candidates, list) and len(candidates) < _CHUNK:
                return self._read(query, candidates, total, conditions)
        return self._read(query, candidates, total, conditions)

    def _read(
        self, query: Query[R], candidates: Iterable[int], total: int | None, conditions: Sequence[Condition]
    ) -> Page[R]:
        tests = [make_test(condition, self._reader(condition.field)) for condition in conditions]
        either = [make_test(condition, self._reader(condition.field)) for condition in query.any_of]
        matches = ((position, row) for position in candidates if (row := self.row(position)) is not None)
        if tests:
            matches = (match for match in matches if all(test(match[1].record) for test in tests))
        if either:
            matches = (match for match in matches if any(test(match[1].record) for test in either))
        stop = None if query.limit < 0 else query.offset + query.limit
        if query.sort_by is None and stop is not None and (total is not None or not query.count):
            found = list(islice(matches, stop))
        else:
            found = list(matches)
            total = len(found)
        if query.sort_by is not None and len(found) > 1:
            read = self._reader(query.sort_by)
            sort_by(found, lambda match: read(match[1].record), query.descending)
        found = found[query.offset : stop]
        last = found[-1][0] if found and query.sort_by is None else None
        return Page([row for _, row in found], total if query.count else None, last)

    def _candidates(self, query: Query[R]) -> tuple[Iterable[int], int | None, Sequence[Condition]]:
        """Returns the positions to check, the number of matches if an index has it, and the conditions left to test.

        The caller holds the lock. It keeps it while it reads the positions if they are a list of less than a chunk.
        """
        where: Sequence[Condition] = query.where
        descending = query.descending and query.sort_by is None
        wanted = {condition.field: values for condition in where if (values := lookup_values(condition)) is not None}
        if wanted.keys() >= self._key_fields:
            keys = product(*[wanted[field] for field in self._keys])
            found = [position for key in keys if (position := self.positions.get(key, 0)) > (query.after or 0)]
            return sorted(found, reverse=descending), None, where
        start = inf if descending else query.after or 0
        for index in self._indexes:
            places = index.find(wanted)
            if places is not None:
                break
        else:
            index, places = _NO_INDEX, [self._all]
        count = sum(map(len, places))
        chunk = places[0].chunk(start, descending) if len(places) == 1 else []
        total = count if len(index.fields) == len(where) and not query.any_of else None
        if index.constant and len(wanted) == len(where):
            where = [condition for condition in where if condition.field not in index.fields]
        if 0 < len(chunk) < _CHUNK:
            return chunk, total, where
        walks = [self._walk(positions, start, descending) for positions in places]
        merged = heapq.merge(*walks, reverse=descending)  # a record may still be listed under its earlier values
        return (position for position, _ in groupby(merged)), total, where

    def _walk(self, positions: Positions, start: float, descending: bool) -> Iterator[int]:
        while True:
            with self._lock:
                chunk = positions.chunk(start, descending)
            yield from chunk
            if len(chunk) < _CHUNK:
                return
            start = chunk[-1]

    def _reader(self, field: str) -> Callable[[Any], Any]:
        if field not in self._readers:
            self._readers[field] = read_field(field)
        return self._readers[field]
