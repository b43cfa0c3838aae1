-- What schema version 1 of sqlite_store left on disk; never changed, so that later versions prove that they read it.
PRAGMA application_id = 1095191635;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE attempt (
            position INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL, attempt_id NOT NULL,
            sequence_id NOT NULL, live, worker_id, last_heartbeat_time, last_span NOT NULL DEFAULT 0,
            revision NOT NULL, record NOT NULL, UNIQUE (rollout, attempt_id)
        );
INSERT INTO "attempt" VALUES(1,1,'at-4f32fdcb3dc1522c',1,NULL,'worker-1',1.79526793925137901309e+09,2,3,'{"rollout_id":"ro-c47dbf2d9d386aac","attempt_id":"at-4f32fdcb3dc1522c","sequence_id":1,"start_time":1795267939.2451875,"end_time":1795267939.251379,"status":"succeeded","worker_id":"worker-1","last_heartbeat_time":1795267939.251379,"metadata":null,"error":null,"late_status":null,"spans_dropped":0}');
CREATE TABLE event (position INTEGER PRIMARY KEY AUTOINCREMENT, origin NOT NULL, events NOT NULL);
INSERT INTO "event" VALUES(1,56477460384882912,'[{"run_id":"default","time":1795267939.2337482,"kind":"run_started","name":"first"}]');
INSERT INTO "event" VALUES(2,56477460384882912,'[{"run_id":"default","time":1795267939.2391303,"kind":"resources_published","resources_id":"rs-3049d4af53c2e7e6","version":1}]');
INSERT INTO "event" VALUES(3,56477460384882912,'[{"run_id":"default","time":1795267939.2408025,"kind":"resources_published","resources_id":"rs-3049d4af53c2e7e6","version":2}]');
INSERT INTO "event" VALUES(4,56477460384882912,'[{"run_id":"default","time":1795267939.2438078,"kind":"rollout_enqueued","rollout_id":"ro-c47dbf2d9d386aac"}]');
INSERT INTO "event" VALUES(5,56477460384882912,'[{"run_id":"default","time":1795267939.2451875,"kind":"rollout_started","rollout_id":"ro-c47dbf2d9d386aac","attempt_id":"at-4f32fdcb3dc1522c","worker_id":"worker-1"}]');
INSERT INTO "event" VALUES(6,56477460384882912,'[{"run_id":"default","time":1795267939.251379,"kind":"attempt_finished","rollout_id":"ro-c47dbf2d9d386aac","attempt_id":"at-4f32fdcb3dc1522c","status":"succeeded","error":null},{"run_id":"default","time":1795267939.251379,"kind":"rollout_finished","rollout_id":"ro-c47dbf2d9d386aac","status":"succeeded","mode":"train"}]');
INSERT INTO "event" VALUES(7,56477460384882912,'[{"run_id":"default","time":1795267939.2531924,"kind":"step_finished","step":1,"values":{"reward":0.5}}]');
INSERT INTO "event" VALUES(8,56477460384882912,'[{"run_id":"default","time":1795267939.2545328,"kind":"rollout_enqueued","rollout_id":"ro-80eb5592793f47fd"}]');
CREATE TABLE metrics (
            position INTEGER PRIMARY KEY AUTOINCREMENT, run_id NOT NULL, step NOT NULL, revision NOT NULL,
            record NOT NULL, UNIQUE (run_id, step)
        );
INSERT INTO "metrics" VALUES(1,'default',1,1,'{"run_id":"default","step":1,"time":1795267939.2531924,"values":{"reward":0.5}}');
CREATE TABLE resources (
            position INTEGER PRIMARY KEY AUTOINCREMENT, resources_id NOT NULL, version NOT NULL, run_id NOT NULL,
            revision NOT NULL, record NOT NULL, UNIQUE (resources_id, version)
        );
INSERT INTO "resources" VALUES(1,'rs-3049d4af53c2e7e6',1,'default',1,'{"resources_id":"rs-3049d4af53c2e7e6","create_time":1795267939.2391303,"update_time":1795267939.2391303,"version":1,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think.","engine":"f-string"}},"run_id":"default"}');
INSERT INTO "resources" VALUES(2,'rs-3049d4af53c2e7e6',2,'default',1,'{"resources_id":"rs-3049d4af53c2e7e6","create_time":1795267939.2391303,"update_time":1795267939.2408025,"version":2,"resources":{"prompt":{"resource_type":"prompt_template","template":"Think twice.","engine":"f-string"}},"run_id":"default"}');
CREATE TABLE rollout (
            position INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id NOT NULL UNIQUE, run_id NOT NULL, status NOT NULL,
            start_time NOT NULL, task_id, group_id, step, queue_position INTEGER,
            revision NOT NULL, record NOT NULL
        );
