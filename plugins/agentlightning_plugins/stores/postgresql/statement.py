# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""The SQL statements that write, claim and read events.

Each is one statement in its own transaction, so row locks exist only while the server runs it: a client that is
slow, paused or offline holds none. Rows are locked with SKIP LOCKED, so writers never wait for each other and cannot
deadlock on rows; a row that another transaction has locked is reported as ``busy`` and the caller tries again.
"""

from __future__ import annotations

from typing import Final

# ``seen`` is what the statement's snapshot shows, ``position`` and ``revision`` belong to the locked row, which may be
# newer. Nothing is written unless every check of every caller holds (``go``).
_LOCK: Final = """
rollouts AS MATERIALIZED (
    SELECT t.*, seen.position AS seen, seen.run_id AS seen_run, held.*,
        coalesce(seen.position, CASE WHEN action = 'put' THEN nextval('agl.rollout_position_seq') END) AS place
    FROM ROWS FROM (json_to_recordset($1::json) AS (
        rollout_id text, locks bool, wanted bigint, needed bool, action text, run_id text, status text,
        start_time float8, end_time float8, task_id text, group_id text, step text, record text
    )) WITH ORDINALITY AS t
    LEFT JOIN agl.rollout seen ON seen.rollout_id = t.rollout_id
    LEFT JOIN LATERAL (
        SELECT position, revision, status AS old_status, queue_position FROM agl.rollout
        WHERE position = seen.position AND t.locks FOR UPDATE SKIP LOCKED
    ) held ON true
), parents AS MATERIALIZED (
    SELECT array_agg(place ORDER BY ordinality) AS places, array_agg(coalesce(seen_run, run_id) ORDER BY ordinality)
        AS runs FROM rollouts
), attempts AS MATERIALIZED (
    SELECT t.*, places[parent] AS rollout, runs[parent] AS run_id, seen.position AS seen, held.*,
        coalesce(seen.position, CASE WHEN action = 'put' THEN nextval('agl.attempt_position_seq') END) AS place
    FROM parents, ROWS FROM (json_to_recordset($2::json) AS (
        parent int, attempt_id text, wanted bigint, needed bool, action text, sequence_id bigint, status text,
        live bool, worker_id text, heartbeat float8, record text
    )) WITH ORDINALITY AS t
    LEFT JOIN LATERAL (
        SELECT position FROM agl.attempt a WHERE a.rollout = places[parent] AND a.attempt_id = t.attempt_id
    ) seen ON true
    LEFT JOIN LATERAL (
        SELECT position, revision, last_span FROM agl.attempt
        WHERE position = seen.position FOR UPDATE SKIP LOCKED
    ) held ON true
), owners AS MATERIALIZED (
    SELECT array_agg(place ORDER BY ordinality) AS places, array_agg(run_id ORDER BY ordinality) AS runs,
        array_agg(coalesce(last_span, 0) ORDER BY ordinality) AS counters FROM attempts
), spans AS MATERIALIZED (
    SELECT t.*, places[owner] AS attempt, runs[owner] AS run_id, counters[owner] AS counter, s.position, s.revision,
        action <> 'delete' AND (s.position IS NULL OR action = 'put') AS is_numbered
    FROM owners, ROWS FROM (json_to_recordset($3::json) AS (
        owner int, span_id text, wanted bigint, action text, sequence_id bigint, start_time float8, name text,
        trace_id text, parent_id text, record text
    )) WITH ORDINALITY AS t
    LEFT JOIN LATERAL (
        SELECT position, revision FROM agl.span WHERE attempt = places[owner] AND span_id = t.span_id
    ) s ON true
), documents AS MATERIALIZED (
    SELECT t.*, seen.position AS seen, held.* FROM ROWS FROM (json_to_recordset($4::json) AS (
        kind text, id text, number bigint, wanted bigint, action text, run_id text, record text
    )) WITH ORDINALITY AS t
    LEFT JOIN agl.document seen ON seen.kind = t.kind AND seen.id = t.id AND seen.number = t.number
    LEFT JOIN LATERAL (
        SELECT position, revision FROM agl.document WHERE position = seen.position FOR UPDATE SKIP LOCKED
    ) held ON true
), deleted AS MATERIALIZED (
    -- Attempts of rollouts that are deleted. A span may have been appended since the snapshot, which the deletion would
    -- not see: then the attempt has another version.
    SELECT a.position, r.seen_run AS run_id, r.ordinality, a.xmin IS DISTINCT FROM held.version AS is_busy
    FROM rollouts r JOIN agl.attempt a ON a.rollout = r.seen
    LEFT JOIN LATERAL (
        SELECT xmin AS version FROM agl.attempt WHERE position = a.position FOR UPDATE SKIP LOCKED
    ) held ON true
    WHERE r.action = 'delete'
)
"""

# A span without a number takes the number after the greatest one before it. If z spans up to here have no number, that
# is z plus the greatest of the counter and (number - z at that place) of the numbered spans before it.
_CHECK: Final = """
numbered AS MATERIALIZED (
    SELECT *, CASE WHEN sequence_id <> 0 THEN sequence_id
        ELSE z + greatest(counter, max(sequence_id - z) FILTER (WHERE sequence_id <> 0) OVER so_far) END AS slot
    FROM (
        SELECT *, count(*) FILTER (WHERE sequence_id = 0) OVER (PARTITION BY owner ORDER BY ordinality) AS z
        FROM spans WHERE is_numbered
    ) AS counted WINDOW so_far AS (PARTITION BY owner ORDER BY ordinality)
), counters AS MATERIALIZED (
    SELECT owner, max(slot) AS last_span FROM numbered GROUP BY owner
), last AS MATERIALIZED (
    SELECT batch FROM agl.writer WHERE origin = $5 FOR UPDATE
), failed AS MATERIALIZED (
    SELECT 'rollouts' AS part, ordinality, CASE
        WHEN locks AND seen IS NOT NULL AND position IS NULL THEN 'busy'
        WHEN coalesce(revision, 0) <> wanted THEN 'refused' WHEN needed AND seen IS NULL THEN 'unknown' END AS why
    FROM rollouts
    UNION ALL SELECT 'attempts', ordinality, CASE WHEN seen IS NOT NULL AND position IS NULL THEN 'busy'
        WHEN coalesce(revision, 0) <> wanted THEN 'refused' WHEN needed AND seen IS NULL THEN 'unknown' END
    FROM attempts
    UNION ALL SELECT 'documents', ordinality, CASE WHEN seen IS NOT NULL AND position IS NULL THEN 'busy'
        WHEN coalesce(revision, 0) <> wanted THEN 'refused' END
    FROM documents
    UNION ALL SELECT 'spans', ordinality, 'refused' FROM spans WHERE coalesce(revision, 0) <> wanted
    UNION ALL SELECT 'rollouts', ordinality, 'busy' FROM deleted WHERE is_busy
    UNION ALL SELECT 'batch', 0, 'repeated' FROM last WHERE batch >= $6
), go AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM failed WHERE why IS NOT NULL) AS ok
)
"""

_CHANGE: Final = """
updated_rollout AS (
    UPDATE agl.rollout o SET status = n.status, start_time = n.start_time, end_time = n.end_time, task_id = n.task_id,
        group_id = n.group_id, step = n.step, revision = o.revision + 1, record = n.record,
        queue_position = CASE WHEN n.status IN ('queuing', 'requeuing')
            THEN coalesce(n.queue_position, nextval('agl.queue')) END
    FROM rollouts n WHERE o.position = n.position AND action = 'put' AND (SELECT ok FROM go)
), inserted_rollout AS (
    INSERT INTO agl.rollout (position, rollout_id, run_id, status, start_time, end_time, task_id, group_id, step,
        queue_position, revision, record) OVERRIDING SYSTEM VALUE
    SELECT place, rollout_id, run_id, status, start_time, end_time, task_id, group_id, step,
        CASE WHEN status IN ('queuing', 'requeuing') THEN nextval('agl.queue') END, 1, record
    FROM rollouts WHERE action = 'put' AND seen IS NULL AND (SELECT ok FROM go) ORDER BY ordinality
), deleted_rollout AS (
    DELETE FROM agl.rollout o USING rollouts n
    WHERE o.position = n.position AND action = 'delete' AND (SELECT ok FROM go)
), updated_attempt AS (
    UPDATE agl.attempt o SET sequence_id = coalesce(n.sequence_id, o.sequence_id),
        status = coalesce(n.status, o.status), live = coalesce(n.live, o.live),
        worker_id = CASE WHEN action = 'put' THEN n.worker_id ELSE o.worker_id END,
        last_heartbeat_time = CASE WHEN action = 'put' OR o.live AND n.heartbeat IS NOT NULL THEN n.heartbeat
            ELSE o.last_heartbeat_time END,
        last_span = greatest(o.last_span, c.last_span), record = coalesce(n.record, o.record),
        revision = o.revision + CASE WHEN action = 'put' THEN 1 ELSE 0 END
    FROM attempts n LEFT JOIN counters c ON c.owner = n.ordinality
    WHERE o.position = n.position AND action IN ('put', 'append') AND (SELECT ok FROM go)
), inserted_attempt AS (
    INSERT INTO agl.attempt (position, rollout, attempt_id, sequence_id, status, live, worker_id, last_heartbeat_time,
        last_span, revision, record) OVERRIDING SYSTEM VALUE
    SELECT place, rollout, attempt_id, sequence_id, status, live, worker_id, heartbeat, coalesce(last_span, 0), 1,
        record
    FROM attempts n
    WHERE action = 'put' AND seen IS NULL AND (SELECT ok FROM go) ORDER BY ordinality
), deleted_attempt AS (
    DELETE FROM agl.attempt o USING (
        SELECT position FROM deleted UNION SELECT position FROM attempts WHERE action = 'delete'
    ) n WHERE o.position = n.position AND (SELECT ok FROM go)
    RETURNING o.position, o.rollout
), updated_span AS (
    UPDATE agl.span o SET sequence_id = slot, start_time = n.start_time, name = n.name, trace_id = n.trace_id,
        parent_id = n.parent_id, revision = o.revision + 1, record = n.record
    FROM numbered n WHERE o.position = n.position AND action = 'put' AND (SELECT ok FROM go)
), inserted_span AS (
    INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, parent_id, revision,
        record)
    SELECT attempt, span_id, slot, run_id, start_time, name, trace_id, parent_id, 1, record
    FROM numbered WHERE position IS NULL AND action <> 'number' AND (SELECT ok FROM go) ORDER BY ordinality
), deleted_span AS (
    DELETE FROM agl.span o USING (
        SELECT s.position FROM deleted_attempt a JOIN agl.span s ON s.attempt = a.position
        UNION SELECT position FROM spans WHERE action = 'delete'
    ) n WHERE o.position = n.position RETURNING o.run_id
), updated_document AS (
    UPDATE agl.document o SET run_id = n.run_id, revision = o.revision + 1, record = n.record
    FROM documents n WHERE o.position = n.position AND action = 'put' AND (SELECT ok FROM go)
), inserted_document AS (
    INSERT INTO agl.document (kind, id, number, run_id, revision, record)
    SELECT kind, id, number, run_id, 1, record FROM documents
    WHERE action = 'put' AND seen IS NULL AND (SELECT ok FROM go) ORDER BY kind, id, number
), deleted_document AS (
    DELETE FROM agl.document o USING documents n
    WHERE o.position = n.position AND action = 'delete' AND (SELECT ok FROM go)
), changes (name, run_id, status, number) AS (
    SELECT 'rollouts', run_id, status, 1 FROM rollouts WHERE action = 'put' AND old_status IS DISTINCT FROM status
    UNION ALL SELECT 'rollouts', seen_run, old_status, -1 FROM rollouts
    WHERE position IS NOT NULL AND (action = 'delete' OR action = 'put' AND old_status <> status)
    UNION ALL SELECT 'attempts', run_id, '', CASE action WHEN 'put' THEN 1 ELSE -1 END FROM attempts
    WHERE action = 'put' AND seen IS NULL OR action = 'delete' AND position IS NOT NULL
    UNION ALL SELECT 'attempts', run_id, '', -1 FROM deleted
    UNION ALL SELECT 'spans', run_id, '', 1 FROM numbered WHERE position IS NULL AND action <> 'number'
    UNION ALL SELECT 'spans', run_id, '', -1 FROM deleted_span
    UNION ALL SELECT kind, '', '', CASE action WHEN 'put' THEN 1 ELSE -1 END FROM documents
    WHERE action = 'put' AND seen IS NULL OR action = 'delete' AND position IS NOT NULL
), tallied AS (
    INSERT INTO agl.tally AS t (name, run_id, status, slot, number)
    SELECT name, run_id, status, $7, sum(number) FROM changes WHERE (SELECT ok FROM go)
    GROUP BY 1, 2, 3 HAVING sum(number) <> 0
    ON CONFLICT (name, run_id, status, slot) DO UPDATE SET number = t.number + excluded.number
), told AS (
    INSERT INTO agl.event (xid, origin, events)
    SELECT pg_current_xact_id()::text::bigint, $5, $8::text WHERE $8::text IS NOT NULL AND (SELECT ok FROM go)
    RETURNING position
), outcome AS (
    INSERT INTO agl.writer AS w (origin, batch, outcome)
    SELECT $5, $6, jsonb_build_object(
        'told', (SELECT position FROM told),
        'numbers', (SELECT json_agg(slot ORDER BY s.ordinality)
            FROM spans s LEFT JOIN numbered n ON n.ordinality = s.ordinality)
    ) WHERE (SELECT ok FROM go)
    ON CONFLICT (origin) DO UPDATE SET batch = excluded.batch, outcome = excluded.outcome, seen = now()
    RETURNING w.outcome
)
"""

# An event becomes visible when its transaction commits, which is not the order of positions or transaction ids. Events
# of transactions below the horizon of an earlier snapshot were visible in it. Above the horizon, the events of each
# process become visible in order, so the last event seen of each process determines which ones are new.
_EVENTS: Final = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS horizon,
    (SELECT json_agg(json_build_array(position, xid, origin, events) ORDER BY position) FROM agl.event
        WHERE xid >= {horizon} AND origin <> {me} AND position > coalesce(({seen}::jsonb ->> origin::text)::bigint, 0)
    ) AS events,
"""

