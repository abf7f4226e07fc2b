"""Image pyramids: each level halves the rows and columns of the one before it.

A sample of level k + 1 stands for a box of 2 × 2 samples of level k, in the same plane, channel and sample of the
pixel. If the number of rows or columns is odd, the last one is taken twice. Labels and booleans take the box's first
sample (nearest); all others take its mean:

- integers: rounded to nearest, halves up, of the exact sum;
- floats: ((a + c) + (b + d)) / 4 in float64 for the box a b / c d, rounded to the dtype once;
- NaN and nodata are left out of the mean; a box without any other sample is nodata, or NaN if there is none.

The first levels are made of each region as it is written, so the regions of a pyramid begin at multiples of `ALIGNED`
rows and columns and end there or at the image's edge. Levels above `STREAMED` are made at the end, of level `STREAMED`,
which has 1/256 of the samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import for_each
from pipeline.errors import ParameterError, counted
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import geotiff

STREAMED = 4
ALIGNED = 1 << STREAMED
LABELS = "image-label"  # of a header's metadata: the samples are labels, with what OME-Zarr states of them
# By default, images with more than _LARGE rows or columns get levels, down to one with at most _SMALL of each.
_LARGE = 4096
_SMALL = 512
_STRIP_BYTES = 1 << 20  # of the widened sums
_FINISHED = 2048  # rows and columns of a region of which further levels are made
_WIDE = {1: np.int16, 2: np.int32, 4: np.int64}


def chosen_levels(asked: int | None, header: ImageHeader, *, by_default: bool = True) -> int:
    """How many levels an output has, level 0 included.

    asked      : None: as many as viewers need if the input is a pyramid, or if it is large and `by_default`; else one

    ParameterError if there cannot be so many.
    """
    longest = max(_sizes(header))
    most = 1 + math.ceil(math.log2(longest))
    if asked is None:
        wanted = header.levels > 1 or (by_default and longest > _LARGE)
        return 1 + max(math.ceil(math.log2(longest / _SMALL)), 0) if wanted else 1
    if asked > most:
        rows, columns = _sizes(header)
        raise ParameterError(
            f"--levels {asked}: {rows:,} × {columns:,} pixels have {counted(most, 'level')}: give no more, or auto"
        )
    return asked


def at_level(header: ImageHeader, level: int) -> ImageHeader:
    """The header of a level: its shape, and the sizes and positions of its samples."""
    known, step = header.calibration, 1 << level
    sizes = {
        letter: replace(each, size=each.size * step) if letter in "YX" else each for letter, each in known.steps.items()
    }
    # Of the first box's centre.
    centres = {letter: (step - 1) / 2 * each.size for letter, each in known.steps.items() if letter in "YX"}
    origin = {**known.origin, **{letter: known.origin.get(letter, 0.0) + by for letter, by in centres.items()}}
    shape = tuple(-(-n // step) if letter in "YX" else n for letter, n in zip(header.axes, header.shape, strict=True))
    return replace(header, shape=shape, levels=1, calibration=replace(known, steps=sizes, origin=origin))


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the levels of an image are made. `missing`: the nodata value."""

    axes: str
    nearest: bool
    missing: float | None

    @classmethod
    def of(cls, header: ImageHeader) -> Reduction:
        nearest = header.dtype.kind == "b" or isinstance(header.metadata.get(LABELS), Mapping)
        return cls(axes=header.axes, nearest=nearest, missing=geotiff.nodata_of(header.metadata, header.dtype))

    @property
    def method(self) -> str:
        return "nearest" if self.nearest else "mean"

    def halved(self, samples: NDArray[Any]) -> NDArray[Any]:
        """The next level of samples that begin at even rows and columns."""
        first = self.axes.index("Y")
        rows, columns = samples.shape[first : first + 2]
        source = samples.reshape(-1, rows, columns, math.prod(samples.shape[first + 2 :]))
        halves = (-(-rows // 2), -(-columns // 2))
        out = np.empty((*samples.shape[:first], *halves, *samples.shape[first + 2 :]), samples.dtype)
        target = out.reshape(len(source), *halves, source.shape[-1])
        if self.nearest:
            target[...] = source[:, ::2, ::2]
            return out
        row_bytes = max(columns * source.shape[-1] * 8, 1)
        strip = max(_STRIP_BYTES // row_bytes, 1)

        def reduce(place: tuple[int, int]) -> None:
            plane, begin = place
            end = min(begin + strip, halves[0])
            target[plane, begin:end] = self._means(source[plane, 2 * begin : 2 * end])

        for_each(reduce, list(itertools.product(range(len(source)), range(0, halves[0], strip))))
        return out

    def _means(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Means of rows × columns × samples, in the dtype or a wider one."""
        with np.errstate(over="ignore", invalid="ignore"):
            if rows.dtype.kind == "f":
                means = _sums(rows, np.float64) / 4
                if np.isnan(means).any() or (self.missing is not None and np.any(rows == self.missing)):
                    means = self._without_missing(rows)
                return np.asarray(means.astype(rows.dtype, copy=False))
            if self.missing is not None and np.any(rows == rows.dtype.type(self.missing)):
                return self._without_missing(rows)
        wide = _WIDE.get(rows.dtype.itemsize)
        if wide is not None:
            return np.asarray((_sums(rows, wide) + 2) >> 2)
        # A sum of four would pass 64 bits: quarters and remainders are added apart.
        return np.asarray(_sums(rows >> 2, rows.dtype) + ((_sums(rows & 3, rows.dtype) + 2) >> 2))

    def _without_missing(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Means of those samples of each box that are neither NaN nor nodata."""
        rows = np.pad(rows, [(0, n % 2) for n in rows.shape[:2]] + [(0, 0)], mode="edge")
        absent = np.isnan(rows) if rows.dtype.kind == "f" else np.zeros(rows.shape, bool)
        if self.missing is not None:
            absent |= rows == rows.dtype.type(self.missing)
        counts = _sums(~absent, np.int64)
        if rows.dtype.kind == "f":
            means = _sums(np.where(absent, 0, rows), np.float64) / np.maximum(counts, 1)
            empty = np.nan if self.missing is None else self.missing
            return np.where(counts == 0, empty, means)
        assert self.missing is not None, "only nodata is absent from integers"
        # Quotients and remainders apart: up to 64 bits nothing passes the dtype's range.
        divisor = np.maximum(counts, 1).astype(rows.dtype)
        given = np.where(absent, 0, rows)
        whole, rest = np.zeros(counts.shape, rows.dtype), np.zeros(counts.shape, np.int64)
        for part in (given[top::2, left::2] for top in (0, 1) for left in (0, 1)):
            whole += part // divisor
            rest += (part % divisor).astype(np.int64)
        whole += ((2 * rest + counts) // (2 * np.maximum(counts, 1))).astype(rows.dtype)
        return np.where(counts == 0, rows.dtype.type(self.missing), whole)

    def region(self, region: Region) -> Region:
        """The region's part of the next level."""
        ends = [
            [-(-n // 2) if letter in "YX" else n for letter, n in zip(self.axes, each, strict=True)]
            for each in (region.start, region.stop)
        ]
        return Region(tuple(ends[0]), tuple(ends[1]))

    def levels_of(self, region: Region, samples: NDArray[Any], count: int) -> Iterator[tuple[int, Region, Any]]:
        """The `count` levels (at most `STREAMED`) above a region: level, region in that level, samples."""
        for above in range(1, min(count, STREAMED) + 1):
            region, samples = self.region(region), self.halved(samples)
            yield above, region, samples


def require_alignment(header: ImageHeader, region: Region) -> None:
    """ValueError unless every sample of the levels up to `STREAMED` is of this region alone or of others alone."""
    for letter, start, stop, size in zip(header.axes, region.start, region.stop, header.shape, strict=True):
        if letter in "YX" and (start % ALIGNED or (stop % ALIGNED and stop != size)):
            raise ValueError(f"a pyramid's region must begin and end at multiples of {ALIGNED}, not {start}:{stop}")


def finish(
    header: ImageHeader,
    levels: int,
    read: Callable[[int, Region], NDArray[Any]],
    write: Callable[[int, Region, NDArray[Any]], None],
) -> None:
    """Make the levels above `STREAMED` of those that are written. `read` and `write`: a region of a level."""
    reduction = Reduction.of(header)
    for base in range(STREAMED, levels - 1, STREAMED):
        shape = at_level(header, base).shape
        extents = [_FINISHED if letter in "YX" else 1 if letter != "S" else n
                   for letter, n in zip(header.axes, shape, strict=True)]  # fmt: skip
        starts = [range(0, n, extent) for n, extent in zip(shape, extents, strict=True)]
        for start in itertools.product(*starts):
            stop = (min(first + extent, n) for first, extent, n in zip(start, extents, shape, strict=True))
            region = Region(start, tuple(stop))
            for above, part, samples in reduction.levels_of(region, read(base, region), levels - 1 - base):
                write(base + above, part, samples)


def _sizes(header: ImageHeader) -> tuple[int, int]:
    return header.shape[header.axes.index("Y")], header.shape[header.axes.index("X")]


def _sums(rows: NDArray[Any], wide: Any) -> NDArray[Any]:
    """The sums of all boxes: first down, then across, the last row and column twice if they are single."""
    top, bottom = rows[::2], rows[1::2]
    pairs = np.empty((len(top), *rows.shape[1:]), wide)
    np.add(top[: len(bottom)], bottom, out=pairs[: len(bottom)], dtype=wide)
    if len(top) > len(bottom):
        np.add(top[-1], top[-1], out=pairs[-1], dtype=wide)
    left, right = pairs[:, ::2], pairs[:, 1::2]
    sums = np.empty(left.shape, wide)
    paired = right.shape[1]
    for sample in range(rows.shape[2]):  # an inner loop along columns is much longer than one along samples
        np.add(left[:, :paired, sample], right[..., sample], out=sums[:, :paired, sample])
    if left.shape[1] > paired:
        np.add(left[:, -1], left[:, -1], out=sums[:, -1])
    return sums
