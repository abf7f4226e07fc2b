"""The grid of a potential map and its chunks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from kernels.coulomb import Cell, Grid, Scheme, reaching
from pipeline.errors import ParameterError, StorageError
from pipeline.formats.charges.base import Array
from pipeline.formats.grid.base import GridFormat, GridHeader, readable
from pipeline.formats.image.base import Region
from pipeline.storage.partial import partial_path, samples_path
from pipeline.workloads.coulomb.parameters import DEFAULT_PADDING_ANGSTROM, CoulombParameters
from pipeline.workloads.coulomb.units import in_words
from pipeline.workloads.protocol import JobSpec

# Whole tiles of the kernels and whole blocks of the formats, along x, y and z.
GRAIN = (16, 128, 256)
# Pairs that justify a launch and leave enough chunks to share: 0.4 s on one core (AMD EPYC 7003).
GOOD_PAIRS = 1 << 30


def grid_header(spec: JobSpec, parameters: CoulombParameters, box: tuple[Array, Array]) -> GridHeader:
    """The grid of the parameters, or the one around a box. ParameterError if it has too many points for any file."""
    units = in_words(parameters.units, parameters.temperature_kelvin)
    title = f"Coulomb potential of {spec.input.name}, {parameters.scheme}"
    if parameters.origin is not None and parameters.shape is not None:
        (x, y, z), (nx, ny, nz) = parameters.origin, parameters.shape
        header = GridHeader.orthogonal((nx, ny, nz), (x, y, z), parameters.steps, units=units, title=title)
    else:
        padding = DEFAULT_PADDING_ANGSTROM if parameters.padding is None else parameters.padding
        (x0, y0, z0), (x1, y1, z1) = (box[0] - padding).tolist(), (box[1] + padding).tolist()
        header = GridHeader.covering((x0, y0, z0), (x1, y1, z1), parameters.steps, units=units, title=title)
    try:
        part_of(header, Region.whole(header.shape))
    except ValueError as error:
        option = "spacing" if parameters.origin is None else "shape"
        raise ParameterError(f"--{option}: {error}; that map would take {readable(header.nbytes)}") from error
    return header


def part_of(header: GridHeader, region: Region) -> Grid:
    """A box of the grid for the kernels, with its place in the whole, so that it gets the same bits."""
    x, y, z = region.start
    nx, ny, nz = region.shape
    return Grid(origin=header.origin, spacing=header.spacing, shape=(nx, ny, nz), first=(x, y, z))


def refuse_too_many_cells(spec: JobSpec, header: GridHeader, scheme: Scheme, cells: Sequence[Cell | None]) -> None:
    """ParameterError if the grid covers more periodic images than the kernels allow."""
    known = [cell for cell in cells if cell is not None]
    if not known:
        return
    smallest = min(known, key=lambda cell: float(np.prod(cell.widths)))
    try:
        reaching(np.zeros((1, 3)), part_of(header, Region.whole(header.shape)), scheme, smallest)
    except ValueError as error:
        raise ParameterError(
            f"--cell: {spec.input}: {error}; check the cell's lengths, choose a smaller grid, or --cell none"
        ) from error


def refuse_too_large(spec: JobSpec, header: GridHeader, form: GridFormat) -> None:
    """Raises StorageError if the disk has no room for the map, ParameterError if an empty one would not either."""
    folder = spec.output.parent
    try:
        disk = shutil.disk_usage(folder)
        # The partial output, of this job or an interrupted run, is continued or replaced.
        free = disk.free + _occupied_bytes(spec.output)
    except OSError:  # no such folder: the writer reports it
        return
    needed, what = form.file_bytes(header), f"as {form.name}"
    if spec.output.suffix == ".gz":  # compressed size unknown; the samples are stored beside it
        needed, what = header.nbytes, "even before it is compressed"
    if needed > free:
        points = " × ".join(f"{count:,}" for count in header.shape)
        kind = ParameterError if needed > disk.total else StorageError
        raise kind(
            f"{spec.output}: the grid of {points} points takes {readable(needed)} {what}, and {readable(free)} "
            f"are free in {folder.absolute()}: choose a larger --spacing, a smaller box, or another folder"
        )


def _occupied_bytes(output: Path) -> int:
    """On disk, by the partial output."""
    partial = (partial_path(output), partial_path(samples_path(output)))
    files = (file for path in partial if path.exists() for file in (path, *path.rglob("*")))
    return sum(512 * file.stat().st_blocks for file in files)


def cut_extents(shape: tuple[int, ...], *, most: int, wanted: int, pairs_per_point: float) -> tuple[int, ...]:
    """Points of a chunk along each axis: slabs along x if they fit, in whole grains if possible.

    most, wanted    : maximum and preferred number of points of a chunk
    pairs_per_point : mean number of atoms that a point sums over; much work makes thinner slabs
    """
    limit = max(1, min(most, wanted))
    extents = list(shape)
    for least in (GRAIN, (1, 1, 1)):
        for axis, fewest in enumerate(least):
            others = math.prod(extents) // extents[axis]
            if others * extents[axis] > limit:
                fitting = max(limit // others, min(fewest, extents[axis]))
                extents[axis] = fitting // fewest * fewest if fitting > fewest else fitting
    plane = extents[1] * extents[2]
    good = math.ceil(GOOD_PAIRS / max(pairs_per_point, 1) / plane / GRAIN[0]) * GRAIN[0]
    extents[0] = min(extents[0], good)
    return tuple(_evened(n, extent, grain) for n, extent, grain in zip(shape, extents, GRAIN, strict=True))


def regions(shape: tuple[int, ...], extents: tuple[int, ...]) -> Iterator[Region]:
    """The chunks' boxes, in the order of the file."""
    starts = [range(0, count, extent) for count, extent in zip(shape, extents, strict=True)]
    for start in product(*starts):
        stop = tuple(min(s + e, n) for s, e, n in zip(start, extents, shape, strict=True))
        yield Region(start, stop)


def _evened(length: int, extent: int, grain: int) -> int:
    """At most `extent`, with the last piece about as long as the others."""
    even = math.ceil(length / math.ceil(length / extent))
    rounded = math.ceil(even / grain) * grain
    return rounded if rounded <= extent else even
