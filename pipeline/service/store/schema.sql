-- What the service keeps. Statements between "-- version N" lines bring a database from version N - 1 to N; a version
-- that has been released is never edited. Times are seconds since 1970 (UTC); JSON stands in TEXT.

-- version 1

CREATE TABLE jobs (
  number         INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of submission
  id             TEXT NOT NULL UNIQUE,
  owner          TEXT NOT NULL,
  workload       TEXT NOT NULL,
  input          TEXT NOT NULL,
  output         TEXT NOT NULL,
  parameters     TEXT NOT NULL,                      -- JSON, as the user gave them
  priority       INTEGER NOT NULL,
  array_id       TEXT,                               -- of jobs submitted as one array
  array_index    INTEGER,
  -- The state machine's (pipeline/service/jobs.py)
  state          TEXT NOT NULL,
  epoch          INTEGER NOT NULL,
  attempts       INTEGER NOT NULL,
  cancelling     INTEGER NOT NULL,
  chunks         INTEGER,
  chunks_done    INTEGER NOT NULL,
  error          TEXT,
  story          TEXT NOT NULL,                      -- JSON list
  -- Everybody else's
  submitted_at   REAL NOT NULL,
  changed_at     REAL NOT NULL,
  started_at     REAL,                               -- first claim since it was submitted or retried
  finished_at    REAL,
  device_seconds REAL NOT NULL DEFAULT 0,
  runner         TEXT,                               -- who holds the lease
  lease_until    REAL,
  receipt        TEXT                                -- JSON, once it has succeeded
);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_owner ON jobs (owner, number);
CREATE INDEX jobs_by_array ON jobs (array_id, array_index) WHERE array_id IS NOT NULL;
CREATE UNIQUE INDEX jobs_by_active_output ON jobs (output) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');

-- What a job comes after. Rows stay when a dependency is in, so that a retry knows them.
CREATE TABLE dependencies (
  job   TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  after TEXT NOT NULL,
  state TEXT NOT NULL,                               -- waiting or succeeded
  PRIMARY KEY (job, after)
) WITHOUT ROWID;
CREATE INDEX dependencies_by_after ON dependencies (after);

-- Requests that may come again: the same key and body get the same answer.
CREATE TABLE requests (
  owner       TEXT NOT NULL,
  key         TEXT NOT NULL,
  body_sha256 TEXT NOT NULL,
  jobs        TEXT NOT NULL,                         -- JSON list of ids
  at          REAL NOT NULL,
  PRIMARY KEY (owner, key)
) WITHOUT ROWID;

-- What happened to a job, in order: its log, and what listeners are sent.
CREATE TABLE events (
  number  INTEGER PRIMARY KEY AUTOINCREMENT,
  job     TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
  at      REAL NOT NULL,
  kind    TEXT NOT NULL,                             -- state, log
  message TEXT NOT NULL
);
CREATE INDEX events_by_job ON events (job, number);

-- Device-seconds that each owner has used, halved for every half-life since `at`: who used least goes first.
CREATE TABLE shares (
  owner          TEXT PRIMARY KEY,
  device_seconds REAL NOT NULL,
  at             REAL NOT NULL
) WITHOUT ROWID;

-- version 2

-- Who waits longest: every scrape of the metrics asks.
CREATE INDEX jobs_by_wait ON jobs (changed_at, id) WHERE state = 'queued';

-- version 3

-- What every submission and every claim asks, however many jobs are over by now, or wait.
CREATE INDEX jobs_by_turn ON jobs (owner, priority DESC, number) WHERE state = 'queued';
CREATE INDEX jobs_by_active_owner ON jobs (owner, state)
  WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX jobs_by_end ON jobs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX requests_by_time ON requests (at);

-- version 4

-- A file may be named in several ways: jobs must not write one at once, whatever they call it.
ALTER TABLE jobs ADD COLUMN written TEXT;             -- the output, links and dots resolved; NULL in older rows
DROP INDEX jobs_by_active_output;
CREATE UNIQUE INDEX jobs_by_active_output ON jobs (COALESCE(written, output))
  WHERE state NOT IN ('succeeded', 'failed', 'cancelled');

-- Python reads and writes NaN and Infinity as JSON, SQLite and everybody else does not.
UPDATE jobs SET parameters =
  replace(replace(replace(parameters, '-Infinity', '"-inf"'), 'Infinity', '"inf"'), 'NaN', '"nan"')
  WHERE NOT json_valid(parameters);

-- version 5

-- What every cancellation asks, and a server that starts for each of the latest, however many jobs have failed.
CREATE INDEX jobs_by_failed_output ON jobs (COALESCE(written, output)) WHERE state = 'failed';

-- version 6

-- Jobs that had been cancelled or had failed were not told, but looked when they were retried.
UPDATE dependencies SET state = 'succeeded' WHERE after IN (SELECT id FROM jobs WHERE state = 'succeeded');

-- version 7

-- Processes that died at a job since it last finished a chunk: after the third it fails, also if the server itself died.
ALTER TABLE jobs ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;

-- version 8

