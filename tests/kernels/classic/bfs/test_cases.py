"""Every case on the CPU against another method; properties of levels; errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.csgraph

from kernels.classic.bfs import UNREACHED, levels
from tests.kernels.classic.bfs.cases import KINDS, Case, cases, check_levels, exact, made_graph


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    offsets, columns = case.graph()
    result = case.apply(offsets, columns)
    case.check(result)
    check_levels(offsets, columns, case.source, result)


@pytest.mark.parametrize("kind", ["random", "grid", "rmat", "fans"])
def test_scipy_agrees(kind: str) -> None:
    offsets, columns = made_graph(kind, 1003, symmetric=True)
    vertices = len(offsets) - 1
    matrix = scipy.sparse.csr_array((np.ones(len(columns)), columns, offsets), shape=(vertices, vertices))
    far = scipy.sparse.csgraph.shortest_path(matrix, unweighted=True, indices=7)
    np.testing.assert_array_equal(levels(offsets, columns, 7), np.where(np.isinf(far), UNREACHED, far))


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_in_both_directions_finds_the_same(kind: str) -> None:
    offsets, columns = made_graph(kind, 301, symmetric=True)
    for source in (0, 150, 300 if kind != "grid" else 288):
        one_way = levels(offsets, columns, source)
        np.testing.assert_array_equal(levels(offsets, columns, source, symmetric=True), one_way, strict=True)


@pytest.mark.parametrize("kind", ["random", "rmat", "fans"])
def test_other_names_of_the_vertices_change_nothing(kind: str) -> None:
    offsets, columns = made_graph(kind, 997, symmetric=False)
    names = np.random.default_rng(3).permutation(997)
    first = np.repeat(np.arange(997), np.diff(offsets))
    order = np.argsort(names[first], kind="stable")
    renamed = np.zeros(998, np.int64)
    renamed[1:] = np.cumsum(np.bincount(names[first], minlength=997))
    result = levels(renamed, names[columns][order].astype(np.int32), int(names[5]))
    np.testing.assert_array_equal(result[names], levels(offsets, columns, 5), strict=True)


def test_the_check_notices_what_is_wrong() -> None:
    offsets, columns = made_graph("grid", 400, symmetric=True)
    right = exact(offsets, columns, 21)
    check_levels(offsets, columns, 21, right)
    for place, wrong in ((399, right[399] + 1), (0, UNREACHED), (21, 1), (5, 0)):
        spoilt = right.copy()
        spoilt[place] = wrong
        with pytest.raises(AssertionError):
            check_levels(offsets, columns, 21, spoilt)


def test_a_given_array_is_filled() -> None:
    offsets, columns = made_graph("random", 100, symmetric=True)
    out = np.full(100, 77, np.int32)
    assert levels(offsets, columns, 3, out=out) is out
    np.testing.assert_array_equal(out, exact(offsets, columns, 3))


OFFSETS, COLUMNS = np.array([0, 1, 2, 2]), np.array([1, 2], np.int32)
CYCLE, SHORT = np.array([1, 2, 0], np.int32), np.array([0, 1, 2, 3], np.int32)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: levels([0, 1], COLUMNS, 0), TypeError, "offsets must be a NumPy or CuPy array; got list"),
    (lambda: levels(OFFSETS.astype(np.float64), COLUMNS, 0), TypeError, "offsets has dtype float64"),
    (lambda: levels(OFFSETS, COLUMNS.astype(np.int64), 0), TypeError, "columns has dtype int64; supported are int32"),
    (lambda: levels(OFFSETS[None], COLUMNS, 0), ValueError, "offsets must have one axis; got shape (1, 4)"),
    (lambda: levels(OFFSETS[:1], COLUMNS, 0), ValueError, "offsets must have n + 1 entries"),
    (lambda: levels(OFFSETS, COLUMNS, 3), ValueError, "source must be from 0 to 2; got 3"),
    (lambda: levels(OFFSETS, COLUMNS, 0.5), TypeError, "source must be a vertex's number; got float"),
    (lambda: levels(OFFSETS + 1, COLUMNS, 0), ValueError, "offsets must rise from 0 to the number of columns, 2"),
    (lambda: levels(OFFSETS[[0, 2, 1, 3]], COLUMNS, 0), ValueError, "offsets must rise"),
    (lambda: levels(OFFSETS, COLUMNS + 1, 0), ValueError, "columns: entry 1 is 3, of 3 vertices"),
    (lambda: levels(OFFSETS, COLUMNS, 0, out=np.empty(3)), ValueError, "out must be a C-contiguous ndarray of shape"),
    (lambda: levels(OFFSETS, CYCLE, 0, out=CYCLE), ValueError, "out shares memory with columns"),
    (lambda: levels(SHORT, CYCLE, 0, out=SHORT[1:]), ValueError, "out shares memory with offsets"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_errors_name_the_parameter(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
