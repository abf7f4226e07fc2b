"""Every case on the CPU against a tree split node by node; laws of quadtrees; errors."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from kernels.classic.quadtree import build
from tests.kernels.classic.quadtree.cases import Case, cases, made_points


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(asdict(case.apply(case.points())))


def test_leaves_hold_every_point_once_and_each_node_its_childrens() -> None:
    tree = build(made_points("clustered", 20_011), leaf_limit=5)
    np.testing.assert_array_equal(np.sort(tree.order), np.arange(20_011))
    leaves = tree.child < 0
    assert (tree.end - tree.begin)[leaves].sum() == 20_011
    assert ((tree.end - tree.begin)[leaves] <= 5)[tree.depth[leaves] < 16].all()
    parents = np.flatnonzero(~leaves)
    np.testing.assert_array_equal(tree.begin[tree.child[parents]], tree.begin[parents])
    np.testing.assert_array_equal(tree.end[tree.child[parents] + 3], tree.end[parents])
    for quadrant in range(3):
        children = tree.child[parents] + quadrant
        np.testing.assert_array_equal(tree.end[children], tree.begin[children + 1])
    assert sorted(np.concatenate([tree.child[parents] + q for q in range(4)])) == list(range(1, len(tree.child)))


def test_the_points_of_a_node_lie_in_its_cell() -> None:
    points = made_points("uniform", 3001)
    tree = build(points, leaf_limit=10, box=(-3, -3, 5, 5))
    for node in range(0, len(tree.begin), 7):
        depth, code = int(tree.depth[node]), int(tree.code[node])
        bits = [code >> 2 * k for k in range(depth)]
        corner = [sum((b >> axis & 1) << k for k, b in enumerate(bits)) * 8 / 2**depth - 3 for axis in range(2)]
        inside = points[tree.order[tree.begin[node] : tree.end[node]]]
        assert ((inside >= corner) & (inside <= np.array(corner) + 8 / 2**depth)).all()


def test_a_smaller_limit_only_splits_further() -> None:
    points = made_points("clustered", 4001)
    fine, coarse = build(points, leaf_limit=4), build(points, leaf_limit=40)
    np.testing.assert_array_equal(fine.order, coarse.order)
    cells = set(zip(fine.depth.tolist(), fine.code.tolist(), strict=True))
    assert cells > set(zip(coarse.depth.tolist(), coarse.code.tolist(), strict=True))


def test_the_check_notices_what_is_wrong() -> None:
    case = Case(count=300)
    tree = asdict(case.apply(case.points()))
    for name in ("order", "begin", "end", "child", "depth", "code"):
        wrong = {**tree, name: tree[name].copy()}
        wrong[name][-1] += 1
        with pytest.raises(AssertionError):
            case.check(wrong)
    with pytest.raises(AssertionError):
        replace(case, leaf_limit=7).check(tree)


def test_arrays_of_any_layout() -> None:
    points = made_points("clustered", 999)
    right = build(points)
    for other in (np.asfortranarray(points), points.astype(">f8"), np.repeat(points, 2, axis=0)[::2]):
        np.testing.assert_array_equal(build(other).order, right.order, strict=True)


POINTS = np.zeros((4, 2))
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: build([1]), TypeError, "points must be a NumPy or CuPy array; got list"),
    (lambda: build(POINTS.astype(int)), TypeError, "points has dtype int64; supported are float32, float64"),
    (lambda: build(POINTS[:, :1]), ValueError, "points must be an array [n, 2]"),
    (lambda: build(POINTS + np.nan), ValueError, "points: x of point 0 is nan"),
    (lambda: build(POINTS, max_depth=17), ValueError, "max_depth must be a whole number from 0 to 16; got 17"),
    (lambda: build(POINTS, leaf_limit=0), ValueError, "leaf_limit must be a whole number from 1"),
    (lambda: build(POINTS, box=(0, 1)), TypeError, "box must be four numbers"),
    (lambda: build(POINTS, box=(0, 1, 0, 0)), ValueError, "box must be low x, low y, high x, high y, finite"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_errors_name_the_parameter(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
