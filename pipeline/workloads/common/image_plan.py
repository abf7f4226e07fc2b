"""Cutting an image job into chunks, each read with its halo: what every filter of images plans alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import format_bytes
from pipeline.errors import MemoryTooSmall, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, ImageReader, Region, Storage
from pipeline.formats.image.pyramid import ALIGNED
from pipeline.workloads.common.axes import named
from pipeline.workloads.common.tiling import Tiling, best_tiling
from pipeline.workloads.protocol import ArraySpec, Budget, Chunk, JobSpec, Plan

# Each chunk of a plan takes 700 bytes of memory and 10 µs: of more, chunks are made larger.
MOST_CHUNKS = 1 << 18


def plan_image(
    reader: ImageReader,
    spec: JobSpec,
    budget: Budget,
    halo: Sequence[tuple[int, int]],
    *,
    header: ImageHeader,
    further: ArraySpec | None = None,
    most_bytes: int | None = None,
    whole: Collection[int] = (),
    padded: Collection[int] = (),
    storage: Storage | None = None,
    also: Sequence[tuple[Path, ImageHeader]] = (),
) -> Plan:
    """Cut an image along the blocks of its input and output.

    halo       : samples that a chunk needs before and after along each axis
    header     : of the output, of the input's shape
    further    : an output of each chunk besides the samples
    most_bytes : of a chunk's input and output samples together
    whole      : axes that no chunk parts, besides the samples of a pixel
    storage    : of the output
    also       : further outputs of the same shape
    padded     : axes along which chunks hold the halo even if they are not cut

    Raises ParameterError if not even the smallest chunk fits the budget, or if there would be too many.
    """
    source = reader.header
    form = images.format_for_output(spec.output, storage)
    multiple = (1,) * len(source.shape)
    # Chunks are cut along the output's files, or where these are too large, along what is encoded at once.
    grains = [_grain(reader, blocks, header) for blocks in (form.block_shape(header), form.part_shape(header))]
    outputs = [(spec.output, header), *also]
    if any(images.format_for_output(path, storage).levels(each, path) > 1 for path, each in outputs):
        multiple = tuple(ALIGNED if letter in "YX" else 1 for letter in header.axes)
        grains = [_aligned(grain, multiple, header) for grain in grains]
        # The levels of a region take a third of its output's bytes.
        budget = replace(budget, budget_bytes=budget.budget_bytes * 6 // 7, target_bytes=budget.target_bytes * 6 // 7)
    reserved = further.nbytes if further else 0
    limit, target = budget.budget_bytes - reserved, budget.target_bytes
    if most_bytes is not None:
        limit = min(limit, most_bytes)
    cut: Callable[..., Tiling | None] = partial(
        best_tiling, source.shape, halo, max(source.dtype.itemsize, header.dtype.itemsize),
        whole={*whole, *(axis for axis, letter in enumerate(source.axes) if letter == "S")}, padded=padded,
        multiple=multiple,
    )  # fmt: skip

    def tilings(**limits: int) -> Tiling | None:
        found = cut(grain=grains[0], **limits)
        return cut(grain=grains[1], **limits) if found is None or found.parted else found

    tiling = tilings(budget_bytes=limit, target_bytes=target)
    while tiling is not None and tiling.count > MOST_CHUNKS and target < limit:
        target = min(2 * target, limit)
        tiling = tilings(budget_bytes=limit, target_bytes=target)
    if tiling is None or tiling.count > MOST_CHUNKS:
        needed = _needed(limit, tilings)
        if most_bytes is not None and needed > most_bytes:
            raise ParameterError(
                f"one chunk of {spec.input} with its halo takes {format_bytes(needed)}, more than the "
                f"{format_bytes(most_bytes)} that --statistics takes: leave it out"
            )
        what = f"one chunk of {spec.input} with its halo"
        if tiling is not None:
            what = f"{spec.input}, which would be cut into {tiling.count:,} chunks, more than {MOST_CHUNKS:,}"
        times = math.ceil(100 * (needed + reserved) / max(budget.budget_bytes, 1)) / 100
        raise MemoryTooSmall(f"--memory is too small for {what}", times)
    reader.expect(
        [
            [(max(start - before, 0), min(start + extent + after, length)) for start in range(0, length, extent)]
            for length, extent, (before, after) in zip(source.shape, tiling.extents, tiling.chunk_halo, strict=True)
        ]
    )
    return Plan(chunks=_chunks(tiling, source, header.dtype, (further,) if further else ()))


def _needed(limit: int, tilings: Callable[..., Tiling | None]) -> int:
    """The least bytes of a chunk, to 1 in 64, beyond a limit that is too low."""

    def fits(nbytes: int) -> bool:
        tiling = tilings(budget_bytes=nbytes, target_bytes=nbytes)
        return tiling is not None and tiling.count <= MOST_CHUNKS

    low, high = limit, max(2 * limit, 1)
    while not fits(high):
        low, high = high, 2 * high
    while high - low > max(high >> 6, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _grain(reader: ImageReader, written: tuple[int, ...] | None, header: ImageHeader) -> tuple[int, ...]:
    """The blocks of both files along each axis: of the output's alone where no chunk could hold both."""
    unit = (1,) * len(header.shape)
    both = map(math.lcm, reader.block_shape or unit, written or unit)
    return tuple(one if one <= n else own for one, own, n in zip(both, written or unit, header.shape, strict=True))


