"""Stencil steps on a CUDA device: every variant against float64 and, bit by bit, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.stencil import stencil
from kernels.classic.stencil.cuda import VARIANTS, ladders, production
from kernels.classic.stencil.cuda import stencil as on_cuda
from tests.kernels.classic.stencil.cases import Case, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("stencil")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_has_the_bits_of_the_cpu(cupy: Any, case: Case) -> None:
    on_cpu = case.apply(case.field())
    case.check(on_cpu)
    field = cupy.asarray(case.field())
    np.testing.assert_array_equal(case.apply(field).get(), on_cpu, strict=True)
    for name in VARIANTS:
        out = cupy.full(case.shape, cupy.nan, cupy.float32)
        on_cuda(field, case.centre, case.neighbour, case.steps, out, variant=name)
        np.testing.assert_array_equal(out.get(), on_cpu, err_msg=name, strict=True)
    np.testing.assert_array_equal(field.get(), case.field(), strict=True)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", [(1025, 1021, 1031), (1040, 1020, 1024)])
@pytest.mark.large
def test_more_than_4_gib(cupy: Any, name: str, shape: tuple[int, int, int]) -> None:
    """Integers, so that every point is compared with shifted arrays, some planes at a time."""
    field = cupy.random.default_rng(1).integers(-9, 10, shape).astype(cupy.float32)
    assert field.nbytes > 1 << 32
    out = cupy.full(shape, cupy.nan, cupy.float32)
    steps = 4 if name.startswith("temporal") else 1
    on_cuda(field, 1.0, 1.0, steps, out, variant=name)
    part = 128
    for first in range(0, shape[0], part):
        low, high = max(first - steps, 0), min(first + part + steps, shape[0])
        expected = field[low:high].copy()
        for _ in range(steps):
            stepped = expected.copy()
            inside = stepped[1:-1, 1:-1, 1:-1]
            for axis in range(3):
                for shift in (slice(None, -2), slice(2, None)):
                    window = tuple(shift if a == axis else slice(1, -1) for a in range(3))
                    inside += expected[window]
            expected = stepped
        rows = slice(first, min(first + part, shape[0]))
        assert bool((out[rows] == expected[rows.start - low : rows.stop - low]).all()), f"planes {first} and on"


def test_any_strides_offsets_and_the_stream_given(cupy: Any) -> None:
    case = Case(shape=(13, 17, 20), steps=5)
    expected = case.apply(case.field())
    stream = cupy.cuda.Stream(non_blocking=True)
    field = cupy.asarray(case.field())
    memory = cupy.empty(field.size + 1, cupy.float32)
    shifted = memory[1:].reshape(case.shape)  # rows are whole vectors, but begin 4 bytes off
    shifted[...] = field
    turned = cupy.asfortranarray(field)
    cupy.cuda.get_current_stream().synchronize()
    results = [case.apply(given, stream=stream) for given in (shifted, turned)]
    stream.synchronize()
    for result in results:
        np.testing.assert_array_equal(result.get(), expected, strict=True)
    with pytest.raises(ValueError, match="out shares memory with field"):
        stencil(field, centre=1, neighbour=1, out=field)


@pytest.mark.large
def test_ladders_can_be_run(cupy: Any) -> None:
    for ladder in ladders():
        assert ladder.variants[-1] == production(1 if ladder.name.startswith("1 ") else 4)
        ladder.prepare(ladder.variants[-1])()
    cupy.cuda.get_current_stream().synchronize()
