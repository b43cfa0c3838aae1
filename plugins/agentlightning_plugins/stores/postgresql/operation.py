"""What callers want written, as the steps that the function ``agl.write`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, TypeAlias

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Claim, Guard, Key, Put, Row, Write, key_of
from agentlightning.types import Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.postgresql.schema import KEPT_EVENTS
from agentlightning_plugins.stores.sql.document import encode, encode_events

Step: TypeAlias = tuple[Any, ...]
"""step, id, second, third, number, time, run, status, first, other, last, record; as ``agl.step`` names them."""

SpanRow: TypeAlias = tuple[str, int, float | None, str, str, str | None, str]
"""id, number, start time, name, trace, parent, record; an ``agl.new_span``."""

_KINDS: Final[dict[type[Record], str]] = {
    Run: "runs",
    ResourcesUpdate: "resources",
    Worker: "workers",
    Metrics: "metrics",
}
_LONGEST_KEY: Final = 200
"""Characters of a metadata value that are indexed as they are; PostgreSQL's index takes no more than 2.7 kB."""


@dataclass(slots=True)
class Operation:
    """One caller's part of a write."""

    steps: list[Step]
    events: Sequence[Event] = ()
    attempts: Sequence[tuple[str, str]] = ()
    """Those that a step ``need attempt`` names by number."""
    spans: Sequence[Span] | None = None
    """What is being appended; None: this is no append."""
    numbers: int = 0
    """How many numbers of spans it takes."""
    rows: Sequence[SpanRow] = ()
    """The spans as columns."""

    @property
    def size(self) -> int:
        """Characters of JSON."""
        return sum(len(step[-1] or "") for step in self.steps) + sum(len(row[-1]) for row in self.rows)

    def conclude(self, verdict: str, numbers: Sequence[int | None]) -> Any:
        """What the caller gets.

        Raises:
            NotFoundError: a rollout or an attempt that is not stored.
        """
        if verdict.startswith("no rollout "):
            raise NotFoundError(f"no rollout {verdict.removeprefix('no rollout ')!r} in this store")
        if verdict.startswith("no attempt "):
            rollout_id, attempt_id = self.attempts[int(verdict.removeprefix("no attempt "))]
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        if self.spans is not None:
            return [_numbered(span, number) for span, number in zip(self.spans, numbers, strict=True)]
        return numbers if self.numbers else verdict == "done"


@dataclass(slots=True)
class Claiming:
    """One caller's claim, which becomes an operation once its rollouts are locked."""

    run_id: str
    limit: int
    decide: Claim
    locked: list[tuple[Row[Rollout], int]] = field(default_factory=list)


def commit(writes: Sequence[Write], guards: Sequence[Guard], events: Sequence[Event]) -> Operation:
    """Writes records, unless a guard does not hold."""
    steps = [_guard(guard) for guard in guards]
    own = {write.record.rollout_id for write in writes if isinstance(write, Put) and isinstance(write.record, Rollout)}
    parents: dict[str, None] = {}
    attempts: dict[tuple[str, str], None] = {}
    puts: list[Step] = []
    for write in writes:
        if not isinstance(write, Put):
            puts.append(_delete(write.kind, write.key))
        elif isinstance(write.record, Span):
            key = (write.record.rollout_id, write.record.attempt_id)
            attempts[key] = None
            puts += [_step("open attempt", *key), _put_span(write.record), _step("close attempt", *key)]
        else:
            puts.append(_put(write.record))
            if isinstance(write.record, Attempt) and write.record.rollout_id not in own:
                parents[write.record.rollout_id] = None
    steps += [_step("need rollout", rollout_id) for rollout_id in parents]
    steps += _need(tuple(attempts))
    steps += puts
    if events:
        # Without the brackets: what several tell is one list.
        steps.append(_step("tell", number=KEPT_EVENTS, record=encode_events(list(events))[1:-1]))
    return Operation(steps, events, tuple(attempts))


def append(spans: Sequence[Span], now: float) -> Operation:
    """Appends spans to attempts, all or none."""
    attempts = tuple(dict.fromkeys((span.rollout_id, span.attempt_id) for span in spans))
    steps = _need(attempts)
    for key, group in _split(spans):
        steps += [
            _step("open attempt", *key),
            _step("append spans", number=len(group)),
            _step("close attempt", *key, time=now),
        ]
    return Operation(steps, attempts=attempts, spans=spans, numbers=len(spans), rows=[_row(span) for span in spans])


def take_numbers(attempts: Sequence[tuple[str, str]]) -> Operation:
    """Takes the next span number of each attempt."""
    named = tuple(dict.fromkeys(attempts))
    steps = _need(named)
    for key in attempts:
        steps += [_step("open attempt", *map(_plain, key)), _step("take number"), _step("close attempt", *key)]
    return Operation(steps, attempts=named, numbers=len(attempts))


def join(operations: Sequence[Operation]) -> tuple[list[tuple[int, *Step]], list[SpanRow]]:
    """The steps of several callers, each with its caller's number, and their spans; as ``agl.write`` takes them."""
    steps: list[tuple[int, *Step]] = []
    rows: list[SpanRow] = []
    for number, operation in enumerate(operations):
        at = len(rows) + 1
        for step in operation.steps:
            if step[0] == "append spans":  # says how many, and is told where they begin
                step, at = _step("append spans", number=at, first=str(step[4])), at + step[4]
            steps.append((number, *step))
        rows += operation.rows
    return steps, rows


