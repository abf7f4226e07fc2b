"""Reading a region together with its halo, which may reach past the edge of the image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.borders import OUTSIDE, border_indices
from pipeline.codecs.packed import PackedBlocks
from pipeline.formats.image.base import ImageReader, Region
from pipeline.workloads.common.crop import CroppedReader
from pipeline.workloads.common.image_plan import within


def read_with_borders(reader: ImageReader, region: Region, mode: str, cval: float, out: NDArray[Any]) -> None:
    """Fill `out` with the image's samples in `region`, and beyond the edge with what the border mode puts there.

    region : may start before 0 and stop after the image's last sample, along any axis
    mode   : one of `kernels.smoothing.BORDER_MODES`
    out    : C-contiguous, the region's shape, the image's dtype
    """
    if isinstance(reader, CroppedReader):  # what lies around a part of an image is the image
        read_with_borders(reader.whole, reader.moved(region), mode, cval, out)
        return
    shape = reader.header.shape
    inside = _inside(region, shape)
    if inside == region:
        reader.read(region, out)
        return
    if all(inside.shape):
        _read_into(reader, inside, out[within(inside, region)])
    for axis in range(len(shape)):
        _fill_beyond(reader, region, inside, axis, mode, cval, out)


def pack_with_borders(
    reader: ImageReader, region: Region, mode: str, cval: float, memory: NDArray[np.uint8]
) -> PackedBlocks | None:
    """Gather the region's encoded blocks in `memory`, see `ImageReader.read_packed`; None if `read_with_borders` must
    read it."""
    if isinstance(reader, CroppedReader):
        return pack_with_borders(reader.whole, reader.moved(region), mode, cval, memory)
    shape = reader.header.shape
    inside = _inside(region, shape)
    if not all(inside.shape):
        return None
    for axis in range(len(shape)):
        beyond = np.concatenate([np.arange(region.start[axis], 0), np.arange(shape[axis], region.stop[axis])])
        sources = border_indices(beyond, shape[axis], mode)
        sources = sources[sources != OUTSIDE]
        if sources.size and not inside.start[axis] <= sources.min() <= sources.max() < inside.stop[axis]:
            return None
    packed = reader.read_packed(inside, memory)
    if packed is None or inside == region:
        return packed

    def complete(out: Any) -> None:
        for axis in range(len(shape)):
            _fill_beyond(reader, region, inside, axis, mode, cval, out)

    return replace(packed, target=within(inside, region), complete=complete)


def _inside(region: Region, shape: tuple[int, ...]) -> Region:
    """The part of a region that the image holds."""
    return Region(
        tuple(min(max(start, 0), length) for start, length in zip(region.start, shape, strict=True)),
        tuple(min(max(stop, 0), length) for stop, length in zip(region.stop, shape, strict=True)),
    )


def _fill_beyond(
    reader: ImageReader, region: Region, inside: Region, axis: int, mode: str, cval: float, out: Any
) -> None:
    """Fill what lies beyond the edge along one axis, across the whole of `out` along the others.

    Along later axes that copies samples not yet read; their own turn overwrites them.
    """
    first, last = region.start[axis], region.stop[axis]
    for start, stop in ((first, min(inside.start[axis], last)), (max(inside.stop[axis], first), last)):
        sources = border_indices(np.arange(start, stop), reader.header.shape[axis], mode)
        for position, source, count, step in _runs(start, sources):
            target = out[_along(axis, position - first, count, out.ndim)]
            lowest = min(source, source + (count - 1) * step)
            highest = max(source, source + (count - 1) * step)
            if source == OUTSIDE:
                target[...] = cval
            elif inside.start[axis] <= lowest and highest < inside.stop[axis] and all(inside.shape):
                target[...] = out[_along(axis, source - first, count, out.ndim, step)]
            else:
                elsewhere = Region(_replaced(region.start, axis, lowest), _replaced(region.stop, axis, highest + 1))
                samples = np.empty(elsewhere.shape, out.dtype)
                read_with_borders(reader, elsewhere, mode, cval, samples)
                target[...] = samples[_along(axis, source - lowest, count, out.ndim, step)]


def _runs(start: int, sources: NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """Cut positions start, start + 1 … into (position, source, count, step) with sources that ascend or descend one by
    one, or stay the same: step 1, -1 or 0."""
    begin, steps = 0, np.diff(sources).tolist()
    while begin < len(sources):
        step = steps[begin] if begin < len(steps) and abs(steps[begin]) < 2 else 1
        end = begin + 1
        while end < len(sources) and steps[end - 1] == step:
            end += 1
        yield start + begin, int(sources[begin]), end - begin, step
        begin = end


def _read_into(reader: ImageReader, region: Region, target: NDArray[Any]) -> None:
    if target.flags.c_contiguous or reader.any_strides:
        reader.read(region, target)
        return
    samples = np.empty(target.shape, target.dtype)
    reader.read(region, samples)
    target[...] = samples


def _along(axis: int, start: int, count: int, ndim: int, step: int = 1) -> tuple[slice, ...]:
    """The index of `count` samples along an axis; step 0: of one sample, which is repeated."""
    end = start + count * step if step else start + 1
    span = slice(start, None if end < 0 else end, step or 1)
    return tuple(span if each == axis else slice(None) for each in range(ndim))


def _replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
