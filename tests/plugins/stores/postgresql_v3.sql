-- What schema version 3 left in a database; never changed, so that later versions prove that they read it.
CREATE SCHEMA agl;
CREATE TYPE agl.new_span AS (
	span_id text,
	number bigint,
	start_time double precision,
	name text,
	trace_id text,
	parent_id text,
	record text
);
CREATE TYPE agl.step AS (
	item integer,
	step text,
	id text,
	second text,
	third text,
	number bigint,
	"time" double precision,
	run text,
	status text,
	first text,
	other text,
	last text,
	record text
);
CREATE FUNCTION agl.claim(locked text[], queues text[], limits integer[]) RETURNS TABLE(queue integer, revision bigint, attempts bigint, record text)
    LANGUAGE plpgsql
    AS $$
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
END $$;
CREATE FUNCTION agl.write(me bigint, batch_number bigint, heard_until bigint, n_items integer, steps agl.step[], spans agl.new_span[], OUT outcome jsonb, OUT heard jsonb) RETURNS record
    LANGUAGE plpgsql
    AS $$
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
END $$;
CREATE TABLE agl.attempt (
    "position" bigint NOT NULL,
    rollout bigint NOT NULL,
    attempt_id text NOT NULL COLLATE pg_catalog."C",
    sequence_id bigint NOT NULL,
    status text NOT NULL COLLATE pg_catalog."C",
    live boolean NOT NULL,
    worker_id text COLLATE pg_catalog."C",
    last_heartbeat_time double precision,
    last_span bigint DEFAULT 0 NOT NULL,
    revision bigint NOT NULL,
    record text NOT NULL
)
WITH (fillfactor='70');
ALTER TABLE agl.attempt ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME agl.attempt_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE agl.document (
    "position" bigint NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    id text NOT NULL COLLATE pg_catalog."C",
    number bigint NOT NULL,
    run_id text COLLATE pg_catalog."C",
    revision bigint NOT NULL,
    record text NOT NULL
)
WITH (fillfactor='70');
ALTER TABLE agl.document ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME agl.document_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE agl.event (
    "position" bigint NOT NULL,
    origin bigint NOT NULL,
    events text NOT NULL
);
ALTER TABLE agl.event ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME agl.event_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE VIEW agl.metrics AS
 SELECT "position",
    id AS run_id,
    number AS step,
    revision,
    record
   FROM agl.document
  WHERE (kind = 'metrics'::text);
CREATE SEQUENCE agl.queue
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE VIEW agl.resources AS
 SELECT "position",
    id AS resources_id,
    number AS version,
    run_id,
    revision,
    record
   FROM agl.document
  WHERE (kind = 'resources'::text);
CREATE TABLE agl.rollout (
    "position" bigint NOT NULL,
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL COLLATE pg_catalog."C",
    start_time double precision NOT NULL,
    task_id text COLLATE pg_catalog."C",
    group_id text COLLATE pg_catalog."C",
    step text COLLATE pg_catalog."C",
    queue_position bigint,
    revision bigint NOT NULL,
    record text NOT NULL
);
ALTER TABLE agl.rollout ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME agl.rollout_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE VIEW agl.run AS
 SELECT "position",
    id AS run_id,
    revision,
    record
   FROM agl.document
  WHERE (kind = 'runs'::text);
CREATE TABLE agl.schema_version (
    version integer NOT NULL
);
CREATE TABLE agl.span (
    "position" bigint NOT NULL,
    attempt bigint NOT NULL,
    span_id text NOT NULL COLLATE pg_catalog."C",
    sequence_id bigint NOT NULL,
    run_id text NOT NULL COLLATE pg_catalog."C",
    start_time double precision,
    name text COLLATE pg_catalog."C",
    trace_id text COLLATE pg_catalog."C",
    parent_id text COLLATE pg_catalog."C",
    revision bigint NOT NULL,
    record text NOT NULL
);
ALTER TABLE agl.span ALTER COLUMN "position" ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME agl.span_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE agl.tally (
    name text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL COLLATE pg_catalog."C",
    number bigint NOT NULL
)
WITH (fillfactor='20');
CREATE VIEW agl.worker AS
 SELECT "position",
    id AS worker_id,
    revision,
    record
   FROM agl.document
  WHERE (kind = 'workers'::text);