def rollouts_in(operations: Sequence[Operation]) -> list[str]:
    """The rollouts that a write of these locks."""
    return [
        step[1]
        for operation in operations
        for step in operation.steps
        if step[0] in ("guard rollout", "put rollout", "delete rollout")
    ]


def index_key(value: object) -> str | None:
    """What is indexed of a metadata value: the same for equal values, and for those only. None: it is not indexed."""
    if isinstance(value, str):
        if len(value) <= _LONGEST_KEY and "\0" not in value:
            return f"s{value}"
        return "h" + sha256(value.encode(errors="surrogatepass")).hexdigest()
    if isinstance(value, (int, float)):
        whole = int(value) if value == value // 1 else None  # 1, 1.0 and True are equal
        return f"n{value if whole is None else whole}"
    return None


def _numbered(span: Span, number: int | None) -> Span | None:
    """A span as it is stored; None if another with its key was there."""
    if number is None:
        return None
    return span if span.sequence_id else span.model_copy(update={"sequence_id": number})


def _step(
    step: str,
    id: str | None = None,
    second: str | None = None,
    third: str | None = None,
    *,
    number: int | None = None,
    time: float | None = None,
    run: str | None = None,
    status: str | None = None,
    first: str | None = None,
    other: str | None = None,
    last: str | None = None,
    record: str | None = None,
) -> Step:
    return step, id, second, third, number, time, run, status, first, other, last, record


def _need(attempts: Sequence[tuple[str, str]]) -> list[Step]:
    return [_step("need attempt", *map(_plain, key), number=number) for number, key in enumerate(attempts)]


def _guard(guard: Guard) -> Step:
    kind, revision = guard.kind, guard.revision
    if kind in _KINDS:
        name, number = _document_key(guard.key)
        return _step("guard document", name, _KINDS[kind], number=revision, last=str(number))
    return _step(f"guard {kind.__name__.lower()}", *map(_plain, guard.key), number=revision)


def _delete(kind: type[Record], key: Key) -> Step:
    if kind in _KINDS:
        name, number = _document_key(key)
        return _step("delete document", name, _KINDS[kind], number=number)
    return _step(f"delete {kind.__name__.lower()}", *map(_plain, key))


def _put(record: Record) -> Step:
    text = encode(record)
    match record:
        case Rollout():
            metadata = record.metadata or {}
            return _step(
                "put rollout",
                _plain(record.rollout_id),
                time=record.start_time,
                run=_plain(record.run_id),
                status=record.status,
                first=index_key(metadata.get("task_id")),
                other=index_key(metadata.get("group")),
                last=index_key(metadata.get("step")),
                record=text,
            )
        case Attempt():
            return _step(
                "put attempt",
                _plain(record.rollout_id),
                _plain(record.attempt_id),
                number=record.sequence_id,
                time=record.last_heartbeat_time,
                status=record.status,
                first=None if record.worker_id is None else _plain(record.worker_id),
                record=text,
            )
        case _:
            name, number = _document_key(key_of(record))
            run = record.run_id if isinstance(record, (ResourcesUpdate, Metrics)) else None
            kind = _KINDS[type(record)]
            return _step(
                "put document", name, kind, number=number, run=None if run is None else _plain(run), record=text
            )


def _put_span(span: Span) -> Step:
    span_id, number, time, name, trace_id, parent_id, record = _row(span)
    return _step(
        "put span",
        third=span_id,
        number=number,
        time=time,
        first=name,
        other=trace_id,
        last=parent_id,
        record=record,
    )


def _row(span: Span) -> SpanRow:
    return (
        _plain(span.span_id),
        span.sequence_id,
        span.start_time,
        _shown(span.name),
        _shown(span.trace_id),
        None if span.parent_id is None else _shown(span.parent_id),
        encode(span),
    )


def _split(spans: Sequence[Span]) -> list[tuple[tuple[str, str], set[str]]]:
    """Groups that one statement can append, in order, each as its attempt and the ids of its spans.

    They are of one attempt, either all with a number or all without, and no two have the same id.
    """
    groups: list[tuple[tuple[str, str], set[str]]] = []
    like: object = None
    for span in spans:
        key = (span.rollout_id, span.attempt_id)
        kind = (key, span.sequence_id == 0)
        if kind != like or span.span_id in groups[-1][1]:
            groups.append((key, set()))
            like = kind
        groups[-1][1].add(span.span_id)
    return groups


def _document_key(key: Key) -> tuple[str, int]:
    number = key[1] if len(key) > 1 else 0
    assert isinstance(number, int)
    return _plain(key[0]), number


def _plain(value: object) -> str:
    """A key that PostgreSQL can hold.

    Raises:
        ConfigError: it has a NUL, or half of a pair of surrogates.
    """
    text = str(value)
    if "\0" in text or (not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text)):
        raise ConfigError(f"the id {text!r} has a character that PostgreSQL cannot store; leave it out")
    return text


def _shown(text: str) -> str:
    """What is found by, of a text that need not be plain; the JSON has the truth."""
    return text.replace("\0", "\ufffd") if "\0" in text else text
