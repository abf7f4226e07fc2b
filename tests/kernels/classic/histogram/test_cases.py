"""Every case on the CPU against counts from sorted values; and laws of histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.histogram import histogram
from kernels.classic.histogram.cuda import rounded_edges
from tests.kernels.classic.histogram.cases import Case, cases


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_cases(dtype: str) -> None:
    for case in cases():
        if case.dtype == dtype:
            case.check(case.apply(case.values()))


def test_the_check_notices_one_wrong_count() -> None:
    case = Case(dtype="uint8", shape=(1031,))
    result = case.apply(case.values())
    result[7] += 1
    with pytest.raises(AssertionError):
        case.check(result)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_counts_add_up_whatever_the_number_of_workers(workers: int) -> None:
    values = np.random.default_rng(1).integers(0, 256, (1001, 1003, 3)).astype(np.uint8)
    channels = histogram(values, channel_axis=2, workers=workers)
    np.testing.assert_array_equal(channels.sum(1), [1001 * 1003] * 3)
    np.testing.assert_array_equal(channels.sum(0), histogram(values, workers=workers))
    np.testing.assert_array_equal(channels[1], np.bincount(values[..., 1].ravel(), minlength=256))


def test_rounded_edges_compare_as_the_exact_ones_do() -> None:
    rng = np.random.default_rng(1)
    edges = np.sort(np.concatenate([rng.normal(size=500), np.float32(rng.normal(size=500)), [-1e300, 1e300, -1e-50]]))
    lower, last = rounded_edges(edges, np.float32)
    near = edges[np.abs(edges) < 1e30].astype(np.float32)
    values = np.concatenate([near, np.nextafter(near, np.float32(9)), np.nextafter(near, np.float32(-9)), [0]])
    exact = values.astype(np.float64)[:, None] >= edges[:-1]
    np.testing.assert_array_equal(values[:, None] >= lower, exact)
    np.testing.assert_array_equal(values <= np.float32(last), values.astype(np.float64) <= edges[-1])


def test_agrees_with_numpy() -> None:
    values = np.random.default_rng(1).normal(size=10_007)
    edges = np.linspace(-2, 2, 78)
    np.testing.assert_array_equal(histogram(values, edges), np.histogram(values, edges)[0])


VALUES = np.zeros((5, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: histogram([1]), TypeError, "values must be a NumPy or CuPy array; got list"),
        (lambda: histogram(np.zeros(2, np.int32)), TypeError, "values has dtype int32; supported are uint8"),
        (lambda: histogram(VALUES), ValueError, "edges: values of float32 need them"),
        (lambda: histogram(VALUES.astype(np.uint8), [0, 1]), ValueError, "edges: values of uint8 have a bin each"),
        (lambda: histogram(VALUES, 7), TypeError, "edges must be a NumPy array or a sequence of numbers; got int"),
        (lambda: histogram(VALUES, [1.0]), ValueError, r"edges must be two numbers or more in a row; got shape \(1,\)"),
        (lambda: histogram(VALUES, [0, 1, 1]), ValueError, "edges must ascend"),
        (lambda: histogram(VALUES, [0, np.nan]), ValueError, "edges must ascend"),
        (lambda: histogram(VALUES, [0, 1], channel_axis=2), ValueError, "channel_axis is 2, but values has 2 axes"),
        (lambda: histogram(VALUES[:, :0], [0, 1], channel_axis=1), ValueError, "values has no channels"),
        (lambda: histogram(VALUES, [0, 1], workers=0), ValueError, "workers must be a whole number of threads"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
