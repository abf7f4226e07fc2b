"""Samples as integers of the same order, and which of them are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.rank.task import Task


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The key of an integer is itself; that of a float are its bits, all but the sign turned round if it is negative.

    bits          : dtype of the samples' bits
    lowest … highest : keys of numbers; those beyond are of NaN
    nodata        : first and last key of the value that marks missing samples; the first exceeds the last if none does
    empty         : bits of the result of a window of missing samples
    nan, cval     : bits
    """

    bits: np.dtype[Any]
    lowest: int
    highest: int
    nodata: tuple[int, int]
    empty: int
    nan: int
    cval: int


def keys_of(task: Task) -> Keys:
    """The keys of a task's dtype."""
    dtype = task.dtype
    bits = np.dtype(f"i{dtype.itemsize}") if dtype.kind == "f" else dtype

    def bits_of(value: float) -> int:
        return int(np.array(value, dtype).view(bits))

    if dtype.kind != "f":
        ends = np.iinfo(dtype)
        nodata = (1, 0) if task.nodata is None else (int(task.nodata),) * 2
        return Keys(
            bits=bits, lowest=int(ends.min), highest=int(ends.max), nodata=nodata, empty=int(task.nodata or 0), nan=0,
            cval=int(task.cval),
        )  # fmt: skip
    most = int(np.iinfo(bits).max)

    def key_of(value: float) -> int:
        found = bits_of(value)
        return found if found >= 0 else found ^ most

    nodata = (1, 0)
    if task.nodata is not None and task.nodata == task.nodata:  # not NaN
        nodata = (-1, 0) if task.nodata == 0 else (key_of(task.nodata),) * 2
    nan = bits_of(np.nan)
    empty = nan if task.nodata is None else bits_of(task.nodata)
    return Keys(
        bits=bits, lowest=key_of(-np.inf), highest=key_of(np.inf), nodata=nodata, empty=empty, nan=nan,
        cval=bits_of(task.cval),
    )  # fmt: skip
