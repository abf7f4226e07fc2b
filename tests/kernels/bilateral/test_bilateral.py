"""The bilateral filter against its definition in float64, and by what does not change a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.bilateral import bilateral
from kernels.smoothing.borders import MODES
from tests.kernels.rank.cases import extended, samples_of

SIGMA_RANGE = {"uint8": 40, "uint16": 9_000, "int16": 9_000, "float32": 0.7, "float64": 0.7}
# Steps, or relative to the range.
WITHIN = {"uint8": 0.51, "uint16": 0.6, "int16": 0.6, "float32": 2e-6, "float64": 1e-14}


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
        scale = 6 if image.dtype.kind == "f" else 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=WITHIN[dtype] * scale, err_msg=f"{shape} {mode}")


def test_edges_stay_and_even_parts_do_not_change() -> None:
    image = np.full((31, 29), 40, np.uint8)
    image[:, 13:] = 200
    np.testing.assert_array_equal(bilateral(image, 10, 3), image)


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


def test_nan_spreads_to_its_windows() -> None:
    image = np.ones((9, 9), np.float32)
    image[4, 4] = np.nan
    found = bilateral(image, 1, 1, size=3)
    assert np.isnan(found[3:6, 3:6]).all()
    assert np.isnan(found).sum() == 9


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
    cases += [((2, 61, 83), (1, 2), (3, 3)), ((150, 64), (0, 1), (5, 5)), ((61, 37, 3), (0, 1), (5, 5)), ((40, 97), (0, 1), (7, 7))]
    cases += [((2, 8, 5), (1, 2), (5, 5)), ((7, 1031), (0, 1), (7, 7))]
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
