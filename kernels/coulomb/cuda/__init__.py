"""Potential maps on CUDA: launches the kernels of coulomb.cu for each scheme."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.coulomb.cells import Cells, cells_around
from kernels.coulomb.cuda.structs import (
    CONSTANT_ATOMS,
    AtomChunk,
    CellsStruct,
    PointsStruct,
    cells_struct,
    in_cutoffs,
    points_struct,
)
from kernels.coulomb.geometry import SCHEMES, Cell, Grid, Scheme, images, reach_box
from kernels.coulomb.tuning import CUBES, OVERFLOW_BLOCKS, SLICES, THREADS
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream

# Every kernel must assign an atom to the same cell, so the compiler may not contract multiplications and additions.
OPTIONS = ("--fmad=false",)

DIRECT_THREADS, COARSE = 128, 8
DIRECT_TILE = (16, 8, 8)
REGION, REGION_THREADS, SLOTS = (8, 8, 8), 128, 8
TILE, WARPS, TILES_A_BLOCK = (4, 4, 8), 4, (2, 2, 1)
SCANNED, SCAN_THREADS = 4096, 1024
MAX_CELLS = (1 << 31) - 1 - SCANNED
REALS = {"float32": "float", "float64": "double"}
CUTOFF_SCHEMES = SCHEMES[:-1]
RATE_ENTRY, RATE_ROOTS_A_ROUND = "inverse_roots", 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """One map to compute."""

    atoms: Any  # CuPy [n, 4], C-contiguous, native byte order
    grid: Grid
    scheme: Scheme
    cell: Cell | None
    out: Any
    stream: Any

    @property
    def real(self) -> str:
        return REALS[self.atoms.dtype.name]

    @property
    def template(self) -> str:
        return f"{SCHEMES.index(self.scheme.name)}, {str(self.scheme.distance_dependent).lower()}"

    def launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        kernel("coulomb", entry).launch((blocks,), (threads,), args, stream=self.stream)


def potential(
    atoms: Any,
    grid: Grid,
    scheme: Scheme,
    cell: Cell | None,
    out: Any,
    *,
    stream: Any = None,
    variant: str | None = None,
) -> Any:
    """The map of a CuPy array of atoms; see kernels.coulomb.

    variant : a name in `VARIANTS`; default the fastest that applies

    Raises ValueError if the variant does not apply to the scheme.
    """
    import cupy

    found = _chosen(variant, scheme)
    with on_stream(atoms, stream) as current:
        atoms = cupy.ascontiguousarray(atoms, np.dtype(atoms.dtype).newbyteorder("="))
        if out is None:
            out = cupy.empty(grid.shape, cupy.float32)
        if len(atoms) == 0:
            out.fill(0)
            return out
        task = Task(atoms=atoms, grid=grid, scheme=scheme, cell=cell, out=out, stream=current)
        found.run(task)
        if scheme.exclude_radius_angstrom > 0:
            _exclude(task)
    return out


def exclude_near(atoms: Any, grid: Grid, radius: float, cell: Cell | None, out: Any, *, stream: Any = None) -> None:
    """See kernels.coulomb.exclude."""
    import cupy

    with on_stream(atoms, stream) as current:
        atoms = cupy.ascontiguousarray(atoms, np.dtype(atoms.dtype).newbyteorder("="))
        scheme = Scheme(name="direct", exclude_radius_angstrom=radius)
        if len(atoms):
            _exclude(Task(atoms=atoms, grid=grid, scheme=scheme, cell=cell, out=out, stream=current))


def variants_of(scheme: Scheme) -> Mapping[str, Variant]:
    """The variants that compute a scheme, naive to fast; the last is in production."""
    return DIRECT if scheme.name == "direct" else CUTOFF


def _chosen(name: str | None, scheme: Scheme) -> Variant:
    variants = variants_of(scheme)
    if name is None:
        return list(variants.values())[-1]
    if name not in variants:
        raise ValueError(f"variant {name!r} cannot compute the scheme {scheme.name!r}")
    return variants[name]


def _points(task: Task, unit: float) -> PointsStruct:
    return points_struct(task.grid, task.scheme, len(task.atoms), unit)


def _cells(task: Task, cells: Cells) -> CellsStruct:
    return cells_struct(task.grid, task.scheme, task.cell, len(task.atoms), *cells.box(), cells.images, cells)


def tiles_of(grid: Grid, tile: tuple[int, ...]) -> int:
    """The number of tiles, counted from the whole grid's origin, that a part of it touches."""
    return math.prod((f + n - 1) // t - f // t + 1 for f, n, t in zip(grid.first, grid.shape, tile, strict=True))


def _exclude(task: Task) -> None:
    import cupy

    radius = task.scheme.exclude_radius_angstrom
    low, high = reach_box(task.grid, radius, (1, 1, 1))
    multiples = images(task.cell, low, high)
    struct = cells_struct(task.grid, task.scheme, task.cell, len(task.atoms), low, high, multiples, None)
    blocks = blocks_of(32 * len(task.atoms), THREADS)
    args = (task.atoms, cupy.asarray(multiples), task.out, struct, _points(task, 1.0), ctypes.c_double(radius))
    task.launch(f"exclude_points<{task.real}>", blocks, THREADS, *args)


def _relative_atoms(task: Task, points: PointsStruct) -> Any:
    import cupy

    relative = cupy.empty((len(task.atoms), 4), cupy.float32)
    blocks = blocks_of(len(task.atoms), THREADS)
    task.launch(f"relative_atoms<{task.real}>", blocks, THREADS, task.atoms, relative, points)
    return relative


def _by_distance(task: Task) -> str:
    return str(task.scheme.distance_dependent).lower()


def _run_scatter(task: Task) -> None:
    points = _points(task, 1.0)
    task.out.fill(0)
    args = (_relative_atoms(task, points), task.out, points)
    task.launch(f"direct_scatter<{_by_distance(task)}>", blocks_of(len(task.atoms), 32), 32, *args)


def _run_gather(task: Task) -> None:
    points = _points(task, 1.0)
    args = (_relative_atoms(task, points), task.out, points)
    entry = f"direct_gather<{_by_distance(task)}>"
    task.launch(entry, blocks_of(task.grid.size, DIRECT_THREADS), DIRECT_THREADS, *args)


def _row_blocks(grid: Grid) -> int:
    return blocks_of(grid.shape[0] * grid.shape[1] * blocks_of(grid.shape[2], COARSE), DIRECT_THREADS)


def _run_coarsened(task: Task, apart: str) -> None:
    points = _points(task, 1.0)
    args = (_relative_atoms(task, points), task.out, points)
    entry = f"direct_coarsened<{_by_distance(task)}, {apart}>"
    task.launch(entry, _row_blocks(task.grid), DIRECT_THREADS, *args)


def _run_constant(task: Task) -> None:
    """Copies the atoms to the host, since they are launch parameters."""
    import cupy

    points = _points(task, 1.0)
    atoms = cupy.asnumpy(_relative_atoms(task, points), stream=task.stream)
    task.out.fill(0)
    for begin in range(0, len(atoms), CONSTANT_ATOMS):
        part = atoms[begin : begin + CONSTANT_ATOMS].ravel()
        chunk = AtomChunk()
        chunk.atom[: len(part)] = part.tolist()
        args = (chunk, ctypes.c_int(len(part) // 4), task.out, points)
        task.launch(f"direct_constant<{_by_distance(task)}>", _row_blocks(task.grid), DIRECT_THREADS, *args)


def _run_direct_tiles(task: Task) -> None:
    entry = f"direct_tiles<{task.real}, {_by_distance(task)}>"
    args = (task.atoms, task.out, _points(task, 1.0))
    task.launch(entry, tiles_of(task.grid, DIRECT_TILE), DIRECT_THREADS, *args)


def _checked_cells(task: Task, tile: tuple[int, int, int], cut: tuple[int, int, int] = CUBES) -> Cells:
    cells = cells_around(task.grid, task.scheme, task.cell, tile, cut)
    if cells.size > MAX_CELLS or tiles_of(task.grid, tile) >= 1 << 31:
        raise ValueError(f"grid shape {task.grid.shape} is too large for one call: compute it in slabs (Grid.slab)")
    return cells


def _run_classic(task: Task) -> None:
    """The host fills the bins and, while the device computes, sums the overflow: the design of 2008."""
    import cupy

    from kernels.coulomb import cpu  # imports Numba, which nothing else here needs

    cells = _checked_cells(task, REGION)
    struct = _cells(task, cells)
    atoms = cupy.asnumpy(task.atoms, stream=task.stream)
    positions, charges, starts = cpu.sorted_atoms(atoms, task.grid, task.scheme, task.cell, cells)
    counts = np.diff(starts)
    slot = np.arange(len(charges)) - np.repeat(starts[:-1], counts)
    place = np.repeat(np.arange(cells.size), counts) * SLOTS + slot
    bins = np.zeros((cells.size * SLOTS, 4), np.float32)
    fits = slot < SLOTS
    bins[place[fits], :3] = positions[fits] / struct.unit
    root = task.scheme.name == "shift"
    bins[place[fits], 3] = np.copysign(np.sqrt(np.abs(charges[fits])), charges[fits]) if root else charges[fits]
    args = (cupy.asarray(bins), task.out, _points(task, struct.unit), in_cutoffs(struct))
    task.launch(f"regions_slots<{task.template}>", tiles_of(task.grid, REGION), REGION_THREADS, *args)
    origin = np.array(task.grid.origin)
    rest = np.column_stack([positions[~fits] + origin, charges[~fits].astype(np.float64)])
    scheme = replace(task.scheme, exclude_radius_angstrom=0.0)
    cupy.add(task.out, cupy.asarray(cpu.potential(rest, task.grid, scheme, None, None)), out=task.out)


def _count(task: Task, struct: CellsStruct, multiples: Any, counts: Any) -> None:
    blocks = blocks_of(len(task.atoms), THREADS)
    task.launch(f"count_atoms<{task.real}>", blocks, THREADS, task.atoms, multiples, counts, struct)


def _run_atomic(task: Task) -> None:
    import cupy

    cells = _checked_cells(task, REGION)
    struct = _cells(task, cells)
    counts, overflowed = cupy.zeros(cells.size, cupy.int32), cupy.zeros(1, cupy.int32)
    bins = cupy.zeros((cells.size * SLOTS, 4), cupy.float32)
    overflow = cupy.empty((len(task.atoms) * max(len(cells.images), 1), 4), cupy.float32)
    multiples, blocks = cupy.asarray(cells.images), blocks_of(len(task.atoms), THREADS)
    task.launch(
        f"fill_slots<{task.real}>", blocks, THREADS, task.atoms, multiples, counts, bins, overflow, overflowed, struct
    )
    points, blocks = _points(task, struct.unit), tiles_of(task.grid, REGION)
    task.launch(f"regions_slots<{task.template}>", blocks, REGION_THREADS, bins, task.out, points, in_cutoffs(struct))
    entry = f"add_overflow<{task.template}>"
    task.launch(entry, OVERFLOW_BLOCKS, REGION_THREADS, overflow, overflowed, task.out, points)


def _sorted(task: Task, cells: Cells, struct: CellsStruct) -> tuple[Any, Any, Any]:
    """Atoms and images by cell, then by input order: positions as high and low floats, and the first of each cell."""
    import cupy

    multiples = cupy.asarray(cells.images)
    counts, starts = cupy.zeros(cells.size, cupy.int32), cupy.empty(cells.size + 1, cupy.int32)
    _count(task, struct, multiples, counts)
    blocks, size = blocks_of(cells.size + 1, SCANNED), ctypes.c_int(cells.size)
    sums = cupy.empty(blocks, cupy.int32)
    task.launch("sum_cells", blocks, SCAN_THREADS, counts, sums, size)
    task.launch("scan_cells", blocks, SCAN_THREADS, counts, sums, starts, size)
    held = len(task.atoms) if task.cell is None else int(starts[-1].get(stream=task.stream))
    held = max(held, 1)
    keys = cupy.empty(held, cupy.int64)
    high, low = cupy.empty((held, 4), cupy.float32), cupy.empty((held, 4), cupy.float32)
    blocks = blocks_of(len(task.atoms), THREADS)
    task.launch(f"place_atoms<{task.real}>", blocks, THREADS, task.atoms, multiples, counts, starts, keys, struct)
    args = (task.atoms, multiples, starts, keys, high, low, struct)
    task.launch(f"sort_cells<{task.real}>", blocks_of(held, THREADS), THREADS, *args)
    return high, low, starts


def _run_sorted(task: Task) -> None:
    cells = _checked_cells(task, REGION)
    struct = _cells(task, cells)
    high, _low, starts = _sorted(task, cells, struct)
    args = (high, starts, task.out, _points(task, struct.unit), in_cutoffs(struct))
    task.launch(f"regions_sorted<{task.template}>", tiles_of(task.grid, REGION), REGION_THREADS, *args)


def _run_tiles(task: Task) -> None:
    cells = _checked_cells(task, TILE, SLICES)
    struct = _cells(task, cells)
    high, low, starts = _sorted(task, cells, struct)
    args = (high, low, starts, task.out, _points(task, struct.unit), in_cutoffs(struct))
    span = tuple(a * b for a, b in zip(TILE, TILES_A_BLOCK, strict=True))
    task.launch(f"tiles<{task.template}>", tiles_of(task.grid, span), 32 * WARPS, *args)


def _entries(*names: str) -> tuple[str, ...]:
    kinds = itertools.product(names, range(len(CUTOFF_SCHEMES)), ("false", "true"))
    split = CUTOFF_SCHEMES.index("split")  # has no distance-dependent dielectric
    return tuple(f"{name}<{scheme}, {far}>" for name, scheme, far in kinds if (scheme, far) != (split, "true"))


def _reals(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}<{real}>" for name in names for real in REALS.values())


_RELATIVE = _reals("relative_atoms")
_SORT = (*_reals("count_atoms", "place_atoms", "sort_cells"), "sum_cells", "scan_cells")
_EXCLUDE = _reals("exclude_points")
_BOTH = ("false", "true")

# In source order, naive to fast; the last is in production.
DIRECT: Mapping[str, Variant] = MappingProxyType(
    {
        "scatter": Variant(
            summary="direct sum, one thread an atom: atomic additions to every point",
            entries=(*_RELATIVE, *(f"direct_scatter<{kind}>" for kind in _BOTH)),
            run=_run_scatter,
        ),
        "gather": Variant(
            summary="direct sum, one thread a point: no atomics",
            entries=(*_RELATIVE, *(f"direct_gather<{kind}>" for kind in _BOTH)),
            run=_run_gather,
        ),
        "coarsened": Variant(
            summary="direct sum, one thread eight neighbours of a row, which share loads and distances",
            entries=(*_RELATIVE, *(f"direct_coarsened<{kind}, false>" for kind in _BOTH)),
            run=lambda task: _run_coarsened(task, "false"),
        ),
        "coalesced": Variant(
            summary="the same with a thread's points spread out, so that neighbouring threads store neighbours",
            entries=(*_RELATIVE, *(f"direct_coarsened<{kind}, true>" for kind in _BOTH)),
            run=lambda task: _run_coarsened(task, "true"),
        ),
        "constant": Variant(
            summary="the same with atoms from constant memory",
            entries=(*_RELATIVE, *(f"direct_constant<{kind}>" for kind in _BOTH)),
            run=_run_constant,
        ),
        "direct_tiles": Variant(
            summary="direct sum in compact tiles: atoms staged relative to the tile, sums compensated",
            entries=(*(f"direct_tiles<{real}, {kind}>" for real in REALS.values() for kind in _BOTH), *_EXCLUDE),
            run=_run_direct_tiles,
        ),
    }
)
CUTOFF: Mapping[str, Variant] = MappingProxyType(
    {
        "classic": Variant(
            summary="within a cutoff: bins of eight slots filled by the host, which sums what does not fit",
            entries=_entries("regions_slots"),
            run=_run_classic,
        ),
        "atomic": Variant(
            summary="the same with bins filled on the device by atomics",
            entries=(*_reals("fill_slots"), *_entries("regions_slots", "add_overflow")),
            run=_run_atomic,
        ),
        "sorted": Variant(
            summary="regions over atoms sorted by cell: no empty slots, no overflow",
            entries=(*_SORT, *_entries("regions_sorted")),
            run=_run_sorted,
        ),
        "tiles": Variant(
            summary="a warp 4 × 4 × 8 points: lanes test atoms against the tile, only hits are computed",
            entries=(*_SORT, *_entries("tiles"), *_EXCLUDE),
            run=_run_tiles,
        ),
    }
)
VARIANTS: Mapping[str, Variant] = MappingProxyType({**DIRECT, **CUTOFF})
