"""Every case on the CPU against float64; laws of convolution; errors of the public functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.convolution import convolve, layer
from tests.kernels.classic.convolution.cases import Case, cases

LINE, IMAGE = np.zeros(7, np.float32), np.zeros((5, 7), np.float32)
LAYER, WIDE = np.zeros((2, 3, 5, 7), np.float32), np.ones((1, 33), np.float32)
MASK, SQUARE = np.ones(3, np.float32), np.ones((3, 3), np.float32)
ONE, (PIXEL, FILTER) = np.ones((1, 3, 1, 1), np.float32), np.ones((2, 1, 1, 1, 1), np.float32)
WITHIN = LAYER.ravel()[35:105].reshape(2, 1, 5, 7)  # within the images, and not at their start
HEAVY = np.broadcast_to(np.float32(0), (1, 1 << 15, 1 << 8, 1 << 8))  # 2³¹ numbers in the memory of one


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    samples, mask = case.arrays()
    kept, out = samples.copy(), np.full(case.out_shape(), np.nan, np.float32)
    assert case.apply(samples, mask, out=out) is out
    case.check(out)
    np.testing.assert_array_equal(samples, kept, strict=True)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-3])
def test_the_check_notices_one_wrong_result(spoil: float) -> None:
    case = Case(shape=(9, 11), mask_shape=(3, 5))
    result = case.apply(*case.arrays())
    result[3, 4] += spoil
    with pytest.raises(AssertionError, match=r"at \(3, 4\)"):
        case.check(result)


def test_a_line_is_convolved_as_numpy_does_it() -> None:
    samples, mask = Case(shape=(501,), mask_shape=(13,)).arrays()
    np.testing.assert_allclose(convolve(samples, mask), np.convolve(samples, mask, "same"), rtol=1e-5, atol=1e-5)


def test_an_impulse_shows_the_mask_and_a_layer_shows_it_turned() -> None:
    impulse, mask = np.zeros((9, 9), np.float32), np.arange(15, dtype=np.float32).reshape(3, 5)
    impulse[4, 4] = 1
    np.testing.assert_array_equal(convolve(impulse, mask)[3:6, 2:7], mask)
    maps = layer(impulse[None, None], mask[None, None])[0, 0]
    np.testing.assert_array_equal(maps[2:5, :5], np.flip(mask))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_bits_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    for shape, mask_shape in (((700_001,), (5,)), ((601, 503), (3, 3))):
        samples, mask = Case(shape=shape, mask_shape=mask_shape).arrays()
        whole = convolve(samples, mask, workers=1)
        np.testing.assert_array_equal(convolve(samples, mask, workers=workers), whole, strict=True)


def test_any_strides_and_byte_order_will_do() -> None:
    case = Case(shape=(41, 53), mask_shape=(3, 5))
    samples, mask = case.arrays()
    case.check(convolve(np.asfortranarray(samples), np.asfortranarray(mask)))
    case.check(convolve(samples.astype(">f4"), mask.astype(">f4")))
    deep = Case(shape=(2, 3, 11, 13), mask_shape=(4, 3, 3, 3))
    images, filters = deep.arrays()
    deep.check(layer(images.transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0), np.asfortranarray(filters)))


READ_ONLY = IMAGE.copy()
READ_ONLY.flags.writeable = False
REFUSALS = {
    "list": (TypeError, "samples must be a NumPy or CuPy array; got list", lambda: convolve([1.0], MASK)),
    "dtype": (TypeError, "samples has dtype float64; supported is float32", lambda: convolve(LINE.astype(float), MASK)),
    "axes": (ValueError, r"samples must have 1 or 2 axes; got shape \(2, 3, 5, 7\)", lambda: convolve(LAYER, SQUARE)),
    "mask list": (TypeError, "mask must be a NumPy array, .*got list", lambda: convolve(LINE, [1.0])),
    "mask dtype": (TypeError, "mask has dtype int64; supported is float32", lambda: convolve(LINE, MASK.astype(int))),
    "mask axes": (ValueError, r"mask must have as many axes as samples \(1\)", lambda: convolve(LINE, SQUARE)),
    "even mask": (ValueError, r"odd sides up to 961; got \(2,\)", lambda: convolve(LINE, MASK[:2])),
    "long mask": (ValueError, r"odd sides up to 961; got \(963,\)", lambda: convolve(LINE, np.ones(963, np.float32))),
    "wide mask": (ValueError, r"odd sides up to 31; got \(1, 33\)", lambda: convolve(IMAGE, WIDE)),
    "nan in mask": (ValueError, "mask has a weight that is not finite: nan", lambda: convolve(LINE, MASK * np.nan)),
    "workers": (ValueError, "workers must be a whole number", lambda: convolve(LINE, MASK, workers=0)),
    "shape of out": (ValueError, r"out must be .*shape \(5, 7\)", lambda: convolve(IMAGE, SQUARE, out=LINE)),
    "read-only out": (ValueError, "out is read-only", lambda: convolve(IMAGE, SQUARE, out=READ_ONLY)),
    "out is samples": (ValueError, "out shares memory with samples", lambda: convolve(IMAGE, SQUARE, out=IMAGE)),
    "out is mask": (ValueError, "out shares memory with mask", lambda: convolve(SQUARE + 1, SQUARE, out=SQUARE)),
    "out is images": (ValueError, "out shares memory with images", lambda: layer(LAYER, ONE, out=WITHIN)),
    "out is filters": (ValueError, "out shares memory with filters", lambda: layer(PIXEL, FILTER, out=FILTER)),
    "heavy filters": (
        ValueError,
        "filters must have at most 2147482623 weights a map; got 2147483648, of shape",
        lambda: layer(HEAVY, HEAVY),
    ),
    "channels": (ValueError, "images have 3 channels and filters 2", lambda: layer(LAYER, LAYER[:, :2])),
    "large filters": (ValueError, "filters of 5 × 7 do not fit .* of 3 × 7", lambda: layer(LAYER[:, :, :3], LAYER)),
    "images": (ValueError, r"images must have 4 axes; got shape \(5, 7\)", lambda: layer(IMAGE, LAYER)),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_the_parameter(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
