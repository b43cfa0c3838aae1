"""Conditions and orders of the backend in SQL, where SQL means the same as Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from agentlightning.store.backend import Condition
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.sqlite_store.document import document_fields
from agentlightning_plugins.sqlite_store.transaction import COLUMNS

_INDEXED: Final = {"metadata.task_id": "task_id", "metadata.group": "group_id", "metadata.step": "step"}
_ROLLOUT: Final = "(SELECT position FROM rollout WHERE rollout_id "
_IN: Final = "IN (SELECT value FROM json_each(?))"


class Test(NamedTuple):
    """A condition in SQL."""

    sql: str
    parameters: tuple[Any, ...] = ()


def translate(kind: type[Record], condition: Condition) -> Test | None:
    """A condition in SQL; None if SQL could answer otherwise than Python would."""
    field, op, value = condition
    expression = _expression(kind, field)
    if expression is None:
        return None
    is_free = "." in field  # any JSON may stand there: its lists and dicts are text to SQL
    if value is None and op == "eq":
        return Test(f"{expression} IS NULL")
    match op:
        case "eq" if _is_bindable(value):
            parent = _parent_test(kind, field, value)
            if parent is not None:
                return parent
            return _only_scalars(kind, field, Test(f"{expression} = ?", (value,)), is_free and isinstance(value, str))
        case "in" if all(map(_is_bindable, value)):
            values = orjson.dumps(list(value)).decode()
            if kind is Attempt and field == "rollout_id":
                return Test(f"rollout IN {_ROLLOUT}{_IN})", (values,))
            has_text = any(isinstance(item, str) for item in value)
            return _only_scalars(kind, field, Test(f"{expression} {_IN}", (values,)), is_free and has_text)
        case "contains" if isinstance(value, str) and _is_bindable(value):
            test = Test(f"(typeof({expression}) = 'text' AND instr({expression}, ?) > 0)", (value,))
            return _only_scalars(kind, field, test, is_free)
        case "ge" | "le" if _is_bindable(value):
            types = "('text')" if isinstance(value, str) else "('integer', 'real')"
            sign = ">=" if op == "ge" else "<="
            test = Test(f"(typeof({expression}) IN {types} AND {expression} {sign} ?)", (value,))
            return _only_scalars(kind, field, test, is_free and isinstance(value, str))
    return None


def order_of(kind: type[Record], field: str) -> str | None:
    """An expression that SQL sorts by as Python would; None if there is none."""
    return _expression(kind, field) if field not in document_fields(kind) else None
