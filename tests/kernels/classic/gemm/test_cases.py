"""Every case on the CPU against float64 sums of outer products; errors of the public functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.gemm import gemm, gram
from tests.kernels.classic.gemm.cases import Case, cases, check, error_bound, exact

SQUARE = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(case.apply(*case.matrices()))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_the_result_goes_where_it_is_wanted(case: Case) -> None:
    matrices = case.matrices()
    out = np.full((case.m, case.m if case.n is None else case.n), np.nan, np.float32)
    assert case.apply(*matrices, out=out) is out
    case.check(out)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-2])
def test_the_check_notices_one_wrong_element(spoil: float) -> None:
    case = Case(m=13, k=17, n=19)
    result = case.apply(*case.matrices())
    result[7, 11] += spoil
    with pytest.raises(AssertionError, match=r"at \(7, 11\)"):
        case.check(result)


def test_rounding_to_tf32_is_not_taken_for_float32() -> None:
    """The bounds separate the precisions: a result of one precision fails the bound of the next finer one."""
    case = Case(m=64, k=64, n=64)
    a, b = case.matrices()
    coarse = [(matrix.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32) for matrix in (a, b)]
    rounded = gemm(*coarse)
    case.check(rounded, precision="tf32")
    with pytest.raises(AssertionError):
        case.check(rounded, precision="3xtf32")


def test_two_terms_of_tf32_hold_a_float32() -> None:
    """The error bound of the three-term products, computed in float64: high·high + high·low + low·high."""
    case = Case(m=40, k=64, n=40)

    def halves(matrix: Any) -> tuple[Any, Any]:
        high = (matrix.view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32)
        low = ((matrix - high).view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.float32)
        return high.astype(np.float64), low.astype(np.float64)

    (a, a_low), (b, b_low) = map(halves, case.matrices())
    values, sizes = exact(*case.matrices())
    assert (np.abs(a @ b + a @ b_low + a_low @ b - values) <= error_bound(sizes, 0, "3xtf32")).all()


def test_any_strides_and_byte_order_will_do() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((58, 62)).astype(np.float32) for _ in range(2))
    check(gemm(a[::2, ::-2], b.T[::2, ::2]), a[::2, ::-2], b.T[::2, ::2])
    check(gemm(a.astype(">f4"), b.T), a, b.T)
    check(gram(a[:, ::3]), a[:, ::3], a[:, ::3].T)


def test_a_gram_matrix_is_symmetric() -> None:
    product = gram(np.random.default_rng(5).standard_normal((37, 91)).astype(np.float32))
    np.testing.assert_allclose(product, product.T, rtol=1e-5, atol=1e-5)


SIDES = np.ones((2, 3, 3), np.float32)
READ_ONLY = np.zeros((3, 3), np.float32)
READ_ONLY.flags.writeable = False
REFUSALS = {
    "list": (TypeError, "a must be a NumPy or CuPy array; got list", lambda: gemm([[1.0]], SQUARE)),
    "dtype": (TypeError, "b has dtype float64; supported is float32", lambda: gemm(SQUARE, SQUARE.T.astype(float))),
    "flat": (ValueError, r"a must be a matrix .*got shape \(12,\)", lambda: gram(SQUARE.ravel())),
    "inner": (ValueError, "a has 4 columns and b 3 rows", lambda: gemm(SQUARE, SQUARE)),
    "shape of out": (
        ValueError,
        "out must be .*shape \\(3, 3\\)",
        lambda: gram(SQUARE, out=np.zeros((3, 4), np.float32)),
    ),
    "dtype of out": (ValueError, "out must be .*float32", lambda: gram(SQUARE, out=np.zeros((3, 3)))),
    "strides of out": (
        ValueError,
        "out must be a C-contiguous",
        lambda: gram(SQUARE, out=np.zeros((3, 6), np.float32)[:, ::2]),
    ),
    "read-only out": (ValueError, "out is read-only", lambda: gram(SQUARE, out=READ_ONLY)),
    "out is b": (ValueError, "out shares memory with b", lambda: gemm(SIDES[0], SIDES[1], out=SIDES[1])),
    "out is a": (ValueError, "out shares memory with a", lambda: gram(SIDES[0], out=SIDES[0])),
}


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_parameter(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
