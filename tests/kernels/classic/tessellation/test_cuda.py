"""Tessellation on a CUDA device: every variant against exact counts, and to the bit against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.tessellation import tessellate
from kernels.classic.tessellation.cuda import VARIANTS
from kernels.classic.tessellation.cuda import tessellate as on_cuda
from tests.kernels.classic.tessellation.cases import CONTENTS, Case, cases, made_curves

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("tessellation")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_polylines(cupy: Any, case: Case) -> None:
    right, curves = case.apply(case.curves()), cupy.asarray(case.curves())
    result = case.apply(curves)
    case.check(result.offsets.get(), result.points.get())
    for name in VARIANTS:
        found = on_cuda(curves, case.tolerance, case.max_segments, variant=name)
        np.testing.assert_array_equal(found["offsets"].get(), right.offsets, name, strict=True)
        assert found["points"].get().tobytes() == right.points.tobytes(), name


@pytest.mark.parametrize("content", CONTENTS)
def test_many_curves_have_the_bits_of_the_cpu(cupy: Any, content: str) -> None:
    curves = made_curves(content, 100_003)
    right = tessellate(curves, 0.01)
    for name in VARIANTS:
        found = on_cuda(cupy.asarray(curves), 0.01, 256, variant=name)
        np.testing.assert_array_equal(found["offsets"].get(), right.offsets, name, strict=True)
        assert found["points"].get().tobytes() == right.points.tobytes(), name


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    host = made_curves("random", 50_021)
    right = tessellate(host, 0.01)
    stream = cupy.cuda.Stream(non_blocking=True)
    curves = cupy.zeros(host.shape, cupy.float32)
    cupy.cuda.Device().synchronize()  # zeroed, on another stream
    for _ in range(5):
        curves.set(host, stream=stream)
        found = tessellate(curves, 0.01, stream=stream)
        with stream:
            curves.fill(0)
        assert found.points.get(stream=stream).tobytes() == right.points.tobytes()


def test_curves_that_are_no_numbers_have_the_most_segments(cupy: Any) -> None:
    curves = cupy.full((3, 3, 2), cupy.nan, cupy.float32)
    np.testing.assert_array_equal(tessellate(curves, 1.0, max_segments=9).offsets.get(), [0, 10, 20, 30])


@pytest.mark.large
def test_more_than_two_to_the_32_bytes_of_points(cupy: Any) -> None:
    """Points beyond 2³²: the last curve has the same points as in a call of its own."""
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 8 << 30, "this test needs 8 GiB of device memory"
    curves = np.repeat(made_curves("wide", 1), 9001, axis=0)
    curves[-1] = made_curves("random", 1)
    found = tessellate(cupy.asarray(curves), 1e-12, max_segments=1 << 16)
    assert found.points.nbytes > 1 << 32
    alone = tessellate(curves[-1:], 1e-12, max_segments=1 << 16).points
    assert found.points[-len(alone) :].get().tobytes() == alone.tobytes()
    del found
    cupy.get_default_memory_pool().free_all_blocks()
