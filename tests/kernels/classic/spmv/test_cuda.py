"""Sparse products on CUDA: every variant against sums in extended precision; conversions; reproducible bits."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from kernels.classic.spmv import Csr, spmv, to_coo, to_csr
from kernels.classic.spmv.cuda import VARIANTS, converted, ladders, production
from kernels.classic.spmv.cuda import spmv as on_cuda
from kernels.classic.spmv.matrices import mesh, scattered
from tests.kernels.classic.spmv.cases import FORMATS, Case, cases, in_format

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def moved(matrix: Any, to: Any) -> Any:
    """A matrix with all its arrays converted to the other library."""
    arrays = {}
    for field in fields(matrix):
        value = getattr(matrix, field.name)
        arrays[field.name] = (
            moved(value, to) if is_dataclass(value) else to(value) if hasattr(value, "dtype") else value
        )
    return type(matrix)(**arrays)


@pytest.mark.sanitize("spmv")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_definition(cupy: Any, case: Case) -> None:
    matrix, x = moved(case.matrix(), cupy.asarray), cupy.asarray(case.x())
    case.check(spmv(matrix, x).get(), "coo in no order")
    csr = to_csr(matrix)
    for wide in (False, True):
        rows = replace(csr, starts=csr.starts.astype(np.int64)) if wide else csr
        case.check(spmv(rows, x).get(), "csr")
        for name in VARIANTS:
            out = cupy.full(case.rows, cupy.nan, case.dtype)
            on_cuda(converted(rows, name), x, out, variant=name)
            case.check(out.get(), name)


@pytest.mark.parametrize("name", FORMATS)
def test_conversions_give_what_they_give_on_the_cpu(cupy: Any, name: str) -> None:
    for case in cases():
        on_cpu = in_format(case.matrix(), name)
        on_device = moved(in_format(moved(case.matrix(), cupy.asarray), name), cupy.asnumpy)
        for given, expected in ((on_device, on_cpu), (to_coo(on_device), to_coo(on_cpu))):
            assert_same(given, expected)


def assert_same(given: Any, expected: Any) -> None:
    for field in fields(expected):
        value, wanted = getattr(given, field.name), getattr(expected, field.name)
        if is_dataclass(wanted):
            assert_same(value, wanted)
        else:
            np.testing.assert_array_equal(value, wanted, strict=True)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "coo_atomic"])
def test_every_run_gives_the_same_bits(cupy: Any, name: str) -> None:
    csr = scattered(cupy, 20_011) if name != "ell" else mesh(cupy, 30)
    matrix, x = converted(csr, name), cupy.random.default_rng(2).standard_normal(csr.shape[1], dtype=cupy.float32)
    first = on_cuda(matrix, x, None, variant=name).get()
    for _ in range(5):
        np.testing.assert_array_equal(on_cuda(matrix, x, None, variant=name).get(), first, strict=True)


def whole_numbers(cupy: Any, rows: int, each: int, columns: int) -> Csr:
    """A matrix of small integers with as many nonzeros in every row."""
    rng = cupy.random.default_rng(1)
    values = rng.integers(-9, 10, rows * each, dtype=np.int32).astype(cupy.float32)
    places = rng.integers(0, columns, rows * each, dtype=np.int32)
    dtype = np.int64 if rows * each > 2_147_000_000 else np.int32
    starts = cupy.arange(rows + 1, dtype=dtype) * dtype(each)
    return Csr(values=values, columns=places, starts=starts, shape=(rows, columns))


def expected_of(cupy: Any, csr: Csr, x: Any, each: int) -> Any:
    products = cupy.empty(csr.shape[0], cupy.float32)
    part = 1 << 24
    for first in range(0, csr.shape[0], part):
        window = slice(first * each, min(first + part, csr.shape[0]) * each)
        products[first : first + part] = (csr.values[window] * x[csr.columns[window]]).reshape(-1, each).sum(1)
    return products


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name not in ("csr_thread", "csr_warp", "csr_lanes", "merge")]
)
@pytest.mark.large
def test_more_than_4_gib_of_values(cupy: Any, name: str) -> None:
    each = 16
    csr = whole_numbers(cupy, 67_109_003, each, 1 << 20)
    assert csr.values.nbytes > 1 << 32
    x = cupy.random.default_rng(2).integers(-9, 10, csr.shape[1]).astype(cupy.float32)
    expected = expected_of(cupy, csr, x, each)
    matrix = converted(csr, name)
    del csr
    out = cupy.full(len(expected), cupy.nan, cupy.float32)
    on_cuda(matrix, x, out, variant=name)
    assert bool((out == expected).all())


@pytest.mark.parametrize("name", ["csr_thread", "csr_warp", "csr_lanes", "merge"])
def test_more_nonzeros_than_32_bits_count(cupy: Any, name: str) -> None:
    each = 32
    csr = whole_numbers(cupy, 67_109_003, each, 1 << 20)
    assert csr.nonzeros > 1 << 31
    x = cupy.random.default_rng(2).integers(-9, 10, csr.shape[1]).astype(cupy.float32)
    expected = expected_of(cupy, csr, x, each)
    out = cupy.full(len(expected), cupy.nan, cupy.float32)
    on_cuda(csr, x, out, variant=name)
    assert bool((out == expected).all())


@pytest.mark.parametrize("name", ["merge", "coo_segments", "csr_warp"])
def test_one_row_of_a_hundred_million(cupy: Any, name: str) -> None:
    """Thousands of parts carry to one row."""
    csr = whole_numbers(cupy, 1, 100_000_007, 4096)
    x = cupy.ones(4096, cupy.float32)
    values = csr.values * 0
    values[::100] = 1.0
    matrix = converted(replace(csr, values=values), name)
    assert float(on_cuda(matrix, x, None, variant=name)[0]) == len(values[::100])


def test_the_stream_given(cupy: Any) -> None:
    case = Case(rows=1009, columns=1013, nonzeros=12_007)
    matrix, x = moved(case.matrix(), cupy.asarray), cupy.asarray(case.x())
    formats = [in_format(matrix, name) for name in FORMATS]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    results = [spmv(made, x, stream=stream) for made in formats]
    stream.synchronize()
    for name, result in zip(FORMATS, results, strict=True):
        case.check(result.get(), name)
    with pytest.raises(ValueError, match="'ell' does not take a Csr: convert it with to_ell"):
        on_cuda(to_csr(matrix), x, None, variant="ell")
    with pytest.raises(TypeError, match="x must be a cupy array like the matrix"):
        spmv(matrix, case.x())


@pytest.mark.large
def test_ladders_can_be_run(cupy: Any) -> None:
    for ladder, matrix in zip(ladders(), (mesh(cupy, 9), scattered(cupy, 999)), strict=True):
        assert ladder.variants[-1] == production(matrix)
        ladder.prepare(ladder.variants[-1])()
        for run in ladder.libraries().values():
            run()
    cupy.cuda.get_current_stream().synchronize()
