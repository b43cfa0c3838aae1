"""Operations, the writes of one caller, and batches of operations as the parameters of the statement ``WRITE``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, TypeAlias

import orjson

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Claim, Delete, Guard, Key, Row, Write, key_of
from agentlightning.types import LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.sql.batch import Item
from agentlightning_plugins.stores.sql.document import encode

Fields: TypeAlias = dict[str, Any]
"""A row of one of the statement's parameters. ``action`` is put, delete, append (of an attempt: its spans) or number;
``wanted`` is the revision of a guard."""
AttemptKey: TypeAlias = tuple[str, str]
DocumentKey: TypeAlias = tuple[str, str, int]

_KINDS: Final[dict[type[Record], str]] = {
    Run: "runs",
    ResourcesUpdate: "resources",
    Worker: "workers",
    Metrics: "metrics",
}
_LONGEST_KEY: Final = 200
"""Length of the longest metadata value that is indexed as it is; PostgreSQL's index takes no more than 2.7 kB."""


@dataclass(slots=True)
class Operation:
    """The writes of one caller, done completely or not at all."""

    events: Sequence[Event] = ()
    rollouts: dict[str, Fields] = field(default_factory=dict)
    attempts: dict[AttemptKey, Fields] = field(default_factory=dict)
    spans: list[tuple[AttemptKey, Fields]] = field(default_factory=list)
    documents: dict[DocumentKey, Fields] = field(default_factory=dict)
    appended: Sequence[Span] | None = None
    """The spans of an append, one for each of ``spans``."""
    size: int = 0
    """Number of characters of JSON."""
    tries: int = 0
    """How often a row was locked by another transaction."""

    @classmethod
    def commit(cls, writes: Sequence[Write], guards: Sequence[Guard], events: Sequence[Event]) -> Operation:
        """Writes records if all guards hold."""
        operation = cls(events)
        for guard in guards:
            operation._row(guard.kind, guard.key)["wanted"] = guard.revision
        for write in writes:
            if isinstance(write, Delete):
                operation._row(write.kind, write.key)["action"] = "delete"
            else:
                operation._put(write.record)
        return operation

    @classmethod
    def append(cls, spans: Sequence[Span], now: float) -> Operation:
        """Appends spans to attempts."""
        operation = cls(appended=spans)
        for span in spans:
            key = operation._count_spans_of(span.rollout_id, span.attempt_id)
            operation.attempts[key]["heartbeat"] = now
            operation.spans.append((key, operation._span_fields(span, "append")))
        return operation

    @classmethod
    def take_numbers(cls, attempts: Sequence[AttemptKey]) -> Operation:
        """Takes the next span number of each attempt."""
        operation = cls()
        for rollout_id, attempt_id in attempts:
            key = operation._count_spans_of(rollout_id, attempt_id)
            operation.spans.append((key, {"action": "number", "sequence_id": 0}))
        return operation

    def _row(self, kind: type[Record], key: Key) -> Fields:
        """Returns the row of a record that is guarded or written."""
        if kind is Rollout:
            rollout_id = _plain(key[0])
            row = self.rollouts.setdefault(rollout_id, {"rollout_id": rollout_id})
            row["locks"] = True
            return row
        if kind is Attempt:
            return self._attempt_row(_plain(key[0]), _plain(key[1]))
        if kind is Span:
            self._attempt_row(_plain(key[0]), _plain(key[1]))
            self.spans.append(((_plain(key[0]), _plain(key[1])), {"span_id": _plain(key[2]), "sequence_id": 0}))
            return self.spans[-1][1]
        number = key[1] if len(key) > 1 else 0
        assert isinstance(number, int)
        fields = {"kind": _KINDS[kind], "id": _plain(key[0]), "number": number}
        return self.documents.setdefault((_KINDS[kind], _plain(key[0]), number), fields)

    def _attempt_row(self, rollout_id: str, attempt_id: str) -> Fields:
        self.rollouts.setdefault(rollout_id, {"rollout_id": rollout_id})
        return self.attempts.setdefault((rollout_id, attempt_id), {"attempt_id": attempt_id})

    def _count_spans_of(self, rollout_id: str, attempt_id: str) -> AttemptKey:
        """Adds an attempt that must exist and whose span counter advances."""
        key = (_plain(rollout_id), _plain(attempt_id))
        row = self._attempt_row(*key)
        if row.setdefault("action", "append") != "put":
            row["needed"] = self.rollouts[key[0]]["needed"] = True
        return key

    def _put(self, record: Record) -> None:
        if isinstance(record, Span):
            key = self._count_spans_of(record.rollout_id, record.attempt_id)
            self.spans.append((key, self._span_fields(record, "put")))
            return
        text = encode(record)
        self.size += len(text)
        row = self._row(type(record), key_of(record))
        row |= {"action": "put", "record": text, "needed": False}
        match record:
            case Rollout():
                metadata = record.metadata or {}
                row |= {
                    "run_id": _plain(record.run_id),
                    "status": record.status,
                    "start_time": record.start_time,
                    "end_time": record.end_time,
                    "task_id": index_key(metadata.get("task_id")),
                    "group_id": index_key(metadata.get("group")),
                    "step": index_key(metadata.get("step")),
                }
            case Attempt():
                row |= {
                    "sequence_id": record.sequence_id,
                    "status": record.status,
                    "live": record.status in LIVE_ATTEMPT,
                    "worker_id": None if record.worker_id is None else _plain(record.worker_id),
                    "heartbeat": record.last_heartbeat_time,
                }
                parent = self.rollouts[record.rollout_id]
                parent["needed"] = parent.get("action") != "put"
            case ResourcesUpdate() | Metrics():
                row["run_id"] = _plain(record.run_id)

    def _span_fields(self, span: Span, action: str) -> Fields:
        text = encode(span)
        self.size += len(text)
        return {
            "span_id": _plain(span.span_id),
            "action": action,
            "sequence_id": span.sequence_id,
            "start_time": span.start_time,
            "name": _shown(span.name),
            "trace_id": _shown(span.trace_id),
            "parent_id": None if span.parent_id is None else _shown(span.parent_id),
            "record": text,
        }

    def result(self, numbers: Sequence[int | None]) -> Any:
        """Returns the caller's result; ``numbers`` are the numbers of its spans."""
        if self.appended is None:
            return numbers if self.spans else True
        return [
            None if number is None else span if span.sequence_id else span.model_copy(update={"sequence_id": number})
            for span, number in zip(self.appended, numbers, strict=True)
        ]


