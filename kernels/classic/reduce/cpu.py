"""Reductions of NumPy arrays by whole-array arithmetic: strips of tiles on our own threads.

The order is that of reduce.cu, so the bits are equal. A tile is ROWS rows of THREADS × columns_of(itemsize) values.
Each column is reduced row by row; then the columns of a thread, the threads of a warp and the warps are joined, each by
halving. The results of tiles are reduced in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
State = tuple[Array, ...]  # partial results: one array per field

THREADS, WARP, ROWS = 256, 32, 16
TILES_A_STRIP = 16


def columns_of(itemsize: int) -> int:
    """Values of a row per thread: 16 bytes."""
    return max(1, 16 // itemsize)


def sum_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of a sum: 64 bits of the same kind."""
    return np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[np.dtype(dtype).kind])


class Sum:
    """Sums in 64 bits."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = sum_dtype(dtype)

    def none(self, shape: tuple[int, ...]) -> State:
        return (np.full(shape, -0.0).astype(self.dtype),)

    def add(self, state: State, values: Array, row: int) -> State:
        return (state[0] + values.astype(self.dtype),)

    def join(self, left: State, right: State) -> State:
        return (left[0] + right[0],)


class Extreme:
    """The smallest or the largest value; NaN wins over both."""

    def __init__(self, dtype: np.dtype[Any], *, largest: bool) -> None:
        self.dtype, self.largest = dtype, largest
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        self.start = low if largest else high

    def none(self, shape: tuple[int, ...]) -> State:
        return (np.full(shape, self.start, self.dtype),)

    def add(self, state: State, values: Array, row: int) -> State:
        return self.join(state, (values,))

    def join(self, left: State, right: State) -> State:
        return ((np.maximum if self.largest else np.minimum)(left[0], right[0]),)


class Moments:
    """(count, mean, sum of squared differences): Welford's updates, Chan's joins."""

    def none(self, shape: tuple[int, ...]) -> State:
        return tuple(np.zeros(shape) for _ in range(3))

    def add(self, state: State, values: Array, row: int) -> State:
        _count, mean, squares = state
        x = values.astype(np.float64)
        difference = x - mean
        mean = mean + difference * (1.0 / (row + 1))
        return np.full(x.shape, row + 1.0), mean, squares + difference * (x - mean)

    def join(self, left: State, right: State) -> State:
        count = left[0] + right[0]
        difference = right[1] - left[1]
        share = right[0] / np.maximum(count, 1)
        joined = (
            count,
            left[1] + difference * share,
            left[2] + right[2] + difference * difference * (left[0] * share),
        )
        pick = np.where(right[0] == 0, 0, np.where(left[0] == 0, 1, 2))
        return tuple(np.choose(pick, fields) for fields in zip(left, right, joined, strict=True))


def reduced(operation: str, values: Array, ddof: int, *, workers: int | None = None) -> Any:
    """See kernels.classic.reduce."""
    flat = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1)
    workers = workers or len(os.sched_getaffinity(0))
    if operation == "argmax":
        return np.array(_argmax(flat, workers))
    if operation == "total":
        return _fold(Sum(flat.dtype), flat, workers)[0] if flat.size else np.zeros((), Sum(flat.dtype).dtype)
    if operation in ("minimum", "maximum"):
        return _fold(Extreme(flat.dtype, largest=operation == "maximum"), flat, workers)[0]
    count, mean, squares = _fold(Moments(), flat, workers)
    return np.array([mean, squares / (count - ddof)])


def _argmax(values: Array, workers: int) -> int:
    """The first of the largest values, or the first NaN, strip by strip."""
    strip = TILES_A_STRIP * ROWS * THREADS * columns_of(values.itemsize)
    firsts = range(0, values.size, strip)
    indices = np.array(_each(lambda first: first + int(np.argmax(values[first : first + strip])), firsts, workers))
    return int(indices[int(np.argmax(values[indices]))])


def _each(work: Callable[[int], Any], items: range, workers: int) -> list[Any]:
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))


def _fold(operation: Any, values: Array, workers: int) -> State:
    """Reduces all values, then the partial results, until one is left; its fields are zero-dimensional."""
    with np.errstate(all="ignore"):
        state = _partials(operation, values, workers)
        while state[0].size > 1:
            state = _joined_tiles(operation, state)
    return tuple(field.reshape(()) for field in state)


def _partials(operation: Any, values: Array, workers: int) -> State:
    columns = columns_of(values.itemsize)
    row, tile = THREADS * columns, ROWS * THREADS * columns

    def strip(first: int) -> State:
        part = values[first : first + TILES_A_STRIP * tile]
        whole = part.size // tile
        states = [_tiles(operation, part[: whole * tile].reshape(whole, ROWS, row), columns)] if whole else []
        if part.size % tile:
            states.append(_ragged(operation, part[whole * tile :], columns))
        return tuple(np.concatenate(fields) for fields in zip(*states, strict=True))

    with np.errstate(all="ignore"):
        strips = _each(_quietly(strip), range(0, values.size, TILES_A_STRIP * tile), workers)
    return tuple(np.concatenate(fields) for fields in zip(*strips, strict=True))


def _quietly(work: Callable[[int], State]) -> Callable[[int], State]:
    """Silences NumPy's warnings, a setting of each thread: sums may overflow, and inf − inf is invalid."""

    def run(item: int) -> State:
        with np.errstate(all="ignore"):
            return work(item)

    return run


