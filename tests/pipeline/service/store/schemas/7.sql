-- A database of version 7, as that version's own program created it.
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, workload TEXT NOT NULL, input TEXT NOT NULL, output TEXT NOT NULL, parameters TEXT NOT NULL, priority INTEGER NOT NULL, array_id TEXT, array_index INTEGER, state TEXT NOT NULL, epoch INTEGER NOT NULL, attempts INTEGER NOT NULL, cancelling INTEGER NOT NULL, chunks INTEGER, chunks_done INTEGER NOT NULL, error TEXT, story TEXT NOT NULL, submitted_at REAL NOT NULL, changed_at REAL NOT NULL, started_at REAL, finished_at REAL, device_seconds REAL NOT NULL DEFAULT 0, runner TEXT, lease_until REAL, receipt TEXT , written TEXT, deaths INTEGER NOT NULL DEFAULT 0);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_owner ON jobs (owner, number);
CREATE INDEX jobs_by_array ON jobs (array_id, array_index) WHERE array_id IS NOT NULL;
CREATE TABLE dependencies (job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, after TEXT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (job, after)) WITHOUT ROWID;
CREATE INDEX dependencies_by_after ON dependencies (after);
CREATE TABLE requests (owner TEXT NOT NULL, key TEXT NOT NULL, body_sha256 TEXT NOT NULL, jobs TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (owner, key)) WITHOUT ROWID;
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, at REAL NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL);
CREATE INDEX events_by_job ON events (job, number);
CREATE TABLE shares (owner TEXT PRIMARY KEY, device_seconds REAL NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX jobs_by_wait ON jobs (changed_at, id) WHERE state = 'queued';
CREATE INDEX jobs_by_turn ON jobs (owner, priority DESC, number) WHERE state = 'queued';
CREATE INDEX jobs_by_active_owner ON jobs (owner, state) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX jobs_by_end ON jobs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX requests_by_time ON requests (at);
CREATE UNIQUE INDEX jobs_by_active_output ON jobs (COALESCE(written, output)) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX jobs_by_failed_output ON jobs (COALESCE(written, output)) WHERE state = 'failed';
PRAGMA user_version = 7;
