"""What a rank filter computes, in the form that the bodies take it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.borders import MODES

MAX_AXES = 3
SYMMETRIC = ("reflect", "mirror", "wrap")  # border modes: beyond an edge a window has the samples of one in the image
MAX_SAMPLES = 1 << 22  # of a window: 2047 × 2047, or 161 in each of three directions


@dataclass(frozen=True)
class Rank:
    """The rank to take, from 0, among n samples: a percentile as in scipy.ndimage, or a rank of a whole window.

    Where samples of a whole window are missing, a rank keeps its place relative to the others: floor(rank n / whole).
    """

    percentile: float | None = None
    rank: int = 0
    whole: int = 1

    def of(self, counts: Any) -> NDArray[np.int32]:
        """For each count of samples; 0 for none."""
        n = np.asarray(counts, np.int64)
        if self.percentile is None:
            ranks = self.rank * n // self.whole
            # The last rank stays the last.
            ranks = np.where(self.rank == self.whole - 1, n - 1, ranks)
        elif self.percentile == 100:
            ranks = n - 1
        else:
            ranks = (n.astype(np.float64) * self.percentile / 100).astype(np.int64)
        return np.clip(ranks, 0, np.maximum(n - 1, 0)).astype(np.int32)


@dataclass(kw_only=True)
class Difference:
    """What a filter on CUDA may do besides, which saves passes over memory.

    image   : from which results are subtracted as they are stored, of their shape and dtype; None: from none
    reverse : the image from the results, instead of the results from the image
    opens   : first the opposite filter with the same windows, of the same image; a filter that cannot gives None
    is_done : whether the filter did it
    """

    image: Any
    reverse: bool
    opens: bool = False
    is_done: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: output i is computed from the positions first + i … first + i + taps - 1 of the input."""

    length: int
    out_length: int
    first: int
    taps: int
    mode: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """A rank filter of an array seen as [planes, three axes, inner].

    footprint : boolean array of the axes' taps; None: all samples count
    samples   : in a whole window
    omit_nan  : whether NaN are missing; else a window with a NaN gives NaN
    nodata    : a value that marks missing samples, or None
    cval      : the value beyond the edge in mode "constant"
    """

    dtype: np.dtype[Any]
    planes: int
    axes: tuple[Axis, Axis, Axis]
    inner: int
    footprint: NDArray[np.bool_] | None
    rank: Rank
    samples: int
    omit_nan: bool
    nodata: float | None
    cval: float

    @property
    def may_miss(self) -> bool:
        """Whether samples may be missing."""
        return self.nodata is not None or (self.omit_nan and self.dtype.kind == "f")

    @cached_property
    def ranks(self) -> NDArray[np.int32]:
        """The rank for every count of present samples, 0 … samples."""
        return self.rank.of(np.arange(self.samples + 1))

    @cached_property
    def whole_rank(self) -> int:
        """The rank in a window without missing samples."""
        return int(self.rank.of(self.samples))

    @property
    def taps(self) -> tuple[int, int, int]:
        first, second, third = (axis.taps for axis in self.axes)
        return first, second, third

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.planes, *(axis.out_length for axis in self.axes), self.inner)


def axis_of(length: int, taps: int, mode: str, origin: int = 0, steps: int = 1) -> Axis:
    """A window of `taps` samples; an even number reaches one sample farther to the left, as in scipy.ndimage. Mode
    "valid" shrinks the axis in each of the steps that are computed at once."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if mode != "valid":
        return Axis(length=length, out_length=length, first=-(taps // 2) - origin, taps=taps, mode=mode)
    if steps * (taps - 1) >= length:
        raise ValueError(f'a window of {taps} along an axis of {length} samples: mode "valid" leaves nothing')
    return Axis(length=length, out_length=length - steps * (taps - 1), first=0, taps=taps, mode=mode)


def is_foldable(windows: Mapping[int, tuple[int, str, int, int]], shape: Sequence[int]) -> bool:
    """Whether `folded` can take the axes of an array as they are."""
    return len(_spanned(shape, windows)) <= MAX_AXES


def folded(
    shape: Sequence[int], windows: Mapping[int, tuple[int, str, int, int]]
) -> tuple[int, tuple[Axis, Axis, Axis], int]:
    """Planes, three axes and inner samples of a C-contiguous array. `windows`: taps, mode, origin and steps by axis."""
    axes = _spanned(shape, windows)
    first, second, third = [axis_of(1, 1, "nearest")] * (MAX_AXES - len(axes)) + axes
    begin, end = min(windows, default=0), max(windows, default=-1) + 1
    return math.prod(shape[:begin]), (first, second, third), math.prod(shape[end:])


def _spanned(shape: Sequence[int], windows: Mapping[int, tuple[int, str, int, int]]) -> list[Axis]:
    """The filtered axes, and between them those that are not, neighbours together."""
    axes: list[Axis] = []
    between = 1
    for axis in range(min(windows, default=0), max(windows, default=-1) + 1):
        if axis not in windows:
            between *= shape[axis]
            continue
        if between > 1:
            axes.append(axis_of(between, 1, "nearest"))
            between = 1
        axes.append(axis_of(shape[axis], *windows[axis]))
    return axes
