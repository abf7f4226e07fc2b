"""Formats of sparse matrices over NumPy or CuPy arrays, and conversions between them, with the same code for both.

All arrays of a matrix come from one library. Values are float32 or float64, columns and rows int32. The contents of
NumPy arrays are checked when a matrix is made; those of CuPy arrays are not, since that would wait for the device: a
column outside the matrix is then undefined behaviour in the product.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array

__all__ = [
    "VALUES",
    "Coo",
    "Csr",
    "Ell",
    "Hybrid",
    "Jds",
    "Matrix",
    "to_coo",
    "to_csr",
    "to_ell",
    "to_hybrid",
    "to_jds",
]

VALUES = ("float32", "float64")
MAX_SIZE = (1 << 31) - 1 - 1024  # rows and columns
MAX_NONZEROS_32 = (1 << 31) - 1 - 1024  # for 32-bit row starts, with room for a step beyond the end
EMPTY = -1  # the column of an empty slot


@dataclass(frozen=True, kw_only=True)
class Csr:
    """Compressed sparse rows: nonzeros row by row, in any order within a row; duplicates are added."""

    values: Any  # [nonzeros]
    columns: Any  # [nonzeros]
    starts: Any  # [rows + 1] int32 or int64: where each row begins, and where the last ends
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_values("values", self.values, 1)
        _check_indices("columns", self.columns, self.values.shape, ("int32",), self.shape[1])
        _check_indices("starts", self.starts, (self.shape[0] + 1,), ("int32", "int64"), None)
        _check_kinds(self.values, self.columns, self.starts)
        if self.starts.dtype == np.int32 and self.values.size > MAX_NONZEROS_32:
            raise ValueError(f"starts must be int64 for {self.values.size} nonzeros")
        if isinstance(self.starts, np.ndarray):
            ends = self.starts[0], self.starts[-1]
            if ends != (0, self.values.size) or (np.diff(self.starts) < 0).any():
                raise ValueError(f"starts must ascend from 0 to {self.values.size}, the number of nonzeros")

    @property
    def nonzeros(self) -> int:
        return int(self.values.size)

    @cached_property
    def longest(self) -> int:
        """Nonzeros of the longest row. Waits for the device, once per matrix."""
        return int(library(self.starts).diff(self.starts).max()) if self.shape[0] else 0


@dataclass(frozen=True, kw_only=True)
class Coo:
    """Coordinates: row, column and value of each nonzero; duplicates are added."""

    values: Any  # [nonzeros]
    rows: Any  # [nonzeros]
    columns: Any  # [nonzeros]
    shape: tuple[int, int]
    by_rows: bool  # whether the rows ascend; if not, the order of additions is not fixed

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_values("values", self.values, 1)
        _check_indices("rows", self.rows, self.values.shape, ("int32",), self.shape[0])
        _check_indices("columns", self.columns, self.values.shape, ("int32",), self.shape[1])
        _check_kinds(self.values, self.rows, self.columns)
        if self.by_rows and isinstance(self.rows, np.ndarray) and (np.diff(self.rows) < 0).any():
            raise ValueError("rows must ascend where by_rows is True")

    @property
    def nonzeros(self) -> int:
        return int(self.values.size)


@dataclass(frozen=True, kw_only=True)
class Ell:
    """The same number of slots for every row, slot by slot; column -1 and value 0 in empty slots."""

    values: Any  # [slots, rows]
    columns: Any  # [slots, rows]
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_values("values", self.values, 2)
        if self.values.shape[1] != self.shape[0]:
            raise ValueError(f"values must have {self.shape[0]} columns, one per row; got shape {self.values.shape}")
        _check_indices("columns", self.columns, self.values.shape, ("int32",), self.shape[1], least=EMPTY)
        _check_kinds(self.values, self.columns)

    @property
    def nonzeros(self) -> int:
        return int((self.columns != EMPTY).sum())


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Slots for most nonzeros, coordinates for the rest."""

    ell: Ell
    coo: Coo

    def __post_init__(self) -> None:
        if self.ell.shape != self.coo.shape or not self.coo.by_rows:
            raise ValueError(f"coo must be by rows and of shape {self.ell.shape}; got {self.coo.shape}")
        _check_kinds(self.ell.values, self.coo.values)
        if self.ell.values.dtype != self.coo.values.dtype:
            raise ValueError(
                f"ell and coo must have values of one dtype; got {self.values.dtype}, {self.coo.values.dtype}"
            )

    @property
    def values(self) -> Any:
        return self.ell.values

    @property
    def shape(self) -> tuple[int, int]:
        return self.ell.shape

    @property
    def nonzeros(self) -> int:
        return self.ell.nonzeros + self.coo.nonzeros


