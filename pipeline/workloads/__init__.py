"""The kinds of job: the contract with the engine, the registry, and one folder for each built-in kind."""

from pipeline.workloads.protocol import (
    ArraySpec,
    Budget,
    Chunk,
    JobSpec,
    JobSummary,
    OpenJob,
    Parameters,
    Plan,
    Workload,
)
from pipeline.workloads.registry import LOCAL_ONLY, runs_own_code, unusable, workload_named, workloads

__all__ = ["ArraySpec", "Budget", "Chunk", "JobSpec", "JobSummary", "OpenJob", "Parameters", "Plan", "Workload"]
__all__ += ["LOCAL_ONLY", "runs_own_code", "unusable", "workload_named", "workloads"]
