"""Every metric: name, type, unit, labels and help, in one table."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, start_http_server

from pipeline import __version__
from pipeline.errors import ParameterError

chunks = Counter("millrace_chunks", "Chunks by what became of them.", ["workload", "outcome"])
work = Counter("millrace_work", "Work done, in the workload's own unit.", ["workload", "unit"])
stage_seconds = Counter("millrace_stage_seconds", "Seconds that each stage of the pipeline was busy.", ["stage"])
stage_bytes = Counter("millrace_stage_bytes", "Bytes that went through each stage of the pipeline.", ["stage"])
pipeline_wall_seconds = Counter("millrace_pipeline_wall_seconds", "Seconds from a run's first read to its last write.")
audit_error_ratio = Gauge("millrace_audit_error_ratio", "Worst audited error, over its tolerance.", ["workload"])
collective_bytes = Counter("millrace_collective_bytes", "Bytes that this process gave to collectives.", ["op"])
collective_seconds = Counter("millrace_collective_seconds", "Seconds in collectives, waiting for others too.", ["op"])
communicator_aborts = Counter("millrace_communicator_aborts", "Communicators given up, as seen here.", ["reason"])
communicator_epoch = Gauge("millrace_communicator_epoch", "The newest epoch of ranks: above 1, a rank was lost.")
jobs_finished = Counter("millrace_jobs_finished", "Jobs that ended, by how.", ["workload", "outcome"])
build_info = Gauge("millrace_build_info", "Always 1; the label says which version runs.", ["version"])
build_info.labels(__version__).set(1)


def serve(port: int) -> None:
    """Serve every metric at http://127.0.0.1:PORT/metrics from a daemon thread."""
    try:
        start_http_server(port, addr="127.0.0.1")
    except OSError as error:
        raise ParameterError(f"--metrics-port {port}: {error.strerror}; choose another port") from error
