"""Every case in every format on the CPU against sums in extended precision; conversions and back; errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.classic.spmv import Coo, Csr, Ell, Hybrid, Jds, spmv, to_coo, to_csr, to_ell, to_hybrid, to_jds
from kernels.classic.spmv.matrices import mesh, mesh_nonzeros, scattered, scattered_lengths
from tests.kernels.classic.spmv.cases import FORMATS, Case, cases, in_format


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    matrix, x = case.matrix(), case.x()
    case.check(spmv(matrix, x), "coo in no order")
    for name in FORMATS:
        out = np.full(case.rows, np.nan, case.dtype)
        assert spmv(in_format(matrix, name), x, out=out) is out
        case.check(out, name)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-2])
def test_the_check_notices_one_wrong_result(spoil: float) -> None:
    case = Case(rows=13, columns=17, nonzeros=40)
    result = spmv(case.matrix(), case.x())
    result[7] += spoil
    with pytest.raises(AssertionError, match=r"at \(7,\) got"):
        case.check(result)


def dense(matrix: Any) -> Any:
    """As a dense matrix, without the conversions under test."""
    result = np.zeros(matrix.shape)
    if isinstance(matrix, Hybrid):
        return dense(matrix.ell) + dense(matrix.coo)
    if isinstance(matrix, Coo):
        np.add.at(result, (matrix.rows, matrix.columns), matrix.values)
    elif isinstance(matrix, Ell):
        for row, slot in itertools.product(range(matrix.shape[0]), range(len(matrix.values))):
            if matrix.columns[slot, row] >= 0:
                result[row, matrix.columns[slot, row]] += matrix.values[slot, row]
    else:
        for major in range(len(matrix.starts) - 1):
            for place, i in enumerate(range(matrix.starts[major], matrix.starts[major + 1])):
                row = major if isinstance(matrix, Csr) else matrix.order[place if matrix.transposed else major]
                result[row, matrix.columns[i]] += matrix.values[i]
    return result


SMALL = [
    Case(rows=23, columns=19, nonzeros=90, content="integers"),
    Case(rows=31, columns=7, nonzeros=40, content="integers"),
    Case(rows=1, columns=9, nonzeros=5, content="integers"),
    Case(rows=2, columns=2, nonzeros=3, content="integers"),
    Case(rows=5, columns=5, nonzeros=0),
    Case(rows=0, columns=5, nonzeros=0),
]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FORMATS, FORMATS)))
def test_conversions_keep_the_matrix(source: str, target: str) -> None:
    for case in SMALL:
        matrix = case.matrix()
        there = in_format(in_format(matrix, source), target)
        assert there.nonzeros == case.nonzeros
        assert there.shape == (case.rows, case.columns)
        np.testing.assert_array_equal(dense(there), dense(matrix), strict=True)


def test_formats_are_what_they_are_called() -> None:
    matrix = Case(rows=101, columns=103, nonzeros=900, content="power").matrix()
    lengths = np.bincount(matrix.rows, minlength=101)
    assert to_coo(matrix).by_rows
    assert to_csr(matrix).longest == lengths.max()
    assert to_csr(Case(rows=0, columns=5, nonzeros=0).matrix()).longest == 0
    assert to_ell(matrix).values.shape == (lengths.max(), 101)
    assert to_ell(matrix, slots=500).values.shape == (500, 101)
    hybrid = to_hybrid(matrix)
    assert (lengths >= len(hybrid.ell.values)).sum() >= 101 // 3 > (lengths > len(hybrid.ell.values)).sum()
    assert to_hybrid(matrix, slots=2).coo.nonzeros == (lengths - np.minimum(lengths, 2)).sum()
    for transposed in (False, True):
        assert (np.diff(lengths[to_jds(matrix, transposed=transposed).order]) <= 0).all()
    assert (np.diff(np.diff(to_jds(matrix, transposed=True).starts)) <= 0).all()


def test_row_starts_of_64_bits_will_do() -> None:
    case = Case(rows=1009, columns=1013, nonzeros=12_007)
    csr = to_csr(case.matrix())
    wide = replace(csr, starts=csr.starts.astype(np.int64))
    for name in FORMATS:
        case.check(spmv(in_format(wide, name), case.x()), name)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_bits_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    case = Case(rows=5003, columns=4001, nonzeros=700_001, content="power")
    csr = to_csr(case.matrix())
    for name in ("csr", "hybrid", "jds", "jds transposed"):
        matrix = in_format(csr, name)
        expected = spmv(matrix, case.x(), workers=1)
        np.testing.assert_array_equal(spmv(matrix, case.x(), workers=workers), expected, strict=True)


def test_the_matrices_to_measure_on() -> None:
    matrix = mesh(np, 7)
    assert matrix.nonzeros == mesh_nonzeros(7)
    assert (dense(replace(matrix, values=np.ones_like(matrix.values))) == dense(matrix).astype(bool)).all()
    assert (dense(matrix).astype(bool) == dense(matrix).astype(bool).T).all()
    lengths = scattered_lengths(1000)
    np.testing.assert_array_equal(np.diff(scattered(np, 1000).starts), lengths)
    assert lengths.min() == 4
    assert lengths.max() > 100


CSR = Csr(
    values=np.ones(3, np.float32),
    columns=np.array([0, 2, 1], np.int32),
    starts=np.array([0, 2, 3], np.int32),
    shape=(2, 3),
)
ELL, COO, JDS = to_ell(CSR), to_coo(CSR), to_jds(CSR)
HYBRID = to_hybrid(CSR, slots=1)
SLOTS = HYBRID.ell.values
X, READ_ONLY = np.ones(3, np.float32), np.ones(2, np.float32)
READ_ONLY.flags.writeable = False


def _changed(matrix: Any, **changes: Any) -> Any:
    return lambda: replace(matrix, **changes)


def _int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


REFUSALS = {
    "matrix": (TypeError, "matrix must be a Csr, Coo, Ell, Hybrid or Jds; got ndarray", lambda: spmv(X, X)),
    "list": (TypeError, "x must be a numpy array like the matrix; got list", lambda: spmv(CSR, [1.0, 2.0, 3.0])),
    "dtype of x": (TypeError, "x has dtype float64; the matrix has float32", lambda: spmv(CSR, X.astype(float))),
    "size of x": (ValueError, r"x must be C-contiguous of shape \(3,\); got shape \(2,\)", lambda: spmv(CSR, X[:2])),
    "strides of x": (ValueError, "x must be C-contiguous", lambda: spmv(CSR, np.ones(6, np.float32)[::2])),
    "size of out": (ValueError, r"out must be a C-contiguous ndarray of shape \(2,\)", lambda: spmv(CSR, X, out=X)),
    "read-only out": (ValueError, "out is read-only", lambda: spmv(CSR, X, out=READ_ONLY)),
    "out is x": (ValueError, "out shares memory with x", lambda: spmv(CSR, X, out=X[:2])),
    "out is values": (ValueError, "out shares memory with values", lambda: spmv(CSR, X, out=CSR.values[1:])),
    "out is in hybrid": (ValueError, "out shares memory with ell's values", lambda: spmv(HYBRID, X, out=SLOTS[0])),
    "workers": (ValueError, "workers must be a whole number of threads", lambda: spmv(CSR, X, workers=0)),
    "values": (TypeError, "values has dtype int64; supported are float32, float64", _changed(CSR, values=np.arange(3))),
    "no array": (TypeError, "values must be a NumPy or CuPy array; got list", _changed(CSR, values=[1.0])),
    "dtype of columns": (TypeError, "columns has dtype int64", _changed(CSR, columns=np.zeros(3, np.int64))),
    "columns": (ValueError, "columns must be from 0 to 2; got 3", _changed(CSR, columns=_int32(0, 3, 1))),
    "few columns": (ValueError, r"columns must be C-contiguous of shape \(3,\)", _changed(CSR, columns=_int32(0))),
    "negative column": (ValueError, "columns must be from 0 to 2; got -1", _changed(CSR, columns=_int32(0, -1, 1))),
    "negative slot": (ValueError, "columns must be from -1 to 2; got -2", _changed(ELL, columns=ELL.columns * 0 - 2)),
    "rows": (ValueError, "rows must be from 0 to 1; got 7", _changed(COO, rows=_int32(0, 0, 7))),
    "rows' order": (ValueError, "rows must ascend", _changed(COO, rows=_int32(0, 1, 0))),
    "starts": (ValueError, "starts must ascend from 0 to 3", _changed(CSR, starts=_int32(0, 2, 2))),
    "falling starts": (ValueError, "starts must ascend from 0 to 3", _changed(CSR, starts=_int32(0, 4, 3))),
    "shape": (ValueError, r"shape must be two sizes of 0 to", _changed(CSR, shape=(2, -3))),
    "slots": (ValueError, "values must have 2 columns, one per row", _changed(ELL, values=np.ones((2, 3), np.float32))),
    "few slots": (ValueError, "slots must be 2 or more, for the longest row; got 1", lambda: to_ell(CSR, slots=1)),
    "jds": (ValueError, "starts must ascend from 0 to 3, in steps", _changed(JDS, starts=np.array([0, 1, 3]))),
    "order": (ValueError, "order must be from 0 to 1; got 2", _changed(JDS, order=_int32(0, 2))),
    "hybrid": (ValueError, "coo must be by rows", lambda: Hybrid(ell=ELL, coo=replace(COO, by_rows=False))),
    "wide hybrid": (
        ValueError,
        "ell and coo must have values of one dtype",
        lambda: Hybrid(ell=ELL, coo=replace(COO, values=COO.values.astype(float))),
    ),
}


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_parameter(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_jagged_diagonals_are_checked_too() -> None:
    transposed = to_jds(CSR, transposed=True)
    assert isinstance(transposed, Jds)
    with pytest.raises(ValueError, match="at most 2 rows"):
        replace(transposed, starts=np.array([0, 3]))
