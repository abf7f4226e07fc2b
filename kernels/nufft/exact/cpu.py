"""The exact transform of NumPy arrays, as one real matrix product.

Pixels y and −y of the last axis are computed together: with A = samples × exp(iφ of the other axes) as real and
imaginary rows, the products of A with cos θy and with sin θy give both. That takes two real products per pair of pixel
and sample instead of the complex product's four. BLAS computes them, in float32 for complex64 and in float64 for
complex128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft.tuning import PART_BYTES

Array = NDArray[Any]

RADIX = 16


def forward(trajectory: Array, images: Array, result: Array) -> None:
    """Fills samples [coils, M] from images [coils, *shape]; trajectory float64 [M, d] in cycles per field of view."""
    shape, coils = images.shape[1:], len(images)
    if not images.size or not result.size:
        result[...] = 0
        return
    operands = [_halves(image.reshape(-1, shape[-1])) for image in images]
    for part in _parts(len(trajectory), shape, images.dtype.itemsize):
        waves, rows, turn = _factors(trajectory[part], shape, images.dtype)
        np.conj(rows, out=rows)
        np.conj(turn, out=turn)
        for coil in range(coils):
            lines = (waves @ operands[coil]).view(images.dtype)
            result[coil, part] = turn * np.einsum("mr,mr->m", lines, rows)


def adjoint(trajectory: Array, samples: Array, result: Array) -> None:
    """Fills images [coils, *shape] from samples [coils, M]; trajectory float64 [M, d] in cycles per field of view."""
    shape, coils = result.shape[1:], len(samples)
    if not samples.size or not result.size:
        result[...] = 0
        return
    rows_count, pairs = math.prod(shape[:-1]), (shape[-1] + 1) // 2
    sums = np.zeros((coils, 2 * rows_count, 2 * pairs), samples.real.dtype)
    for part in _parts(len(trajectory), shape, samples.dtype.itemsize):
        waves, rows, turn = _factors(trajectory[part], shape, samples.dtype)
        for coil in range(coils):
            weighted = rows * (samples[coil, part] * turn)[:, None]
            sums[coil] += weighted.view(sums.dtype).T @ waves
    for coil in range(coils):
        _join(sums[coil].reshape(rows_count, 2, pairs, 2), result[coil].reshape(rows_count, shape[-1]))


def _parts(count: int, shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Batches of samples, the same for any number of coils, so that a coil's bits do not depend on the others."""
    step = max(PART_BYTES // (itemsize * (math.prod(shape[:-1]) + shape[-1])), 16)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _factors(trajectory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array, Array]:
    """cos and sin of the last axis [m, 2 pairs]; exp(iφ) of the other axes [m, rows]; the centre's phase [m]."""
    # Folded into the period exactly, before any multiplication.
    turns = [np.remainder(k + size / 2, size) / size - 0.5 for k, size in zip(trajectory.T, shape, strict=True)]
    odd = shape[-1] % 2
    pairs = (shape[-1] + 1) // 2
    last = turns[-1]
    waves = _powers(last, 0.0 if odd else 0.5, pairs, dtype)
    rows = _powers(turns[0], -(shape[0] // 2), shape[0], dtype)
    for turn, size in zip(turns[1:-1], shape[1:-1], strict=True):
        more = _powers(turn, -(size // 2), size, dtype)
        rows = (rows[:, :, None] * more[:, None, :]).reshape(len(last), -1)
    middle = np.ones(len(last), dtype) if odd else _unit(-last / 2).astype(dtype)
    return waves.view(waves.real.dtype), rows, middle


def _unit(turns: Array) -> Array:
    """exp(2πi turns), folded before rounding."""
    waves: Array = np.exp(2j * np.pi * (turns - np.rint(turns)))
    return waves


def _powers(turns: Array, first: float, count: int, dtype: Any) -> Array:
    """exp(2πi turns (first + n)) for n < count, [m, count]: products of two small tables."""
    coarse = _geometric(_unit(turns * first), _unit(turns * RADIX), -(-count // RADIX)).astype(dtype)
    fine = _geometric(np.ones(len(turns), np.complex128), _unit(turns), min(RADIX, count)).astype(dtype)
    table = (coarse[:, :, None] * fine[:, None, :]).reshape(len(turns), -1)
    return np.ascontiguousarray(table[:, :count])


def _geometric(start: Array, step: Array, count: int) -> Array:
    """start × stepⁿ for n < count, [m, count], by doubling."""
    table = start[:, None]
    while table.shape[1] < count:
        table = np.concatenate([table, table * step[:, None]], 1)
        step = step * step
    return table[:, :count]


def _halves(lines: Array) -> Array:
    """The factors of cos and sin for the real and imaginary parts of each line: [2 pairs, 2 lines]."""
    size = lines.shape[1]
    up, down = lines[:, size // 2 :], lines[:, (size - 1) // 2 :: -1]
    even, odd = up + down, up - down
    if size % 2:
        even[:, 0] = up[:, 0]
    operand = np.empty((even.shape[1], 2, len(lines), 2), lines.real.dtype)
    operand[:, 0, :, 0], operand[:, 1, :, 0] = even.real.T, odd.imag.T
    operand[:, 0, :, 1], operand[:, 1, :, 1] = even.imag.T, -odd.real.T
    return operand.reshape(2 * even.shape[1], 2 * len(lines))


def _join(sums: Array, lines: Array) -> None:
    """Lines from the products [line, re or im, pair, cos or sin]: P ± iQ."""
    size = lines.shape[1]
    (real_cos, real_sin), (imag_cos, imag_sin) = sums[:, 0].transpose(2, 0, 1), sums[:, 1].transpose(2, 0, 1)
    down, up = lines[:, (size - 1) // 2 :: -1], lines[:, size // 2 :]
    down.real, down.imag = real_cos + imag_sin, imag_cos - real_sin
    up.real, up.imag = real_cos - imag_sin, imag_cos + real_sin
