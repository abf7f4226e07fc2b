-- Every statement of the store by name; {name} includes another statement.

-- name: add_job
INSERT INTO jobs (id, owner, owner_group, workload, input, output, written, parameters, priority, array_id, array_index,
                  throttle, parked, limits, webhook, no_clobber, state, epoch, attempts, cancelling, chunks, chunks_done, error,
                  story, submitted_at, changed_at)
VALUES (:id, :owner, :group, :workload, :input, :output, :written, :parameters, :priority, :array_id, :array_index,
        :throttle, :parked, :limits, :webhook, :no_clobber, :state, 0, 0, 0, NULL, 0, NULL, :story, :at, :at);

-- name: add_dependency
INSERT INTO dependencies (job, after, state, any_end) VALUES (:job, :after, :state, :any_end);

-- name: add_request
INSERT INTO requests (owner, key, body_sha256, jobs, at) VALUES (:owner, :key, :body_sha256, :jobs, :at);

-- name: request
SELECT body_sha256, jobs FROM requests WHERE owner = :owner AND key = :key;

-- name: forget_requests
DELETE FROM requests WHERE at < :before;

-- name: jobs
SELECT *, EXISTS (SELECT 1 FROM dependencies WHERE job = jobs.id AND state = 'waiting') AS waits
FROM jobs WHERE id IN (SELECT value FROM json_each(:ids));

-- name: waiting_for
SELECT after, any_end FROM dependencies WHERE job = :job AND state = 'waiting';

-- name: dependents
SELECT job FROM dependencies WHERE after = :after ORDER BY job;

-- name: dependency_succeeded
-- Also for jobs that are cancelled or failed: a retry finds it, even if the dependency is forgotten by then.
UPDATE dependencies SET state = 'succeeded' WHERE after = :after;

-- name: dependency_ended
UPDATE dependencies SET state = 'succeeded' WHERE after = :after AND any_end;

-- name: change_job
UPDATE jobs SET state = :state, epoch = :epoch, attempts = :attempts, deaths = :deaths,
    preemptions = :preemptions, cancelling = :cancelling, chunks = :chunks, chunks_done = :chunks_done, error = :error,
    story = :story, changed_at = :at, started_at = :started_at, finished_at = :finished_at, runner = :runner,
    lease_until = :lease_until, receipt = :receipt, run_seconds = IIF(:again, 0, run_seconds)
WHERE id = :id;

-- name: add_use
UPDATE jobs SET device_seconds = device_seconds + :seconds, run_seconds = run_seconds + :run_seconds,
    memory_bytes = MAX(COALESCE(memory_bytes, 0), COALESCE(:memory_bytes, memory_bytes)),
    gpu_memory_bytes = MAX(COALESCE(gpu_memory_bytes, 0), COALESCE(:gpu_memory_bytes, gpu_memory_bytes))
WHERE id = :id RETURNING owner, owner_group;

-- name: note_estimate
-- Seconds by the work of earlier jobs of the workload.
UPDATE jobs SET work = :work, estimate = json_set(
    :estimate, '$.seconds', (SELECT :work * seconds / work FROM rates WHERE workload = jobs.workload AND work > 0))
WHERE id = :id;

-- name: add_rate
INSERT INTO rates (workload, work, seconds)
SELECT workload, work, run_seconds FROM jobs WHERE id = :id AND work > 0 AND run_seconds > 0
ON CONFLICT (workload) DO UPDATE SET work = 0.9 * work + excluded.work, seconds = 0.9 * seconds + excluded.seconds;

-- name: renew_leases
UPDATE jobs SET lease_until = :until
WHERE id IN (SELECT value FROM json_each(:jobs)) AND runner = :runner AND state IN ('planning', 'running', 'publishing');

-- name: expired_leases
-- A lease that ends later than a new one would is from before the clock was set back; a live runner has renewed it since.
SELECT id, epoch FROM jobs
WHERE state IN ('planning', 'running', 'publishing') AND (lease_until < :now OR lease_until > :now + :lease) ORDER BY number;

-- name: leases_of_others
SELECT id, epoch FROM jobs WHERE state IN ('planning', 'running', 'publishing') AND runner != :runner ORDER BY number;

