"""SQLite's dialect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import orjson

from agentlightning_plugins.stores.shared.sql.condition import Dialect
from agentlightning_plugins.stores.shared.sql.plan import Planner


def index_key(value: object) -> str | int | float | None:
    """Returns the value itself, because columns have no types; None if it is not indexed but found by its JSON."""
    if isinstance(value, str):
        return None if any("\ud800" <= sign <= "\udfff" for sign in value) else value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _make_list(values: Sequence[Any]) -> str:
    """Encodes any number of values as one parameter."""
    return orjson.dumps(list(values)).decode()


PLANNER: Final = Planner(
    Dialect(
        prefix="",
        in_list="{} IN (SELECT value FROM json_each(?))",
        in_query="{} IN ({})",
        contains="instr({}, ?) > 0",
        contains_id="position IN (SELECT position FROM rollout WHERE instr(rollout_id, ?) > 0)",
        finds_ids_in_order=True,
        unindexed="+{}",
        live="live = 1",
        make_list=_make_list,
        index_key=index_key,
        no_limit=-1,
    )
)
