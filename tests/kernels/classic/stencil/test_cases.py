"""Every case on the CPU against float64; laws of the stencil; errors of the public function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.classic.stencil import stencil
from kernels.classic.stencil.cuda import split_steps
from tests.kernels.classic.stencil.cases import Case, cases

FIELD = np.zeros((4, 5, 6), np.float32)
LARGE = Case(shape=(48, 61, 67), steps=3)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    field = case.field()
    kept, out = field.copy(), np.full(case.shape, np.nan, np.float32)
    assert case.apply(field, out=out) is out
    case.check(out)
    np.testing.assert_array_equal(field, kept, strict=True)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-5])
def test_the_check_notices_one_wrong_point(spoil: float) -> None:
    case = Case(shape=(5, 7, 3))
    result = case.apply(case.field())
    result[3, 4, 1] += spoil
    with pytest.raises(AssertionError, match=r"at \(3, 4, 1\)"):
        case.check(result)


@pytest.mark.parametrize(
    ("shared_kib", "passes"),
    [(227, [4, 4, 2, 1]), (128, [4, 4, 2, 1]), (99, [2] * 5 + [1]), (64, [2] * 5 + [1]), (48, [1] * 11)],
)
def test_passes_take_as_many_steps_as_shared_memory_holds(shared_kib: int, passes: list[int]) -> None:
    assert split_steps(11, (4, 2, 1), shared_kib * 1024) == passes


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_bits_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    field = LARGE.field()
    np.testing.assert_array_equal(LARGE.apply(field, workers=workers), LARGE.apply(field, workers=2), strict=True)


def test_several_steps_have_the_bits_of_one_after_another() -> None:
    field = LARGE.field()
    whole = LARGE.apply(field)
    for _ in range(LARGE.steps):
        field = replace(LARGE, steps=1).apply(field)
    np.testing.assert_array_equal(field, whole, strict=True)


def test_any_axis_may_be_mirrored() -> None:
    """Sums of two neighbours do not depend on their order, so mirrored fields give mirrored bits."""
    field = LARGE.field()
    whole = LARGE.apply(field)
    for axis in range(3):
        np.testing.assert_array_equal(LARGE.apply(np.flip(field, axis)), np.flip(whole, axis), strict=True)


def test_heat_flows_until_the_field_is_as_its_walls() -> None:
    field = np.random.default_rng(1).random((9, 8, 7)).astype(np.float32)
    inside = (slice(1, -1),) * 3
    field[inside], walls = 0, field.copy()
    field[...] = 5.0
    field[inside] = walls[inside] + 1
    result = stencil(field, centre=1 - 6 * 0.15, neighbour=0.15, steps=600)
    np.testing.assert_allclose(result, 5.0, rtol=1e-5)


def test_other_byte_orders_and_strides_will_do() -> None:
    case = Case(shape=(13, 17, 19), steps=2)
    field = case.field()
    case.check(case.apply(field.astype(">f4")))
    case.check(case.apply(np.asfortranarray(field)))


READ_ONLY = FIELD.copy()
READ_ONLY.flags.writeable = False


def _refused(**options: Any) -> Any:
    return lambda: stencil(**{"field": FIELD, "centre": 0.4, "neighbour": 0.1, **options})


REFUSALS = {
    "list": (TypeError, "field must be a NumPy or CuPy array; got list", _refused(field=[[[1.0]]])),
    "dtype": (TypeError, "field has dtype float64; supported is float32", _refused(field=FIELD.astype(float))),
    "plane": (ValueError, r"field must be an array \[z, y, x\].*got shape \(5, 6\)", _refused(field=FIELD[0])),
    "centre": (ValueError, "centre must be finite in float32; got nan", _refused(centre=math.nan)),
    "neighbour": (ValueError, "neighbour must be finite in float32; got 1e\\+40", _refused(neighbour=1e40)),
    "factor": (TypeError, "centre must be a number; got '1'", _refused(centre="1")),
    "steps": (ValueError, "steps must be a whole number, 0 or more; got -1", _refused(steps=-1)),
    "half a step": (ValueError, "steps must be a whole number, 0 or more; got 0.5", _refused(steps=0.5)),
    "workers": (ValueError, "workers must be a whole number of threads, 1 or more; got 0", _refused(workers=0)),
    "shape of out": (ValueError, r"out must be .*shape \(4, 5, 6\)", _refused(out=FIELD[1:])),
    "read-only out": (ValueError, "out is read-only", _refused(out=READ_ONLY)),
    "out is field": (ValueError, "out shares memory with field", _refused(out=FIELD)),
}


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_parameter(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
