"""Breadth-first search on CUDA: every variant against another method; large graphs by the definition of levels."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from kernels.classic.bfs import levels
from kernels.classic.bfs.cuda import VARIANTS
from kernels.classic.bfs.cuda import levels as on_cuda
from tests.kernels.classic.bfs.cases import Case, cases, check_levels, made_graph

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def _cases() -> list[Case]:
    """The cases for race detection, without those of hundreds of levels, which need too many launches."""
    few = bool(os.environ.get("MILLRACE_TEST_FEWEST_LAUNCHES"))
    return [case for case in cases() if not (few and case.kind in ("chain", "loops") and case.vertices > 100)]


@pytest.mark.sanitize("bfs")
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_every_variant_gives_the_levels(cupy: Any, case: Case) -> None:
    expected = case.exact()
    offsets, columns = (cupy.asarray(array) for array in case.graph())
    case.check(case.apply(offsets, columns).get(), expected)
    for name in VARIANTS:
        out = cupy.full(len(offsets) - 1, 77, cupy.int32)
        case.check(
            on_cuda(offsets, columns, case.source, symmetric=case.symmetric, out=out, variant=name).get(), expected
        )


@pytest.mark.parametrize("kind", ["random", "grid", "rmat", "fans", "sparse"])
def test_large_graphs(cupy: Any, kind: str) -> None:
    offsets, columns = made_graph(kind, 300_007, symmetric=True)
    source = int(np.argmax(np.diff(offsets)))
    right = levels(offsets, columns, source)
    check_levels(offsets, columns, source, right)
    device = cupy.asarray(offsets), cupy.asarray(columns)
    for name in VARIANTS:
        for symmetric in (True, False):
            found = on_cuda(*device, source, symmetric=symmetric, variant=name).get()
            np.testing.assert_array_equal(found, right, name, strict=True)


def test_a_long_chain(cupy: Any) -> None:
    offsets, columns = made_graph("chain", 20_001, symmetric=True)
    found = levels(cupy.asarray(offsets), cupy.asarray(columns), 7, symmetric=True).get()
    np.testing.assert_array_equal(found, np.abs(np.arange(20_001) - 7))


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    offsets, columns = made_graph("rmat", 30_011, symmetric=True)
    right = levels(offsets, columns, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    on_device, host = cupy.asarray(offsets), columns
    arriving = cupy.zeros(columns.size, cupy.int32)
    cupy.cuda.Device().synchronize()  # zeroed, on another stream
    for _ in range(5):
        arriving.set(host, stream=stream)
        found = levels(on_device, arriving, 0, symmetric=True, stream=stream)
        with stream:
            arriving.fill(0)
        np.testing.assert_array_equal(found.get(stream=stream), right, strict=True)


def test_a_wrong_number_of_columns_is_refused(cupy: Any) -> None:
    with pytest.raises(ValueError, match="offsets must rise from 0 to the number of columns, 2"):
        levels(cupy.asarray([0, 1, 1]), cupy.asarray([0, 1], dtype=cupy.int32), 0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.large
def test_more_than_two_to_the_31_edges(cupy: Any, symmetric: bool) -> None:
    """Each vertex leads to the 16411 next and previous ones in a ring, so its level is its distance over 16411."""
    vertices, reach = 70_001, 16_411
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 24 * vertices * reach, "this test needs 28 GiB of device memory"
    near = cupy.concatenate((cupy.arange(-reach, 0), cupy.arange(1, reach + 1))).astype(cupy.int32)
    columns = (cupy.arange(vertices, dtype=cupy.int32)[:, None] + near) % vertices
    offsets = cupy.arange(vertices + 1) * (2 * reach)
    assert columns.size > 1 << 31
    far = np.abs((np.arange(vertices) - 69_990 + vertices // 2) % vertices - vertices // 2)
    right = -(-np.minimum(far, vertices - far) // reach)
    for name in ("expand_global", "chunks", "directions"):
        found = on_cuda(offsets, columns.ravel(), 69_990, symmetric=symmetric, variant=name)
        np.testing.assert_array_equal(found.get(), right, name)
    del columns
    cupy.get_default_memory_pool().free_all_blocks()
