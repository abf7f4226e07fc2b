"""Every case on the CPU against exact counts and de Casteljau's points; laws; errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.classic.tessellation import tessellate
from tests.kernels.classic.tessellation.cases import Case, cases, made_curves


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    result = case.apply(case.curves())
    case.check(result.offsets, result.points)


@pytest.mark.parametrize("tolerance", [1.0, 0.01, 1e-4])
def test_no_curve_strays_farther_than_the_tolerance(tolerance: float) -> None:
    curves = made_curves("random", 60)
    result = tessellate(curves, tolerance, max_segments=1 << 16)
    for curve, begin, end in zip(curves.astype(np.float64), result.offsets[:-1], result.offsets[1:], strict=True):
        line = result.points[begin:end].astype(np.float64)
        steps = np.linspace(0, 1, 8)
        for i in range(len(line) - 1):
            t = ((i + steps) / (len(line) - 1))[:, None]
            on_curve = curve[0] * (1 - t) ** 2 + 2 * curve[1] * t * (1 - t) + curve[2] * t**2
            on_chord = line[i] + steps[:, None] * (line[i + 1] - line[i])
            assert np.hypot(*(on_curve - on_chord).T).max() <= tolerance * (1 + 1e-6) + 1e-5


def test_curves_apart_give_the_bits_of_curves_together() -> None:
    curves = made_curves("skewed", 200)
    whole = tessellate(curves, 0.02)
    parts = [tessellate(part, 0.02).points for part in np.array_split(curves, 7)]
    assert np.concatenate(parts).tobytes() == whole.points.tobytes()


def test_the_check_notices_what_is_wrong() -> None:
    case = Case(count=50)
    result = case.apply(case.curves())
    for spoil in (np.nan, 1e-4):
        points = result.points.copy()
        points[len(points) // 2, 1] += spoil
        with pytest.raises(AssertionError):
            case.check(result.offsets, points)
    with pytest.raises(AssertionError, match="too few"):
        case.check(np.arange(51) * 2, result.points)


def test_arrays_of_any_layout() -> None:
    curves = made_curves("random", 40)
    right = tessellate(curves, 0.01)
    for other in (np.asfortranarray(curves), curves.astype(">f4"), np.repeat(curves, 2, axis=0)[::2]):
        result = tessellate(other, 0.01)
        np.testing.assert_array_equal(result.offsets, right.offsets, strict=True)
        np.testing.assert_array_equal(result.points, right.points, strict=True)


CURVES = np.zeros((4, 3, 2), np.float32)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: tessellate([1], 1), TypeError, "curves must be a NumPy or CuPy array; got list"),
    (lambda: tessellate(CURVES.astype(float), 1), TypeError, "curves has dtype float64; supported is float32"),
    (lambda: tessellate(CURVES[:, :2], 1), ValueError, "curves must be an array [n, 3, 2]"),
    (lambda: tessellate(CURVES + np.inf, 1), ValueError, "curves: x of a of curve 0 is inf"),
    (lambda: tessellate(CURVES, 0), ValueError, "tolerance must be finite and over 0"),
    (lambda: tessellate(CURVES, np.nan), ValueError, "tolerance must be finite and over 0"),
    (lambda: tessellate(CURVES, "1"), TypeError, "tolerance must be a number; got str"),
    (lambda: tessellate(CURVES, 1, max_segments=0), ValueError, "max_segments must be a whole number from 1 to 65536"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_errors_name_the_parameter(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
