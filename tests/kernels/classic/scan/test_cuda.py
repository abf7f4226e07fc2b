"""Prefix sums on a CUDA device: every rung against sums in extended precision; bits that depend on the input alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kernels.classic.scan import DTYPES, exclusive, inclusive, segmented
from kernels.classic.scan.cuda import PRODUCTION, VARIANTS, scanned
from tests.kernels.classic.scan.cases import KINDS, Case, cases

pytestmark = pytest.mark.gpu

CLASSIC = [name for name in VARIANTS if name != PRODUCTION]
SIZES = (1, 2, 31, 33, 1023, 1024, 1025, 4095, 4096, 4097, 8193, 1 << 20, 1_048_583, 5_000_011)


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("scan")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases(cupy: Any, kind: str, dtype: str) -> None:
    for case in cases():
        if (case.kind, case.dtype) == (kind, dtype):
            values, heads = cupy.asarray(case.values()), cupy.asarray(case.heads())
            out = cupy.full(values.shape, 85, dtype)
            case.check(case.apply(values, heads, out=out).get())


@pytest.mark.sanitize("scan")
@pytest.mark.parametrize("variant", CLASSIC)
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("dtype", ["uint32", "float32"])
def test_every_rung(cupy: Any, variant: str, kind: str, dtype: str) -> None:
    for size in SIZES:
        case = Case(kind=kind, dtype=dtype, size=size)
        out = cupy.full(size, 85, dtype)
        scanned(cupy.asarray(case.values()), None, case.exclusive, out, variant=variant)
        case.check(out.get(), single=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("without", [False, True])
def test_in_place(cupy: Any, variant: str, without: bool) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 31, 300_007).astype(np.uint32)
    array = cupy.asarray(values)
    scanned(array, None, without, array, variant=variant)
    expected = np.cumsum(values, dtype=np.uint32)
    np.testing.assert_array_equal(array.get(), expected - values if without else expected)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.1])
def test_roundings_that_all_go_one_way_stay_within_the_bound(cupy: Any, value: float) -> None:
    size = 1 << 24
    values, heads = cupy.full(size, value), cupy.zeros(size, cupy.uint8)
    heads[5000] = 1
    places = np.arange(1, 4097) * 4096 - 1
    for sums, first in ((inclusive(values), 0), (segmented(values, heads), 5000)):
        chosen = places[places > first]
        for place, found in zip(chosen.tolist(), sums[cupy.asarray(chosen)].tolist(), strict=True):
            exact = (place + 1 - first) * Fraction(value)
            assert abs(Fraction(found) - exact) <= exact / 2**45


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_gives_the_same_bits(cupy: Any, kind: str) -> None:
    case = Case(kind=kind, dtype="float32", size=20_000_003)
    values = cupy.asarray(np.random.default_rng(1).normal(size=case.size).astype(np.float32))
    heads = cupy.asarray((np.random.default_rng(2).random(case.size) < 1e-6).astype(np.uint8))
    first = case.apply(values, heads)
    for _ in range(20):
        assert bool((case.apply(values, heads).view(cupy.uint32) == first.view(cupy.uint32)).all())


def test_values_that_are_not_aligned(cupy: Any) -> None:
    values = np.random.default_rng(1).integers(0, 100, 100_003).astype(np.int32)
    heads = (np.random.default_rng(2).random(100_003) < 0.001).astype(np.uint8)
    array, marks = cupy.asarray(values), cupy.asarray(heads)
    for first in (1, 2, 3):
        np.testing.assert_array_equal(inclusive(array[first:]).get(), np.cumsum(values[first:]))
        expected = segmented(values[first:], heads[first:])
        np.testing.assert_array_equal(segmented(array[first:], marks[first:]).get(), expected)
    np.testing.assert_array_equal(segmented(array[:-1], marks[1:]).get(), segmented(values[:-1], heads[1:]))


@pytest.mark.large
def test_more_than_two_to_the_32_bytes(cupy: Any) -> None:
    count = (1 << 32) + 4099
    values = cupy.ones(count, cupy.uint32)
    sums = inclusive(values)
    for first in range(0, count, 1 << 28):
        part = cupy.arange(first + 1, min(first + (1 << 28), count) + 1, dtype=cupy.uint64).astype(cupy.uint32)
        assert bool((sums[first : first + (1 << 28)] == part).all())
    heads = cupy.zeros(count, cupy.uint8)
    heads[count - 100] = 1
    assert int(segmented(values, heads)[-1]) == 100
    assert int(exclusive(values)[-1]) == (count - 1) % (1 << 32)


def test_a_rung_that_does_not_apply_is_refused(cupy: Any) -> None:
    with pytest.raises(ValueError, match="variant 'brent_kung' cannot scan float64"):
        scanned(cupy.zeros(5), None, False, None, variant="brent_kung")


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    values = cupy.zeros(1 << 25, cupy.uint32)
    for number in range(1, 6):
        with stream:
            values.fill(number)
        result = inclusive(values, stream=stream)
        with stream:
            values.fill(0)
            assert int(result[-1]) == number << 25