@dataclass(frozen=True, kw_only=True)
class Jds:
    """Jagged diagonals: rows sorted by length, longest first, either row by row or, transposed, the first nonzeros of
    all rows, then the second nonzeros of the rows that have one, and so on."""

    values: Any  # [nonzeros]
    columns: Any  # [nonzeros]
    starts: Any  # int64: of each sorted row and the end; transposed, of each diagonal and the end
    order: Any  # [rows]: the matrix row of each sorted row
    shape: tuple[int, int]
    transposed: bool

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        _check_values("values", self.values, 1)
        _check_indices("columns", self.columns, self.values.shape, ("int32",), self.shape[1])
        _check_indices("order", self.order, (self.shape[0],), ("int32",), self.shape[0])
        expected = self.starts.shape if self.transposed else (self.shape[0] + 1,)
        _check_indices("starts", self.starts, expected, ("int64",), None)
        _check_kinds(self.values, self.columns, self.starts, self.order)
        if isinstance(self.starts, np.ndarray):
            lengths = np.diff(self.starts)
            if tuple(self.starts[[0, -1]]) != (0, self.values.size) or (np.diff(lengths) > 0).any():
                raise ValueError(f"starts must ascend from 0 to {self.values.size}, in steps that never grow")
            if (lengths < 0).any() or (self.transposed and (lengths > self.shape[0]).any()):
                raise ValueError(f"starts must ascend in steps of at most {self.shape[0]} rows")

    @property
    def nonzeros(self) -> int:
        return int(self.values.size)


Matrix = Csr | Coo | Ell | Hybrid | Jds


def arrays_of(matrix: Matrix) -> dict[str, Any]:
    """The arrays of a matrix, by name."""
    if isinstance(matrix, Hybrid):
        ell, coo = arrays_of(matrix.ell), arrays_of(matrix.coo)
        return {f"ell's {name}": ell[name] for name in ell} | {f"coo's {name}": coo[name] for name in coo}
    return {name: value for name, value in vars(matrix).items() if hasattr(value, "dtype")}


