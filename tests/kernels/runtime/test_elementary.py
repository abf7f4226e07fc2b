"""Exponentials and cosines for tables: accurate, and exact where cells and weights rely on it."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coulomb import Cell
from kernels.runtime.elementary import cosine, exponential
from pipeline.formats.charges.base import cell_vectors


@settings(max_examples=100, deadline=None)
@given(st.floats(-740.0, 0.0))
def test_exponentials_are_accurate(x: float) -> None:
    expected = float(Decimal(x).exp())
    assert abs(float(exponential(x)) - expected) <= 2 * math.ulp(expected)


def test_exponentials_of_far_numbers_are_zero() -> None:
    assert exponential([0.0, -746.0, -1e300, -math.inf]).tolist() == [1.0, 0.0, 0.0, 0.0]


@settings(max_examples=100, deadline=None)
@given(st.floats(-0.5, 0.5), st.integers(-3, 3))
def test_cosines_are_accurate(x: float, turns: int) -> None:
    # x + turns is rounded; the rest is exact.
    assert abs(float(cosine(x + turns)) - math.cos(2 * math.pi * (x + turns - turns))) <= 5e-16


def test_cosines_of_quarter_turns_are_exact() -> None:
    assert np.array_equal(cosine(np.arange(-8, 9) / 4), [1.0, 0.0, -1.0, 0.0] * 4 + [1.0])


def test_values_stay_as_they_are() -> None:
    """On every machine."""
    values = np.concatenate((exponential(-np.arange(2000) / 7), cosine(np.arange(2000) / 1999)))
    assert (
        hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()
        == "8beea6734fea127dce1a72380db4c7e330ad839045d9900e616dfe0f314b72b1"
    )


def test_cells_stay_as_they_are() -> None:
    """On every machine, since several may compute parts of a map."""
    vectors = Cell.from_lengths(31.7, 42.3, 53.9, 71.2, 83.4, 109.47).vectors
    assert np.array_equal(vectors, cell_vectors(np.array([31.7, 42.3, 53.9]), np.array([71.2, 83.4, 109.47])))
    assert [x.hex() for row in vectors[1:] for x in row] == [
        "-0x1.c32c3d66b6cacp+3",
        "0x1.3f0c8a2158584p+5",
        "0x0.0p+0",
        "0x1.8c7cb8c4adec5p+2",
        "0x1.49d22bbed588cp+4",
        "0x1.8b532544b416cp+5",
    ]