def _tiles(operation: Any, tiles: Array, columns: int) -> State:
    """The results of whole tiles [n, ROWS, row]."""
    state = operation.none((tiles.shape[0], tiles.shape[2]))
    for row in range(ROWS):
        state = operation.add(state, tiles[:, row], row)
    return _joined_columns(operation, state, columns)


def _ragged(operation: Any, values: Array, columns: int) -> State:
    """The result of an incomplete tile, [1]."""
    row = THREADS * columns
    state = operation.none((row,))
    for number, first in enumerate(range(0, values.size, row)):
        part = values[first : first + row]
        added = operation.add(tuple(field[: part.size] for field in state), part, number)
        state = tuple(np.concatenate([new, old[part.size :]]) for new, old in zip(added, state, strict=True))
    return _joined_columns(operation, tuple(field[None] for field in state), columns)


def _joined_columns(operation: Any, state: State, columns: int) -> State:
    """From [n, row] to [n]: columns of a thread, threads of a warp, warps, each by halving."""
    shape = (state[0].shape[0], THREADS // WARP, WARP, columns)
    state = tuple(field.reshape(shape) for field in state)
    for _axis in range(3):
        while (half := state[0].shape[-1] // 2) > 0:
            state = operation.join(
                tuple(field[..., :half] for field in state), tuple(field[..., half:] for field in state)
            )
        state = tuple(field[..., 0] for field in state)
    return state


def _joined_tiles(operation: Any, states: State) -> State:
    """Reduces partial results by one level, in the order of values, but joined instead of added."""
    size = sum(field.itemsize for field in states)
    columns = columns_of(size)
    tile = ROWS * THREADS * columns
    found = [
        _ragged(_Joining(operation), _packed(states, first, tile), columns) for first in range(0, states[0].size, tile)
    ]
    return tuple(np.concatenate(fields) for fields in zip(*found, strict=True))


def _packed(states: State, first: int, count: int) -> Any:
    return _Fields(tuple(field[first : first + count] for field in states))


class _Fields:
    """Partial results with the slicing of an array of values."""

    def __init__(self, fields: State) -> None:
        self.fields, self.size = fields, fields[0].size

    def __getitem__(self, part: slice) -> _Fields:
        return _Fields(tuple(field[part] for field in self.fields))


class _Joining:
    """An operation on its own partial results."""

    def __init__(self, operation: Any) -> None:
        self.none, self.join = operation.none, operation.join

    def add(self, state: State, values: _Fields, row: int) -> State:
        joined: State = self.join(state, values.fields)
        return joined
