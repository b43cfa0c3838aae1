# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""Translates the backend's conditions and orders to SQL, where SQL gives the same answer as Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson

from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Condition
from agentlightning.store.condition import choices
from agentlightning.types import LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker

ColumnType: TypeAlias = Literal["text", "label", "key", "integer", "float", "boolean"]
"""A ``label`` is text of which the column may have only ``LONGEST_LABEL`` characters, with U+FFFD in place of NUL; a
``key`` is what ``Dialect.index_key`` returns."""
LONGEST_LABEL: Final = 200

TABLES: Final[dict[type[Record], str]] = {
    Run: "run",
    Rollout: "rollout",
    Attempt: "attempt",
    Span: "span",
    ResourcesUpdate: "resources",
    Worker: "worker",
    Metrics: "metrics",
}
COLUMNS: Final[Mapping[type[Record], Mapping[str, ColumnType]]] = {
    Run: {"run_id": "text"},
    ResourcesUpdate: {"resources_id": "text", "version": "integer", "run_id": "text"},
    Worker: {"worker_id": "text"},
    Metrics: {"run_id": "text", "step": "integer"},
    Rollout: {
        "rollout_id": "text",
        "run_id": "text",
        "status": "text",
        "start_time": "float",
        "end_time": "float",
        "task_id": "key",
        "group_id": "key",
        "step": "key",
        "priority": "integer",
        "queue_position": "integer",
        "mode": "text",
        "resources_id": "label",
    },
    Attempt: {
        "rollout": "integer",
        "attempt_id": "text",
        "sequence_id": "integer",
        "status": "text",
        "live": "boolean",
        "worker_id": "text",
        "last_heartbeat_time": "float",
        "last_span": "integer",
    },
    Span: {
        "attempt": "integer",
        "span_id": "text",
        "sequence_id": "integer",
        "run_id": "text",
        "start_time": "float",
        "name": "label",
        "trace_id": "label",
        "parent_id": "label",
    },
}
"""The columns in addition to position, revision and JSON, in the order in which the kinds are written: parents first.

The first two of a table never change. For an attempt's heartbeat and a span's number only the column is current: both
are set without rewriting the JSON.
"""
_INDEXED: Final = {"metadata.task_id": "task_id", "metadata.group": "group_id", "metadata.step": "step"}
_NULLABLE: Final = frozenset(
    {"worker_id", "last_heartbeat_time", "parent_id", "start_time", "end_time", "mode", "resources_id"}
)


class Test(NamedTuple):
    """A condition in SQL, with a ``?`` for each parameter."""

    sql: str
    parameters: tuple[Any, ...] = ()


_NEVER: Final = Test("1 = 0")


