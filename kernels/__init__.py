"""Pure computation on arrays: one folder an operation, each with a CPU and a CUDA body under one contract."""

from kernels.runtime.operations import get, names

__all__ = ["get", "names"]