-- name: claimable
-- By priority, then the owner's device use, least first, then order of submission; blocked owners and groups wait.
-- Reads only the head of each owner's queue, so that claims stay fast with any number of waiting jobs.
WITH RECURSIVE owners (owner) AS (
  SELECT MIN(owner) FROM jobs INDEXED BY jobs_by_turn WHERE state = 'queued' AND held = 0 AND parked = 0
  UNION ALL
  SELECT (
    SELECT MIN(owner) FROM jobs INDEXED BY jobs_by_turn WHERE state = 'queued' AND held = 0 AND parked = 0 AND owner > owners.owner
  )
  FROM owners WHERE owner IS NOT NULL
), heads (number) AS (
  SELECT (
    SELECT number FROM jobs INDEXED BY jobs_by_turn
    WHERE state = 'queued' AND held = 0 AND parked = 0 AND owner = owners.owner
      AND owner_group NOT IN (SELECT value FROM json_each(:blocked_groups))
      AND NOT EXISTS (SELECT 1 FROM dependencies WHERE job = jobs.id AND state = 'waiting')
    ORDER BY priority DESC, number LIMIT 1
  )
  FROM owners WHERE owner NOT IN (SELECT value FROM json_each(:blocked_owners))
)
SELECT jobs.id, jobs.epoch, jobs.changed_at, jobs.priority
FROM heads JOIN jobs ON jobs.number = heads.number LEFT JOIN shares ON shares.owner = jobs.owner
ORDER BY jobs.priority DESC, COALESCE(halved(shares.device_seconds, :now - shares.at), 0), jobs.number
LIMIT 1;

-- name: company
-- Further jobs of the same array that may run together with this one, which is its first: none has been claimed before.
SELECT jobs.*, 0 AS waits FROM jobs AS first JOIN jobs NOT INDEXED ON jobs.number > first.number AND jobs.number <= first.number + :within
WHERE first.id = :id AND jobs.array_id = first.array_id AND jobs.owner = first.owner
  AND jobs.owner_group = first.owner_group AND jobs.workload = first.workload AND jobs.parameters = first.parameters
  AND jobs.priority = first.priority AND jobs.limits = first.limits
  AND jobs.state = 'queued' AND jobs.epoch = 0 AND jobs.held = 0 AND jobs.parked = 0
  AND NOT EXISTS (SELECT 1 FROM dependencies WHERE job = jobs.id AND state = 'waiting')
ORDER BY jobs.number LIMIT :most;

-- name: turns_taken
-- Of an array, up to :most.
SELECT COUNT(*) FROM (
  SELECT 1 FROM jobs
  WHERE array_id = :array_id AND id != :id AND parked = 0 AND state NOT IN ('succeeded', 'failed', 'cancelled')
  LIMIT :most
);

-- name: park
UPDATE jobs SET parked = :parked WHERE id = :id AND parked != :parked RETURNING id;

-- name: unpark_next
UPDATE jobs SET parked = 0, changed_at = :at
WHERE number = (SELECT MIN(number) FROM jobs INDEXED BY jobs_by_parked_array WHERE array_id = :array_id AND parked = 1)
RETURNING id;

-- name: active_of_group
SELECT COUNT(*) FROM jobs WHERE owner_group = :name AND state IN ('queued', 'planning', 'running', 'publishing');

-- name: active_of_owner
SELECT COUNT(*) FROM jobs WHERE owner = :name AND state NOT IN ('succeeded', 'failed', 'cancelled');

-- name: add_share
INSERT INTO shares (owner, device_seconds, at) VALUES (:owner, :seconds, :at)
ON CONFLICT (owner) DO UPDATE SET
  device_seconds = halved(device_seconds, :at - at) + :seconds, at = :at;

-- name: fitting
-- The numbers of jobs, the newest first. Only one of the six branches runs, the one with the most selective index: SQLite
-- checks constant conditions before any row.
SELECT number FROM jobs
WHERE :array_id IS NOT NULL AND array_id = :array_id
  AND (:state IS NULL OR state = :state) AND (:owner IS NULL OR owner = :owner)
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
  AND (:groups IS NULL OR owner_group IN (SELECT value FROM json_each(:groups)))
UNION ALL
SELECT number FROM jobs INDEXED BY jobs_by_group_state
WHERE :array_id IS NULL AND :state IS NOT NULL AND :only_group IS NOT NULL
  AND owner_group = :only_group AND state = :state
  AND (:owner IS NULL OR owner = :owner)
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
UNION ALL
SELECT number FROM jobs INDEXED BY jobs_by_state
WHERE :array_id IS NULL AND :state IS NOT NULL AND :only_group IS NULL AND state = :state
  AND (:groups IS NULL OR owner_group IN (SELECT value FROM json_each(:groups)))
  AND (:owner IS NULL OR owner = :owner)
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
UNION ALL
SELECT number FROM jobs INDEXED BY jobs_by_owner
WHERE :array_id IS NULL AND :state IS NULL AND :owner IS NOT NULL AND owner = :owner
  AND (:groups IS NULL OR owner_group IN (SELECT value FROM json_each(:groups)))
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
UNION ALL
SELECT number FROM jobs INDEXED BY jobs_by_group
WHERE :array_id IS NULL AND :state IS NULL AND :owner IS NULL AND :only_group IS NOT NULL AND owner_group = :only_group
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
UNION ALL
SELECT number FROM jobs
WHERE :array_id IS NULL AND :state IS NULL AND :owner IS NULL AND :only_group IS NULL
  AND (:groups IS NULL OR owner_group IN (SELECT value FROM json_each(:groups)))
  AND (:workload IS NULL OR workload = :workload) AND (:before IS NULL OR number < :before)
