"""Every case on the CPU against exact arithmetic; and laws of reductions in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.reduce import DTYPES, OPERATIONS, argmax, maximum, mean_variance, minimum, total
from tests.kernels.classic.reduce.cases import Case, cases, made_values


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases(operation: str, dtype: str) -> None:
    for case in cases():
        if (case.operation, case.dtype) == (operation, dtype):
            case.check(case.apply(case.values()))


@pytest.mark.parametrize(("operation", "spoil"), [("total", 1e-6), ("mean_variance", 1e-9), ("maximum", np.nan)])
def test_the_check_notices_a_wrong_result(operation: str, spoil: float) -> None:
    case = Case(operation=operation, dtype="float32", size=1031)
    with pytest.raises(AssertionError):
        case.check(case.apply(case.values()) + np.array(spoil, np.float32 if operation == "maximum" else np.float64))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_the_bits_do_not_depend_on_the_number_of_workers(operation: str, dtype: str) -> None:
    values = made_values("random", dtype, 700_001)
    case = Case(operation=operation, dtype=dtype, size=values.size)
    alone = case.apply(values, workers=1)
    for workers in (2, 3, 8):
        assert case.apply(values, workers=workers).tobytes() == alone.tobytes()


def test_a_naive_sum_would_not_do() -> None:
    """Values whose running float32 sum stops growing, and deviations far below the mean."""
    assert float(total(np.full(1 << 25, 1.0, np.float32))) == 1 << 25
    mean, variance = mean_variance(made_values("offset", "float64", 65537))
    assert abs(mean - 4096) < 1e-4
    assert 0.9e-6 < variance < 1.1e-6


def test_the_definition_of_ddof_and_of_nothing() -> None:
    values = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(mean_variance(values), [7 / 3, values.var()], rtol=1e-15)
    np.testing.assert_allclose(mean_variance(values, ddof=1)[1], values.var(ddof=1), rtol=1e-15)
    nothing = total(np.zeros((0, 3), np.int8))
    assert (nothing.dtype, int(nothing)) == (np.int64, 0)


def test_arrays_of_any_layout() -> None:
    values = np.random.default_rng(2).normal(size=(37, 41, 5))
    for array in (values, np.asfortranarray(values), values[::2, ::-1], values.astype(">f8"), np.array(1.5)):
        assert float(maximum(array)) == array.max()
        assert int(argmax(array)) == int(np.argmax(array))
        np.testing.assert_allclose(float(total(array)), array.sum(), rtol=1e-12)


def test_a_nan_beats_an_infinity_and_the_first_one_counts() -> None:
    values = np.array([1, np.inf, np.nan, -np.inf, np.nan], np.float32)
    assert np.isnan(minimum(values))
    assert np.isnan(maximum(values))
    assert int(argmax(values)) == 2
    assert int(argmax(np.full(5000, -np.inf, np.float32))) == 0


VALUES = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: total([1.0]), TypeError, "values must be a NumPy or CuPy array; got list"),
        (lambda: total(np.zeros(2, np.complex64)), TypeError, "values has dtype complex64; supported are int8"),
        (lambda: minimum(np.zeros(0)), ValueError, r"values must have more than 0 elements .* got shape \(0,\)"),
        (lambda: argmax(np.zeros((2, 0))), ValueError, "values must have more than 0 elements for argmax"),
        (lambda: mean_variance(VALUES, ddof=3), ValueError, "values must have more than 3 elements for mean_variance"),
        (lambda: mean_variance(VALUES, ddof=-1), ValueError, "ddof must be a whole number, 0 or more; got -1"),
        (lambda: maximum(VALUES, workers=True), ValueError, "workers must be a whole number of threads"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