INSERT INTO "rollout" VALUES(1,'ro-c47dbf2d9d386aac','default','succeeded',1.79526793924380779262e+09,'t','g',1,NULL,4,'{"rollout_id":"ro-c47dbf2d9d386aac","input":{"question":"2 + 2"},"start_time":1795267939.2438078,"end_time":1795267939.251379,"mode":"train","resources_id":"rs-3049d4af53c2e7e6","status":"succeeded","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":{"group":"g","step":1,"task_id":"t"},"run_id":"default"}');
INSERT INTO "rollout" VALUES(2,'ro-80eb5592793f47fd','default','queuing',1.79526793925453281397e+09,NULL,NULL,NULL,1,1,'{"rollout_id":"ro-80eb5592793f47fd","input":"waiting","start_time":1795267939.2545328,"end_time":null,"mode":null,"resources_id":"rs-3049d4af53c2e7e6","status":"queuing","config":{"timeout_seconds":null,"unresponsive_seconds":null,"max_attempts":1,"retry_condition":[]},"metadata":null,"run_id":"default"}');
CREATE TABLE run (
            position INTEGER PRIMARY KEY AUTOINCREMENT, run_id NOT NULL UNIQUE, revision NOT NULL, record NOT NULL
        );
INSERT INTO "run" VALUES(1,'default',1,'{"run_id":"default","name":"first","created_at":1795267939.2337482,"config":{"lr":0.1},"status":"running","metadata":null}');
CREATE TABLE span (
            position INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, span_id NOT NULL,
            sequence_id NOT NULL, run_id NOT NULL, start_time, revision NOT NULL, record NOT NULL,
            UNIQUE (attempt, span_id)
        );
INSERT INTO "span" VALUES(1,1,'0000000000000001',1,'default',1795267939.24643,1,'{"rollout_id":"ro-c47dbf2d9d386aac","attempt_id":"at-4f32fdcb3dc1522c","sequence_id":0,"trace_id":"5efb610084e68d1b404ac2beadd79cd2","span_id":"0000000000000001","parent_id":null,"name":"call","status":{"status_code":"UNSET","description":null},"attributes":{"n":0},"events":[],"links":[],"start_time":1795267939.24643,"end_time":1795267939.24643,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
INSERT INTO "span" VALUES(2,1,'0000000000000002',2,'default',1.79526793924647355077e+09,1,'{"rollout_id":"ro-c47dbf2d9d386aac","attempt_id":"at-4f32fdcb3dc1522c","sequence_id":0,"trace_id":"c60e3017f9b4429db033e8f2f37eb891","span_id":"0000000000000002","parent_id":null,"name":"call","status":{"status_code":"UNSET","description":null},"attributes":{"n":1},"events":[],"links":[],"start_time":1795267939.2464736,"end_time":1795267939.2464736,"context":null,"parent":null,"resource":{"attributes":{},"schema_url":""}}');
CREATE TABLE tally (
            name NOT NULL, run_id NOT NULL, status NOT NULL, number NOT NULL, PRIMARY KEY (name, run_id, status)
        ) WITHOUT ROWID;
INSERT INTO "tally" VALUES('attempts','default','',1);
INSERT INTO "tally" VALUES('metrics','','',1);
INSERT INTO "tally" VALUES('resources','','',2);
INSERT INTO "tally" VALUES('rollouts','default','preparing',0);
INSERT INTO "tally" VALUES('rollouts','default','queuing',1);
INSERT INTO "tally" VALUES('rollouts','default','running',0);
INSERT INTO "tally" VALUES('rollouts','default','succeeded',1);
INSERT INTO "tally" VALUES('runs','','',1);
INSERT INTO "tally" VALUES('spans','default','',2);
INSERT INTO "tally" VALUES('workers','','',1);
CREATE TABLE worker (
            position INTEGER PRIMARY KEY AUTOINCREMENT, worker_id NOT NULL UNIQUE, revision NOT NULL, record NOT NULL
        );
INSERT INTO "worker" VALUES(1,'worker-1',2,'{"worker_id":"worker-1","status":"idle","heartbeat_stats":null,"last_heartbeat_time":1795267939.2451875,"last_dequeue_time":1795267939.2451875,"last_busy_time":1795267939.2451875,"last_idle_time":1795267939.251379,"current_rollout_id":null,"current_attempt_id":null}');
CREATE INDEX rollout_run ON rollout (run_id);
CREATE INDEX rollout_status ON rollout (run_id, status);
CREATE INDEX rollout_queue ON rollout (run_id, queue_position) WHERE queue_position IS NOT NULL;
CREATE INDEX rollout_task ON rollout (task_id) WHERE task_id IS NOT NULL;
CREATE INDEX rollout_group ON rollout (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX rollout_step ON rollout (step) WHERE step IS NOT NULL;
CREATE INDEX attempt_live ON attempt (live, worker_id) WHERE live IS NOT NULL;
CREATE INDEX span_run ON span (run_id);
CREATE INDEX resources_run ON resources (run_id);
CREATE INDEX resources_id ON resources (resources_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('run',1);
INSERT INTO "sqlite_sequence" VALUES('event',8);
INSERT INTO "sqlite_sequence" VALUES('resources',2);
INSERT INTO "sqlite_sequence" VALUES('rollout',2);
INSERT INTO "sqlite_sequence" VALUES('attempt',1);
INSERT INTO "sqlite_sequence" VALUES('worker',1);
INSERT INTO "sqlite_sequence" VALUES('span',2);
INSERT INTO "sqlite_sequence" VALUES('metrics',1);
COMMIT;