ORDER BY number DESC LIMIT :limit;

-- name: list_jobs
-- Without the long columns, receipts and stories.
SELECT number, id, owner, owner_group, workload, input, output, written, parameters, priority, array_id, array_index,
    throttle, limits, webhook, no_clobber, state, epoch, attempts, deaths, preemptions, cancelling, chunks, chunks_done, error,
    '[]' AS story, submitted_at, changed_at, started_at, finished_at, device_seconds, estimate, run_seconds, memory_bytes,
    gpu_memory_bytes, held, runner, lease_until, NULL AS receipt
FROM jobs WHERE number IN ({fitting}) ORDER BY number DESC;

-- name: list_json
-- A JSON list of views: ten times as fast as row by row.
SELECT MIN(number) AS last, COUNT(*) AS count, json_group_array({view}) AS jobs
FROM (
  SELECT number, id, owner, owner_group, workload, input, output, parameters, priority, array_id, array_index, state, attempts,
      cancelling, chunks, chunks_done, error, submitted_at, started_at, finished_at, device_seconds, preemptions, throttle,
      no_clobber, limits, estimate, run_seconds, memory_bytes, gpu_memory_bytes, held
  FROM jobs WHERE number IN ({fitting}) ORDER BY number DESC
);

-- name: jobs_json
SELECT json_group_array({view}) FROM (SELECT * FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY number);

-- name: view
-- The fields of api_models.JobView.
json_object(
    'id', id, 'number', number, 'owner', owner, 'group', owner_group, 'workload', workload, 'input', input,
    'output', output, 'parameters', json(parameters), 'priority', priority, 'array', array_id, 'index', array_index, 'state', state,
    'cancelling', json(iif(cancelling, 'true', 'false')), 'attempts', attempts, 'chunks', chunks,
    'chunks_done', chunks_done, 'error', error, 'submitted_at', submitted_at, 'started_at', started_at,
    'finished_at', finished_at, 'device_seconds', device_seconds,
    'held', json(iif(held, 'true', 'false')), 'preemptions', preemptions, 'throttle', throttle,
    'no_clobber', json(iif(no_clobber, 'true', 'false')), 'limits', json(limits), 'estimate', json(estimate), 'used', json_object(
        'seconds', run_seconds, 'memory_bytes', memory_bytes, 'gpu_memory_bytes', gpu_memory_bytes))

-- name: lately_cancelled
SELECT id FROM jobs
WHERE finished_at >= (SELECT at FROM events ORDER BY number DESC LIMIT 1) - :within AND state = 'cancelled';

-- name: kept_for_another
-- The job, if any, that may continue the partial output: one whose run began after this job's last. Numbers of events give
-- the order, since clocks may be set back.
SELECT id FROM (
  SELECT id FROM jobs WHERE COALESCE(written, output) = :written AND state NOT IN ('succeeded', 'failed', 'cancelled')
  UNION ALL
  SELECT id FROM jobs INDEXED BY jobs_by_failed_output WHERE state = 'failed' AND COALESCE(written, output) = :written
) AS other
WHERE (SELECT MAX(number) FROM events WHERE job = other.id AND kind = 'state' AND message = 'planning') > COALESCE(
  (SELECT MAX(number) FROM events WHERE job = :job AND kind = 'state' AND message = 'planning'), 0)
LIMIT 1;

-- name: prune_jobs
-- Cascades to their events and dependencies.
DELETE FROM jobs WHERE id IN (
  SELECT id FROM jobs WHERE finished_at < :before
    AND NOT EXISTS (
      SELECT 1 FROM dependencies JOIN jobs AS later ON later.id = dependencies.job
      WHERE dependencies.after = jobs.id AND later.state NOT IN ('succeeded', 'failed', 'cancelled')
    )
  ORDER BY finished_at LIMIT :most
) RETURNING id;

-- name: count_by_state
SELECT state, COUNT(*) AS jobs FROM jobs GROUP BY state;

-- name: count_by_state_in_groups
SELECT state, COUNT(*) AS jobs FROM jobs WHERE owner_group IN (SELECT value FROM json_each(:groups)) GROUP BY state;

