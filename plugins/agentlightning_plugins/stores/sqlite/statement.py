# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""The columns of each kind of record, and the statements that write and find one."""

from __future__ import annotations

from typing import Final

from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import KEYS
from agentlightning.types import Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.sql.condition import TABLES

COLUMNS: Final[dict[type[Record], tuple[str, ...]]] = {
    Run: ("run_id",),
    Rollout: ("rollout_id", "run_id", "status", "start_time", "task_id", "group_id", "step", "queue_position"),
    Attempt: ("rollout", "attempt_id", "sequence_id", "live", "worker_id", "last_heartbeat_time"),
    Span: ("attempt", "span_id", "sequence_id", "run_id", "start_time"),
    ResourcesUpdate: ("resources_id", "version", "run_id"),
    Worker: ("worker_id",),
    Metrics: ("run_id", "step"),
}
"""The columns in addition to the JSON of a record; the first ones, counted in ``FIXED``, never change.

For an attempt's heartbeat and a span's number only the column is current: both are set without rewriting the JSON.
"""


FIXED: Final[dict[type[Record], int]] = {
    Run: 1,
    Rollout: 2,
    Attempt: 2,
    Span: 2,
    ResourcesUpdate: 2,
    Worker: 1,
    Metrics: 2,
}
"""How many of the columns never change. Updates omit them, so that their indexes are not written again."""


def _insert(kind: type[Record]) -> str:
    columns = COLUMNS[kind]
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {TABLES[kind]} ({', '.join(columns)}, revision, record) VALUES ({marks}, 1, ?)"


def _update(kind: type[Record]) -> str:
    columns = "".join(f"{column} = ?, " for column in COLUMNS[kind][FIXED[kind] :])
    return f"UPDATE {TABLES[kind]} SET {columns}revision = revision + 1, record = ? WHERE position = ?"


INSERT: Final = {kind: _insert(kind) for kind in TABLES}
UPDATE: Final = {kind: _update(kind) for kind in TABLES}
FIND: Final[dict[type[Record], str]] = {
    kind: f"SELECT position, revision FROM {TABLES[kind]} WHERE " + " AND ".join(f"{field} = ?" for field in KEYS[kind])
    for kind in (Run, ResourcesUpdate, Worker, Metrics)
} | {
    Rollout: "SELECT position, revision, run_id, status, queue_position FROM rollout WHERE rollout_id = ?",
    Attempt: "SELECT position, revision, live, last_span FROM attempt WHERE rollout = ? AND attempt_id = ?",
    Span: "SELECT position, revision FROM span WHERE attempt = ? AND span_id = ?",
}
