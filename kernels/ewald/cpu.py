"""The far field of NumPy arrays: Numba-compiled loops on our own threads, and SciPy's FFT.

Floors of a core for A atoms, T taps and M mesh points: A T³ additions in cache, a store a cycle each; and of a free
mesh's transforms, 7/12 of those of all M points, since 1/4 and 1/2 of the lines along two axes are not all zeros.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb.geometry import Grid
from kernels.ewald.mesh import DOUBLE_BELOW, Mesh, compacted
from kernels.runtime.compiled import compiled
from kernels.runtime.threads import for_each

Array = NDArray[Any]

FFT_PLANES = 4  # transformed at once: they stay in a core's cache


class Body:
    """The CPU's far field on one mesh."""

    def __init__(self, mesh: Mesh, scale: float, _like: Any, _stream: Any) -> None:
        self._mesh = mesh
        self._scale = scale
        self._dtype = np.dtype(np.float64 if mesh.level.accuracy < DOUBLE_BELOW else np.float32)
        self._influence = mesh.influence(np).astype(self._dtype)
        self._to_mesh = mesh.to_mesh
        self._origin = np.array(mesh.origin)

    def spread(self, atoms: Array, charges: Array | None, workers: int | None, _stream: Any) -> Array:
        mesh, workers = self._mesh, workers or _cores()
        if charges is None:
            charges = np.zeros(mesh.shape, np.int64)
        placed = np.ascontiguousarray(atoms[:, :3].astype(np.float64) - self._origin)
        amounts, target = atoms[:, 3].astype(np.float64) * self._scale, charges

        def one(part: tuple[int, int]) -> None:
            _spread(placed, amounts, self._to_mesh, mesh.polynomials, target, *part)

        for_each(one, _parts(mesh.shape[0], 1 if workers == 1 else 4 * workers), workers)
        return charges

    def solve(self, charges: Array, workers: int | None, _stream: Any) -> Array:
        """The filled part, float32. Along each axis, lines of zeros and lines that no point reads are left out."""
        from scipy import fft

        mesh, workers = self._mesh, workers or _cores()
        (x, y, z), (nx, ny, nz) = mesh.filled, mesh.shape
        fold_x, fold_y = (np.minimum(np.arange(n), n - np.arange(n)) if mesh.free else np.arange(n) for n in (nx, ny))
        field = np.empty((x, ny, nz // 2 + 1), np.result_type(self._dtype, np.complex64))
        found = np.empty((x, y, z), np.float32)

        def forward(planes: slice) -> None:
            real = charges[planes, :y, :z].astype(self._dtype) * self._dtype.type(1 / self._scale)
            field[planes] = fft.fft(fft.rfft(real, nz), ny, axis=1, overwrite_x=True)

        def across(rows: slice) -> None:
            spectrum = fft.fft(field[:, rows], nx, axis=0)
            spectrum *= self._influence[np.ix_(fold_x, fold_y[rows])]
            field[:, rows] = fft.ifft(spectrum, axis=0, overwrite_x=True)[:x]

        def backward(planes: slice) -> None:
            rows = fft.ifft(field[planes], axis=1, overwrite_x=True)[:, :y]
            found[planes] = fft.irfft(rows, nz, overwrite_x=True)[:, :, :z]

        for step, count in ((forward, x), (across, ny), (backward, x)):
            for_each(step, [slice(i, min(i + FFT_PLANES, count)) for i in range(0, count, FFT_PLANES)], workers)
        return found

    def add(self, solved: Array, grid: Grid, out: Array, ramp: Array, workers: int | None, _stream: Any) -> None:
        workers = workers or _cores()
        slabs = _parts(grid.shape[0], 1 if workers == 1 else 4 * workers)
        work = self._add_product if self._mesh.is_axis_aligned else self._add_gathered
        for_each(lambda part: work(solved, grid.slab(*part), out[slice(*part)], ramp), slabs, workers)

    def _add_product(self, solved: Array, grid: Grid, out: Array, ramp: Array) -> None:
        """Axis by axis: along z for the mesh's rows that the slab reads, along y, then along x for each point."""
        (x, wx), (y, wy), (z, wz) = self._mesh.taps(grid)
        rows_x, x = compacted(x)
        rows_y, y = compacted(y)
        along_z = np.empty((len(rows_y), grid.shape[2]), np.float32)
        along_y = np.empty((len(rows_x), *grid.shape[1:]), np.float32)
        for plane, row in enumerate(rows_x):
            _read_along_z(solved[row], rows_y, z, wz, along_z)
            _read_rows(along_z, y, wy, along_y[plane])
        xs, ys, zs = grid.axes()
        _read_planes(along_y, x, wx, out, xs, ys, zs, ramp)

    def _add_gathered(self, solved: Array, grid: Grid, out: Array, ramp: Array) -> None:
        xs, ys, zs = grid.axes()
        _gather(solved, self._origin, self._to_mesh, self._mesh.polynomials, xs, ys, zs, out, ramp)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _parts(count: int, parts: int) -> list[tuple[int, int]]:
    parts = min(parts, count)
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


@compiled
def _window(place: float, count: int, polynomials: Any, weights: Any, places: Any) -> None:
    """The window at a position in mesh points, on a ring of `count`: weights and mesh points [taps]."""
    taps = len(polynomials)
    first = np.floor(place - taps / 2) + 1
    rest = place - taps / 2 + 1 - first
    index = int(first) % count
    for tap in range(taps):
        value = 0.0
        for k in range(polynomials.shape[1] - 1, -1, -1):
            value = value * rest + polynomials[tap, k]
        weights[tap], places[tap] = value, index
        index = index + 1 if index + 1 < count else 0


@compiled
def _spread(positions: Any, amounts: Any, to_mesh: Any, polynomials: Any, mesh: Any, begin: int, end: int) -> None:
    """Adds the charges to the planes begin … end - 1 of the mesh. amounts: charges times the scale."""
    taps = len(polynomials)
    weights, places = np.empty((3, taps)), np.empty((3, taps), np.int64)
    n0 = mesh.shape[0]
    for atom in range(len(positions)):
        if amounts[atom] == 0:
            continue
        x, y, z = positions[atom, 0], positions[atom, 1], positions[atom, 2]
        at = x * to_mesh[0, 0] + y * to_mesh[1, 0] + z * to_mesh[2, 0]
        ahead = (int(np.floor(at - taps / 2)) + 1 - begin) % n0
        if ahead >= end - begin and ahead <= n0 - taps:
            continue
        for axis in range(3):
            at = x * to_mesh[0, axis] + y * to_mesh[1, axis] + z * to_mesh[2, axis]
            _window(at, mesh.shape[axis], polynomials, weights[axis], places[axis])
        for a in range(taps):
            plane = places[0, a]
            if plane < begin or plane >= end:
                continue
            along = amounts[atom] * weights[0, a]
            for b in range(taps):
                row = mesh[plane, places[1, b]]
                across = along * weights[1, b]
                for c in range(taps):
                    row[places[2, c]] += np.int64(np.rint(across * weights[2, c]))


@compiled
def _read_along_z(plane: Any, rows: Any, taps: Any, weights: Any, out: Any) -> None:
    """out[i, z] = sum over taps of weights[z, t] plane[rows[i], taps[z, t]]."""
    for i in range(len(rows)):
        row = plane[rows[i]]
        for z in range(len(taps)):
            total = np.float32(0)
            for t in range(taps.shape[1]):
                total += weights[z, t] * row[taps[z, t]]
            out[i, z] = total


@compiled
def _read_rows(rows: Any, taps: Any, weights: Any, out: Any) -> None:
    """out[y, :] = sum over taps of weights[y, t] rows[taps[y, t], :]."""
    for y in range(len(taps)):
        into = out[y]
        into[:] = 0
        for t in range(taps.shape[1]):
            weight, row = weights[y, t], rows[taps[y, t]]
            for z in range(len(into)):
                into[z] += weight * row[z]


@compiled
def _read_planes(planes: Any, taps: Any, weights: Any, out: Any, xs: Any, ys: Any, zs: Any, ramp: Any) -> None:
    """out[x, y, :] += sum over taps of weights[x, t] planes[taps[x, t], y, :], and the ramp."""
    sums, tilted = np.empty(out.shape[2], np.float32), (ramp != 0).any()
    for x in range(len(taps)):
        for y in range(out.shape[1]):
            sums[:] = 0
            for t in range(taps.shape[1]):
                weight, row = weights[x, t], planes[taps[x, t], y]
                for z in range(len(sums)):
                    sums[z] += weight * row[z]
            if tilted:
                level = ramp[0] + ramp[1] * xs[x] + ramp[2] * ys[y]
                for z in range(len(sums)):
                    sums[z] += np.float32(level + ramp[3] * zs[z])
            into = out[x, y]
            for z in range(len(sums)):
                into[z] += sums[z]


@compiled
def _gather(
    mesh: Any, origin: Any, to_mesh: Any, polynomials: Any, xs: Any, ys: Any, zs: Any, out: Any, ramp: Any
) -> None:
    """out += the mesh at each point, through the window along the mesh's own axes, and the ramp."""
    taps = len(polynomials)
    weights, places = np.empty((3, taps)), np.empty((3, taps), np.int64)
    for i in range(len(xs)):
        for j in range(len(ys)):
            for k in range(len(zs)):
                x, y, z = xs[i] - origin[0], ys[j] - origin[1], zs[k] - origin[2]
                for axis in range(3):
                    at = x * to_mesh[0, axis] + y * to_mesh[1, axis] + z * to_mesh[2, axis]
                    _window(at, mesh.shape[axis], polynomials, weights[axis], places[axis])
                total = 0.0
                for a in range(taps):
                    plane = mesh[places[0, a]]
                    for b in range(taps):
                        row, part = plane[places[1, b]], 0.0
                        for c in range(taps):
                            part += weights[2, c] * row[places[2, c]]
                        total += weights[0, a] * weights[1, b] * part
                total += ramp[0] + ramp[1] * xs[i] + ramp[2] * ys[j] + ramp[3] * zs[k]
                out[i, j, k] += np.float32(total)
