"""Imports everything that worker processes need. The fork server imports this module once."""

import kernels.runtime.compiled.compiler  # noqa: F401 - Numba, for workers on the CPU
import pipeline.cluster.dask.worker_processes  # noqa: F401 - imported for the forked workers
from pipeline.workloads import workloads

workloads()
