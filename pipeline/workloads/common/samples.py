"""Samples that the kernels do not take are computed in a wider dtype, which holds them exactly, and rounded back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pipeline.errors import InputError

_WIDER: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.uint8),
    "int8": np.dtype(np.int16),
    "float16": np.dtype(np.float32),
}
_WIDER |= dict.fromkeys(("uint32", "int32", "uint64", "int64"), np.dtype(np.float64))
# float64 holds every whole number up to this.
EXACT = 1 << 53


def module_of(array: Any) -> Any:
    """The module `numpy` or `cupy`, without importing it."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def computed_in(stored: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which images of that dtype are computed; of 64-bit integers it holds those up to ±2**53."""
    return _WIDER.get(stored.name, stored)


def computed_in_floats(stored: np.dtype[Any]) -> np.dtype[Any]:
    """The same for means with weights: of bool they are fractions."""
    return np.dtype(np.float32) if stored.kind == "b" else computed_in(stored)


def widened(samples: Any, dtype: np.dtype[Any], *, exactly: bool = False) -> Any:
    """NumPy or CuPy samples in the dtype that `computed_in` gives.

    exactly : InputError if some of them are beyond ±2**53
    """
    if samples.dtype == dtype:
        return samples
    if samples.dtype.kind == "b":  # any byte but 0 is True
        xp = module_of(samples)
        return xp.minimum(samples.view(np.uint8), np.uint8(1)).astype(dtype, copy=False)
    if exactly and samples.dtype.kind in "ui" and samples.dtype.itemsize == 8:
        beyond = (samples > EXACT) | (samples < -EXACT if samples.dtype.kind == "i" else False)
        if bool(beyond.any()):
            raise InputError(
                f"{samples.dtype.name} values beyond ±2**53 ({EXACT:,}) are not computed exactly: subtract an offset, "
                "or number the labels anew"
            )
    return samples.astype(dtype)


def narrow(values: Any, out: Any, *, nodata: float | None = None) -> None:
    """Fill `out` with values rounded to nearest, those beyond its range with the end of it; of bool, with whether they
    are 1/2 or more. `values` may be changed.

    Halves are rounded up, as by the box of other integers.

    nodata  : stored where `values`, of floats, are NaN
    """
    xp, to = module_of(out), out.dtype
    missing = None if nodata is None else xp.isnan(values)
    if missing is not None:
        xp.copyto(values, 0, where=missing)
    if to.kind == "b":
        xp.greater_equal(values, 0.5, out=out)
    elif to.kind == "f":
        with np.errstate(over="ignore"):  # what is beyond the range becomes infinite
            out[...] = values
    else:
        if values.dtype.kind == "f":
            # A mean of n integers that sum to less than 2**48 is a half or at least 1/(2n) from one; sums are exact,
            # and multiplying by 1/n is off by two roundings at most.
            values += xp.minimum(xp.abs(values) * 2.0**-51, 0.25)
            whole = xp.floor(values)
            with np.errstate(invalid="ignore"):  # infinities stay
                whole += values - whole >= 0.5
            values = whole
        _saturate(values, out, xp)
    if missing is not None:
        out[missing] = to.type(nodata)


def _saturate(values: Any, out: Any, xp: Any) -> None:
    ends = np.iinfo(out.dtype)
    if out.dtype.itemsize < 8:
        out[...] = xp.clip(values, ends.min, ends.max)
        return
    beyond = float(ends.max)  # rounded up: one too many
    out[...] = xp.clip(values, float(ends.min), np.nextafter(beyond, 0))
    out[values >= beyond] = ends.max
