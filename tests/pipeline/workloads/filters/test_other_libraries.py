"""The filters against OpenCV and scikit-image, on a photograph of 8 and 16 bits."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import skimage.data
import skimage.filters
import skimage.morphology
import skimage.restoration

from kernels import morphology
from kernels.bilateral import bilateral
from kernels.rank import disk, median_filter
from kernels.rolling_ball import rolling_ball
from kernels.smoothing import gaussian_filter, uniform_filter
from tests.pipeline.workloads.filters.jobs import filtered

BYTES = skimage.data.camera()[150:277, 200:313]
WORDS = (BYTES.astype(np.uint16) * 257) ^ np.random.default_rng(0).integers(0, 256, BYTES.shape, np.uint16)
both = pytest.mark.parametrize("image", [BYTES, WORDS], ids=["uint8", "uint16"])


def _apart(found: Any, expected: Any) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max())


@both
def test_opencv_boxes_and_gaussians(image: Any) -> None:
    for size in ((3, 3), (7, 5), (4, 6)):
        expected = cv2.blur(image, size[::-1], borderType=cv2.BORDER_REFLECT)
        # OpenCV multiplies 16-bit sums by a reciprocal, and rounds halves to even.
        assert _apart(uniform_filter(image, size), expected) <= (image.dtype == np.uint16)
    for sigma in (0.8, 2.0):
        taps = 2 * round(4 * sigma) + 1
        expected = cv2.GaussianBlur(image, (taps, taps), sigma, borderType=cv2.BORDER_REFLECT)
        assert _apart(gaussian_filter(image, sigma), expected) <= 1  # its weights have 8 or 16 bits


@both
def test_scikit_image_gaussians(image: Any) -> None:
    for sigma in (0.8, 2.0):
        exact = skimage.filters.gaussian(image.astype(np.float64), sigma, mode="reflect")
        assert _apart(gaussian_filter(image, sigma), exact) < 1


@both
def test_medians(image: Any) -> None:
    for size in (3, 5):
        np.testing.assert_array_equal(median_filter(image, size, mode="nearest"), cv2.medianBlur(image, size))
    # scikit-image's windows end at the image's edges; it warns of more than 10 bits.
    few = image >> 6 if image.dtype == np.uint16 else image
    expected = skimage.filters.rank.median(few, skimage.morphology.disk(3))
    np.testing.assert_array_equal(median_filter(few, footprint=disk(3))[3:-3, 3:-3], expected[3:-3, 3:-3])


@both
def test_top_hats(image: Any) -> None:
    """OpenCV's are compared in tests/kernels/morphology."""
    for footprint in (np.ones((7, 5), bool), disk(3)):
        for name in ("white_tophat", "black_tophat"):
            expected = getattr(skimage.morphology, name)(image, footprint)
            np.testing.assert_array_equal(getattr(morphology, name)(image, footprint=footprint), expected)


@both
def test_rolling_ball(image: Any) -> None:
    apex = rolling_ball(image, 25, is_opened=False)
    assert _apart(apex, skimage.restoration.rolling_ball(image.astype(np.float64), radius=25)) < 1e-3
    # Of integers, scikit-image cuts off the fraction.
    np.testing.assert_array_equal(np.floor(apex), skimage.restoration.rolling_ball(image, radius=25))


@both
def test_bilateral(image: Any) -> None:
    """scikit-image 0.26 reads its table of distances with the wrong length of a row: only where all distances weigh the
    same can results agree. OpenCV's window is a disk, which holds all but 1e-3 of the weights here."""
    steps = float(np.iinfo(image.dtype).max)
    flat = {"win_size": 5, "sigma_color": 0.1, "sigma_spatial": 1e6, "mode": "symmetric", "bins": 1 << 20}
    expected = skimage.restoration.denoise_bilateral(image / steps, **flat) * steps
    assert _apart(bilateral(image, 0.1 * steps, 1e6, size=5), expected) < 0.51 + 1e-5 * steps
    if image.dtype == np.uint8:
        expected = cv2.bilateralFilter(image, 9, 25, 1.0, borderType=cv2.BORDER_REFLECT)
        assert _apart(bilateral(image, 25, 1.0, size=9), expected) <= 1


@both
def test_composites(tmp_path: Any, image: Any) -> None:
    steps = np.iinfo(image.dtype).max
    exact = image.astype(np.float64)
    expected = skimage.filters.unsharp_mask(exact, radius=2.0, amount=1.5, preserve_range=True).clip(0, steps)
    _, found = filtered(tmp_path, "unsharp", image, "YX", sigma=(2.0,), amount=1.5)
    assert _apart(found, expected) < 0.51 + 1e-5 * steps
    expected = skimage.filters.difference_of_gaussians(exact, 1.5, 3.0, mode="reflect")
    _, found = filtered(tmp_path, "dog", image, "YX", sigma=(1.5,), ratio=2.0)
    assert _apart(found, expected) < 1e-5 * steps