WRITE: Final = (
    f"WITH {_LOCK.strip()}, {_CHECK.strip()}, {_CHANGE.strip()}"
    + _EVENTS.format(horizon="$9", me="$5", seen="$10")
    + "(SELECT json_agg(json_build_array(part, ordinality, why)) FROM failed WHERE why IS NOT NULL) AS failed, "
    "(SELECT outcome FROM outcome) AS outcome"
)
"""Checks and writes a batch, given rollouts, attempts, spans, documents, origin, batch, slot, events, horizon, seen."""

CANDIDATES: Final = """
SELECT r.revision, (SELECT count(*) FROM agl.attempt a WHERE a.rollout = r.position), r.record,
    set_config('synchronous_commit', 'off', true)
FROM agl.rollout r
JOIN LATERAL (
    SELECT FROM agl.rollout WHERE position = r.position AND revision = r.revision FOR UPDATE SKIP LOCKED
) free ON true
WHERE r.run_id = $1 AND r.queue_position IS NOT NULL ORDER BY r.queue_position LIMIT $2
"""
"""The head of a queue without the rows that others are claiming. The locks end with this statement, which need not
reach the disk; ``WRITE`` claims the rows only if their revisions are the same."""

NEW_EVENTS: Final = (
    _EVENTS.format(horizon="$1", me="$2", seen="$3") + "(SELECT coalesce(max(position), 0) FROM agl.event) AS newest"
)
OUTCOME: Final = "SELECT outcome FROM agl.writer WHERE origin = $1 AND batch = $2"
FORGET: Final = (
    "DELETE FROM agl.writer WHERE seen < now() - interval '7 days'",
    # Events of another server whose dump was restored here: transaction ids have started again.
    "DELETE FROM agl.event WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint",
)
# The lock is held as long as the connection, so that no two processes count in the same row.
SLOT: Final = "SELECT n FROM generate_series(1, 100000) AS n WHERE pg_try_advisory_lock(x'41474C02'::int, n) LIMIT 1"
