"""Quadtrees on a CUDA device: every variant against a tree split node by node; large ones against the CPU's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kernels.classic.quadtree import build
from kernels.classic.quadtree.cuda import VARIANTS
from kernels.classic.quadtree.cuda import build as on_cuda
from tests.kernels.classic.quadtree.cases import CONTENTS, Case, cases, made_points

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def on_host(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: array if name == "box" else array.get() for name, array in tree.items()}


@pytest.mark.sanitize("quadtree")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_tree(cupy: Any, case: Case) -> None:
    expected, points = case.exact(), cupy.asarray(case.points())
    case.check(on_host(vars(case.apply(points))), expected)
    for name in VARIANTS:
        case.check(on_host(on_cuda(points, case.box, case.max_depth, case.leaf_limit, variant=name)), expected)


@pytest.mark.parametrize("content", CONTENTS)
def test_many_points_give_the_tree_of_the_cpu(cupy: Any, content: str) -> None:
    points = made_points(content, 300_007)
    right = asdict(build(points, leaf_limit=20))
    for name in VARIANTS:
        found = on_host(on_cuda(cupy.asarray(points), None, 16, 20, variant=name))
        for part, array in right.items():
            np.testing.assert_array_equal(found[part], array, f"{name}: {part}")


def test_work_is_ordered_on_the_stream_given(cupy: Any) -> None:
    host = made_points("clustered", 100_003)
    right = build(host)
    stream = cupy.cuda.Stream(non_blocking=True)
    points = cupy.zeros(host.shape)
    cupy.cuda.Device().synchronize()  # zeroed, on another stream
    for _ in range(5):
        points.set(host, stream=stream)
        tree = build(points, stream=stream)
        with stream:
            points.fill(0)
        np.testing.assert_array_equal(tree.order.get(stream=stream), right.order)
        np.testing.assert_array_equal(tree.child.get(stream=stream), right.child)


def test_points_that_are_no_numbers_are_in_the_first_cell(cupy: Any) -> None:
    points = cupy.full((5, 2), cupy.nan)
    tree = build(points, box=(0, 0, 1, 1), leaf_limit=1, max_depth=3)
    np.testing.assert_array_equal(tree.end.get()[tree.child.get() < 0].max(), 5)
    assert int(tree.code.get()[tree.end.get() > tree.begin.get()].max()) == 0


@pytest.mark.large
def test_more_than_two_to_the_32_bytes_of_points(cupy: Any) -> None:
    """Sixty-four cells: their points are counted by another method; within a cell they keep their order."""
    count = (1 << 28) + 3
    free, _total = cupy.cuda.runtime.memGetInfo()
    assert free > 100 * count, "this test needs 25 GiB of device memory"
    points = cupy.random.default_rng(0).random((count, 2))
    assert points.nbytes > 1 << 32
    tree = build(points, max_depth=3, leaf_limit=1, box=(0, 0, 1, 1))
    assert len(tree.begin) == 1 + 4 + 16 + 64
    cells = (points * 8).astype(cupy.uint8)
    counts = cupy.bincount(cells[:, 0] + 8 * cells[:, 1], minlength=64).get()
    code = tree.code.get()[-64:]
    x, y = (sum((code >> 2 * bit + axis & 1) << bit for bit in range(3)) for axis in range(2))
    np.testing.assert_array_equal((tree.end - tree.begin).get()[-64:], counts[x + 8 * y])
    assert bool((cupy.bincount(tree.order, minlength=count) == 1).all())
    falls = cupy.flatnonzero(tree.order[1:] < tree.order[:-1]).get() + 1
    np.testing.assert_array_equal(falls, tree.begin.get()[-63:])
    del points, tree, cells
    cupy.get_default_memory_pool().free_all_blocks()