CREATE TABLE agl.writer (
    origin bigint NOT NULL,
    batch bigint NOT NULL,
    outcome jsonb NOT NULL,
    seen timestamp with time zone DEFAULT now() NOT NULL
)
WITH (fillfactor='20');
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (1, 1, 'at-602a5591f2e7448c', 1, 'succeeded', false, 'worker-1', 1795422544.471989, 2, 3, '{"rollout_id":"ro-6790b8c8851c1d07","attempt_id":"at-602a5591f2e7448c","sequence_id":1,"start_time":1795422544.4512036,"end_time":1795422544.471989,"status":"succeeded","worker_id":"worker-1","last_heartbeat_time":1795422544.471989,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (2, 2, 'at-3c6eccbc2b93dbf0', 1, 'failed', false, 'worker-2', 1795422544.4948335, 0, 2, '{"rollout_id":"ro-83fc980c556d89e8","attempt_id":"at-3c6eccbc2b93dbf0","sequence_id":1,"start_time":1795422544.49383,"end_time":1795422544.4948335,"status":"failed","worker_id":"worker-2","last_heartbeat_time":1795422544.4948335,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (1, 'runs', 'default', 0, NULL, 1, '{"run_id":"default","name":"first","created_at":1795422544.3072238,"config":{"algorithm":{"name":"apo"}},"status":"running","metadata":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (2, 'resources', 'rs-73989580b8b77d47', 1, 'default', 1, '{"resources_id":"rs-73989580b8b77d47","create_time":1795422544.4200625,"update_time":1795422544.4200625,"version":1,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (3, 'resources', 'rs-73989580b8b77d47', 2, 'default', 1, '{"resources_id":"rs-73989580b8b77d47","create_time":1795422544.4200625,"update_time":1795422544.428815,"version":2,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think twice.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (4, 'workers', 'worker-1', 0, NULL, 2, '{"worker_id":"worker-1","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422544.4512036,"last_dequeue_time":1795422544.4512036,"last_busy_time":1795422544.4512036,"last_idle_time":1795422544.471989,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null,"ended_at":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (5, 'metrics', 'default', 1, 'default', 1, '{"run_id":"default","step":1,"time":1795422544.4849875,"values":{"reward":0.5}}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (6, 'workers', 'worker-2', 0, NULL, 2, '{"worker_id":"worker-2","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422544.49383,"last_dequeue_time":1795422544.49383,"last_busy_time":1795422544.49383,"last_idle_time":1795422544.4948335,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null,"ended_at":null}');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (1, 45961123366669067, '[{"run_id":"default","time":1795422544.3072238,"kind":"run_started","name":"first"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (2, 45961123366669067, '[{"run_id":"default","time":1795422544.4200625,"kind":"resources_published","resources_id":"rs-73989580b8b77d47","version":1}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (3, 45961123366669067, '[{"run_id":"default","time":1795422544.428815,"kind":"resources_published","resources_id":"rs-73989580b8b77d47","version":2}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (4, 45961123366669067, '[{"run_id":"default","time":1795422544.436143,"kind":"rollout_enqueued","rollout_id":"ro-6790b8c8851c1d07"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (5, 45961123366669067, '[{"run_id":"default","time":1795422544.4512036,"kind":"rollout_started","rollout_id":"ro-6790b8c8851c1d07","attempt_id":"at-602a5591f2e7448c","worker_id":"worker-1"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (6, 45961123366669067, '[{"run_id":"default","time":1795422544.471989,"kind":"attempt_finished","rollout_id":"ro-6790b8c8851c1d07","attempt_id":"at-602a5591f2e7448c","status":"succeeded","error":null},{"run_id":"default","time":1795422544.471989,"kind":"rollout_finished","rollout_id":"ro-6790b8c8851c1d07","status":"succeeded","mode":"train"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (7, 45961123366669067, '[{"run_id":"default","time":1795422544.4849875,"kind":"step_finished","step":1,"values":{"reward":0.5}}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (8, 45961123366669067, '[{"run_id":"default","time":1795422544.4918983,"kind":"rollout_enqueued","rollout_id":"ro-83fc980c556d89e8"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (9, 45961123366669067, '[{"run_id":"default","time":1795422544.49383,"kind":"rollout_started","rollout_id":"ro-83fc980c556d89e8","attempt_id":"at-3c6eccbc2b93dbf0","worker_id":"worker-2"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (10, 45961123366669067, '[{"run_id":"default","time":1795422544.4948335,"kind":"attempt_finished","rollout_id":"ro-83fc980c556d89e8","attempt_id":"at-3c6eccbc2b93dbf0","status":"failed","error":null},{"run_id":"default","time":1795422544.4948335,"kind":"rollout_finished","rollout_id":"ro-83fc980c556d89e8","status":"failed","mode":null}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (11, 45961123366669067, '[{"run_id":"default","time":1795422544.521914,"kind":"rollout_enqueued","rollout_id":"ro-8b38f9ce41b605fa"}]');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (1, 'ro-6790b8c8851c1d07', 'default', 'succeeded', 1795422544.436143, 'st', 'sg', 'n1', NULL, 4, '{"rollout_id":"ro-6790b8c8851c1d07","input":{"question":"2 + 2"},"start_time":1795422544.436143,"end_time":1795422544.471989,"mode":"train","resources_id":"rs-73989580b8b77d47","status":"succeeded","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":{"step":1,"task_id":"t","group":"g"},"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (2, 'ro-83fc980c556d89e8', 'default', 'failed', 1795422544.4918983, NULL, NULL, NULL, NULL, 3, '{"rollout_id":"ro-83fc980c556d89e8","input":"fails","start_time":1795422544.4918983,"end_time":1795422544.4948335,"mode":null,"resources_id":"rs-73989580b8b77d47","status":"failed","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (3, 'ro-8b38f9ce41b605fa', 'default', 'queuing', 1795422544.521914, NULL, NULL, NULL, 3, 1, '{"rollout_id":"ro-8b38f9ce41b605fa","input":"waiting","start_time":1795422544.521914,"end_time":null,"mode":null,"resources_id":"rs-73989580b8b77d47","status":"queuing","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.schema_version VALUES (3);
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (1, 1, '790115daf436f76a', 1, 'default', 1795422544.4683056, 'chat', '5ce0dfd22c7fa13f81d8b10e660d29af', NULL, 1, '{"rollout_id":"ro-6790b8c8851c1d07","attempt_id":"at-602a5591f2e7448c","sequence_id":1,"trace_id":"5ce0dfd22c7fa13f81d8b10e660d29af","span_id":"790115daf436f76a","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":0},"events":[],"links":[],"start_time":1795422544.4683056,"end_time":1795422544.4683056,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (2, 1, '3099eb21bb4e180a', 2, 'default', 1795422544.4683492, 'chat', '933e7087a4dada8526d0a8004601ef79', NULL, 1, '{"rollout_id":"ro-6790b8c8851c1d07","attempt_id":"at-602a5591f2e7448c","sequence_id":2,"trace_id":"933e7087a4dada8526d0a8004601ef79","span_id":"3099eb21bb4e180a","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":1},"events":[],"links":[],"start_time":1795422544.4683492,"end_time":1795422544.4683492,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO agl.tally VALUES ('runs', '', '', 1);
INSERT INTO agl.tally VALUES ('resources', '', '', 2);
INSERT INTO agl.tally VALUES ('spans', 'default', '', 2);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'succeeded', 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'running', 0);
INSERT INTO agl.tally VALUES ('metrics', '', '', 1);
INSERT INTO agl.tally VALUES ('workers', '', '', 2);
INSERT INTO agl.tally VALUES ('attempts', 'default', '', 2);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'preparing', 0);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'failed', 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'queuing', 1);
INSERT INTO agl.writer VALUES (45961123366669067, 12, '{"told": 11, "numbers": [], "verdicts": ["done"]}', '2026-11-23 08:29:04.52227+00');
SELECT pg_catalog.setval('agl.attempt_position_seq', 2, true);
SELECT pg_catalog.setval('agl.document_position_seq', 6, true);
SELECT pg_catalog.setval('agl.event_position_seq', 11, true);
SELECT pg_catalog.setval('agl.queue', 3, true);
SELECT pg_catalog.setval('agl.rollout_position_seq', 3, true);
SELECT pg_catalog.setval('agl.span_position_seq', 2, true);
ALTER TABLE ONLY agl.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY agl.attempt
    ADD CONSTRAINT attempt_rollout_attempt_id_key UNIQUE (rollout, attempt_id);
ALTER TABLE ONLY agl.document
    ADD CONSTRAINT document_kind_id_number_key UNIQUE (kind, id, number);
ALTER TABLE ONLY agl.document
    ADD CONSTRAINT document_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY agl.event
    ADD CONSTRAINT event_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY agl.rollout
    ADD CONSTRAINT rollout_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY agl.rollout
    ADD CONSTRAINT rollout_rollout_id_key UNIQUE (rollout_id);
ALTER TABLE ONLY agl.span
    ADD CONSTRAINT span_attempt_span_id_key UNIQUE (attempt, span_id);
ALTER TABLE ONLY agl.span
    ADD CONSTRAINT span_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY agl.tally
    ADD CONSTRAINT tally_pkey PRIMARY KEY (name, run_id, status);
ALTER TABLE ONLY agl.writer
    ADD CONSTRAINT writer_pkey PRIMARY KEY (origin);
CREATE INDEX attempt_live ON agl.attempt USING btree (worker_id, "position") WHERE live;
CREATE INDEX document_id ON agl.document USING btree (kind, id, "position");
CREATE INDEX document_run ON agl.document USING btree (kind, run_id, "position");
CREATE INDEX rollout_group ON agl.rollout USING btree (group_id, "position") WHERE (group_id IS NOT NULL);
CREATE INDEX rollout_queue ON agl.rollout USING btree (run_id, queue_position) WHERE (queue_position IS NOT NULL);
CREATE INDEX rollout_run ON agl.rollout USING btree (run_id, "position");
CREATE INDEX rollout_status ON agl.rollout USING btree (run_id, status, "position");
CREATE INDEX rollout_step ON agl.rollout USING btree (step, "position") WHERE (step IS NOT NULL);
CREATE INDEX rollout_task ON agl.rollout USING btree (task_id, "position") WHERE (task_id IS NOT NULL);
CREATE INDEX span_run ON agl.span USING btree (run_id, "position");