-- Users of a group see only its jobs; '' is the group of those without one.
ALTER TABLE jobs ADD COLUMN owner_group TEXT NOT NULL DEFAULT '';
-- A held job is not claimed until an operator releases it.
ALTER TABLE jobs ADD COLUMN held INTEGER NOT NULL DEFAULT 0;
CREATE INDEX jobs_by_group ON jobs (owner_group, number);
CREATE INDEX jobs_by_group_state ON jobs (owner_group, state, number);
DROP INDEX jobs_by_turn;
CREATE INDEX jobs_by_turn ON jobs (owner, priority DESC, number) WHERE state = 'queued' AND held = 0;

-- Browsers that are signed in. The cookie and the token are stored as hashes.
CREATE TABLE sessions (
  digest     TEXT PRIMARY KEY,
  token      TEXT NOT NULL,                          -- the session ends with it
  expires_at REAL NOT NULL
) WITHOUT ROWID;

-- Whose jobs wait until an operator releases them. kind: owner, group, or all with the name ''.
CREATE TABLE holds (
  kind TEXT NOT NULL,
  name TEXT NOT NULL,
  held_by TEXT NOT NULL,
  at   REAL NOT NULL,
  PRIMARY KEY (kind, name)
) WITHOUT ROWID;

-- Limits that operators set while the service runs. kind: owner or group; the name '' stands for every owner or group.
CREATE TABLE caps (
  kind  TEXT NOT NULL,
  name  TEXT NOT NULL,
  what  TEXT NOT NULL,                               -- running, unfinished, or a quota: gpu_hours, bytes, jobs ...
  value REAL NOT NULL,
  PRIMARY KEY (kind, name, what)
) WITHOUT ROWID;

-- What was used, written with the end of each run and of each job. day: days since 1970-01-01, UTC.
CREATE TABLE usage (
  day            INTEGER NOT NULL,
  owner          TEXT NOT NULL,
  owner_group    TEXT NOT NULL,
  device_seconds REAL NOT NULL DEFAULT 0,            -- of runs: seconds times devices
  gpu_seconds    REAL NOT NULL DEFAULT 0,            -- of those, on GPUs
  read_bytes     INTEGER NOT NULL DEFAULT 0,
  written_bytes  INTEGER NOT NULL DEFAULT 0,
  runs           INTEGER NOT NULL DEFAULT 0,
  succeeded      INTEGER NOT NULL DEFAULT 0,         -- jobs that ended so
  failed         INTEGER NOT NULL DEFAULT 0,
  cancelled      INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (day, owner, owner_group)
) WITHOUT ROWID;

-- version 9

-- What a job may take, what it will by its plan, and what it took.
ALTER TABLE jobs ADD COLUMN limits TEXT NOT NULL
  DEFAULT '{"time_s":null,"memory_bytes":null,"gpu_memory_bytes":null,"gpus":null}';
ALTER TABLE jobs ADD COLUMN estimate TEXT;                             -- JSON, once it was planned
ALTER TABLE jobs ADD COLUMN work INTEGER NOT NULL DEFAULT 0;           -- of the plan, in the workload's unit
ALTER TABLE jobs ADD COLUMN run_seconds REAL NOT NULL DEFAULT 0;       -- since it was submitted or retried
ALTER TABLE jobs ADD COLUMN memory_bytes INTEGER;                      -- the most of any run
ALTER TABLE jobs ADD COLUMN gpu_memory_bytes INTEGER;

-- Work and seconds of earlier jobs, each counting nine tenths of the next one.
CREATE TABLE rates (
  workload TEXT PRIMARY KEY,
  work     REAL NOT NULL,
  seconds  REAL NOT NULL
) WITHOUT ROWID;

ALTER TABLE jobs ADD COLUMN preemptions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN throttle INTEGER;                          -- how many of its array may run at once
-- So many unfinished jobs of an array are not parked; as one ends, the next one is no longer. Claims see no parked jobs.
ALTER TABLE jobs ADD COLUMN parked INTEGER NOT NULL DEFAULT 0;
CREATE INDEX jobs_by_parked_array ON jobs (array_id, number) WHERE parked = 1;
DROP INDEX jobs_by_turn;
CREATE INDEX jobs_by_turn ON jobs (owner, priority DESC, number) WHERE state = 'queued' AND held = 0 AND parked = 0;
DROP INDEX jobs_by_wait;
CREATE INDEX jobs_by_wait ON jobs (changed_at, id) WHERE state = 'queued' AND parked = 0;
-- Whether any ending of `after` will do: its state is then 'succeeded' too.
ALTER TABLE dependencies ADD COLUMN any_end INTEGER NOT NULL DEFAULT 0;

-- Notifications of jobs that have ended.
ALTER TABLE jobs ADD COLUMN webhook TEXT;
CREATE TABLE deliveries (
  id    TEXT PRIMARY KEY,                                              -- the same at every try
  job   TEXT NOT NULL,
  url   TEXT NOT NULL,
  body  TEXT NOT NULL,                                                 -- JSON
  tries INTEGER NOT NULL DEFAULT 0,
  at    REAL NOT NULL,
  due   REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX deliveries_by_due ON deliveries (due);

-- version 10

ALTER TABLE jobs ADD COLUMN no_clobber INTEGER NOT NULL DEFAULT 0;     -- it fails if its output exists
