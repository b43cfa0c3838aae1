"""The two functions in the database: a write of several callers, and the locking of rollouts that are claimed.

A write is one function, so that it is one round trip, and no lock is held while this process is slow, paused or gone.
``operation`` makes its steps.
"""

from __future__ import annotations

from typing import Final

# One array of rows, and not one array for each column: asyncpg looks at every element of an array in Python.
STEP: Final = """
CREATE TYPE agl.step AS (
    item int, step text, id text, second text, third text, number bigint, time float8,
    run text, status text, first text, other text, last text, record text
)
"""
NEW_SPAN: Final = """
CREATE TYPE agl.new_span AS (
    span_id text, number bigint, start_time float8, name text, trace_id text, parent_id text, record text
)
"""

# Locks are taken in one order, so that nobody waits in a circle: rollouts by position, then the one lock of writers,
# under which everything else is read and written. It makes positions of events those of the commits, too. Statements
# in a function see what was committed before each of them began, so what is read under the lock is the last word.
WRITE: Final = """
CREATE FUNCTION agl.write(
    me bigint, batch_number bigint, heard_until bigint, n_items int, steps agl.step[], spans agl.new_span[],
    OUT outcome jsonb, OUT heard jsonb
) LANGUAGE plpgsql AS $$
DECLARE
    s record;
    before record;
    -- The rollout and the attempt that the last step was about, as they are now: the steps of one caller, and often of
    -- several, are about the same, and under the lock nobody else changes them. Without a position there is none.
    rollout_now text; rollout_position bigint; rollout_revision bigint; rollout_run text; rollout_status text;
    rollout_queue bigint;
    attempt_now text; attempt_position bigint; attempt_revision bigint; attempt_span bigint;
    parent bigint;
    found_revision bigint;
    place bigint;
    failed int := -1;               -- the item of which the remaining steps are left out
    verdicts text[] := array_fill('done'::text, ARRAY[n_items]);
    given bigint[] := '{}';         -- the numbers of spans, NULL for one that was stored already
    tellings text[] := '{}';
    told bigint;
    kept_events bigint;
    names text[] := '{}'; owners text[] := '{}'; states text[] := '{}'; changes int[] := '{}';
BEGIN
    PERFORM 1 FROM agl.rollout WHERE rollout_id = ANY (ARRAY(
        SELECT DISTINCT u.id FROM unnest(steps) AS u
        WHERE u.step IN ('guard rollout', 'put rollout', 'delete rollout')
    )) ORDER BY position FOR UPDATE;
    PERFORM pg_advisory_xact_lock(x'41474C02'::int);
    FOR s IN SELECT * FROM unnest(steps) LOOP
        CONTINUE WHEN s.item = failed;
        IF s.id IS DISTINCT FROM rollout_now AND s.step IN ('guard rollout', 'guard attempt', 'need rollout',
            'need attempt', 'open attempt', 'put rollout', 'put attempt')
        THEN
            SELECT position, revision, run_id, status, queue_position
            INTO rollout_position, rollout_revision, rollout_run, rollout_status, rollout_queue
            FROM agl.rollout WHERE rollout_id = s.id;
            rollout_now := s.id; attempt_now := NULL;
        END IF;
        IF s.second IS DISTINCT FROM attempt_now AND s.step IN ('guard attempt', 'need attempt', 'open attempt') THEN
            SELECT position, revision, last_span INTO attempt_position, attempt_revision, attempt_span
            FROM agl.attempt WHERE rollout = rollout_position AND attempt_id = s.second;
            attempt_now := s.second;
        END IF;
        CASE s.step
        WHEN 'append spans' THEN  -- of one attempt, all with a number or all without, no two with the same id
            WITH asked AS (
                SELECT u.*, p.position IS NULL AS is_new
                FROM unnest(spans[s.number:s.number + s.first::int - 1])
                WITH ORDINALITY AS u (span_id, number, start_time, name, trace_id, parent_id, record, n)
                LEFT JOIN agl.span p ON p.attempt = attempt_position AND p.span_id = u.span_id
            ), numbered AS (
                SELECT *, CASE WHEN NOT is_new THEN NULL WHEN number <> 0 THEN number
                    ELSE attempt_span + count(*) FILTER (WHERE is_new) OVER (ORDER BY n) END AS slot
                FROM asked
            ), added AS (
                INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, parent_id,
                    revision, record)
                SELECT attempt_position, span_id, slot, rollout_run, start_time, name, trace_id, parent_id, 1, record
                FROM numbered WHERE is_new ORDER BY n
            )
            SELECT given || array_agg(slot ORDER BY n), count(slot), greatest(attempt_span, max(slot))
            INTO given, parent, place FROM numbered;
            attempt_span := place;
            names := names || 'spans'::text; owners := owners || rollout_run; states := states || ''::text;
            changes := changes || parent::int;
        WHEN 'guard rollout' THEN
            IF coalesce(rollout_revision, 0) <> s.number THEN
                failed := s.item; verdicts[failed + 1] := 'refused';
            END IF;
        WHEN 'guard attempt' THEN
            IF coalesce(attempt_revision, 0) <> s.number THEN
                failed := s.item; verdicts[failed + 1] := 'refused';
            END IF;
        WHEN 'guard span' THEN
            SELECT p.revision INTO found_revision FROM agl.rollout r JOIN agl.attempt a ON a.rollout = r.position
            JOIN agl.span p ON p.attempt = a.position
            WHERE r.rollout_id = s.id AND a.attempt_id = s.second AND p.span_id = s.third;
            IF coalesce(found_revision, 0) <> s.number THEN
                failed := s.item; verdicts[failed + 1] := 'refused';
            END IF;
        WHEN 'guard document' THEN
            SELECT revision INTO found_revision FROM agl.document
            WHERE kind = s.second AND id = s.id AND number = s.last::bigint;
            IF coalesce(found_revision, 0) <> s.number THEN
                failed := s.item; verdicts[failed + 1] := 'refused';
            END IF;
        WHEN 'need rollout' THEN
            IF rollout_position IS NULL THEN
                failed := s.item; verdicts[failed + 1] := 'no rollout ' || s.id;
            END IF;
        WHEN 'need attempt' THEN
            IF rollout_position IS NULL THEN
                failed := s.item; verdicts[failed + 1] := 'no rollout ' || s.id;
            ELSIF attempt_position IS NULL THEN
                failed := s.item; verdicts[failed + 1] := 'no attempt ' || s.number;
            END IF;
        WHEN 'put rollout' THEN
            IF rollout_position IS NULL THEN
                INSERT INTO agl.rollout (rollout_id, run_id, status, start_time, task_id, group_id, step,
                    queue_position, revision, record)
                VALUES (s.id, s.run, s.status, s.time, s.first, s.other, s.last,
                    CASE WHEN s.status IN ('queuing', 'requeuing') THEN nextval('agl.queue') END, 1, s.record)
                RETURNING position, queue_position INTO rollout_position, rollout_queue;
                rollout_revision := 1; rollout_run := s.run; rollout_status := s.status;
                names := names || 'rollouts'::text; owners := owners || s.run; states := states || s.status;
                changes := changes || 1;
            ELSE
                UPDATE agl.rollout SET status = s.status, start_time = s.time, task_id = s.first,
                    group_id = s.other, step = s.last, revision = revision + 1, record = s.record,
                    queue_position = CASE WHEN s.status IN ('queuing', 'requeuing')
                        THEN coalesce(rollout_queue, nextval('agl.queue')) END
                WHERE position = rollout_position
                RETURNING revision, queue_position INTO rollout_revision, rollout_queue;
                IF rollout_status <> s.status THEN
                    names := names || ARRAY['rollouts', 'rollouts']; owners := owners || ARRAY[s.run, s.run];
                    states := states || ARRAY[s.status, rollout_status]; changes := changes || ARRAY[1, -1];
                    rollout_status := s.status;
                END IF;
            END IF;
        WHEN 'put attempt' THEN
            IF s.second = attempt_now AND attempt_position IS NOT NULL THEN
                UPDATE agl.attempt SET sequence_id = s.number, status = s.status,
                    live = s.status IN ('preparing', 'running'), worker_id = s.first, last_heartbeat_time = s.time,
                    revision = revision + 1, record = s.record
                WHERE position = attempt_position RETURNING revision INTO attempt_revision;
            ELSE
                INSERT INTO agl.attempt AS a (rollout, attempt_id, sequence_id, status, live, worker_id,
                    last_heartbeat_time, revision, record)
                VALUES (rollout_position, s.second, s.number, s.status, s.status IN ('preparing', 'running'),
                    s.first, s.time, 1, s.record)
                ON CONFLICT (rollout, attempt_id) DO UPDATE SET sequence_id = excluded.sequence_id,
                    status = excluded.status, live = excluded.live, worker_id = excluded.worker_id,
                    last_heartbeat_time = excluded.last_heartbeat_time, revision = a.revision + 1,
                    record = excluded.record
                RETURNING position, revision, last_span INTO attempt_position, attempt_revision, attempt_span;
                attempt_now := s.second;
                IF attempt_revision = 1 THEN
                    names := names || 'attempts'::text; owners := owners || rollout_run; states := states || ''::text;
                    changes := changes || 1;
                END IF;
            END IF;
        WHEN 'tell' THEN
            tellings := tellings || s.record;
            kept_events := s.number;
        WHEN 'open attempt' THEN
            NULL;  -- the attempt of the steps that follow
        WHEN 'close attempt' THEN
            UPDATE agl.attempt SET last_span = attempt_span, last_heartbeat_time =
                CASE WHEN live AND s.time IS NOT NULL THEN s.time ELSE last_heartbeat_time END
            WHERE position = attempt_position;
        WHEN 'put document' THEN
            UPDATE agl.document SET run_id = s.run, revision = revision + 1, record = s.record
            WHERE kind = s.second AND id = s.id AND number = s.number;
            IF NOT FOUND THEN
                INSERT INTO agl.document (kind, id, number, run_id, revision, record)
                VALUES (s.second, s.id, s.number, s.run, 1, s.record);
                names := names || s.second; owners := owners || ''::text; states := states || ''::text;
                changes := changes || 1;
            END IF;
        WHEN 'put span' THEN
            UPDATE agl.span SET sequence_id = s.number, start_time = s.time, name = s.first, trace_id = s.other,
                parent_id = s.last, revision = revision + 1, record = s.record
            WHERE attempt = attempt_position AND span_id = s.third;
            IF NOT FOUND THEN
                INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, parent_id,
                    revision, record)
                VALUES (attempt_position, s.third, s.number, rollout_run, s.time, s.first, s.other, s.last, 1,
                    s.record);
                names := names || 'spans'::text; owners := owners || rollout_run; states := states || ''::text;
                changes := changes || 1;
            END IF;
        WHEN 'take number' THEN
            attempt_span := attempt_span + 1;
            given := given || attempt_span;
        WHEN 'delete rollout' THEN
            rollout_now := NULL;
            DELETE FROM agl.rollout WHERE rollout_id = s.id RETURNING position, run_id, status INTO before;
            IF FOUND THEN
                DELETE FROM agl.span
                WHERE attempt = ANY (ARRAY(SELECT position FROM agl.attempt WHERE rollout = before.position));
                GET DIAGNOSTICS place = ROW_COUNT;
                DELETE FROM agl.attempt WHERE rollout = before.position;
                GET DIAGNOSTICS parent = ROW_COUNT;
                names := names || ARRAY['rollouts', 'attempts', 'spans'];
                owners := owners || ARRAY[before.run_id, before.run_id, before.run_id];
                states := states || ARRAY[before.status, '', ''];
                changes := changes || ARRAY[-1, -parent::int, -place::int];
            END IF;
        WHEN 'delete attempt' THEN
            rollout_now := NULL;
            DELETE FROM agl.attempt a USING agl.rollout r
            WHERE r.rollout_id = s.id AND a.rollout = r.position AND a.attempt_id = s.second
            RETURNING a.position, r.run_id INTO before;
            IF FOUND THEN
                DELETE FROM agl.span WHERE attempt = before.position;
                GET DIAGNOSTICS place = ROW_COUNT;
                names := names || ARRAY['attempts', 'spans']; owners := owners || ARRAY[before.run_id, before.run_id];
                states := states || ARRAY['', '']; changes := changes || ARRAY[-1, -place::int];
            END IF;
        WHEN 'delete span' THEN
            DELETE FROM agl.span p USING agl.rollout r, agl.attempt a
            WHERE r.rollout_id = s.id AND a.rollout = r.position AND a.attempt_id = s.second
            AND p.attempt = a.position AND p.span_id = s.third
            RETURNING r.run_id INTO before;
            IF FOUND THEN
                names := names || 'spans'::text; owners := owners || before.run_id; states := states || ''::text;
                changes := changes || -1;
            END IF;
        WHEN 'delete document' THEN
            DELETE FROM agl.document WHERE kind = s.second AND id = s.id AND number = s.number;
            IF FOUND THEN
                names := names || s.second; owners := owners || ''::text; states := states || ''::text;
                changes := changes || -1;
            END IF;
        END CASE;
    END LOOP;
    INSERT INTO agl.tally AS t (name, run_id, status, number)
    SELECT u.name, u.owner, u.state, sum(u.change) FROM unnest(names, owners, states, changes)
        AS u (name, owner, state, change) GROUP BY 1, 2, 3 HAVING sum(u.change) <> 0
    ON CONFLICT (name, run_id, status) DO UPDATE SET number = t.number + excluded.number;
    IF tellings <> '{}' THEN
        INSERT INTO agl.event (origin, events) VALUES (me, '[' || array_to_string(tellings, ',') || ']')
        RETURNING position INTO told;
        IF told % 64 = 0 THEN
            DELETE FROM agl.event WHERE position <= told - kept_events;
        END IF;
    END IF;
    SELECT jsonb_agg(jsonb_build_array(e.position, e.events) ORDER BY e.position) INTO heard
    FROM agl.event e WHERE e.position > heard_until AND e.origin <> me;
    outcome := jsonb_build_object('verdicts', verdicts, 'numbers', given, 'told', told);
    INSERT INTO agl.writer AS w (origin, batch, outcome) VALUES (me, batch_number, write.outcome)
    ON CONFLICT (origin) DO UPDATE SET batch = excluded.batch, outcome = excluded.outcome, seen = now();
    IF told IS NOT NULL THEN
        PERFORM pg_notify('agl', me::text);
    END IF;
END $$
"""

# The n-th run is asked for as many as the n-th limit says. ``locked`` are the rollouts that the same transaction will
# write besides: they are locked first and in order, because taking the queue's does not wait. Attempts are counted
# after the lock was won, by a statement of its own: another process may have had the rollout a moment ago.
CLAIM: Final = """
CREATE FUNCTION agl.claim(locked text[], queues text[], limits int[])
RETURNS TABLE (queue int, revision bigint, attempts bigint, record text) LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    PERFORM 1 FROM agl.rollout WHERE rollout_id = ANY (locked) ORDER BY position FOR UPDATE;
    FOR n IN 1 .. cardinality(queues) LOOP
        FOR r IN SELECT o.position, o.revision, o.record FROM agl.rollout o
            WHERE o.run_id = queues[n] AND o.queue_position IS NOT NULL
            ORDER BY o.queue_position LIMIT limits[n] FOR UPDATE SKIP LOCKED
        LOOP
            SELECT n - 1, r.revision, count(*), r.record INTO queue, revision, attempts, record
            FROM agl.attempt a WHERE a.rollout = r.position;
            RETURN NEXT;
        END LOOP;
    END LOOP;
END $$
"""
