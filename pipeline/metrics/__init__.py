"""Prometheus metrics as the program updates them; `table` lists them all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from pipeline import __version__, errors
from pipeline.errors import MillraceError, ParameterError
from pipeline.metrics.families import counter, gauge, histogram
from pipeline.metrics.gpu import monitor as gpus
from pipeline.metrics.pipelines import AtWork, stages, work_of
from pipeline.metrics.table import STAGES

__all__ = ["STAGES", "AtWork", "gpus", "stages", "work_of"]  # besides what is defined here

jobs_finished = counter("millrace_jobs_finished_total")
job_duration = histogram("millrace_job_duration_seconds")
job_queue_wait = histogram("millrace_job_queue_wait_seconds")
audit_error_ratio = gauge("millrace_audit_error_ratio")
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
