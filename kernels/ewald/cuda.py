"""The far field of CuPy arrays: launches the kernels of ewald.cu, and cuFFT between them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.coulomb.geometry import Grid
from kernels.ewald.mesh import DOUBLE_BELOW, Mesh, compacted
from kernels.ewald.splitting import FREE_LEVELS, LEVELS
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream

OPTIONS = ()
REALS = {"float32": "float", "float64": "double"}
SPREAD_THREADS, READ_THREADS, PLANES = 128, 128, 8  # in ewald.cu too
SCALE_THREADS = 256
# Sorting pays if the mesh passes half of the L2 cache (50 MB on an H100).
SORTED_ATOMS, SORTED_MESH_BYTES = 100_000, 25_000_000


class FarStruct(ctypes.Structure):
    """struct Far of ewald.cu."""

    _fields_ = (
        ("origin", ctypes.c_double * 3),
        ("to_mesh", ctypes.c_double * 9),
        ("scale", ctypes.c_double),
        ("shape", ctypes.c_int * 3),
    )


class LatticeStruct(ctypes.Structure):
    """struct Lattice of ewald.cu."""

    _fields_ = (
        ("origin", ctypes.c_double * 3),
        ("step", ctypes.c_double * 3),
        ("ramp", ctypes.c_double * 4),
        ("first", ctypes.c_int * 3),
        ("shape", ctypes.c_int * 3),
    )


def _lattice(grid: Grid, ramp: Any) -> LatticeStruct:
    struct = LatticeStruct()
    struct.origin[:], struct.step[:], struct.ramp[:] = grid.origin, grid.spacing, ramp.tolist()
    struct.first[:], struct.shape[:] = grid.first, grid.shape
    return struct


class Body:
    """One device's far field on one mesh."""

    def __init__(self, mesh: Mesh, scale: float, like: Any, stream: Any) -> None:
        import cupy

        self._mesh = mesh
        self._scale = scale
        self._taps = mesh.level.taps
        self._dtype = np.dtype(np.float64 if mesh.level.accuracy < DOUBLE_BELOW else np.float32)
        with on_stream(like, stream):
            self._influence = mesh.influence(cupy).astype(self._dtype)
            self._polynomials = cupy.asarray(mesh.polynomials)
        self._far = FarStruct(scale=scale)
        self._far.origin[:], self._far.shape[:] = mesh.origin, mesh.shape
        self._far.to_mesh[:] = mesh.to_mesh.ravel()
        self._last: tuple[Grid, tuple[Any, ...]] | None = None

    def spread(self, atoms: Any, charges: Any, _workers: int | None, stream: Any) -> Any:
        import cupy

        with on_stream(atoms, stream) as current:
            atoms = cupy.ascontiguousarray(atoms, np.dtype(atoms.dtype).newbyteorder("="))
            if charges is None:
                charges = cupy.zeros(self._mesh.shape, cupy.int64)
            if len(atoms):
                count, order = ctypes.c_longlong(len(atoms)), ctypes.c_void_p(0)
                if len(atoms) >= SORTED_ATOMS and charges.nbytes >= SORTED_MESH_BYTES:
                    order = self._order(atoms, count, current)
                args = (atoms, self._polynomials, charges, self._far, count, order)
                entry = f"spread<{REALS[atoms.dtype.name]}, {self._taps}>"
                blocks = blocks_of(32 * len(atoms), SPREAD_THREADS)
                kernel("ewald", entry).launch((blocks,), (SPREAD_THREADS,), args, stream=current)
        return charges

    def _order(self, atoms: Any, count: Any, stream: Any) -> Any:
        """The atoms' numbers, by brick of the mesh."""
        import cupy

        keys = cupy.empty(len(atoms), cupy.uint32)
        blocks = blocks_of(len(atoms), SCALE_THREADS)
        args = (atoms, keys, self._far, count)
        kernel("ewald", f"bricks<{REALS[atoms.dtype.name]}>").launch((blocks,), (SCALE_THREADS,), args, stream=stream)
        return cupy.argsort(keys)

    def solve(self, charges: Any, _workers: int | None, stream: Any) -> Any:
        import cupy

        with on_stream(charges, stream) as current:
            real = cupy.empty(charges.shape, self._dtype)
            args = (charges, real, ctypes.c_double(1 / self._scale), ctypes.c_longlong(real.size))
            blocks = blocks_of(real.size, SCALE_THREADS)
            kernel("ewald", f"scaled<{REALS[self._dtype.name]}>").launch(
                (blocks,), (SCALE_THREADS,), args, stream=current
            )
            field = cupy.fft.rfftn(real)
            field *= self._influence
            return cupy.ascontiguousarray(cupy.fft.irfftn(field, self._mesh.shape), cupy.float32)

    def add(self, solved: Any, grid: Grid, out: Any, ramp: Any, _workers: int | None, stream: Any) -> None:
        with on_stream(solved, stream) as current:
            lattice = _lattice(grid, ramp)
            if self._mesh.is_axis_aligned:
                self._add_product(solved, grid, out, lattice, current)
            else:
                args = (solved, self._polynomials, out, self._far, lattice)
                self._launch("gather", grid.shape[0] * grid.shape[1], args, current)

    def _add_product(self, solved: Any, grid: Grid, out: Any, lattice: LatticeStruct, stream: Any) -> None:
        import cupy

        rows_x, rows_y, x, wx, y, wy, z, wz = self._tables(grid)
        nx, ny, nz = grid.shape
        of_z = cupy.empty((len(rows_x), len(rows_y), nz), cupy.float32)
        counts = (ctypes.c_int(len(rows_y)), ctypes.c_int(nz), *map(ctypes.c_int, self._mesh.shape[1:]))
        self._launch("along_z", len(rows_x) * len(rows_y), (solved, rows_x, rows_y, z, wz, of_z, *counts), stream)
        of_y = cupy.empty((len(rows_x), ny, nz), cupy.float32)
        counts = (ctypes.c_int(len(rows_y)), ctypes.c_int(ny), ctypes.c_int(nz))
        self._launch("along_y", len(rows_x) * ny, (of_z, y, wy, of_y, *counts), stream)
        self._launch("along_x", blocks_of(nx, PLANES) * ny, (of_y, x, wx, out, lattice), stream)

    def _tables(self, grid: Grid) -> tuple[Any, ...]:
        """The mesh's rows that a grid reads, and the taps along x, y and z, on the device; kept for the next frame."""
        import cupy

        last = self._last
        if last is None or last[0] != grid:
            (x, wx), (y, wy), (z, wz) = self._mesh.taps(grid)
            rows_x, x = compacted(x)
            rows_y, y = compacted(y)
            last = grid, tuple(cupy.asarray(each) for each in (rows_x, rows_y, x, wx, y, wy, z, wz))
            self._last = last
        return last[1]

    def _launch(self, name: str, blocks: int, args: tuple[Any, ...], stream: Any) -> None:
        kernel("ewald", f"{name}<{self._taps}>").launch((blocks,), (READ_THREADS,), args, stream=stream)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A far field to compute: atoms to the map."""

    field: Any  # FarField
    atoms: Any
    grid: Grid
    out: Any


def _run(task: Task) -> None:
    task.field.add(task.field.solve(task.field.spread(task.atoms)), task.grid, task.out)


_TAPS = sorted({level.taps for level in (*LEVELS, *FREE_LEVELS)})

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "mesh": Variant(
            summary="charges spread in integers, FFT, and the mesh read axis by axis (oblique cells: gathered)",
            entries=(
                *(f"spread<{real}, {taps}>" for real in REALS.values() for taps in _TAPS),
                *(f"{name}<{real}>" for name in ("bricks", "scaled") for real in REALS.values()),
                *(f"{name}<{taps}>" for name in ("along_z", "along_y", "along_x", "gather") for taps in _TAPS),
            ),
            run=_run,
        )
    }
)
