"""Every case on the CPU against sums in extended precision; and laws of scans."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kernels.classic.scan import DTYPES, exclusive, inclusive, segmented
from tests.kernels.classic.scan.cases import KINDS, Case, cases


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases(kind: str, dtype: str) -> None:
    for case in cases():
        if (case.kind, case.dtype) == (kind, dtype):
            case.check(case.apply(case.values(), case.heads()))


@pytest.mark.parametrize("spoil", [np.nan, 1e-3])
def test_the_check_notices_one_wrong_sum(spoil: float) -> None:
    case = Case(kind="inclusive", dtype="float32", size=4099)
    result = case.apply(case.values())
    result[3001] += spoil
    with pytest.raises(AssertionError):
        case.check(result)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_do_not_depend_on_the_number_of_workers(kind: str) -> None:
    case = Case(kind=kind, dtype="float64", size=400_009, content="extreme")
    alone = case.apply(case.values(), case.heads(), workers=1)
    for workers in (2, 3, 8):
        np.testing.assert_array_equal(case.apply(case.values(), case.heads(), workers=workers), alone, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inclusive_is_exclusive_and_the_value(dtype: str) -> None:
    values = np.random.default_rng(1).integers(0, 50, 10_007).astype(dtype)
    np.testing.assert_array_equal(inclusive(values), exclusive(values) + values, strict=True)
    heads = np.random.default_rng(2).random(10_007) < 0.02
    np.testing.assert_array_equal(
        segmented(values, heads), segmented(values, heads, exclusive=True) + values, strict=True
    )


def test_one_segment_is_a_plain_scan_and_lone_segments_are_the_values() -> None:
    values = np.random.default_rng(1).normal(size=70_001)
    np.testing.assert_array_equal(segmented(values, np.zeros(70_001, np.uint8)), inclusive(values), strict=True)
    np.testing.assert_array_equal(segmented(values, np.ones(70_001, np.bool_)), values, strict=True)


def test_a_nan_ends_with_its_segment() -> None:
    result = segmented(np.array([1, np.nan, 1, 2, 3]), np.array([1, 0, 0, 1, 0], np.int8))
    np.testing.assert_array_equal(result, [1, np.nan, np.nan, 2, 5])


def test_arrays_of_any_layout_and_in_place() -> None:
    values = np.arange(20_000, dtype=np.int64)
    np.testing.assert_array_equal(inclusive(values[::-3]), np.cumsum(values[::-3]))
    np.testing.assert_array_equal(inclusive(values.astype(">i8")), np.cumsum(values))
    expected = np.cumsum(values) - values
    assert exclusive(values, out=values) is values
    np.testing.assert_array_equal(values, expected)


VALUES = np.zeros(5, np.float32)
READ_ONLY = VALUES.copy()
READ_ONLY.flags.writeable = False
LONG, BYTES = np.ones(8, np.int32), np.ones(32, np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: inclusive([1.0]), TypeError, "values must be a NumPy or CuPy array; got list"),
        (lambda: inclusive(np.zeros(2, np.int8)), TypeError, "values has dtype int8; supported are int32"),
        (lambda: exclusive(np.zeros((2, 2))), ValueError, r"values must have one axis; got shape \(2, 2\)"),
        (lambda: inclusive(VALUES, workers=0), ValueError, "workers must be a whole number of threads"),
        (lambda: inclusive(VALUES, out=np.zeros(5)), ValueError, r"out must be a C-contiguous ndarray of shape \(5,\)"),
        (lambda: inclusive(VALUES, out=np.zeros(10, np.float32)[::2]), ValueError, "out must be a C-contiguous"),
        (lambda: inclusive(VALUES, out=READ_ONLY), ValueError, "out is read-only"),
        (lambda: inclusive(LONG[:-1], out=LONG[1:]), ValueError, "out shares memory with values"),
        (lambda: exclusive(LONG[::-1], out=LONG), ValueError, "out shares memory with values"),
        (lambda: segmented(LONG, BYTES[:8], out=BYTES.view(np.int32)), ValueError, "out shares memory with heads"),
        (lambda: segmented(VALUES, [0] * 5), TypeError, "heads must be an array of the values' kind, ndarray"),
        (lambda: segmented(VALUES, np.zeros(5)), TypeError, "heads has dtype float64; supported are bool"),
        (lambda: segmented(VALUES, np.zeros(4, np.uint8)), ValueError, r"heads must have the shape of values, \(5,\)"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.1])
def test_roundings_that_all_go_one_way_stay_within_the_bound(value):
    """Equal values have the same rounding error at each addition; those of random values would cancel."""
    size = 1 << 20
    values, heads = np.full(size, value), np.zeros(size, np.uint8)
    heads[5000] = 1
    places = np.arange(1, 257) * 4096 - 1
    for found, first in ((inclusive(values), 0), (segmented(values, heads), 5000)):
        for place in places[places > first].tolist():
            exact = (place + 1 - first) * Fraction(value)
            assert abs(Fraction(float(found[place])) - exact) <= exact / 2**45
