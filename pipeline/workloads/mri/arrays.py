"""Arrays that stand beside the raw data: coil sensitivities, density weights, field maps; from .npy or .cfl."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, MillraceError
from pipeline.formats.cfl import Cfl
from pipeline.storage.positional import first_bytes, reading


def read_array(path: Path, shape: tuple[int, ...], what: str, axes: str) -> NDArray[Any]:
    """An array of `shape`, mapped from the file; axes of one may be missing or stand anywhere.

    path : .npy, or .cfl, whose dimensions count backwards: x is the last axis
    what : the option that named it, for messages; axes: of the shape, in words

    InputError where the file is damaged or has another shape.
    """
    array = Cfl(path).array if path.suffix.lower() == ".cfl" else _npy(path)
    if array.dtype.kind not in "iufc":
        raise InputError(f"{what} {path}: holds {array.dtype}; numbers are needed")
    found = tuple(n for n in array.shape if n > 1)
    if found != tuple(n for n in shape if n > 1):
        raise InputError(f"{what} {path}: has the shape {array.shape}; {axes} = {shape} is needed for this data")
    return np.asarray(array).reshape(shape)


def _npy(path: Path) -> NDArray[Any]:
    first_bytes(path)  # says what is wrong with a path
    try:
        with reading(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy evaluates a header's text, damaged or old as it may be
            return np.lib.format.open_memmap(path, mode="r")
    except MillraceError:
        raise
    except Exception as exc:  # whatever evaluating a damaged header comes to
        raise InputError(f"{path}: is no .npy file of plain numbers, or is damaged; save it again") from exc