def library(array: Any) -> Any:
    """The library of an array, NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_coo(matrix: Matrix) -> Coo:
    """Coordinates by rows."""
    if isinstance(matrix, Coo):
        return matrix if matrix.by_rows else to_coo(to_csr(matrix))
    if isinstance(matrix, Csr):
        rows = _rows_of(matrix.starts, matrix.nonzeros)
        return Coo(values=matrix.values, rows=rows, columns=matrix.columns, shape=matrix.shape, by_rows=True)
    return to_coo(to_csr(matrix))


def to_csr(matrix: Matrix) -> Csr:
    """Compressed rows, with the nonzeros of each row in the order of the other format."""
    if isinstance(matrix, Csr):
        return matrix
    if isinstance(matrix, Coo):
        return _gathered(matrix.values, matrix.rows, matrix.columns, matrix.shape)
    xp = library(matrix.values)
    if isinstance(matrix, Ell):
        slot, row = xp.nonzero(matrix.columns != EMPTY)
        values, columns = matrix.values[slot, row], matrix.columns[slot, row]
        return _gathered(values, row.astype(np.int32), columns, matrix.shape)
    if isinstance(matrix, Hybrid):
        parts = [to_coo(matrix.ell), matrix.coo]
        values, rows, columns = (xp.concatenate([getattr(part, name) for part in parts]) for name in _COORDINATES)
        return _gathered(values, rows, columns, matrix.shape)
    within = _rows_of(matrix.starts, matrix.nonzeros)  # transposed: the diagonal
    if matrix.transposed:
        within = xp.arange(matrix.nonzeros) - matrix.starts[within]
    return _gathered(matrix.values, matrix.order[within], matrix.columns, matrix.shape)


_COORDINATES = ("values", "rows", "columns")


def to_ell(matrix: Matrix, slots: int | None = None) -> Ell:
    """Slots, by default as many as the longest row needs.

    Raises ValueError if a row needs more than `slots`.
    """
    if isinstance(matrix, Ell) and slots in (None, len(matrix.values)):
        return matrix
    csr = to_csr(matrix)
    slots = csr.longest if slots is None else slots
    if csr.longest > slots:
        raise ValueError(f"slots must be {csr.longest} or more, for the longest row; got {slots}")
    return _slotted(csr, slots)[0]


def to_hybrid(matrix: Matrix, slots: int | None = None) -> Hybrid:
    """Slots, by default as many as a third of the rows fill, and coordinates for the rest."""
    if isinstance(matrix, Hybrid) and slots in (None, len(matrix.ell.values)):
        return matrix
    csr = to_csr(matrix)
    if slots is None:
        lengths = library(csr.values).sort(_lengths(csr))
        slots = int(lengths[-(-2 * len(lengths) // 3)]) if len(lengths) > 2 else int(lengths.sum())
    ell, rest = _slotted(csr, slots)
    return Hybrid(ell=ell, coo=rest)


def to_jds(matrix: Matrix, *, transposed: bool = False) -> Jds:
    """Rows sorted by length, row by row or by diagonals; rows of one length keep their order."""
    if isinstance(matrix, Jds) and matrix.transposed == transposed:
        return matrix
    csr = to_csr(matrix)
    xp, rows = library(csr.values), csr.shape[0]
    lengths = _lengths(csr)
    order = xp.argsort(-lengths, kind="stable")
    starts = xp.zeros(rows + 1, np.int64)
    xp.cumsum(lengths[order], out=starts[1:])
    row = _rows_of(starts, csr.nonzeros)
    slot = xp.arange(csr.nonzeros) - starts[row]
    source = csr.starts[order[row]] + slot
    values, columns = csr.values[source], csr.columns[source]
    if transposed:
        reach = rows - xp.searchsorted(xp.sort(lengths), xp.arange(csr.longest), side="right")  # rows on each diagonal
        starts = xp.zeros(csr.longest + 1, np.int64)
        xp.cumsum(reach, out=starts[1:])
        target = starts[slot] + row
        values, columns = xp.empty_like(values), xp.empty_like(columns)
        values[target], columns[target] = csr.values[source], csr.columns[source]
    order = order.astype(np.int32)
    return Jds(values=values, columns=columns, starts=starts, order=order, shape=csr.shape, transposed=transposed)


def _lengths(csr: Csr) -> Any:
    return library(csr.values).diff(csr.starts.astype(np.int64))


def _rows_of(starts: Any, nonzeros: int) -> Any:
    """The row (or diagonal) of each nonzero."""
    xp = library(starts)
    return xp.searchsorted(starts[1:], xp.arange(nonzeros, dtype=starts.dtype), side="right").astype(np.int32)


def _gathered(values: Any, rows: Any, columns: Any, shape: tuple[int, int]) -> Csr:
    """Compressed rows from coordinates in any order, which is preserved within a row."""
    xp = library(values)
    order = xp.argsort(rows, kind="stable")
    wide = np.int64 if values.size > MAX_NONZEROS_32 else np.int32
    starts = xp.searchsorted(rows[order], xp.arange(shape[0] + 1, dtype=rows.dtype), side="left").astype(wide)
    return Csr(values=values[order], columns=columns[order], starts=starts, shape=shape)


def _slotted(csr: Csr, slots: int) -> tuple[Ell, Coo]:
    """The first `slots` nonzeros of each row in slots, and the rest as coordinates."""
    xp = library(csr.values)
    row = _rows_of(csr.starts, csr.nonzeros)
    slot = xp.arange(csr.nonzeros) - csr.starts[row]
    fits = slot < slots
    values = xp.zeros((slots, csr.shape[0]), csr.values.dtype)
    columns = xp.full(values.shape, EMPTY, np.int32)
    values[slot[fits], row[fits]], columns[slot[fits], row[fits]] = csr.values[fits], csr.columns[fits]
    rest = ~fits
    coo = Coo(values=csr.values[rest], rows=row[rest], columns=csr.columns[rest], shape=csr.shape, by_rows=True)
    return Ell(values=values, columns=columns, shape=csr.shape), coo


def _check_shape(shape: tuple[int, int]) -> None:
    if len(shape) != 2 or not all(isinstance(n, int) and 0 <= n <= MAX_SIZE for n in shape):
        raise ValueError(f"shape must be two sizes of 0 to {MAX_SIZE}; got {shape}")


def _check_values(name: str, values: Any, axes: int) -> None:
    check_array(name, values)
    if values.dtype.name not in VALUES or not values.dtype.isnative:
        raise TypeError(f"{name} has dtype {values.dtype}; supported are {', '.join(VALUES)}")
    if values.ndim != axes or not values.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous and have {axes} axes; got shape {values.shape}")


def _check_indices(
    name: str, indices: Any, shape: tuple[int, ...], dtypes: tuple[str, ...], limit: int | None, *, least: int = 0
) -> None:
    check_array(name, indices)
    if indices.dtype.name not in dtypes or not indices.dtype.isnative:
        raise TypeError(f"{name} has dtype {indices.dtype}; supported are {', '.join(dtypes)}")
    if indices.shape != shape or not indices.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous of shape {shape}; got shape {indices.shape}")
    if limit is not None and isinstance(indices, np.ndarray) and indices.size:
        low, high = int(indices.min()), int(indices.max())
        if low < least or high >= limit:
            raise ValueError(f"{name} must be from {least} to {limit - 1}; got {low if low < least else high}")


def _check_kinds(*arrays: Any) -> None:
    if len({type(array) for array in arrays}) > 1:
        raise TypeError("the arrays of a matrix must be of one library, NumPy or CuPy")
