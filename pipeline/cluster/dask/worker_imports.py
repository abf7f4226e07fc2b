"""What every worker process needs. Imported once, by the process that workers are forked from."""

import kernels.runtime.compiled  # noqa: F401 - Numba, for workers on the CPU
import pipeline.cluster.dask.worker_processes  # noqa: F401 - imported for those that are forked
from pipeline.workloads import workloads

workloads()
