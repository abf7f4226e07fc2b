"""Every case on the CPU against the order of values; laws of sorting; errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.classic.sort import DTYPES, argsort, cpu, merge, sort
from tests.kernels.classic.sort.cases import Case, cases, check_order, made_keys, order_of


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    keys, other = case.inputs()
    before = keys.copy()
    case.check(case.apply(keys, other))
    assert keys.tobytes() == before.tobytes(), "the input was changed"


def test_the_order_of_floating_keys_is_the_documented_one() -> None:
    nan = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0xFFC00001], np.uint32).view(np.float32)
    right = np.array([-np.inf, -1, -0.0, 0.0, 1e-45, 2, np.inf, nan[0], nan[1], nan[3], nan[2]], np.float32)
    right[7:] = nan[[0, 1, 3, 2]]
    for seed in range(5):
        mixed = np.random.default_rng(seed).permutation(right.view(np.uint32)).view(np.float32)
        assert sort(mixed).tobytes() == right.tobytes()
        assert mixed[order_of(mixed)].tobytes() == right.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_agrees_where_it_defines_the_order(dtype: str) -> None:
    keys = made_keys("few", 20011, dtype)
    np.testing.assert_array_equal(sort(keys), np.sort(keys), strict=True)
    np.testing.assert_array_equal(argsort(keys), np.argsort(keys, kind="stable"), strict=True)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("content", ["random", "few", "reversed"])
def test_the_bits_do_not_depend_on_the_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int, content: str
) -> None:
    monkeypatch.setattr(cpu, "MIN_PART", 100)
    for dtype in ("float32", "int64"):
        keys = made_keys(content, 5003, dtype)
        order = order_of(keys)
        np.testing.assert_array_equal(argsort(keys, workers=workers), order, strict=True)
        assert sort(keys, workers=workers).tobytes() == keys[order].tobytes()
        parts = np.sort(keys[~np.isnan(keys)][:1900]), np.sort(keys[~np.isnan(keys)][1900:])
        joined = np.concatenate(parts)
        assert merge(*parts, workers=workers).tobytes() == joined[order_of(joined)].tobytes()


def test_many_keys_on_all_cores() -> None:
    keys = np.random.default_rng(0).integers(0, 50_000, 400_009).astype(np.int32)
    check_order(keys, argsort(keys), sort(keys))


def test_the_check_notices_what_is_wrong() -> None:
    keys = made_keys("few", 1000, "uint32")
    indices = argsort(keys)
    swapped, doubled = indices.copy(), indices.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    doubled[5] = doubled[6]
    for wrong in (swapped, doubled):
        with pytest.raises(AssertionError):
            check_order(keys, wrong, sort(keys))
    with pytest.raises(AssertionError):
        Case(count=1000).check(made_keys("random", 1000, "uint32"))


def test_arrays_of_any_layout() -> None:
    keys = made_keys("few", 3001, "int32")
    values = np.arange(3001, dtype=np.float64)
    right = sort(keys, values)
    spread = np.zeros(6002, np.int32)
    spread[::2] = keys
    for other in (spread[::2], keys.astype(">i4")):
        for got, expected in zip(sort(other, values.astype(">f8")), right, strict=True):
            np.testing.assert_array_equal(got, expected, strict=True)


KEYS = np.arange(5, dtype=np.uint32)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: sort([1, 2]), TypeError, "keys must be a NumPy or CuPy array; got list"),
    (lambda: sort(KEYS.astype(np.int16)), TypeError, "keys has dtype int16; supported are uint32"),
    (lambda: sort(KEYS.reshape(5, 1)), ValueError, "keys must have one axis; got shape (5, 1)"),
    (lambda: sort(KEYS, [1]), TypeError, "values must be a ndarray, as keys is; got list"),
    (lambda: sort(KEYS, KEYS.astype(object)), TypeError, "values has dtype object: sort positions instead"),
    (lambda: sort(KEYS, KEYS[1:]), ValueError, "values must have the shape of keys, (5,); got (4,)"),
    (lambda: sort(KEYS, workers=0), ValueError, "workers must be a whole number of threads, 1 or more; got 0"),
    (lambda: argsort(KEYS, workers=True), ValueError, "workers must be a whole number"),
    (lambda: merge(KEYS, KEYS.astype(np.int32)), TypeError, "first and second must be of one library and dtype"),
    (lambda: merge(KEYS, "x"), TypeError, "second must be a NumPy or CuPy array"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:30] for _, _, message in WRONG])
def test_errors_name_the_parameter(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
