"""Histograms on a CUDA device: every rung on every case that it applies to, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.histogram import INTEGER_BINS, cuda, histogram
from tests.kernels.classic.histogram.cases import Case, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def counted(cupy: Any, case: Case, variant: str | None) -> Any:
    values, edges = cupy.asarray(case.values()), case.edges()
    bins = INTEGER_BINS[case.dtype] if edges is None else len(edges) - 1
    axis = case.channel_axis
    channels = 1 if axis is None else values.shape[axis]
    counts = cuda.histogram(values, edges, channel_axis=axis, channels=channels, bins=bins, variant=variant)
    return counts.get().reshape(bins) if axis is None else counts.get()


@pytest.mark.sanitize("histogram")
@pytest.mark.parametrize("variant", [None, *cuda.VARIANTS])
def test_every_variant_on_every_case(cupy: Any, variant: str | None) -> None:
    checked = 0
    for case in cases():
        try:
            result = counted(cupy, case, variant)
        except ValueError as error:
            assert f"variant {variant!r} cannot count" in str(error)  # noqa: PT017 - most cases are not for this one
            continue
        case.check(result)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("content", ["uniform", "equal", "ends"])
def test_counters_that_run_full(cupy: Any, dtype: str, content: str) -> None:
    case = Case(dtype=dtype, shape=(30_000_001,), content=content)
    values = case.values()
    expected = np.bincount(values, minlength=INTEGER_BINS[dtype])
    np.testing.assert_array_equal(histogram(cupy.asarray(values)).get(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_values_that_are_not_aligned(cupy: Any, dtype: str) -> None:
    case = Case(dtype=dtype, shape=(100_003,), content="normal" if dtype == "float32" else "uniform")
    values = cupy.asarray(case.values())
    for first in (1, 3):
        expected = histogram(case.values()[first:], case.edges())
        np.testing.assert_array_equal(histogram(values[first:], case.edges()).get(), expected)


@pytest.mark.large
def test_more_than_two_to_the_32_bytes(cupy: Any) -> None:
    count = (1 << 32) + 4099
    values = cupy.full(count, 200, cupy.uint8)
    values[:1000] = 3
    values[-7:] = 255
    counts = histogram(values).get()
    assert {int(place): int(counts[place]) for place in np.flatnonzero(counts)} == {3: 1000, 200: count - 1007, 255: 7}
    counts = histogram(values.view(cupy.uint8)[: count // 3 * 3].reshape(-1, 3), channel_axis=1).get()
    assert int(counts.sum()) == count // 3 * 3


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    values = cupy.zeros(1 << 28, cupy.uint8)
    for number in range(5):
        with stream:
            values.fill(number)
        counts = histogram(values, stream=stream)
        with stream:
            values.fill(255)
            assert int(counts[number]) == 1 << 28
