-- What schema version 1 left in a database; never changed, so that later versions prove that they read it.
CREATE SCHEMA agl;
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
CREATE FUNCTION agl.write(me bigint, batch_number bigint, heard_until bigint, n_items integer, items integer[], steps text[], ids text[], seconds text[], thirds text[], numbers bigint[], times double precision[], runs text[], statuses text[], firsts text[], others text[], lasts text[], records text[], span_ids text[], span_numbers bigint[], span_times double precision[], span_names text[], span_traces text[], span_parents text[], span_records text[], OUT outcome jsonb, OUT heard jsonb) RETURNS record
    LANGUAGE plpgsql
    AS $$
DECLARE
    s record;
    before record;
    home record;                    -- the attempt that spans are being appended to
    parent bigint;
    found_revision bigint;
    place bigint;
    failed int := -1;               -- the item of which the remaining steps are left out
    verdicts text[] := array_fill('done'::text, ARRAY[n_items]);
    given bigint[] := '{}';         -- the numbers of spans, NULL for one that was stored already
    told bigint;
    names text[] := '{}'; owners text[] := '{}'; states text[] := '{}'; changes int[] := '{}';
BEGIN
    PERFORM 1 FROM agl.rollout WHERE rollout_id = ANY (ARRAY(
        SELECT DISTINCT u.id FROM unnest(steps, ids) AS u (step, id)
        WHERE u.step IN ('guard rollout', 'put rollout', 'delete rollout')
    )) ORDER BY position FOR UPDATE;
    PERFORM pg_advisory_xact_lock(x'41474C02'::int);
    FOR s IN SELECT * FROM unnest(
        items, steps, ids, seconds, thirds, numbers, times, runs, statuses, firsts, others, lasts, records
    ) AS u (item, step, id, second, third, number, time, run, status, first, other, last, record) LOOP
        CONTINUE WHEN s.item = failed;
        CASE s.step
        WHEN 'append spans' THEN  -- of one attempt, all with a number or all without, no two with the same id
            WITH asked AS (
                SELECT u.*, p.position IS NULL AS is_new
                FROM unnest(span_ids[s.number:s.number + s.first::int - 1],
                    span_numbers[s.number:s.number + s.first::int - 1],
                    span_times[s.number:s.number + s.first::int - 1],
                    span_names[s.number:s.number + s.first::int - 1],
                    span_traces[s.number:s.number + s.first::int - 1],
                    span_parents[s.number:s.number + s.first::int - 1],
                    span_records[s.number:s.number + s.first::int - 1])
                WITH ORDINALITY AS u (span_id, number, start_time, name, trace_id, parent_id, record, n)
                LEFT JOIN agl.span p ON p.attempt = home.position AND p.span_id = u.span_id
            ), numbered AS (
                SELECT *, CASE WHEN NOT is_new THEN NULL WHEN number <> 0 THEN number
                    ELSE home.last_span + count(*) FILTER (WHERE is_new) OVER (ORDER BY n) END AS slot
                FROM asked
            ), added AS (
                INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, parent_id,
                    revision, record)
                SELECT home.position, span_id, slot, home.run_id, start_time, name, trace_id, parent_id, 1, record
                FROM numbered WHERE is_new ORDER BY n
            )
            SELECT given || array_agg(slot ORDER BY n), count(slot), greatest(home.last_span, max(slot))
            INTO given, parent, place FROM numbered;
            home.last_span := place;
            names := names || 'spans'::text; owners := owners || home.run_id; states := states || ''::text;
            changes := changes || parent::int;
        WHEN 'guard rollout' THEN
            SELECT revision INTO found_revision FROM agl.rollout WHERE rollout_id = s.id;
            IF coalesce(found_revision, 0) <> s.number THEN
                failed := s.item; verdicts[failed + 1] := 'refused';
            END IF;
        WHEN 'guard attempt' THEN
            SELECT a.revision INTO found_revision FROM agl.rollout r JOIN agl.attempt a ON a.rollout = r.position
            WHERE r.rollout_id = s.id AND a.attempt_id = s.second;
            IF coalesce(found_revision, 0) <> s.number THEN
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
            IF NOT EXISTS (SELECT FROM agl.rollout WHERE rollout_id = s.id) THEN
                failed := s.item; verdicts[failed + 1] := 'no rollout ' || s.id;
            END IF;
        WHEN 'need attempt' THEN
            SELECT position INTO parent FROM agl.rollout WHERE rollout_id = s.id;
            IF NOT FOUND THEN
                failed := s.item; verdicts[failed + 1] := 'no rollout ' || s.id;
            ELSIF NOT EXISTS (SELECT FROM agl.attempt WHERE rollout = parent AND attempt_id = s.second) THEN
                failed := s.item; verdicts[failed + 1] := 'no attempt ' || s.number;
            END IF;
        WHEN 'put rollout' THEN
            SELECT position, status, queue_position INTO before FROM agl.rollout WHERE rollout_id = s.id;
            IF NOT FOUND THEN
                INSERT INTO agl.rollout (rollout_id, run_id, status, start_time, task_id, group_id, step,
                    queue_position, revision, record)
                VALUES (s.id, s.run, s.status, s.time, s.first, s.other, s.last,
                    CASE WHEN s.status IN ('queuing', 'requeuing') THEN nextval('agl.queue') END, 1, s.record);
                names := names || 'rollouts'::text; owners := owners || s.run; states := states || s.status;
                changes := changes || 1;
            ELSE
                UPDATE agl.rollout SET status = s.status, start_time = s.time, task_id = s.first,
                    group_id = s.other, step = s.last, revision = revision + 1, record = s.record,
                    queue_position = CASE WHEN s.status IN ('queuing', 'requeuing')
                        THEN coalesce(before.queue_position, nextval('agl.queue')) END
                WHERE position = before.position;
                IF before.status <> s.status THEN
                    names := names || ARRAY['rollouts', 'rollouts']; owners := owners || ARRAY[s.run, s.run];
                    states := states || ARRAY[s.status, before.status]; changes := changes || ARRAY[1, -1];
                END IF;
            END IF;
        WHEN 'put attempt' THEN
            SELECT position, run_id INTO before FROM agl.rollout WHERE rollout_id = s.id;
            UPDATE agl.attempt SET sequence_id = s.number, status = s.status,
                live = s.status IN ('preparing', 'running'), worker_id = s.first, last_heartbeat_time = s.time,
                revision = revision + 1, record = s.record
            WHERE rollout = before.position AND attempt_id = s.second;
            IF NOT FOUND THEN
                INSERT INTO agl.attempt (rollout, attempt_id, sequence_id, status, live, worker_id,
                    last_heartbeat_time, revision, record)
                VALUES (before.position, s.second, s.number, s.status, s.status IN ('preparing', 'running'),
                    s.first, s.time, 1, s.record);
                names := names || 'attempts'::text; owners := owners || before.run_id; states := states || ''::text;
                changes := changes || 1;
            END IF;
        WHEN 'tell' THEN
            INSERT INTO agl.event (origin, events) VALUES (me, s.record) RETURNING position INTO told;
            IF told % 64 = 0 THEN
                DELETE FROM agl.event WHERE position <= told - s.number;
            END IF;
        WHEN 'open attempt' THEN
            SELECT a.position, a.last_span, r.run_id INTO home
            FROM agl.rollout r JOIN agl.attempt a ON a.rollout = r.position
            WHERE r.rollout_id = s.id AND a.attempt_id = s.second;
        WHEN 'close attempt' THEN
            UPDATE agl.attempt SET last_span = home.last_span, last_heartbeat_time =
                CASE WHEN live AND s.time IS NOT NULL THEN s.time ELSE last_heartbeat_time END
            WHERE position = home.position;
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
            WHERE attempt = home.position AND span_id = s.third;
            IF NOT FOUND THEN
                INSERT INTO agl.span (attempt, span_id, sequence_id, run_id, start_time, name, trace_id, parent_id,
                    revision, record)
                VALUES (home.position, s.third, s.number, home.run_id, s.time, s.first, s.other, s.last, 1, s.record);
                names := names || 'spans'::text; owners := owners || home.run_id; states := states || ''::text;
                changes := changes || 1;
            END IF;
        WHEN 'take number' THEN
            home.last_span := home.last_span + 1;
            given := given || home.last_span;
        WHEN 'delete rollout' THEN
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
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (1, 1, 'at-6de61623f027bd54', 1, 'succeeded', false, 'worker-1', 1795422539.5282893, 2, 3, '{"rollout_id":"ro-0d7076546415333e","attempt_id":"at-6de61623f027bd54","sequence_id":1,"start_time":1795422539.5228777,"end_time":1795422539.5282893,"status":"succeeded","worker_id":"worker-1","last_heartbeat_time":1795422539.5282893,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (2, 2, 'at-145cd8e23f5f353d', 1, 'failed', false, 'worker-2', 1795422539.5358405, 0, 2, '{"rollout_id":"ro-dcdc9c8103c5f742","attempt_id":"at-145cd8e23f5f353d","sequence_id":1,"start_time":1795422539.5347092,"end_time":1795422539.5358405,"status":"failed","worker_id":"worker-2","last_heartbeat_time":1795422539.5358405,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (1, 'runs', 'default', 0, NULL, 1, '{"run_id":"default","name":"first","created_at":1795422539.494522,"config":{"algorithm":{"name":"apo"}},"status":"running","metadata":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (2, 'resources', 'rs-b1fdf7804cbace30', 1, 'default', 1, '{"resources_id":"rs-b1fdf7804cbace30","create_time":1795422539.5140495,"update_time":1795422539.5140495,"version":1,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (3, 'resources', 'rs-b1fdf7804cbace30', 2, 'default', 1, '{"resources_id":"rs-b1fdf7804cbace30","create_time":1795422539.5140495,"update_time":1795422539.5159338,"version":2,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think twice.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (4, 'workers', 'worker-1', 0, NULL, 2, '{"worker_id":"worker-1","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422539.5228777,"last_dequeue_time":1795422539.5228777,"last_busy_time":1795422539.5228777,"last_idle_time":1795422539.5282893,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (5, 'metrics', 'default', 1, 'default', 1, '{"run_id":"default","step":1,"time":1795422539.5309308,"values":{"reward":0.5}}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (6, 'workers', 'worker-2', 0, NULL, 2, '{"worker_id":"worker-2","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422539.5347092,"last_dequeue_time":1795422539.5347092,"last_busy_time":1795422539.5347092,"last_idle_time":1795422539.5358405,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null}');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (1, 71234504916473637, '[{"run_id":"default","time":1795422539.494522,"kind":"run_started","name":"first"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (2, 71234504916473637, '[{"run_id":"default","time":1795422539.5140495,"kind":"resources_published","resources_id":"rs-b1fdf7804cbace30","version":1}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (3, 71234504916473637, '[{"run_id":"default","time":1795422539.5159338,"kind":"resources_published","resources_id":"rs-b1fdf7804cbace30","version":2}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (4, 71234504916473637, '[{"run_id":"default","time":1795422539.517366,"kind":"rollout_enqueued","rollout_id":"ro-0d7076546415333e"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (5, 71234504916473637, '[{"run_id":"default","time":1795422539.5228777,"kind":"rollout_started","rollout_id":"ro-0d7076546415333e","attempt_id":"at-6de61623f027bd54","worker_id":"worker-1"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (6, 71234504916473637, '[{"run_id":"default","time":1795422539.5282893,"kind":"attempt_finished","rollout_id":"ro-0d7076546415333e","attempt_id":"at-6de61623f027bd54","status":"succeeded","error":null},{"run_id":"default","time":1795422539.5282893,"kind":"rollout_finished","rollout_id":"ro-0d7076546415333e","status":"succeeded","mode":"train"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (7, 71234504916473637, '[{"run_id":"default","time":1795422539.5309308,"kind":"step_finished","step":1,"values":{"reward":0.5}}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (8, 71234504916473637, '[{"run_id":"default","time":1795422539.533398,"kind":"rollout_enqueued","rollout_id":"ro-dcdc9c8103c5f742"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (9, 71234504916473637, '[{"run_id":"default","time":1795422539.5347092,"kind":"rollout_started","rollout_id":"ro-dcdc9c8103c5f742","attempt_id":"at-145cd8e23f5f353d","worker_id":"worker-2"}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (10, 71234504916473637, '[{"run_id":"default","time":1795422539.5358405,"kind":"attempt_finished","rollout_id":"ro-dcdc9c8103c5f742","attempt_id":"at-145cd8e23f5f353d","status":"failed","error":null},{"run_id":"default","time":1795422539.5358405,"kind":"rollout_finished","rollout_id":"ro-dcdc9c8103c5f742","status":"failed","mode":null}]');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (11, 71234504916473637, '[{"run_id":"default","time":1795422539.5379753,"kind":"rollout_enqueued","rollout_id":"ro-c1e8cf3cda91f5f1"}]');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (1, 'ro-0d7076546415333e', 'default', 'succeeded', 1795422539.517366, 'st', 'sg', 'n1', NULL, 4, '{"rollout_id":"ro-0d7076546415333e","input":{"question":"2 + 2"},"start_time":1795422539.517366,"end_time":1795422539.5282893,"mode":"train","resources_id":"rs-b1fdf7804cbace30","status":"succeeded","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":{"step":1,"task_id":"t","group":"g"},"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (2, 'ro-dcdc9c8103c5f742', 'default', 'failed', 1795422539.533398, NULL, NULL, NULL, NULL, 3, '{"rollout_id":"ro-dcdc9c8103c5f742","input":"fails","start_time":1795422539.533398,"end_time":1795422539.5358405,"mode":null,"resources_id":"rs-b1fdf7804cbace30","status":"failed","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (3, 'ro-c1e8cf3cda91f5f1', 'default', 'queuing', 1795422539.5379753, NULL, NULL, NULL, 3, 1, '{"rollout_id":"ro-c1e8cf3cda91f5f1","input":"waiting","start_time":1795422539.5379753,"end_time":null,"mode":null,"resources_id":"rs-b1fdf7804cbace30","status":"queuing","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.schema_version VALUES (1);
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (1, 1, '14d3dc329d34c961', 1, 'default', 1795422539.524998, 'chat', 'a75d036698639828390a7a706bd8681f', NULL, 1, '{"rollout_id":"ro-0d7076546415333e","attempt_id":"at-6de61623f027bd54","sequence_id":1,"trace_id":"a75d036698639828390a7a706bd8681f","span_id":"14d3dc329d34c961","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":0},"events":[],"links":[],"start_time":1795422539.524998,"end_time":1795422539.524998,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (2, 1, '56bcfbdac2c04570', 2, 'default', 1795422539.5250242, 'chat', 'c06d77561efb372984974d3f21ac20cf', NULL, 1, '{"rollout_id":"ro-0d7076546415333e","attempt_id":"at-6de61623f027bd54","sequence_id":2,"trace_id":"c06d77561efb372984974d3f21ac20cf","span_id":"56bcfbdac2c04570","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":1},"events":[],"links":[],"start_time":1795422539.5250242,"end_time":1795422539.5250242,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
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
INSERT INTO agl.writer VALUES (71234504916473637, 13, '{"told": 11, "numbers": [], "verdicts": ["done"]}', '2026-11-23 08:28:59.538137+00');
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
