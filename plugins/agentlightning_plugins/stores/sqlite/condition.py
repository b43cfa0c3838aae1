"""Conditions and orders of the backend in SQL, where SQL means the same as Python."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

import orjson

from agentlightning.store.backend import Condition
from agentlightning.types import LIVE_ATTEMPT, Attempt, Record, Rollout, Span
from agentlightning_plugins.stores.sql.document import document_fields
from agentlightning_plugins.stores.sql.plan import Test
from agentlightning_plugins.stores.sqlite.statement import COLUMNS

_INDEXED: Final = {"metadata.task_id": "task_id", "metadata.group": "group_id", "metadata.step": "step"}
_PARENTS: Final = {
    (Attempt, "rollout_id"): "(SELECT rollout_id FROM rollout WHERE rollout.position = attempt.rollout)",
    (Span, "attempt_id"): "(SELECT attempt_id FROM attempt WHERE attempt.position = span.attempt)",
    (Span, "rollout_id"): "(SELECT rollout_id FROM attempt JOIN rollout ON rollout.position = attempt.rollout "
    "WHERE attempt.position = span.attempt)",
}
_CHILDREN: Final = {
    (Attempt, "rollout_id"): "rollout IN (SELECT position FROM rollout WHERE rollout_id {})",
    (Span, "rollout_id"): "attempt IN (SELECT attempt.position FROM rollout JOIN attempt "
    "ON attempt.rollout = rollout.position WHERE rollout_id {})",
}
_IN: Final = "IN (SELECT value FROM json_each(?))"


def translate(kind: type[Record], condition: Condition, *, indexed: bool = True) -> Test | None:
    """A condition in SQL; None if SQL could answer otherwise than Python would.

    Args:
        kind: what is looked for.
        condition: the condition.
        indexed: whether its index may be used; another condition of the query may have a better one.
    """
    field, op, value = condition
    if op == "eq" and value is None:
        expression = field if field in COLUMNS[kind] else _json(field)  # an indexed column has no lists and dicts
        return None if expression is None else Test(f"{expression} IS NULL")
    expression, is_json = _expression(kind, field)
    if expression is None:
        return None
    if not indexed:
        expression = f"+{expression}"
    values = value if op == "in" else (value,)
    if not all(map(_is_bindable, values)):
        return None
    has_text = any(isinstance(item, str) for item in values)
    if is_json and not all(isinstance(item, str) for item in values) and (op in ("ge", "le") or _has_float(values)):
        return None  # SQLite may read the digits of a float as its neighbour
    if op in ("eq", "in"):
        test = _equals(kind, condition, expression)
    elif op == "contains":
        if not has_text:
            return None
        test = Test(f"(typeof({expression}) = 'text' AND instr({expression}, ?) > 0)", (value,))
    else:
        types = "('text')" if has_text else "('integer', 'real')"
        sign = ">=" if op == "ge" else "<="
        test = Test(f"(typeof({expression}) IN {types} AND {expression} {sign} ?)", (value,))
    if has_text and is_json and ("." in field or field in document_fields(kind)):
        number_types = ", 'integer', 'real', 'true', 'false'" if op == "in" else ""
        test = Test(f"({test.sql} AND json_type(record, {_path(field)}) IN ('text'{number_types}))", test.parameters)
    if kind is Attempt and field == "status" and op in ("eq", "in") and LIVE_ATTEMPT.issuperset(values):
        test = Test(f"(live = 1 AND {test.sql})", test.parameters)
    return test


def order_of(kind: type[Record], field: str) -> str | None:
    """An expression that SQL sorts by as Python would; None if there is none."""
    if field in COLUMNS[kind]:
        return field
    if (kind, field) in _PARENTS:
        return _PARENTS[kind, field]
    return None


def _equals(kind: type[Record], condition: Condition, expression: str) -> Test:
    """Reaches children through their parent, whose index is the only one that grows in its middle."""
    field, op, value = condition
    form = _CHILDREN.get((kind, field))
    if op == "in" and len(value) == 1:
        op, (value,) = "eq", value
    if op == "eq":
        return Test(form.format("= ?") if form else f"{expression} = ?", (value,))
    values = orjson.dumps(list(value)).decode()  # one parameter, however many there are
    return Test(form.format(_IN) if form else f"{expression} {_IN}", (values,))


def _expression(kind: type[Record], field: str) -> tuple[str | None, bool]:
    """What SQL compares, and whether it is read from the JSON."""
    if field in COLUMNS[kind]:
        return field, False
    if kind is Rollout and field in _INDEXED:
        return _INDEXED[field], False
    if (kind, field) in _PARENTS:
        return _PARENTS[kind, field], False
    return _json(field), True


def _json(field: str) -> str | None:
    path = _path(field)
    return None if path is None else f"json_extract(record, {path})"


def _path(field: str) -> str | None:
    """The path of a field as an SQL string; None for a key that JSON would write with a backslash."""
    name, dot, key = field.partition(".")
    if not dot:
        return f"'$.{name}'"
    if not key.isprintable() or any(sign in key for sign in '"\\'):
        return None
    return "'$.{}.\"{}\"'".format(name, key.replace("'", "''"))


def _is_bindable(value: Any) -> bool:
    """Whether SQL holds a value as it is."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)


def _has_float(values: Collection[Any]) -> bool:
    return any(isinstance(item, float) for item in values)
