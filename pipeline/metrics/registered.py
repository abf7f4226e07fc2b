"""All metrics of this process, in the registry of prometheus_client.

Imported on first use of what `pipeline.metrics` takes from here: prometheus_client, with the web servers that it
imports, would take a twentieth of a second of every command.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pipeline import __version__, errors
from pipeline.errors import MillraceError, ParameterError
from pipeline.metrics import pipelines
from pipeline.metrics.families import (
    counter,
    counter_family,
    cumulated,
    gauge,
    gauge_family,
    histogram,
    histogram_family,
)
from pipeline.metrics.gpu import monitor as gpus

_DURATION = "millrace_stage_duration_seconds"

jobs_finished = counter("millrace_jobs_finished_total")
job_duration = histogram("millrace_job_duration_seconds")
job_queue_wait = histogram("millrace_job_queue_wait_seconds")
collective_bytes = counter("millrace_collective_bytes_total")
collective_seconds = counter("millrace_collective_seconds_total")
communicator_aborts = counter("millrace_communicator_aborts_total")
communicator_epoch = gauge("millrace_communicator_epoch")
solver_iterations = counter("millrace_solver_iterations_total")
solver_residual = gauge("millrace_solver_residual_ratio")
solver_objective = gauge("millrace_solver_objective")
worker_restarts = counter("millrace_worker_restarts_total")
usage_device_seconds = counter("millrace_usage_device_seconds_total")
usage_gpu_seconds = counter("millrace_usage_gpu_seconds_total")
usage_bytes = counter("millrace_usage_bytes_total")
usage_jobs = counter("millrace_usage_jobs_total")
audit_entries_lost = counter("millrace_audit_entries_lost_total")
_errors = counter("millrace_errors_total")
_INTERNAL = "internal"

gauge("millrace_build_info").labels(__version__).set(1)
# Every kind exists from the start: Prometheus does not see an increase from no series.
for _kind in (name for name, kind in vars(errors).items() if isinstance(kind, type)):
    _errors.labels(_kind)
_errors.labels(_INTERNAL)


def count_error(error: BaseException) -> None:
    """Counts an error that ended a run, or interrupted the service's own work."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    _errors.labels(next(kinds, _INTERNAL) if isinstance(error, MillraceError) else _INTERNAL).inc()


def serve(port: int) -> None:
    """Serve every metric at http://127.0.0.1:PORT/metrics from a daemon thread."""
    with _port_free(port):
        start_http_server(port, addr="127.0.0.1")


def check_port(host: str, port: int) -> None:
    """Raises ParameterError if metrics cannot be served there."""
    with _port_free(port), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


@contextmanager
def _port_free(port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError(f"--metrics-port {port}: {reason}; choose another port") from error


class _Pipelines(Collector):
    """Assembles the counts of `pipelines` at a scrape."""

    def collect(self) -> Iterable[Metric]:
        yield from _of_stages()
        wall = counter_family("millrace_pipeline_wall_seconds_total")
        wall.add_metric([], pipelines.wall.integral)
        yield wall
        yield from _of_work(list(pipelines.work.values()))
        audits = gauge_family("millrace_audit_error_ratio")
        for workload, latest in list(pipelines.audit_error_ratio.items()):
            audits.add_metric([workload], latest.value)
        yield audits


def _of_stages() -> Iterable[Metric]:
    seconds, nbytes = counter_family("millrace_stage_seconds_total"), counter_family("millrace_stage_bytes_total")
    lanes, durations = counter_family("millrace_stage_lane_seconds_total"), histogram_family(_DURATION)
    for stage, count in pipelines.stages.items():
        busy, moved, buckets = count.told()
        seconds.add_metric([stage], busy)
        nbytes.add_metric([stage], moved)
        lanes.add_metric([stage], count.lanes.integral)
        durations.add_metric([stage], cumulated(_DURATION, buckets), busy)
    return seconds, nbytes, lanes, durations


def _of_work(counts: list[pipelines.WorkCount]) -> Iterable[Metric]:
    chunks, work = counter_family("millrace_chunks_total"), counter_family("millrace_work_total")
    read, written = counter_family("millrace_input_bytes_total"), counter_family("millrace_output_bytes_total")
    for count in counts:
        for outcome, number in count.chunks.items():
            chunks.add_metric([count.workload, outcome], number)
        work.add_metric([count.workload, count.unit], count.work)
        read.add_metric([count.workload], count.input_bytes)
        written.add_metric([count.workload], count.output_bytes)
    return chunks, read, written, work


REGISTRY.register(_Pipelines())
REGISTRY.register(gpus)
