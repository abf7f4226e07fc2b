"""Steps of a 7-point stencil on three-dimensional fields, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    next(p) = centre × f(p) + neighbour × (sum of f over the six neighbours of p)    for points inside
    next(p) = f(p)                                                                   for points on the field's border

With centre = 1 − 6 a and neighbour = a these are explicit steps of heat conduction between walls of fixed temperature;
with centre = 0 and neighbour = 1/6, Jacobi's iteration for Laplace's equation.

Field    : float32 [z, y, x], any strides, any sizes, including zero. The result is C-contiguous.
Precision: each product and sum is rounded to float32, in this order: (west + east) + (south + north), then + (below +
           above), times neighbour, added to centre × f. The bits do not depend on device, kernel or number of workers,
           and n steps give the same bits as n calls with one step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = ["DTYPE", "MAX_SIZE", "stencil"]

DTYPE = "float32"
MAX_FACTOR = float(np.finfo(np.float32).max)
MAX_SIZE = (1 << 31) - 1 - 256  # 32-bit indices reach up to a tile beyond the field


def stencil(
    field: Any,
    *,
    centre: float,
    neighbour: float,
    steps: int = 1,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The field after a number of steps.

    field     : NumPy or CuPy array [z, y, x], float32, any strides; not modified
    centre    : factor of the point itself, finite in float32
    neighbour : factor of its six neighbours
    steps     : 0 or more. One call for several steps is faster: CUDA computes up to four in one pass over memory.
    out       : array of the field's library and shape for the result: float32, C-contiguous; must not share memory with
                the field
    workers   : CPU threads; default one per core
    stream    : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the result: float32 [z, y, x], an array of the field's library. More than one pass needs memory for another
    such array.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_field(field)
    for name, factor in (("centre", centre), ("neighbour", neighbour)):
        if not isinstance(factor, int | float | np.number) or isinstance(factor, bool):
            raise TypeError(f"{name} must be a number; got {factor!r}")
        if not math.isfinite(factor) or abs(factor) > MAX_FACTOR:
            raise ValueError(f"{name} must be finite in float32; got {factor!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be a whole number, 0 or more; got {steps!r}")
    check_workers(workers)
    check_out(out, field.shape, np.float32, apart_from={"field": field})
    if isinstance(field, np.ndarray):
        from kernels.classic.stencil import cpu

        return cpu.stencil(field, float(centre), float(neighbour), steps, out, workers=workers)
    from kernels.classic.stencil import cuda

    return cuda.stencil(field, float(centre), float(neighbour), steps, out, stream=stream)


def _check_field(field: Any) -> None:
    check_array("field", field)
    if np.dtype(field.dtype).newbyteorder("=").name != DTYPE:
        raise TypeError(f"field has dtype {field.dtype}; supported is {DTYPE}")
    if field.ndim != 3 or max(field.shape) > MAX_SIZE:
        raise ValueError(f"field must be an array [z, y, x] of at most {MAX_SIZE} a side; got shape {field.shape}")
