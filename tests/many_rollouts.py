"""Fills a database with many finished rollouts by SQL, which is much faster than the store's API."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

import asyncpg

from agentlightning.types import Attempt, Rollout, Span
from agentlightning_plugins.stores.shared.sql.document import encode

FIRST_TIME: Final = 1_700_000_000.5
"""Start time of the first rollout. Each further one starts 10 ms later, and each takes 1 s to 1.7 s."""
ROLLOUTS_OF_STEP: Final = 512
FAILED_OF: Final = 50
"""One in this many rollouts failed."""
_START, _END, _STATUS = 111.25, 222.25, "succeeded"
_METADATA: Final = {"step": 333333, "task_id": 444444, "group": "@group"}
_RECORDS: Final = (
    Rollout(
        rollout_id="@rollout",
        run_id="@run",
        input={"question": "How long does a train take from A to B, if it stops twice? " * 12, "number": 555555},
        start_time=_START,
        end_time=_END,
        mode="train",
        status="succeeded",
        metadata=_METADATA,
    ),
    Attempt(
        rollout_id="@rollout",
        attempt_id="at-1",
        sequence_id=1,
        start_time=_START,
        end_time=_END,
        status="succeeded",
        worker_id="runner-1",
        reward=0.125,
    ),
    Span.from_attributes(
        name="openai.chat.completion",
        attributes={"gen_ai.request.model": "tiny", "gen_ai.usage.output_tokens": 12, "gen_ai.completion": "two hours"},
        rollout_id="@rollout",
        attempt_id="at-1",
        span_id="@span",
        trace_id="@trace",
        sequence_id=1,
        start_time=_START,
        end_time=_END,
    ),
)
_VALUES: Final = f"""
    SELECT n, {{id}} AS rollout_id, {FIRST_TIME} + n * 0.01 AS start_time,
        {FIRST_TIME} + n * 0.01 + 1 + (n * 7 % 71) * 0.01 AS end_time,
        CASE WHEN n % {FAILED_OF} = 0 THEN 'failed' ELSE 'succeeded' END AS status,
        n / {ROLLOUTS_OF_STEP} AS step, n % 64 AS task, (n / 8) || '-0' AS group_name
    FROM {{numbers}}"""


def _document(record: Rollout | Attempt | Span) -> str:
    """Returns an SQL expression for the record of a row of ``_VALUES`` as JSON."""
    text = encode(record)
    expression = "'" + text.replace("'", "''") + "'"
    replaced = {
        "@rollout": "rollout_id",
        "@group": "group_name",
        "@trace": "rollout_id",
        "@span": "rollout_id || '-' || k",
        '"sequence_id":1,"span': """'"sequence_id":' || k || ',"span'""",
        str(_START): "CAST(start_time AS TEXT)",
        str(_END): "CAST(end_time AS TEXT)",
        f'"status":"{_STATUS}"': """'"status":"' || status || '"'""",
        "333333": "CAST(step AS TEXT)",
        "444444": "CAST(task AS TEXT)",
        "555555": "CAST(n AS TEXT)",
        "0.125": "CASE n % 3 WHEN 0 THEN '1.0' ELSE '0.0' END",
    }
    for mark, value in replaced.items():
        if mark in text:
            expression = f"replace({expression}, '{mark}', {value})"
    return expression


def _tally(number: int, spans: int, run_id: str) -> list[tuple[str, str, str, int]]:
    failed = (number + FAILED_OF - 1) // FAILED_OF
    return [
        ("rollouts", run_id, "succeeded", number - failed),
        ("rollouts", run_id, "failed", failed),
        ("attempts", run_id, "", number),
        ("spans", run_id, "", number * spans),
    ]


def fill_sqlite(path: Path, number: int, *, spans: int = 1, run_id: str = "default") -> None:
    """Adds rollouts to a store's file, which no process may have open."""
    rollout, attempt, span = [_document(record).replace("@run", run_id) for record in _RECORDS]
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -400000")
    connection.execute("BEGIN")
    numbers = f"WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n + 1 < {number})"
    values = _VALUES.format(id="'ro-' || lower(hex(randomblob(8)))", numbers="c")
    connection.execute(f"CREATE TEMP TABLE v AS {numbers} {values}")
    ((first,),) = connection.execute("SELECT coalesce(max(position), 0) + 1 FROM rollout").fetchall()
    ((first_attempt,),) = connection.execute("SELECT coalesce(max(position), 0) + 1 FROM attempt").fetchall()
    connection.execute(
        "INSERT INTO rollout (position, rollout_id, run_id, status, start_time, end_time, task_id, group_id, step, "
        f"mode, priority, revision, record) SELECT n + {first}, rollout_id, '{run_id}', status, start_time, end_time, "
        f"task, group_name, step, 'train', 0, 3, {rollout} FROM v ORDER BY n"
    )
    connection.execute(
        "INSERT INTO attempt (position, rollout, attempt_id, sequence_id, status, worker_id, last_span, revision, "
        f"record) SELECT n + {first_attempt}, n + {first}, 'at-1', 1, status, 'runner-1', {spans}, 2, {attempt} FROM v "
        "ORDER BY n"
    )
    for k in range(1, spans + 1):
        document = span.replace("|| k", f"|| '{k}'")
        connection.execute(
            "INSERT INTO span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, revision, record) "
            f"SELECT n + {first_attempt}, rollout_id || '-' || '{k}', {k}, '{run_id}', start_time, "
            f"'openai.chat.completion', rollout_id, 1, {document} FROM v ORDER BY n"
        )
    add = "INSERT INTO tally VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number"
    connection.executemany(add, _tally(number, spans, run_id))
    connection.execute("DROP TABLE v")
    connection.execute("COMMIT")
    connection.close()


