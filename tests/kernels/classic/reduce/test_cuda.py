"""Reductions on a CUDA device: every rung against exact arithmetic, and production against the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.reduce import DTYPES, OPERATIONS, argmax, cpu, cuda, maximum, mean_variance, total
from tests.kernels.classic.reduce.cases import Case, cases, made_values

pytestmark = pytest.mark.gpu

CLASSIC = [name for name in cuda.VARIANTS if name != cuda.PRODUCTION]
SIZES = (1, 2, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049, 65536, 524_309, 3_000_017)


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("reduce")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases_have_the_bits_of_the_cpu(cupy: Any, operation: str, dtype: str) -> None:
    for case in cases():
        if (case.operation, case.dtype) != (operation, dtype):
            continue
        result = case.apply(cupy.asarray(case.values())).get()
        case.check(result)
        on_cpu = np.asarray(cpu.reduced(operation, case.values(), 0))
        np.testing.assert_array_equal(result, on_cpu, err_msg=case.name, strict=True)  # all NaNs count as equal


@pytest.mark.sanitize("reduce")
@pytest.mark.parametrize("variant", CLASSIC)
def test_every_rung_sums(cupy: Any, variant: str) -> None:
    for size in SIZES:
        whole = made_values("random", "int32", size)
        result = cuda.reduced("total", cupy.asarray(whole), 0, variant=variant).get()
        assert (int(result) - int(whole.astype(np.int64).sum())) % (1 << 32) == 0
        real = made_values("random", "float32", size)
        result = cuda.reduced("total", cupy.asarray(real), 0, variant=variant).get()
        exact = real.astype(np.longdouble)
        assert abs(result - exact.sum()) <= 2e-6 * np.abs(exact).sum()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_bits_do_not_depend_on_the_grid(cupy: Any, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    values = cupy.asarray(made_values("random", "float32", 3_000_017))
    results = []
    for blocks in (1, 3, 8, 1000):
        monkeypatch.setattr(cuda, "BLOCKS_A_MULTIPROCESSOR", blocks)
        results.append(cuda.reduced(operation, values, 0).get().tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_values_that_are_not_aligned(cupy: Any, operation: str, dtype: str) -> None:
    values = made_values("random", dtype, 100_003)
    on_device = cupy.asarray(values)
    for first in (1, 3):
        case = Case(operation=operation, dtype=dtype, size=values.size - first)
        expected = np.asarray(cpu.reduced(operation, values[first:], 0))
        np.testing.assert_array_equal(case.apply(on_device[first:]).get(), expected)


@pytest.mark.large
def test_more_than_two_to_the_32_bytes(cupy: Any) -> None:
    count = (1 << 32) + 4099
    values = cupy.ones(count, cupy.uint8)
    values[count - 5] = 7
    assert int(total(values)) == count + 6
    assert int(argmax(values)) == count - 5
    assert int(maximum(values)) == 7
    mean, variance = mean_variance(values).get()
    np.testing.assert_allclose([mean, variance], [1 + 6 / count, 36 / count], rtol=1e-9)


def test_a_rung_that_does_not_apply_is_refused(cupy: Any) -> None:
    with pytest.raises(ValueError, match="variant 'pairs' cannot compute maximum of float32"):
        cuda.reduced("maximum", cupy.zeros(5, cupy.float32), 0, variant="pairs")


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    values = cupy.zeros(1 << 26, cupy.float32)
    for number in range(5):
        with stream:
            values.fill(number)
        result = total(values, stream=stream)
        with stream:
            values.fill(-1)
            assert float(result) == number * float(1 << 26)