def _aligned(grain: tuple[int, ...], multiple: tuple[int, ...], header: ImageHeader) -> tuple[int, ...]:
    """The blocks at which a pyramid's chunks may be cut, at such multiples: of the files if those fit."""
    both = map(math.lcm, grain, multiple)
    return tuple(block if block <= n else finest for block, finest, n in zip(both, multiple, header.shape, strict=True))


def _chunks(
    tiling: Tiling, source: ImageHeader, dtype: np.dtype[Any], further: tuple[ArraySpec, ...]
) -> tuple[Chunk, ...]:
    halo = tiling.chunk_halo
    return tuple(
        Chunk(
            index=index,
            region=region,
            halo=halo,
            inputs=(ArraySpec(grown(region, halo).shape, source.dtype),),
            outputs=(ArraySpec(region.shape, dtype), *further),
            work=math.prod(n for n, letter in zip(region.shape, source.axes, strict=True) if letter != "S"),
        )
        for index, region in enumerate(tiling.regions())
    )


def grown(region: Region, halo: Sequence[tuple[int, int]]) -> Region:
    """The region with its halo."""
    return Region(
        tuple(start - before for start, (before, _) in zip(region.start, halo, strict=True)),
        tuple(stop + after for stop, (_, after) in zip(region.stop, halo, strict=True)),
    )


def within(region: Region, whole: Region) -> tuple[slice, ...]:
    """A region in an array of another that holds it."""
    return tuple(slice(a - c, b - c) for a, b, c in zip(region.start, region.stop, whole.start, strict=True))


def remarks(axes: Sequence[int], header: ImageHeader, output: Path) -> dict[str, str]:
    """For the plan and the receipt: which axes are filtered, and what the output does not state of what is known."""
    lost = images.not_kept(header, output)
    return {"filtered along": named(axes, header.axes)} | ({"not kept": lost} if lost else {})


def check_cval(cval: float, header: ImageHeader, path: Path) -> None:
    """ParameterError if the dtype of the image does not hold the value beyond its edge."""
    if header.dtype.kind == "f":
        with np.errstate(over="ignore"):
            stored = float(header.dtype.type(cval))
        if math.isinf(stored) and not math.isinf(cval):
            raise ParameterError(
                f"--cval {cval:g} is beyond the {header.dtype.name} of {path}, which ends at "
                f"{np.finfo(header.dtype).max:g}: give less, or inf"
            )
        return
    held = (0, 1) if header.dtype.kind == "b" else (np.iinfo(header.dtype).min, np.iinfo(header.dtype).max)
    low, high = held[0], header.maxval or held[1]
    if not (math.isfinite(cval) and cval == int(cval) and low <= cval <= high):
        raise ParameterError(f"--cval must be a whole number in {low} … {high} for {path}; got {cval:g}")
