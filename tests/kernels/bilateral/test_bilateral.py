"""The bilateral filter against its definition in float64, and by what does not change a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.bilateral import bilateral
from kernels.smoothing.borders import MODES
from tests.kernels.rank.cases import extended, samples_of

SIGMA_RANGE = {"uint8": 40, "uint16": 9_000, "int16": 9_000, "float32": 0.7, "float64": 0.7}
# Of sigma_range; integers are then rounded.
WITHIN = {"uint8": 1e-4, "uint16": 1e-4, "float32": 2e-4, "float64": 1e-13}


def image_of(shape: tuple[int, ...], dtype: str) -> Any:
    image = samples_of(shape, dtype)
    return image.clip(-3, 3) if image.dtype.kind == "f" else image


def defined(image: Any, sigma_range: float, sigma: Any, sizes: Any, axes: Any, mode: str, cval: float) -> Any:
    """Each tap as a shifted copy of the extended image."""
    wide = image.astype(np.float64)
    for axis, size in zip(axes, sizes, strict=True):
        wide = extended(wide, axis, size, mode, cval)
    lengths = [wide.shape[axis] - size + 1 for axis, size in zip(axes, sizes, strict=True)]

    def shifted(by: Any) -> Any:
        cut = [slice(None)] * image.ndim
        for axis, start, length in zip(axes, by, lengths, strict=True):
            cut[axis] = slice(start, start + length)
        return wide[tuple(cut)]

    centre = shifted([size // 2 for size in sizes])
    total = weights = np.zeros_like(centre)
    for by in np.ndindex(*sizes):
        far = sum(((at - size // 2) / each) ** 2 for at, size, each in zip(by, sizes, sigma, strict=True))
        weight = np.exp(-0.5 * (far + ((shifted(by) - centre) / sigma_range) ** 2))
        total, weights = total + weight * shifted(by), weights + weight
    return total / weights


# One shape of windows in one process: Numba compiles each dtype once.
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_the_definition(dtype: str) -> None:
    cases: Any = [((23, 19), (0, 1), (5, 3)), ((5, 9, 8), (0, 1, 2), (3, 1, 5)), ((13, 11, 3), (0, 1), (3, 3))]
    for number, mode in enumerate(MODES):
        shape, axes, sizes = cases[number % 3]
        image, sigma = image_of(shape, dtype), (1.5, 2.0, 0.8)[: len(axes)]
        found = bilateral(image, SIGMA_RANGE[dtype], sigma, size=sizes, axes=axes, mode=mode, cval=2)
        expected = defined(image, SIGMA_RANGE[dtype], sigma, sizes, axes, mode, 2)
        assert found.dtype == image.dtype
        within = WITHIN[dtype] * SIGMA_RANGE[dtype] + (0.5 if image.dtype.kind == "u" else 0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=within, err_msg=f"{shape} {mode}")


def test_weights_are_within_the_stated_error() -> None:
    """A window of two samples, 0 and u standard deviations, shows the weight of the second: 0 beyond the cutoff."""
    apart = np.linspace(0.01, 8, 30_011).astype(np.float32)
    image = np.zeros((apart.size, 2), np.float32)
    image[:, 1] = apart
    for by_distance, sigma in ((1.0, 1e6), (np.exp(-0.5), 1.0)):
        found = bilateral(image, 1, sigma, size=3, axes=1, mode="constant", cval=1e9)[:, 0].astype(np.float64)
        weights = found / (apart - found)
        np.testing.assert_allclose(
            weights, by_distance * np.exp(-0.5 * apart.astype(np.float64) ** 2), rtol=0, atol=5.8e-6
        )
        assert not weights[apart > 5.39].any()
        assert (weights <= 1).all()


def test_edges_stay_and_even_parts_do_not_change() -> None:
    image = np.full((31, 29), 40, np.uint8)
    image[:, 13:] = 200
    for dtype in ("uint8", "float32"):
        step = image.astype(dtype) / (3 if dtype == "float32" else 1)
        np.testing.assert_array_equal(bilateral(step.astype(dtype), 10, 3), step.astype(dtype))


def test_parts_threads_and_views_give_the_same() -> None:
    image = image_of((150, 90, 2), "uint8")
    whole = bilateral(image, 30, 1.0, channel_axis=2, mode="valid", workers=2)
    np.testing.assert_array_equal(
        bilateral(image[20:, 7:], 30, 1.0, channel_axis=2, mode="valid", workers=1), whole[20:, 7:]
    )
    view = image.transpose(2, 1, 0)[:, ::-1]
    found = bilateral(view, 30, 1.0, channel_axis=0, mode="valid")
    np.testing.assert_array_equal(found, whole.transpose(2, 1, 0)[:, ::-1])
    out = np.empty_like(whole)
    bilateral(image, 30, 1.0, channel_axis=2, mode="valid", out=out)
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_spread_to_their_windows(dtype: str, value: float) -> None:
    image = np.ones((9, 9), dtype)
    image[4, 4] = value
    found = bilateral(image, 1, 1, size=3)
    assert np.isnan(found[3:6, 3:6]).all()
    assert np.isnan(found).sum() == 9


@pytest.mark.parametrize("sigma_range", [1e-300, 1e300])
@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
def test_extreme_sigmas(dtype: str, sigma_range: float) -> None:
    image = samples_of((9, 11), dtype).clip(-5, 50_000)
    expected = bilateral(image, 1e9, 1, size=3) if sigma_range > 1 else image
    np.testing.assert_allclose(bilateral(image, sigma_range, 1, size=3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 4}, "size must be odd, 1 … 31; got 4"),
        ({"size": 33}, "size must be odd, 1 … 31; got 33"),
        ({"sigma_range": 0}, "sigma_range must be a difference of samples above 0"),
        ({"sigma_range": float("nan")}, "sigma_range must be"),
        ({"sigma_spatial": -1}, "sigma_spatial must be a number of samples above 0"),
        ({"mode": "around"}, "mode must be one of"),
        ({"cval": 300}, "cval must be a whole number"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        bilateral(np.zeros((5, 7), np.uint8), **{"sigma_range": 1, **given})


@pytest.mark.sanitize("bilateral")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SIGMA_RANGE)
def test_a_gpu_gives_the_bits_of_the_cpu(dtype: str) -> None:
    import cupy

    cases: Any = [((70, 91), (0, 1), (5, 9)), ((9, 30, 35), (0, 1, 2), (3, 3, 5)), ((40, 33, 3), (0, 1), (3, 7))]
    # Small squares have a kernel of their own: at all edges, channels, rows that are aligned and not, several bands.
    cases += [
        ((2, 61, 83), (1, 2), (3, 3)),
        ((150, 64), (0, 1), (5, 5)),
        ((61, 37, 3), (0, 1), (5, 5)),
        ((40, 97), (0, 1), (7, 7)),
    ]
    cases += [((2, 8, 5), (1, 2), (5, 5)), ((7, 1031), (0, 1), (7, 7)), ((90, 61), (0, 1), (9, 9))]
    cases += [((5, 31, 37), (0, 1, 2), (1, 5, 5)), ((4, 5, 13, 2), (0, 1, 2), (1, 1, 3))]
    for shape, axes, sizes in cases:
        image = image_of(shape, dtype)
        for mode in MODES:
            options: Any = {"size": sizes, "axes": axes, "mode": mode, "cval": 2}
            found = bilateral(cupy.asarray(image), SIGMA_RANGE[dtype], 1.7, **options).get()
            expected = bilateral(image, SIGMA_RANGE[dtype], 1.7, **options)
            if dtype == "float64":
                np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)  # of samples of about one
            else:
                np.testing.assert_array_equal(found, expected, strict=True)
