-- What schema version 4 left in a database; never changed, so that later versions prove that they read it.
CREATE SCHEMA agl;
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
    events text NOT NULL,
    xid bigint DEFAULT 0 NOT NULL
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
    number bigint NOT NULL,
    slot integer DEFAULT 0 NOT NULL
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
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (1, 1, 'at-8002a2e7a339688b', 1, 'succeeded', false, 'worker-1', 1795422546.7807148, 2, 3, '{"rollout_id":"ro-3bf8a0cbd4944ab0","attempt_id":"at-8002a2e7a339688b","sequence_id":1,"start_time":1795422546.7684898,"end_time":1795422546.7807148,"status":"succeeded","worker_id":"worker-1","last_heartbeat_time":1795422546.7807148,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.attempt OVERRIDING SYSTEM VALUE VALUES (2, 2, 'at-90d02fcd65662e73', 1, 'failed', false, 'worker-2', 1795422546.8061593, 0, 2, '{"rollout_id":"ro-a505c94700e528a0","attempt_id":"at-90d02fcd65662e73","sequence_id":1,"start_time":1795422546.8049135,"end_time":1795422546.8061593,"status":"failed","worker_id":"worker-2","last_heartbeat_time":1795422546.8061593,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (1, 'runs', 'default', 0, NULL, 1, '{"run_id":"default","name":"first","created_at":1795422546.7086365,"config":{"algorithm":{"name":"apo"}},"status":"running","metadata":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (2, 'resources', 'rs-64d8a81abd60514e', 1, 'default', 1, '{"resources_id":"rs-64d8a81abd60514e","create_time":1795422546.7523792,"update_time":1795422546.7523792,"version":1,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (3, 'resources', 'rs-64d8a81abd60514e', 2, 'default', 1, '{"resources_id":"rs-64d8a81abd60514e","create_time":1795422546.7523792,"update_time":1795422546.7589526,"version":2,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think twice.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (4, 'workers', 'worker-1', 0, NULL, 2, '{"worker_id":"worker-1","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422546.7684898,"last_dequeue_time":1795422546.7684898,"last_busy_time":1795422546.7684898,"last_idle_time":1795422546.7807148,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null,"ended_at":null}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (5, 'metrics', 'default', 1, 'default', 1, '{"run_id":"default","step":1,"time":1795422546.7838748,"values":{"reward":0.5}}');
INSERT INTO agl.document OVERRIDING SYSTEM VALUE VALUES (6, 'workers', 'worker-2', 0, NULL, 2, '{"worker_id":"worker-2","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795422546.8049135,"last_dequeue_time":1795422546.8049135,"last_busy_time":1795422546.8049135,"last_idle_time":1795422546.8061593,"current_rollout_id":null,"current_attempt_id":null,"attempt_ids":null,"ended_at":null}');
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (1, 5486655841486156, '[{"run_id":"default","time":1795422546.7086365,"kind":"run_started","name":"first"}]', 798);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (2, 5486655841486156, '[{"run_id":"default","time":1795422546.7523792,"kind":"resources_published","resources_id":"rs-64d8a81abd60514e","version":1}]', 800);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (3, 5486655841486156, '[{"run_id":"default","time":1795422546.7589526,"kind":"resources_published","resources_id":"rs-64d8a81abd60514e","version":2}]', 802);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (4, 5486655841486156, '[{"run_id":"default","time":1795422546.7616735,"kind":"rollout_enqueued","rollout_id":"ro-3bf8a0cbd4944ab0"}]', 804);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (5, 5486655841486156, '[{"run_id":"default","time":1795422546.7684898,"kind":"rollout_started","rollout_id":"ro-3bf8a0cbd4944ab0","attempt_id":"at-8002a2e7a339688b","worker_id":"worker-1"}]', 807);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (6, 5486655841486156, '[{"run_id":"default","time":1795422546.7807148,"kind":"attempt_finished","rollout_id":"ro-3bf8a0cbd4944ab0","attempt_id":"at-8002a2e7a339688b","status":"succeeded","error":null},{"run_id":"default","time":1795422546.7807148,"kind":"rollout_finished","rollout_id":"ro-3bf8a0cbd4944ab0","status":"succeeded","mode":"train"}]', 811);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (7, 5486655841486156, '[{"run_id":"default","time":1795422546.7838748,"kind":"step_finished","step":1,"values":{"reward":0.5}}]', 813);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (8, 5486655841486156, '[{"run_id":"default","time":1795422546.7984152,"kind":"rollout_enqueued","rollout_id":"ro-a505c94700e528a0"}]', 815);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (9, 5486655841486156, '[{"run_id":"default","time":1795422546.8049135,"kind":"rollout_started","rollout_id":"ro-a505c94700e528a0","attempt_id":"at-90d02fcd65662e73","worker_id":"worker-2"}]', 818);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (10, 5486655841486156, '[{"run_id":"default","time":1795422546.8061593,"kind":"attempt_finished","rollout_id":"ro-a505c94700e528a0","attempt_id":"at-90d02fcd65662e73","status":"failed","error":null},{"run_id":"default","time":1795422546.8061593,"kind":"rollout_finished","rollout_id":"ro-a505c94700e528a0","status":"failed","mode":null}]', 820);
INSERT INTO agl.event OVERRIDING SYSTEM VALUE VALUES (11, 5486655841486156, '[{"run_id":"default","time":1795422546.8143983,"kind":"rollout_enqueued","rollout_id":"ro-868078df1bdba5ac"}]', 822);
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (1, 'ro-3bf8a0cbd4944ab0', 'default', 'succeeded', 1795422546.7616735, 'st', 'sg', 'n1', NULL, 4, '{"rollout_id":"ro-3bf8a0cbd4944ab0","input":{"question":"2 + 2"},"start_time":1795422546.7616735,"end_time":1795422546.7807148,"mode":"train","resources_id":"rs-64d8a81abd60514e","status":"succeeded","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":{"step":1,"task_id":"t","group":"g"},"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (2, 'ro-a505c94700e528a0', 'default', 'failed', 1795422546.7984152, NULL, NULL, NULL, NULL, 3, '{"rollout_id":"ro-a505c94700e528a0","input":"fails","start_time":1795422546.7984152,"end_time":1795422546.8061593,"mode":null,"resources_id":"rs-64d8a81abd60514e","status":"failed","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.rollout OVERRIDING SYSTEM VALUE VALUES (3, 'ro-868078df1bdba5ac', 'default', 'queuing', 1795422546.8143983, NULL, NULL, NULL, 3, 1, '{"rollout_id":"ro-868078df1bdba5ac","input":"waiting","start_time":1795422546.8143983,"end_time":null,"mode":null,"resources_id":"rs-64d8a81abd60514e","status":"queuing","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
INSERT INTO agl.schema_version VALUES (4);
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (1, 1, 'd18a45158e8dcdf4', 1, 'default', 1795422546.7711918, 'chat', '82c521274e1e78a5c344f02b7d6dbac7', NULL, 1, '{"rollout_id":"ro-3bf8a0cbd4944ab0","attempt_id":"at-8002a2e7a339688b","sequence_id":1,"trace_id":"82c521274e1e78a5c344f02b7d6dbac7","span_id":"d18a45158e8dcdf4","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":0},"events":[],"links":[],"start_time":1795422546.7711918,"end_time":1795422546.7711918,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO agl.span OVERRIDING SYSTEM VALUE VALUES (2, 1, '29bc808f1a089920', 2, 'default', 1795422546.7712169, 'chat', '0b3c72da722b4f2ed82d6d64b953110b', NULL, 1, '{"rollout_id":"ro-3bf8a0cbd4944ab0","attempt_id":"at-8002a2e7a339688b","sequence_id":2,"trace_id":"0b3c72da722b4f2ed82d6d64b953110b","span_id":"29bc808f1a089920","parent_id":null,"name":"chat","status":{"status_code":"UNSET","description":null},"attributes":{"n":1},"events":[],"links":[],"start_time":1795422546.7712169,"end_time":1795422546.7712169,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO agl.tally VALUES ('runs', '', '', 1, 1);
INSERT INTO agl.tally VALUES ('resources', '', '', 2, 1);
INSERT INTO agl.tally VALUES ('spans', 'default', '', 2, 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'succeeded', 1, 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'running', 0, 1);
INSERT INTO agl.tally VALUES ('metrics', '', '', 1, 1);
INSERT INTO agl.tally VALUES ('workers', '', '', 2, 1);
INSERT INTO agl.tally VALUES ('attempts', 'default', '', 2, 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'preparing', 0, 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'failed', 1, 1);
INSERT INTO agl.tally VALUES ('rollouts', 'default', 'queuing', 1, 1);
INSERT INTO agl.writer VALUES (5486655841486156, 13, '{"told": 11, "numbers": null}', '2026-11-23 08:29:06.822356+00');
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
    ADD CONSTRAINT tally_pkey PRIMARY KEY (name, run_id, status, slot);
ALTER TABLE ONLY agl.writer
    ADD CONSTRAINT writer_pkey PRIMARY KEY (origin);
CREATE INDEX attempt_live ON agl.attempt USING btree (worker_id, "position") WHERE live;
CREATE INDEX document_id ON agl.document USING btree (kind, id, "position");
CREATE INDEX document_run ON agl.document USING btree (kind, run_id, "position");
CREATE INDEX event_xid ON agl.event USING btree (xid);
CREATE INDEX rollout_group ON agl.rollout USING btree (group_id, "position") WHERE (group_id IS NOT NULL);
CREATE INDEX rollout_queue ON agl.rollout USING btree (run_id, queue_position) WHERE (queue_position IS NOT NULL);
CREATE INDEX rollout_run ON agl.rollout USING btree (run_id, "position");
CREATE INDEX rollout_status ON agl.rollout USING btree (run_id, status, "position");
CREATE INDEX rollout_step ON agl.rollout USING btree (step, "position") WHERE (step IS NOT NULL);
CREATE INDEX rollout_task ON agl.rollout USING btree (task_id, "position") WHERE (task_id IS NOT NULL);
CREATE INDEX span_run ON agl.span USING btree (run_id, "position");
