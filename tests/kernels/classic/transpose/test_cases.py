"""Every case on the CPU, bit by bit; and laws of transposes."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.classic.transpose import transpose
from tests.kernels.classic.transpose.cases import DTYPES, VOIDS, Case, cases


@pytest.mark.parametrize("dtype", [*DTYPES, *VOIDS])
def test_cases(dtype: str) -> None:
    for case in cases((dtype,)):
        case.check(case.apply(case.laid_out()))


def test_the_check_notices_one_wrong_bit() -> None:
    case = Case(shape=(67, 129))
    result = case.apply(case.laid_out())
    result.view(np.uint32)[5, 7] ^= 1
    with pytest.raises(AssertionError, match="bits differ"):
        case.check(result)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_twice_is_the_array_itself(workers: int) -> None:
    array = np.random.default_rng(1).normal(size=(2, 1031, 517))
    np.testing.assert_array_equal(transpose(transpose(array, workers=workers), workers=workers), array, strict=True)


def test_out_is_what_is_returned() -> None:
    array = np.arange(35, dtype=np.uint16).reshape(5, 7)
    out = np.zeros((7, 5), np.uint16)
    assert transpose(array, out=out) is out
    np.testing.assert_array_equal(out, array.T, strict=True)


ARRAY = np.zeros((5, 7), np.float32)
READ_ONLY = np.zeros((7, 5), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("array", "options", "error", "message"),
    [
        ([[1]], {}, TypeError, "array must be a NumPy or CuPy array; got list"),
        (np.array([[None]]), {}, TypeError, "array has dtype object; elements must be of 1 to 16 bytes"),
        (np.zeros((2, 2), "V17"), {}, TypeError, r"array has dtype \|V17; elements must be of 1 to 16 bytes"),
        (np.zeros(3), {}, ValueError, r"array must have two axes or more; got shape \(3,\)"),
        (ARRAY, {"workers": 0}, ValueError, "workers must be a whole number of threads, 1 or more; got 0"),
        (ARRAY, {"out": np.zeros((5, 7), np.float32)}, ValueError, r"C-contiguous ndarray of shape \(7, 5\)"),
        (ARRAY, {"out": np.zeros((7, 5))}, ValueError, "out must be .* and dtype float32"),
        (ARRAY, {"out": np.zeros((5, 7), np.float32).T}, ValueError, "out must be a C-contiguous"),
        (ARRAY, {"out": READ_ONLY}, ValueError, "out is read-only"),
        (ARRAY, {"out": ARRAY.reshape(7, 5)}, ValueError, "out shares memory with array"),
    ],
)  # fmt: skip
def test_mistakes_are_named(array, options, error, message) -> None:
    with pytest.raises(error, match=message):
        transpose(array, **options)
