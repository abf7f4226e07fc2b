"""The table of all metrics: name, type, unit, labels, help and who serves each.

Units are base units (seconds, bytes, watts, degrees Celsius, ratios from 0 to 1). No label contains a job or a
user, so that the number of series stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
# The service counts jobs; a worker is the process that computes: a Dask worker, or the one that owns the device.
Served = Literal["service", "worker", "service and worker"]

# decode, encode: on a GPU alone, of chunks that are uploaded, or written, as files hold them.
STAGES = ("read", "upload", "decode", "compute", "encode", "download", "write")
# A job takes from a tenth of a second to half a day, and waits as long.
JOB_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200)
# A chunk is in a stage from less than a millisecond (a copy over the bus) to a minute (many pairs).
STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


@dataclass(frozen=True)
class Metric:
    """One row. `name` is the name in Prometheus; a histogram appends `_bucket`, `_sum` and `_count`."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    served: Served
    buckets: tuple[float, ...] = ()


TABLE = (
    # Jobs
    Metric("millrace_jobs", "gauge", "jobs", ("state",), "Jobs in the service's store, by state.", "service"),
    Metric(
        "millrace_jobs_finished_total", "counter", "jobs", ("workload", "outcome"),
        "Jobs that ended: succeeded, failed or cancelled.", "service",
    ),
    Metric(
        "millrace_job_duration_seconds", "histogram", "seconds", ("workload", "outcome"),
        "Time from a job's first claim to its end, for jobs that were started.", "service", JOB_SECONDS,
    ),
    Metric(
        "millrace_job_queue_wait_seconds", "histogram", "seconds", ("workload",),
        "Time from when a job was ready to run to its claim, observed at each claim.", "service",
        JOB_SECONDS,
    ),
    Metric(
        "millrace_queue_oldest_age_seconds", "gauge", "seconds", (),
        "Waiting time of the oldest job that is ready to run; 0 if none waits.",
        "service",
    ),
    Metric(
        "millrace_usage_device_seconds_total", "counter", "seconds", ("group",),
        "Run time of ended runs times the number of devices that each could use. Users without a group count under ''. "
        "`millrace usage` lists it by user.",
        "service",
    ),
    Metric(
        "millrace_usage_gpu_seconds_total", "counter", "seconds", ("group",), "Device seconds spent on GPUs.", "service"
    ),
    Metric(
        "millrace_usage_bytes_total", "counter", "bytes", ("group", "direction"),
        "Bytes of samples that runs read and wrote; `direction` is read or written.", "service",
    ),
    Metric(
        "millrace_usage_jobs_total", "counter", "jobs", ("group", "outcome"),
        "Jobs that ended: succeeded, failed or cancelled.", "service",
    ),
    Metric(
        "millrace_errors_total", "counter", "errors", ("kind",),
        "Errors that ended a run or stopped a task of the service, by class of the exception tree; `internal` is any "
        "other exception.",
        "service",
    ),
    Metric(
        "millrace_audit_entries_lost_total", "counter", "errors", (),
        "Entries of the audit log that could not be written, for example on a full disk.", "service",
    ),
    Metric(
        "millrace_audit_error_ratio", "gauge", "ratio", ("workload",),
        "Largest error found by the latest audit, over its tolerance. Above 1, a result was refused.", "service",
    ),
    # Work
    Metric(
        "millrace_chunks_total", "counter", "chunks", ("workload", "outcome"),
        "Chunks written, kept (finished by an earlier run of the same job) or failed (a stage raised an error).",
        "service and worker",
    ),
    Metric(
        "millrace_input_bytes_total", "counter", "bytes", ("workload",),
        "Bytes of input read for chunks; halos count each time.", "worker",
    ),
    Metric(
        "millrace_output_bytes_total", "counter", "bytes", ("workload",), "Bytes of output written.", "worker"
    ),
    Metric(
        "millrace_solver_iterations_total", "counter", "iterations", ("workload",),
        "Iterations of finished MRI reconstructions.", "worker",
    ),
    Metric(
        "millrace_solver_residual_ratio", "gauge", "ratio", ("workload",),
        "Relative residual of the latest reconstruction: of the normal equations, or with a penalty of the samples.",
        "worker",
    ),
    Metric(
        "millrace_solver_objective", "gauge", "objective", ("workload",),
        "Objective of the latest reconstruction with a penalty.", "worker",
    ),
    Metric(
        "millrace_work_total", "counter", "the label's unit", ("workload", "unit"),
        "Work done, in the workload's own unit: pixels, samples, or point-atom pairs (with a cutoff, estimated from "
        "the mean density).",
        "worker",
    ),
    # The pipeline
    Metric(
        "millrace_stage_seconds_total", "counter", "seconds", ("stage",),
        "Time that each stage of the pipeline was busy, summed over its lanes.", "worker",
    ),
    Metric(
        "millrace_stage_bytes_total", "counter", "bytes", ("stage",),
        "Bytes that passed through each stage of the pipeline. For compute, bytes of input, or of the result if ranks "
        "compute it together.",
        "worker",
    ),
    Metric(
        "millrace_stage_duration_seconds", "histogram", "seconds", ("stage",),
        "Time that a chunk spent in a stage.", "worker", STAGE_SECONDS,
    ),
    Metric(
        "millrace_stage_lane_seconds_total", "counter", "seconds", ("stage",),
        "Time that each stage could have been busy: wall time times its lanes. The busiest stage's seconds divided by "
        "this are the overlap efficiency.",
        "worker",
    ),
    Metric(
        "millrace_pipeline_wall_seconds_total", "counter", "seconds", (),
        "Time during which at least one chunk was in a pipeline of this process.", "worker",
    ),
    # Ranks
    Metric(
        "millrace_collective_bytes_total", "counter", "bytes", ("op",),
        "Bytes that this rank contributed to collectives.", "worker",
    ),
    Metric(
        "millrace_collective_seconds_total", "counter", "seconds", ("op",),
        "Time in collectives, including waiting for other ranks.", "worker",
    ),
    Metric(
        "millrace_communicator_aborts_total", "counter", "aborts", ("reason",),
        "Aborted communicators: the service counts one per attempt of a gang, a worker one per rank.",
        "service and worker",
    ),
    Metric(
        "millrace_communicator_epoch", "gauge", "epochs", (), "Latest epoch of the ranks; above 1, a rank was lost.",
        "service and worker",
    ),
    # GPUs: of the GPU that the process computes on
    Metric("millrace_gpu_memory_used_bytes", "gauge", "bytes", ("gpu",), "Memory in use by all programs.", "worker"),
    Metric("millrace_gpu_memory_total_bytes", "gauge", "bytes", ("gpu",), "Memory of the GPU.", "worker"),
    Metric(
        "millrace_gpu_utilization_ratio", "gauge", "ratio", ("gpu",),
        "Share of time during which a kernel was running.", "worker",
    ),
    Metric("millrace_gpu_power_watts", "gauge", "watts", ("gpu",), "Power drawn.", "worker"),
    Metric(
        "millrace_gpu_temperature_celsius", "gauge", "degrees Celsius", ("gpu",), "Temperature of the chip.", "worker"
    ),
    Metric(
        "millrace_gpu_pcie_bytes_total", "counter", "bytes", ("gpu", "direction"),
        "Bytes over PCI Express since the process started: rx into the GPU, tx out of it.", "worker",
    ),
    Metric(
        "millrace_gpu_pcie_link_bytes_per_second", "gauge", "bytes per second", ("gpu",),
        "Maximum rate of the GPU's PCI Express link, one way.", "worker",
    ),
    # Workers and the program
    Metric("millrace_workers", "gauge", "workers", (), "Worker processes that are alive.", "service"),
    Metric(
        "millrace_worker_heartbeat_age_seconds", "gauge", "seconds", ("worker",),
        "Time since a worker's last heartbeat. Workers send two a second; the value is accurate to about two seconds.",
        "service",
    ),
    Metric(
        "millrace_worker_restarts_total", "counter", "restarts", (),
        "Restarts of worker processes that had ended; the service counts its own workers, `millrace worker` its own.",
        "service and worker",
    ),
    Metric(
        "millrace_build_info", "gauge", "1", ("version",), "Always 1; the label is the running version.",
        "service and worker",
    ),
)  # fmt: skip
ROWS = {row.name: row for row in TABLE}


def as_markdown() -> str:
    """The table in docs/metrics.md."""
    lines = ["| Metric | Type | Unit | Labels | Served by | Meaning |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        labels = ", ".join(f"`{label}`" for label in row.labels) or "–"
        lines.append(f"| `{row.name}` | {row.kind} | {row.unit} | {labels} | {row.served} | {row.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