-- name: oldest_queued
SELECT MIN(changed_at) FROM (
  SELECT changed_at FROM jobs INDEXED BY jobs_by_wait
  WHERE state = 'queued' AND parked = 0 AND NOT EXISTS (SELECT 1 FROM dependencies WHERE job = jobs.id AND state = 'waiting')
  ORDER BY changed_at LIMIT 1
);

-- name: add_event
INSERT INTO events (job, at, kind, message) VALUES (:job, :at, :kind, :message);

-- name: newest_event
SELECT at FROM events ORDER BY number DESC LIMIT 1;

-- name: events_of_job
SELECT number, at, kind, message FROM events WHERE job = :job AND number > :after ORDER BY number LIMIT :limit;

-- name: output_in_use
SELECT id, owner_group, state FROM jobs
WHERE COALESCE(written, output) = :written AND state NOT IN ('succeeded', 'failed', 'cancelled');

-- name: add_delivery
INSERT INTO deliveries (id, job, url, body, at, due)
SELECT :id, id, :url, json_object('type', 'job.' || state, 'timestamp', :stamp, 'data', {view}), :at, :at
FROM jobs WHERE id = :job;

-- name: due_deliveries
SELECT id, job, url, body, tries, at FROM deliveries WHERE due <= :now ORDER BY due LIMIT :most;

-- name: next_delivery
SELECT MIN(due) FROM deliveries;

-- name: put_off_delivery
UPDATE deliveries SET tries = tries + 1, due = :due WHERE id = :id;

-- name: forget_delivery
DELETE FROM deliveries WHERE id = :id;

-- name: add_session
INSERT INTO sessions (digest, token, expires_at) VALUES (:digest, :token, :expires_at);

-- name: end_session
DELETE FROM sessions WHERE digest = :digest;

-- name: forget_sessions
DELETE FROM sessions WHERE expires_at <= :now OR digest IN (
  SELECT digest FROM sessions WHERE token = :token ORDER BY expires_at DESC LIMIT -1 OFFSET :most
);

-- name: sessions
SELECT digest, token, expires_at FROM sessions WHERE expires_at > :now;

-- name: active_by_owner
SELECT owner, owner_group, COUNT(*) AS jobs FROM jobs WHERE state IN ('planning', 'running', 'publishing')
GROUP BY owner, owner_group;

-- name: holds
SELECT kind, name, held_by, at FROM holds ORDER BY kind, name;

-- name: hold
INSERT INTO holds (kind, name, held_by, at) VALUES (:kind, :name, :held_by, :at) ON CONFLICT DO NOTHING;

-- name: release
DELETE FROM holds WHERE kind = :kind AND name = :name;

-- name: hold_job
UPDATE jobs SET held = :held WHERE id = :id AND held != :held AND state NOT IN ('succeeded', 'failed', 'cancelled');

-- name: unfinished
SELECT id FROM jobs
WHERE state NOT IN ('succeeded', 'failed', 'cancelled') AND NOT cancelling
  AND (:owner IS NULL OR owner = :owner) AND (:group IS NULL OR owner_group = :group)
ORDER BY number DESC LIMIT :limit;

-- name: caps
SELECT kind, name, what, value FROM caps ORDER BY kind, name, what;

-- name: set_cap
INSERT INTO caps (kind, name, what, value) VALUES (:kind, :name, :what, :value)
ON CONFLICT (kind, name, what) DO UPDATE SET value = :value;

-- name: remove_cap
DELETE FROM caps WHERE kind = :kind AND name = :name AND what = :what;

-- name: add_usage
INSERT INTO usage (day, owner, owner_group, device_seconds, gpu_seconds, read_bytes, written_bytes, runs, succeeded, failed,
                   cancelled)
VALUES (:day, :owner, :group, :device_seconds, :gpu_seconds, :read_bytes, :written_bytes, :runs, :succeeded, :failed,
        :cancelled)
ON CONFLICT (day, owner, owner_group) DO UPDATE SET
  device_seconds = device_seconds + :device_seconds, gpu_seconds = gpu_seconds + :gpu_seconds,
  read_bytes = read_bytes + :read_bytes, written_bytes = written_bytes + :written_bytes, runs = runs + :runs,
  succeeded = succeeded + :succeeded, failed = failed + :failed, cancelled = cancelled + :cancelled;

-- name: usage_days
SELECT * FROM usage WHERE day >= :first AND (:until IS NULL OR day < :until) ORDER BY day, owner, owner_group;

-- name: usage_sums
SELECT owner, owner_group, SUM(device_seconds) AS device_seconds, SUM(gpu_seconds) AS gpu_seconds,
    SUM(read_bytes) AS read_bytes, SUM(written_bytes) AS written_bytes, SUM(succeeded) AS succeeded, SUM(failed) AS failed,
    SUM(cancelled) AS cancelled
FROM usage WHERE day >= :first GROUP BY owner, owner_group;
