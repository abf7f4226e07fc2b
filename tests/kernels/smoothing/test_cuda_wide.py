"""Wide windows on a CUDA device: the CPU's bits for every type, border, number of channels, stage and offset."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.smoothing import BORDER_MODES, DTYPES, gaussian_filter, uniform_filter
from kernels.smoothing.decimation import decimation

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def noise(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(shape) * 1000).astype(dtype)
    held = np.iinfo(dtype)
    return rng.integers(held.min, held.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("sigmas", [(5.9, 7.7), (7.7, 9.0), (13.0, 30.0), (60.0, 8.5), (140.0, 300.0), (1.5, 20.0)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decimated_gaussians_match_the_cpu_bit_by_bit(
    cupy: Any, dtype: str, channels: int, sigmas: tuple[float, float]
) -> None:
    for index, mode in enumerate(BORDER_MODES):
        image = noise((331 + index, 523 - 11 * index, channels), dtype)
        options: dict[str, Any] = {"mode": mode, "cval": 5, "channel_axis": 2, "offset": (3 * index, 7 * index)}
        got = cupy.asnumpy(gaussian_filter(cupy.asarray(image), sigmas, **options))
        np.testing.assert_array_equal(got, gaussian_filter(image, sigmas, **options), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 90, 120), (1, 1, 3000), (3000, 5, 1)])
def test_volumes_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, shape: tuple[int, ...]) -> None:
    image = noise(shape, dtype)
    for sigmas, mode in product(((9.0, 0, 12.0), (8.2, 16.5, 9.0)), BORDER_MODES):
        got = cupy.asnumpy(gaussian_filter(cupy.asarray(image), sigmas, mode=mode))
        np.testing.assert_array_equal(got, gaussian_filter(image, sigmas, mode=mode), strict=True)
    np.testing.assert_array_equal(
        cupy.asnumpy(uniform_filter(cupy.asarray(image), 301)), uniform_filter(image, 301), strict=True
    )


@pytest.mark.parametrize(
    ("smoothed", "widths"),
    [
        *((gaussian_filter, sigmas) for sigmas in ((9.0, 9.0), (13.0, 30.0), (60.0, 140.0))),
        (uniform_filter, (40, 30)),
        (uniform_filter, (127, 300)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls_have_the_same_bits(cupy: Any, dtype: str, smoothed: Any, widths: tuple[float, float]) -> None:
    """Later calls repeat the first one's launches, on arrays, streams and memory in between of their own."""
    shape = (167, 211, 3)
    streams = [None, None, cupy.cuda.Stream(non_blocking=True)]
    images = [noise(shape, dtype), noise(shape, dtype)[::-1].copy(), noise(shape, dtype)[:, ::-1].copy()]
    sources = [cupy.asarray(image) for image in images]
    cupy.cuda.Device().synchronize()
    results = [cupy.empty_like(source) for source in sources]
    for source, result, stream in zip(sources, results, streams, strict=True):
        smoothed(source, widths, channel_axis=2, out=result, stream=stream)
    cupy.cuda.Device().synchronize()
    for image, result in zip(images, results, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(result), smoothed(image, widths, channel_axis=2), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1023, 1023), (256, 3), (2, 900), (1, 4001), (4001, 1), (1, 20_011), (20_011, 1), (5000, 257)]
)
def test_wide_boxes_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, sizes: tuple[int, int]) -> None:
    for index, mode in enumerate(BORDER_MODES):
        image = noise((331, 523 + index % 3, (1, 3)[index % 2]), dtype)
        options: dict[str, Any] = {"mode": mode, "cval": 5, "channel_axis": 2, "offset": (3 * index, 7 * index)}
        got = cupy.asnumpy(uniform_filter(cupy.asarray(image), sizes, **options))
        np.testing.assert_array_equal(got, uniform_filter(image, sizes, **options), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1500, 700), (2000, 2051)])
def test_wide_boxes_of_several_bands_and_lines_a_block_match_the_cpu_bit_by_bit(
    cupy: Any, dtype: str, shape: tuple[int, int]
) -> None:
    for sizes, mode in (((257, 1023), "reflect"), ((511, 5001), "constant"), ((300, 272), "valid")):
        image, options = noise(shape, dtype), {"mode": mode, "cval": 5, "offset": (3, 9)}
        got = cupy.asnumpy(uniform_filter(cupy.asarray(image), sizes, **options))
        np.testing.assert_array_equal(got, uniform_filter(image, sizes, **options), strict=True)


@pytest.mark.parametrize("columns", [9000, 9001])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_wide_boxes_of_several_strips_and_bands_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, columns: int) -> None:
    """Bands divide the window into parts that are not all of one height; rows are aligned and not."""
    for sizes, mode in (((257, 301), "reflect"), ((23, 260), "constant"), ((97, 1023), "valid")):
        image = noise((301, columns, 3), dtype)
        options: dict[str, Any] = {"mode": mode, "cval": 5, "channel_axis": 2}
        got = cupy.asnumpy(uniform_filter(cupy.asarray(image), sizes, **options))
        np.testing.assert_array_equal(got, uniform_filter(image, sizes, **options), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_direct_gaussians_of_any_reach_match_the_cpu_bit_by_bit(cupy: Any, dtype: str) -> None:
    image = noise((97, 311, 3), dtype)
    for mode in BORDER_MODES:
        options: dict[str, Any] = {"mode": mode, "cval": 5, "channel_axis": 2, "truncate": 3.0}
        got = cupy.asnumpy(gaussian_filter(cupy.asarray(image), (60, 90), **options))
        np.testing.assert_array_equal(got, gaussian_filter(image, (60, 90), **options), strict=True)


def test_a_piece_of_a_large_image_has_the_bits_of_the_whole(cupy: Any) -> None:
    image = cupy.asarray(noise((2000, 1700, 3), "uint16"))
    whole = gaussian_filter(image, 21.0, channel_axis=2)
    options: dict[str, Any] = {"mode": ("valid", "reflect"), "channel_axis": 2}
    before, after = decimation(21.0, np.dtype(np.float32)).extent
    for start, stop in ((101, 900), (777, 1413)):
        piece = gaussian_filter(image[start:stop], 21.0, offset=(start, 0), **options)
        assert len(piece) == stop - start - before - after > 0
        assert (piece == whole[start + before : stop - after]).all()