async def fill_postgresql(url: str, number: int, *, spans: int = 1, run_id: str = "default") -> None:
    """Adds rollouts to a store's database, which no process may have open, and vacuums it as autovacuum would."""
    rollout, attempt, span = [_document(record).replace("@run", run_id) for record in _RECORDS]
    connection = await asyncpg.connect(url)
    some_id, numbers = "'ro-' || substr(md5(random()::text), 1, 16)", f"generate_series(0, {number - 1}) AS n"
    values = _VALUES.format(id=some_id, numbers=numbers)
    await connection.execute("SET synchronous_commit = on")  # otherwise VACUUM may not see the rows as committed
    await connection.execute(f"CREATE TEMP TABLE v AS {values}")
    first = await connection.fetchval("SELECT coalesce(max(position), 0) + 1 FROM agl.rollout")
    first_attempt = await connection.fetchval("SELECT coalesce(max(position), 0) + 1 FROM agl.attempt")
    await connection.execute(
        f"INSERT INTO agl.rollout (position, rollout_id, run_id, status, start_time, end_time, task_id, group_id, "
        f"step, mode, priority, revision, record) OVERRIDING SYSTEM VALUE SELECT n + {first}, rollout_id, '{run_id}', "
        f"status, start_time, end_time, 'n' || task, 's' || group_name, 'n' || step, 'train', 0, 3, {rollout} FROM v "
        "ORDER BY n"
    )
    await connection.execute(
        "INSERT INTO agl.attempt (position, rollout, attempt_id, sequence_id, status, live, worker_id, last_span, "
        f"revision, record) OVERRIDING SYSTEM VALUE SELECT n + {first_attempt}, n + {first}, 'at-1', 1, status, false, "
        f"'runner-1', {spans}, 2, {attempt} FROM v ORDER BY n"
    )
    await connection.execute(
        "INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, xid, revision, "
        f"record) SELECT n + {first_attempt}, rollout_id || '-' || k, k, '{run_id}', start_time, "
        f"'openai.chat.completion', rollout_id, 1, 1, {span} FROM v, generate_series(1, {spans}) AS k ORDER BY n, k"
    )
    for table in ("rollout", "attempt"):
        sequence = f"agl.{table}_position_seq"
        await connection.execute(f"SELECT setval('{sequence}', (SELECT max(position) FROM agl.{table}))")
    add = "INSERT INTO agl.tally AS t VALUES ($1, $2, $3, $4) ON CONFLICT (name, run_id, status, slot) "
    add += "DO UPDATE SET number = t.number + excluded.number"
    await connection.executemany(add, _tally(number, spans, run_id))
    await connection.execute("DROP TABLE v")
    for table in ("rollout", "attempt", "span"):
        await connection.execute(f"VACUUM ANALYZE agl.{table}")
    await connection.close()
