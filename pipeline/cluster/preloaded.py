"""What every worker process needs. Imported once, by the process that workers are forked from."""

import pipeline.cluster.worker_processes  # noqa: F401 - imported for those that are forked
from pipeline.workloads import workloads

workloads()