@dataclass(slots=True)
class Claiming:
    """One caller's claim, which becomes an operation when there are candidates."""

    run_id: str
    limit: int
    decide: Claim
    candidates: list[tuple[Row[Rollout], int]] = field(default_factory=list)

    def claim(self) -> Operation:
        """Claims the candidates, unless another process has changed one meanwhile."""
        writes, events = self.decide(self.candidates)
        guards = [Guard(Rollout, key_of(row.record), row.revision) for row, _ in self.candidates]
        return Operation.commit(writes, guards, events)


Work: TypeAlias = Operation | Claiming


class Batch:
    """Operations that one statement does. They have no rows in common, except rows that they only add to."""

    def __init__(self) -> None:
        self.members: list[tuple[Item[Work], Operation]] = []
        self.size = 0
        self._rollouts: dict[str, Fields] = {}
        self._attempts: dict[AttemptKey, Fields] = {}
        self._documents: dict[DocumentKey, Fields] = {}
        self._spans: list[Fields] = []
        self._numbers: list[list[int | None]] = []
        """Indexes of each member's spans in ``_spans``; None if an earlier span has the same key."""
        self._known_spans: set[tuple[AttemptKey, str]] = set()
        self._index: dict[object, int] = {}
        """The place of each rollout and attempt in its parameter, counted from 1."""
        self._users: dict[tuple[str, int], list[Item[Work]]] = {}

    def add(self, item: Item[Work], operation: Operation) -> bool:
        """Adds an operation; returns False if it has to wait for another batch."""
        if (
            _collide(self._rollouts, operation.rollouts, "append")
            or _collide(self._attempts, operation.attempts, "append")
            or _collide(self._documents, operation.documents, "put")
        ):
            return False
        self.members.append((item, operation))
        self.size += operation.size
        for rollout_id, row in operation.rollouts.items():
            self._merge(item, "rollouts", self._rollouts, rollout_id, row)
        for key, row in operation.attempts.items():
            self._merge(item, "attempts", self._attempts, key, {"parent": self._index[key[0]], **row})
        for name, row in operation.documents.items():
            self._merge(item, "documents", self._documents, name, row)
        numbers: list[int | None] = []
        for key, row in operation.spans:
            span = (key, row.get("span_id", ""))
            is_known = span[1] and span in self._known_spans
            if row.get("action") == "append" and is_known:
                numbers.append(None)
                continue
            self._known_spans.add(span)
            numbers.append(len(self._spans))
            self._spans.append({"owner": self._index[key], **row})
            self._users["spans", len(self._spans)] = [item]
        self._numbers.append(numbers)
        return True

    def _merge(self, item: Item[Work], part: str, rows: dict[Any, Fields], key: object, row: Fields) -> None:
        index = self._index.setdefault(key, len(rows) + 1)
        rows.setdefault(key, {}).update(row)
        self._users.setdefault((part, index), []).append(item)

    @property
    def parameters(self) -> tuple[str, str, str, str]:
        """Rollouts, attempts, spans and documents, each as JSON."""
        rows: tuple[Iterable[Fields], ...]
        rows = (self._rollouts.values(), self._attempts.values(), self._spans, self._documents.values())
        first, second, third, fourth = (orjson.dumps(list(part)).decode() for part in rows)
        return first, second, third, fourth

    def numbers_of(self, member: int, numbers: Sequence[int | None]) -> list[int | None]:
        """Returns the numbers of a member's spans, given the numbers of all spans in the batch."""
        return [None if place is None else numbers[place] for place in self._numbers[member]]

    def failures(self, failed: Sequence[tuple[str, int, str]]) -> dict[Item[Work], bool | Exception | None]:
        """Returns the results of members that were not applied; None if another transaction has locked their rows."""
        found: dict[Item[Work], bool | Exception | None] = {}
        rollouts, attempts = list(self._rollouts), list(self._attempts)
        for part, place, why in sorted(failed, key=lambda failure: _PRIORITY.index(failure[2])):
            for item in self._users[part, place]:
                if item in found:
                    continue
                if why == "busy":
                    found[item] = None
                elif why == "refused":
                    found[item] = False
                elif part == "rollouts":
                    found[item] = NotFoundError(f"no rollout {rollouts[place - 1]!r} in this store")
                else:
                    rollout_id, attempt_id = attempts[place - 1]
                    found[item] = NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return found


