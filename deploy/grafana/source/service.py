"""*Service*: what became of the jobs, how long they wait, and whether anything is wrong."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.panels import (
    BAD,
    GOOD,
    STATE_COLOURS,
    WARN,
    Panel,
    Query,
    Steps,
    assembled,
    dashboard_of,
    graph,
    number,
    spread,
)

HOUR_S = 3600
_WAIT_STEPS = Steps(GOOD, ((HOUR_S / 4, WARN), (HOUR_S, BAD)))
_FAILING_STEPS = Steps(GOOD, ((0.05, WARN), (0.2, BAD)))
_SHARES = ((0.5, "half"), (0.9, "9 of 10"), (0.99, "99 of 100"))


def service() -> Dashboard:
    board = dashboard_of(
        "millrace-service", "Millrace: Service", "Jobs, the queue, outcomes, waits, and whether anything is wrong."
    )
    rows = {"Now": _now(), "Jobs": _jobs(), "Waits": _waits(), "Accounts": _accounts(), "Health": _health()}
    return assembled(board, rows)


def _now() -> list[Panel]:
    return [
        number(
            "Workers", "Workers that can take chunks now. Without any no job moves, and an alert comes.", "none",
            Query("sum(millrace_workers)", "workers"), thresholds=Steps(BAD, ((1, GOOD),)),
        ),
        number(
            "Running", "Jobs that are being planned, computed or published.", "none",
            Query('sum(millrace_jobs{state=~"planning|running|publishing"})', "running"),
        ),
        number("Waiting", "Jobs in the queue.", "none", Query('sum(millrace_jobs{state="queued"})', "waiting")),
        number(
            "Oldest in the queue", "How long that job has waited which has waited longest of those that could be run.",
            "s", Query("max(millrace_queue_oldest_age_seconds)", "oldest"), thresholds=_WAIT_STEPS,
        ),
        number(
            "Share that fails", "Of the jobs that ended in the last half hour.", "percentunit",
            Query("millrace:jobs_failed:ratio_rate30m", "failed"), thresholds=_FAILING_STEPS,
        ),
        number(
            "Version", "What the service and its workers run. More than one: an upgrade has not come everywhere.",
            "none", Query("count by (version) (millrace_build_info)", "{{version}}"), by_name=True,
        ),
    ]  # fmt: skip


def _jobs() -> list[Panel]:
    return [
        graph(
            "Jobs that are not over", "How many are in each state.", "none",
            [Query('sum by (state) (millrace_jobs{state=~"queued|planning|running|publishing"})', "{{state}}")],
            stacked=True, colours=STATE_COLOURS,
        ),
        graph(
            "Jobs that ended", "How many each minute, by how they ended.", "suffix: jobs/min",
            [Query("60 * sum by (outcome) (rate(millrace_jobs_finished_total[$__rate_interval]))", "{{outcome}}")],
            stacked=True, colours=STATE_COLOURS,
        ),
        graph(
            "Jobs that ended, by workload", "How many each minute, however they ended.", "suffix: jobs/min",
            [Query(
                "60 * sum by (workload) (rate(millrace_jobs_finished_total[$__rate_interval])) > 0", "{{workload}}"
            )],
            stacked=True,
        ),
        graph(
            "Share that fails", "Of the jobs that ended in the half hour before. Above 20 % an alert comes.",
            "percentunit", [Query("millrace:jobs_failed:ratio_rate30m", "failed")],
            thresholds=_FAILING_STEPS, highest=1,
        ),
    ]  # fmt: skip


def _waits() -> list[Panel]:
    return [
        graph(
            "Wait in the queue", "Of the jobs that were started: half waited at most so long, 9 of 10, 99 of 100.", "s",
            _quantiles("millrace_job_queue_wait_seconds"), thresholds=_WAIT_STEPS,
        ),
        spread(
            "Waits, all of them", "Jobs started each second, by how long they had waited.", "s",
            Query("sum by (le) (rate(millrace_job_queue_wait_seconds_bucket[$__rate_interval]))", "{{le}}"),
        ),
        graph(
            "Time a job takes", "From its first start to its end: half take at most so long, 9 of 10, 99 of 100.", "s",
            _quantiles("millrace_job_duration_seconds"),
        ),
        graph(
            "Oldest in the queue", "How long the oldest of the jobs that could be run has waited. Above an hour an "
            "alert comes.", "s", [Query("max(millrace_queue_oldest_age_seconds)", "oldest")], thresholds=_WAIT_STEPS,
        ),
    ]  # fmt: skip


def _quantiles(metric: str) -> list[Query]:
    buckets = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return [Query(f"histogram_quantile({share}, {buckets})", name) for share, name in _SHARES]


def _accounts() -> list[Panel]:
    by_group = "sum by (group) (rate({metric}[$__rate_interval]))"
    return [
        graph(
            "Device time, by group", "Devices that each group's runs could use, counted when a run ends.", "none",
            [Query(by_group.format(metric="millrace_usage_device_seconds_total"), "{{group}}")], stacked=True,
        ),
        graph(
            "GPU time, by group", "GPUs among those devices.", "none",
            [Query(by_group.format(metric="millrace_usage_gpu_seconds_total"), "{{group}}")], stacked=True,
        ),
        graph(
            "Bytes, by group", "Samples read and written, counted when a run ends.", "Bps",
            [Query(by_group.format(metric="millrace_usage_bytes_total"), "{{group}}")], stacked=True,
        ),
        graph(
            "Jobs that ended, by group", "How many each minute, however they ended.", "suffix: jobs/min",
            [Query("60 * " + by_group.format(metric="millrace_usage_jobs_total"), "{{group}}")], stacked=True,
        ),
    ]  # fmt: skip


def _health() -> list[Panel]:
    return [
        graph(
            "Errors", "Errors each minute, by class. Users can correct theirs; three others in half an hour raise an "
            "alert.", "suffix: errors/min",
            [Query("60 * sum by (kind) (rate(millrace_errors_total[$__rate_interval])) > 0", "{{kind}}")],
        ),
        graph(
            "Entries of the audit log lost", "How many each minute could not be written, such as on a full disk.",
            "suffix: entries/min",
            [Query("60 * sum(rate(millrace_audit_entries_lost_total[$__rate_interval]))", "lost")],
        ),
        graph(
            "Audit error", "Worst error of the newest audit over what is tolerated. Above 1 the result was wrong, and "
            "an alert comes; integer images come close to 1 by rounding alone.", "percentunit",
            [Query("max by (workload) (millrace_audit_error_ratio)", "{{workload}}")],
            thresholds=Steps(GOOD, ((1, BAD),)),
        ),
        graph(
            "Workers started again", "Worker processes that died in the hour before. Above 3 an alert comes.", "none",
            [Query("millrace:worker_restarts:increase1h", "started again")],
            thresholds=Steps(GOOD, ((3, BAD),)),
        ),
        graph(
            "Age of heartbeats", "Time since each worker's last one. Above a minute an alert comes.", "s",
            [Query("max by (worker) (millrace_worker_heartbeat_age_seconds)", "{{worker}}")],
            thresholds=Steps(GOOD, ((60, BAD),)),
        ),
        graph(
            "Chunks", "How many each second: written, kept from an earlier run of the job, or failed.",
            "suffix: chunks/s",
            [Query("sum by (outcome) (rate(millrace_chunks_total[$__rate_interval]))", "{{outcome}}")],
        ),
    ]  # fmt: skip
