"""Conditions and orders of the backend in PostgreSQL's SQL, where it means the same as Python."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Condition
from agentlightning.types import LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.condition import choices
from agentlightning_plugins.stores.postgresql.operation import index_key
from agentlightning_plugins.stores.sql.plan import Planner, Test

TABLES: Final[dict[type[Record], str]] = {
    Run: "agl.run",
    Rollout: "agl.rollout",
    Attempt: "agl.attempt",
    Span: "agl.span",
    ResourcesUpdate: "agl.resources",
    Worker: "agl.worker",
    Metrics: "agl.metrics",
}
_TEXT: Final[dict[type[Record], frozenset[str]]] = {
    Run: frozenset({"run_id"}),
    Rollout: frozenset({"rollout_id", "run_id", "status"}),
    Attempt: frozenset({"attempt_id", "status", "worker_id"}),
    Span: frozenset({"span_id", "run_id", "name", "trace_id", "parent_id"}),
    ResourcesUpdate: frozenset({"resources_id", "run_id"}),
    Worker: frozenset({"worker_id"}),
    Metrics: frozenset({"run_id"}),
}
_INTEGER: Final[dict[type[Record], frozenset[str]]] = {
    Attempt: frozenset({"sequence_id"}),
    Span: frozenset({"sequence_id"}),
    ResourcesUpdate: frozenset({"version"}),
    Metrics: frozenset({"step"}),
}
_FLOAT: Final[dict[type[Record], frozenset[str]]] = {
    Rollout: frozenset({"start_time"}),
    Attempt: frozenset({"last_heartbeat_time"}),
    Span: frozenset({"start_time"}),
}
_NULLABLE: Final = frozenset({"worker_id", "last_heartbeat_time", "parent_id"})
_SHOWN: Final = frozenset({"name", "trace_id", "parent_id"})
"""Columns in which a NUL of the record is another character."""
_INDEXED: Final = {"metadata.task_id": "task_id", "metadata.group": "group_id", "metadata.step": "step"}
_PARENTS: Final = {
    (Attempt, "rollout_id"): "(SELECT rollout_id FROM agl.rollout r WHERE r.position = attempt.rollout)",
    (Span, "attempt_id"): "(SELECT attempt_id FROM agl.attempt a WHERE a.position = span.attempt)",
    (Span, "rollout_id"): "(SELECT rollout_id FROM agl.attempt a JOIN agl.rollout r ON r.position = a.rollout "
    "WHERE a.position = span.attempt)",
}
# The inner query is done first and its few positions are looked up: the planner need not guess how few they are.
_CHILDREN: Final = {
    (Attempt, "rollout_id"): "rollout = ANY (ARRAY(SELECT position FROM agl.rollout WHERE rollout_id {}))",
    (Span, "rollout_id"): "attempt = ANY (ARRAY(SELECT a.position FROM agl.rollout r JOIN agl.attempt a "
    "ON a.rollout = r.position WHERE r.rollout_id {}))",
}
_NEVER: Final = Test("false")


def translate(kind: type[Record], condition: Condition, *, indexed: bool = True) -> Test | None:
    """A condition in SQL; None if SQL could answer otherwise than Python would.

    Args:
        kind: what is looked for.
        condition: the condition.
        indexed: whether the indexes of rollouts by run and status may be used. Without fresh statistics PostgreSQL
            would prefer them to one that finds a few.
    """
    field, op, value = condition
    if kind is Rollout and field in _INDEXED:
        return _translate_indexed(_INDEXED[field], condition)
    is_text = field in _TEXT[kind] or (kind, field) in _PARENTS
    is_number = field in _INTEGER.get(kind, ()) or field in _FLOAT.get(kind, ())
    if not is_text and not is_number:
        return None
    if op == "eq" and value is None:
        return Test(f"{field} IS NULL") if field in _NULLABLE else _NEVER
    if op == "in" and any(item is None for item in value):
        return None
    if is_number:
        return _translate_number(kind, condition)
    expression = _PARENTS.get((kind, field), field)
    if kind is Rollout and field in ("run_id", "status") and not indexed:
        expression = f"({field} || '')"
    if op == "contains":
        if not isinstance(value, str) or not _is_sendable(value, field):
            return None
        return Test(f"strpos({expression}, ?) > 0", (value,))
    if op not in ("eq", "in"):
        return None
    texts = [item for item in choices(condition) if isinstance(item, str)]
    if not texts:
        return _NEVER
    if not all(_is_sendable(text, field) for text in texts):
        return None
    form = _CHILDREN.get((kind, field), f"{expression} {{}}")
    test = Test(form.format("= ?"), (texts[0],)) if len(texts) == 1 else Test(form.format("= ANY (?)"), (texts,))
    if kind is Attempt and field == "status" and LIVE_ATTEMPT.issuperset(texts):
        return Test(f"(live AND {test.sql})", test.parameters)
    return test


def order_of(kind: type[Record], field: str) -> str | None:
    """An expression that SQL sorts by as Python would; None if there is none."""
    if (kind, field) in _PARENTS:
        return _PARENTS[kind, field]
    if field in _TEXT[kind]:
        return None if field in _SHOWN else field
    return field if field in _INTEGER.get(kind, ()) or field in _FLOAT.get(kind, ()) else None


PLANNER: Final = Planner(TABLES, translate, order_of, tally="agl.tally", no_limit=None)


def _translate_indexed(column: str, condition: Condition) -> Test | None:
    if condition.op not in ("eq", "in"):
        return None
    keys = [index_key(value) for value in choices(condition)]
    if any(key is None or not _is_sendable(key, column) for key in keys):
        return None
    return Test(f"{column} = ?", (keys[0],)) if len(keys) == 1 else Test(f"{column} = ANY (?)", (keys,))


def _translate_number(kind: type[Record], condition: Condition) -> Test | None:
    field, op, value = condition
    if op == "contains":
        return _NEVER
    is_integer = field in _INTEGER.get(kind, ())
    numbers = [item for item in (value if op == "in" else (value,)) if isinstance(item, (int, float))]
    if not numbers:
        return _NEVER
    if not all(_is_exact(number, is_integer) for number in numbers):
        return None
    sent: list[int | float] = [int(number) if is_integer else float(number) for number in numbers]
    if op in ("ge", "le"):
        return Test(f"{field} {'>=' if op == 'ge' else '<='} ?", (sent[0],))
    return Test(f"{field} = ?", (sent[0],)) if len(sent) == 1 else Test(f"{field} = ANY (?)", (sent,))


def _is_sendable(text: str, field: str) -> bool:
    """Whether PostgreSQL takes a text, and finds by it what Python would."""
    if "\0" in text or (field in _SHOWN and "\ufffd" in text):
        return False
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def _is_exact(number: int | float, is_integer: bool) -> bool:
    """Whether a number is the same in its column's type."""
    if isinstance(number, float) and not math.isfinite(number):
        return False
    if is_integer:
        return number == int(number) and -(2**63) <= number < 2**63
    return -(2**53) <= number <= 2**53 or isinstance(number, float)


@lru_cache(maxsize=1000)
def number_parameters(sql: str) -> str:
    """The same with PostgreSQL's ``$1``, ``$2`` for each ``?``."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