_PRIORITY: Final = ("busy", "refused", "unknown")


def _collide(mine: dict[Any, Fields], others: dict[Any, Fields], harmless: str) -> bool:
    """Whether both write the same row. Two ``harmless`` actions on a row do not collide: the later one counts."""
    return any(
        key in mine and any("wanted" in one or one.get("action", harmless) != harmless for one in (mine[key], row))
        for key, row in others.items()
    )


def index_key(value: object) -> str | None:
    """Returns the index key of a metadata value, equal only for equal values; None if the value is not indexed."""
    if isinstance(value, str):
        if len(value) <= _LONGEST_KEY and "\0" not in value:
            return f"s{value}"
        return "h" + sha256(value.encode(errors="surrogatepass")).hexdigest()
    if isinstance(value, (int, float)):
        whole = int(value) if value == value // 1 else None  # 1, 1.0 and True are equal
        return f"n{value if whole is None else whole}"
    return None


def _plain(value: object) -> str:
    """Returns an id that PostgreSQL can store.

    Raises:
        ConfigError: the id has a NUL, or half of a surrogate pair.
    """
    text = str(value)
    if "\0" in text or (not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text)):
        raise ConfigError(f"the id {text!r} has a character that PostgreSQL cannot store; remove it")
    return text


def _shown(text: str) -> str:
    """Returns a name as its column stores it; the JSON has the original."""
    return text.replace("\0", "\ufffd") if "\0" in text else text
