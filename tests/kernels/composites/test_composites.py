"""Composites against their definitions by scipy.ndimage in float64, and the laws that their contract promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import ndimage

from kernels import composites
from kernels.runtime.filtering import DTYPES
from tests.kernels.smoothing.noise import noise

SHAPE = (37, 31, 2)
MODES = ("reflect", "mirror", "nearest", "wrap")


def _gaussian(image: Any, sigma: Any, **options: Any) -> Any:
    return ndimage.gaussian_filter(image, sigma, axes=(0, 1), **options)


def _deviation(image: Any, size: Any, **options: Any) -> Any:
    return ndimage.generic_filter(image, np.std, size, axes=(0, 1), **options)


# Name, what it takes, and its definition. Below sigma 5.8 no Gaussian is decimated.
CASES: list[tuple[str, tuple[Any, ...], Callable[..., Any]]] = [
    ("difference_of_gaussians", (1.5,), lambda x, s, **o: _gaussian(x, s, **o) - _gaussian(x, 1.6 * s, **o)),
    ("difference_of_gaussians", ((1, 2), (3, 2.5)), lambda x, a, b, **o: _gaussian(x, a, **o) - _gaussian(x, b, **o)),
    ("gaussian_laplace", ((1.2, 2.0),), lambda x, s, **o: ndimage.gaussian_laplace(x, s, axes=(0, 1), **o)),
    ("unsharp_mask", (2.0, 1.5), lambda x, s, amount, **o: x + amount * (x - _gaussian(x, s, **o))),
    ("subtract_background", ((4.0, 0.0),), lambda x, s, **o: x - _gaussian(x, s, **o)),
    ("divide_background", (3.0,), lambda x, s, **o: x / _gaussian(x, s, **o)),
    ("deviation_filter", ((3, 4),), _deviation),
]
each_case = pytest.mark.parametrize(("name", "given", "defined"), CASES, ids=[name for name, _, _ in CASES])


def _image(dtype: str, seed: int = 1) -> Any:
    """Far above 0, so that backgrounds are."""
    image = noise(seed, SHAPE, dtype)
    return 2 + np.sin(image) if image.dtype.kind == "f" else image // 4 + np.iinfo(dtype).max // 2 + 1


@each_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_scipy_in_float64_gives_nearly_the_same(
    name: str, given: tuple[Any, ...], defined: Callable[..., Any], dtype: str
) -> None:
    image = _image(dtype)
    for mode in MODES:
        expected = defined(image.astype(np.float64), *given, mode=mode)
        found = getattr(composites, name)(image, *given, mode=mode, channel_axis=-1)
        scale = np.abs(expected if name == "divide_background" else image).max()
        if name == "unsharp_mask" and image.dtype.kind != "f":
            ends = np.iinfo(dtype)
            assert found.dtype == dtype
            assert np.abs(found - expected.clip(ends.min, ends.max)).max() < 0.5 + 1e-6 * scale
        else:
            assert found.dtype == (np.float64 if dtype == "float64" else np.float32)
            assert_allclose(found, expected, rtol=0, atol=(1e-12 if dtype == "float64" else 1e-6) * scale)


@each_case
def test_pieces_equal_the_whole_and_fill_an_array(
    name: str, given: tuple[Any, ...], defined: Callable[..., Any]
) -> None:
    """Wide ones are decimated, on a grid that depends on the position."""
    function, options = getattr(composites, name), {"mode": ("valid", "reflect"), "axes": (0, 1)}
    rows = np.random.default_rng(1).uniform(1, 3, (401, 13, 2)).astype(np.float32)
    for values in (given, (80,) if name == "deviation_filter" else (9.0, *given[1:])):
        whole = function(rows, *values, **options)
        lost = len(rows) - len(whole)
        found = function(rows[23 : 64 + lost], *values, offset=(23, 0), **options)
        assert_array_equal(found, whole[23:64], strict=True)
        out = np.empty(found.shape, np.float32)
        assert function(rows[23 : 64 + lost], *values, offset=(23, 0), out=out, **options) is out
        assert_array_equal(out, found)


def test_missing_samples_are_left_out() -> None:
    image = _image("float32")
    missing = np.random.default_rng(2).random(image.shape) < 0.2
    image[missing] = np.nan
    there, filled = (~missing).astype(np.float64), np.where(missing, 0, image.astype(np.float64))

    def mean(sigma: float) -> Any:
        return _gaussian(filled, sigma) / _gaussian(there, sigma)

    options: Any = {"channel_axis": 2, "nan_policy": "omit"}
    expected = {
        "difference_of_gaussians": np.where(missing, np.nan, mean(1.0) - mean(1.6)),
        "unsharp_mask": image + (image - mean(1.0)),
        "subtract_background": image - mean(1.0),
        "divide_background": image / mean(1.0),
    }
    for name, defined in expected.items():
        assert_allclose(getattr(composites, name)(image, 1.0, **options), defined, rtol=0, atol=1e-5)
    deviation = ndimage.generic_filter(image.astype(np.float64), np.nanstd, 3, axes=(0, 1), mode="reflect")
    assert_allclose(composites.deviation_filter(image, 3, **options), deviation, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="order: the derivative of a mean"):
        composites.gaussian_laplace(image, 1.0, **options)


def test_an_even_image_has_no_deviation_and_a_border_value_counts() -> None:
    image = np.full((9, 11), 65_533, np.uint16)
    assert not composites.deviation_filter(image, 5).any()
    extended = np.pad(image.astype(np.float64), 1, constant_values=7)
    expected = ndimage.generic_filter(extended, np.std, 3)[1:-1, 1:-1]
    assert_allclose(composites.deviation_filter(image, 3, mode="constant", cval=7), expected, rtol=1e-6)


REFUSALS: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "list": (TypeError, "image must be a NumPy or CuPy array; got list", lambda x: composites.unsharp_mask([[1]])),
    "mask": (TypeError, "image is a numpy.ma array", lambda x: composites.deviation_filter(np.ma.masked_array(x))),
    "sigma": (ValueError, "sigma must be a number of samples", lambda x: composites.subtract_background(x, -1)),
    "sigmas": (ValueError, "sigma has 3 values for 2 filtered axes", lambda x: composites.unsharp_mask(x, (1, 1, 1))),
    "laplace": (ValueError, "sigma 0 reaches no neighbour", lambda x: composites.gaussian_laplace(x, (1, 0))),
    "amount": (ValueError, "amount must be a finite number; got nan", lambda x: composites.unsharp_mask(x, 1, np.nan)),
    "size": (ValueError, "size must lie in 1 … ", lambda x: composites.deviation_filter(x, 0)),
    "policy": (ValueError, "nan_policy must be one of", lambda x: composites.deviation_filter(x, nan_policy="skip")),
    "valid": (ValueError, "axis 0 has 9 samples, fewer than the window's 25",
              lambda x: composites.difference_of_gaussians(x, 1, 3, mode="valid")),
    "out": (ValueError, r"out must be a C-contiguous ndarray of shape \(9, 11\) and dtype float32",
            lambda x: composites.difference_of_gaussians(x, 1, out=np.empty((9, 11), np.uint8))),
    "out of unsharp": (ValueError, "out must be .* and dtype uint8",
                       lambda x: composites.unsharp_mask(x, 1, out=np.empty((9, 11), np.float32))),
    "overlap": (ValueError, "out shares memory with image", lambda x: composites.unsharp_mask(x, 1, out=x)),
}  # fmt: skip


@pytest.mark.parametrize(("error", "said", "call"), REFUSALS.values(), ids=REFUSALS)
def test_mistakes_are_named(error: type[Exception], said: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(error, match=said):
        call(np.ones((9, 11), np.uint8))


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_bits_of_the_cpu(
    name: str, given: tuple[Any, ...], defined: Callable[..., Any], dtype: str
) -> None:
    import cupy

    function, image = getattr(composites, name), _image(dtype)
    wide = [(9.0, *given[1:])] if name in ("unsharp_mask", "subtract_background", "divide_background") else []
    for mode in (*MODES, "constant", "valid"):
        for values in (given, *wide):
            options: Any = {"mode": "reflect" if values != given and mode == "valid" else mode, "channel_axis": 2}
            expected, stream = function(image, *values, **options), cupy.cuda.Stream(non_blocking=True)
            on_device, out = cupy.asarray(image), cupy.empty(expected.shape, expected.dtype)
            cupy.cuda.Device().synchronize()
            assert function(on_device, *values, out=out, stream=stream, **options) is out
            stream.synchronize()
            assert_array_equal(out.get(), expected, strict=True)
    if image.dtype.kind == "f" and name != "gaussian_laplace":
        image[np.random.default_rng(3).random(image.shape) < 0.2] = np.nan
        for policy in ("propagate", "omit"):
            found = function(cupy.asarray(image), *given, channel_axis=2, nan_policy=policy)
            assert_array_equal(found.get(), function(image, *given, channel_axis=2, nan_policy=policy), strict=True)
