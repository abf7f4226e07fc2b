"""Proximal operators of image penalties, on NumPy (CPU) and CuPy arrays (CUDA).

    prox(v) = argmin over x of ½‖x − v‖² + threshold · penalty(x)

    soft_threshold         Σ |x|, or Σ √(Σ_k |x_k|²) of vectors of k values: the group norm of isotropic total variation
    low_rank               Σ over blocks of the nuclear norm of (pixels of the block) × frames
    differences            the operator D of total variation Σ |D x|, and its adjoint
    project                onto |x| ≤ radius, the conjugate's operator: soft_threshold(v) + project(v) = v (Moreau)

The operator of ‖Ψ x‖₁ is `soft_threshold` between the two transforms of `kernels.wavelet`, since Ψ is orthonormal.
Arrays are complex64, on the CPU complex128 too. On CUDA nothing waits for the device.

Sources: Parikh, Boyd, "Proximal algorithms", Found. Trends Optim. 1 (2014); Rudin, Osher, Fatemi, Physica D 60 (1992);
Trzasko, Manduca, "Local versus global low-rank promotion in dynamic MRI series reconstruction", ISMRM 2011, 4371.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.proximal.low_rank import MOST_FRAMES, low_rank, rank_scale
from kernels.runtime.arrays import check_array

__all__ = ["MOST_FRAMES", "differences", "differences_adjoint", "inner", "low_rank", "magnitudes", "project"]
__all__ += ["next_shift", "rank_scale", "soft_threshold"]


def soft_threshold(values: Any, threshold: Any, *, vectors: bool = False) -> Any:
    """Each magnitude less the threshold, and 0 at least.

    threshold : a real number, or a 0-d float32 array of the device
    vectors   : the first axis holds the components of a vector, whose norm shrinks

    Returns a new array. NaN stays NaN. Raises TypeError or ValueError for arrays that are not complex.
    """
    _check(values)
    return _body(values).soft_threshold(values, threshold, vectors)


def project(values: Any, radius: Any, *, vectors: bool = False) -> Any:
    """The nearest values of magnitude `radius` or less; see `soft_threshold`."""
    return values - soft_threshold(values, radius, vectors=vectors)


def magnitudes(values: Any, *, vectors: bool = False) -> Any:
    """Σ |x|, or with `vectors` Σ √(Σ_k |x_k|²) over the first axis k: float64, 0-d, on the device."""
    _check(values)
    return _body(values).magnitudes(values, vectors)


def inner(one: Any, other: Any) -> Any:
    """The real part of Σ conj(one) × other in float64: 0-d, on the device, with the same bits in every run."""
    _check(one)
    return _body(one).inner(one, other)


def differences(image: Any, axes: Sequence[int]) -> Any:
    """Forward differences along axes, [axes, *image.shape]: x[i + 1] − x[i], and 0 at the last place.

    Raises ValueError if the image has more than four axes.
    """
    _check(image)
    return _body(image).differences(image, _axes(image.ndim, axes))


def differences_adjoint(fields: Any, axes: Sequence[int]) -> Any:
    """The adjoint of `differences`: the negative divergence of fields [axes, *image.shape], an image."""
    _check(fields)
    return _body(fields).differences_adjoint(fields, _axes(fields.ndim - 1, axes))


def next_shift(table: Any, row: Any, shift: Any) -> None:
    """The next of a table's shifts, int32 [rows, axes], in place; `row`, int32 [1], is that of `shift` [axes]."""
    if isinstance(table, np.ndarray):
        row[0] = (row[0] + 1) % len(table)
        shift[...] = table[row[0]]
    else:
        from kernels.proximal import cuda

        cuda.next_shift(table, row, shift)


def _axes(dimensions: int, axes: Sequence[int]) -> tuple[int, ...]:
    if dimensions > 4:
        raise ValueError(f"an image must have four axes or fewer; got {dimensions}")
    return tuple(axis % dimensions for axis in axes)


def _check(array: Any) -> None:
    check_array("values", array)
    allowed = ("complex64", "complex128") if isinstance(array, np.ndarray) else ("complex64",)
    if array.dtype.name not in allowed:
        raise ValueError(f"values must be {' or '.join(allowed)}; got {array.dtype}")


def _body(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        from kernels.proximal import cpu

        return cpu
    from kernels.proximal import cuda

    return cuda