@dataclass(frozen=True)
class Dialect:
    """Differences between the databases."""

    prefix: str
    """Prefix of the names of tables."""
    span: str
    """The JSON of a span, put together from its parts."""
    in_list: str
    """Tests whether an expression ``{}`` is in a list that is passed as one parameter."""
    in_query: str
    """Tests whether a column ``{}`` is in the result of a query, the second ``{}``."""
    contains: str
    contains_id: str
    """Tests whether a rollout's id contains ``?``; reads an index, because the JSON next to the ids is long."""
    finds_ids_in_order: bool
    """Whether ``contains_id`` finds rollouts in the order of their positions, so that a full page ends the search."""
    unindexed: str
    """An expression that has the value of the text ``{}`` but uses no index."""
    json_value: str
    """The value in a record's metadata under the key ``?``."""
    json_key: Callable[[str], str | None]
    """Returns the parameter of ``json_value``; None if there is none for this key."""
    compares_json: bool
    """Whether ``json_value`` is JSON; otherwise it is a number or text."""
    live: str
    """Tests whether an attempt is preparing or running; there is an index of such attempts."""
    make_list: Callable[[Sequence[Any]], Any]
    """Makes the parameter for ``in_list``."""
    index_key: Callable[[object], object]
    """Returns the column value for a metadata value; None if the value is not indexed."""
    no_limit: int | None
    """The parameter of LIMIT that means no limit."""

    def table(self, kind: type[Record]) -> str:
        return self.prefix + TABLES[kind]

    def translate(self, kind: type[Record], condition: Condition, *, indexed: bool = True) -> Test | None:
        """Translates a condition to SQL; returns None if SQL could give a different answer than Python.

        Args:
            kind: the kind of record.
            condition: the condition.
            indexed: False if another condition of the query has a better index, so that this index must not be used.
        """
        name, op, value = condition
        if kind is Rollout and name in _INDEXED:
            keys = [self.index_key(item) for item in choices(condition)] if op in ("eq", "in") else [None]
            if None in keys or (len(keys) > 1 and any(isinstance(key, float) for key in keys)):
                return None
            return self._equals(_INDEXED[name], keys) if keys else _NEVER
        if name.startswith("metadata.") and op in ("eq", "in"):
            return self._test_metadata(name.removeprefix("metadata."), choices(condition))
        if kind is Attempt and name == "status" and op == "in" and frozenset(map(str, value)) == LIVE_ATTEMPT:
            return Test(self.live)
        expression, column = self._expression(kind, name)
        if expression is None:
            return None
        if op == "eq" and value is None:
            return Test(f"{expression} IS NULL") if name in _NULLABLE else _NEVER
        values = list(value) if op == "in" else [value]
        if None in values:
            return None
        if column in ("integer", "float"):
            expression = expression if indexed else f"({expression} + 0)"
            return self._compare(expression, column == "integer", op, values)
        expression = expression if indexed else self.unindexed.format(expression)
        texts = [item for item in values if isinstance(item, str)]
        if op in ("ge", "le") or not all(_is_plain(text, column) for text in texts):
            return None
        if not texts:
            return None if op == "contains" else _NEVER
        if op == "contains":
            is_id = kind is Rollout and name == "rollout_id"
            return Test(self.contains_id if is_id else self.contains.format(expression), (texts[0],))
        query = self._parents(kind) if name == "rollout_id" and kind in (Attempt, Span) else None
        if query is None:
            return self._equals(expression, texts)
        test = self._equals("r.rollout_id", texts)
        owner = "rollout" if kind is Attempt else "attempt"
        return Test(self.in_query.format(owner, f"{query} WHERE {test.sql}"), test.parameters)

    def order_of(self, kind: type[Record], field: str) -> str | None:
        """Returns an expression by which SQL sorts as Python would; None if there is none."""
        return self._expression(kind, field)[0]

    def _expression(self, kind: type[Record], field: str) -> tuple[str | None, ColumnType | None]:
        if field in COLUMNS[kind] and (field in kind.model_fields or field == "run_id"):
            return field, COLUMNS[kind][field]
        rollout, attempt = self.table(Rollout), self.table(Attempt)
        if kind is Attempt and field == "rollout_id":
            return f"(SELECT r.rollout_id FROM {rollout} r WHERE r.position = attempt.rollout)", "text"
        if kind is Span and field == "attempt_id":
            return f"(SELECT a.attempt_id FROM {attempt} a WHERE a.position = span.attempt)", "text"
        if kind is Span and field == "rollout_id":
            join = f"{attempt} a JOIN {rollout} r ON r.position = a.rollout"
            return f"(SELECT r.rollout_id FROM {join} WHERE a.position = span.attempt)", "text"
        return None, None

    def _test_metadata(self, key: str, values: Collection[Any]) -> Test | None:
        """Tests a key of the metadata that is not indexed; most records are left out by their text, unparsed."""
        path = self.json_key(key) if _is_plain(key, None) else None
        if not values:
            return _NEVER
        forms = [_json_forms(value) for value in values]
        if path is None or not all(forms) or (len(forms) > 1 and any(isinstance(value, float) for value in values)):
            return None
        texts = [text for form in forms for text in form]
        starts = dict.fromkeys(text.removesuffix(".0") for text in texts)
        parts = [f"{orjson.dumps(key).decode()}:{start}" for start in starts]
        test = self._equals(self.json_value, texts if self.compares_json else list(values))
        is_near = " OR ".join([self.contains.format("record")] * len(parts))
        return Test(f"(({is_near}) AND {test.sql})", (*parts, path, *test.parameters))

    def _parents(self, kind: type[Record]) -> str:
        """Returns a query for the positions that attempts or spans refer to, to be narrowed by the ids of rollouts."""
        rollout = self.table(Rollout)
        if kind is Attempt:
            return f"SELECT r.position FROM {rollout} r"
        return f"SELECT a.position FROM {rollout} r JOIN {self.table(Attempt)} a ON a.rollout = r.position"

    def _equals(self, expression: str, values: Sequence[Any]) -> Test:
        if len(values) == 1:
            return Test(f"{expression} = ?", (values[0],))
        return Test(self.in_list.format(expression), (self.make_list(values),))

    def _compare(self, expression: str, is_integer: bool, op: str, values: Sequence[Any]) -> Test | None:
        if op == "contains":
            return _NEVER
        numbers = [item for item in values if isinstance(item, (int, float))]
        if not numbers:
            return _NEVER
        if not all(_is_exact(number, is_integer) for number in numbers):
            return None
        sent = [int(number) if is_integer else float(number) for number in numbers]
        if op in ("ge", "le"):
            return Test(f"{expression} {'>=' if op == 'ge' else '<='} ?", (sent[0],))
        return None if len(sent) > 1 and not is_integer else self._equals(expression, sent)


def _json_forms(value: object) -> list[str]:
    """Returns the forms in which orjson writes values that equal this one; empty if they are not known."""
    if isinstance(value, str):
        return [orjson.dumps(value).decode()] if _is_plain(value, None) else []
    if not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return []
    if value != value // 1:
        return [orjson.dumps(value).decode()]
    return [str(int(value)), f"{int(value)}.0", *{0: ["false", "-0.0"], 1: ["true"]}.get(int(value), [])]


def _is_plain(text: str, column: ColumnType | None) -> bool:
    """Whether every database accepts a text and finds the same records by it as Python would."""
    if "\0" in text or (column == "label" and ("\ufffd" in text or len(text) >= LONGEST_LABEL)):
        return False
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def _is_exact(number: int | float, is_integer: bool) -> bool:
    """Whether a number is the same in its column's type."""
    if isinstance(number, float) and not math.isfinite(number):
        return False
    if is_integer:
        return number == int(number) and -(2**63) <= number < 2**63
    return -(2**53) <= number <= 2**53 or isinstance(number, float)
