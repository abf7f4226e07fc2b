"""Gaussians of 16-bit samples in exact sums on a CUDA device: the CPU's bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.smoothing import MODES, gaussian_filter
from kernels.smoothing.cases import Case
from kernels.smoothing.cuda import VARIANTS, smooth

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.parametrize("sigmas", [(1.3, 2.0), (4.0, 4.0), (1.3, 4.1), (5.9, 4.3), (5.8, 7.5), (1.3, 7.3)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["uint16", "int16"])
def test_every_variant_matches_the_cpu_bit_by_bit(
    cupy: Any, dtype: str, channels: int, sigmas: tuple[float, float]
) -> None:
    for index, modes in enumerate(product(MODES, MODES)):
        rows, columns = ((128, 320), (97, 331), (97, 330))[index % 3]  # aligned, and rows of odd and even numbers
        shape = (rows, columns) if channels == 1 else (2, rows, columns, channels)
        axes = (0, 1) if channels == 1 else (1, 2)
        content = ("random", "extreme", "checkerboard")[index // 3 % 3]
        case = Case(
            shape=shape,
            dtype=dtype,
            axes=axes,
            sigmas=sigmas,
            modes=modes,
            cval=-6 * (dtype == "int16"),
            content=content,
        )
        image, windows = cupy.asarray(case.image()), case.windows()
        assert windows[0].words
        expected = case.apply(case.image())
        assert VARIANTS["words"].can_filter(image.shape, image.dtype, windows) == (channels < 5)
        for variant in ("word_sums", "words_apart", "words")[: 2 + (channels < 5)]:
            out = cupy.full(expected.shape, 0x5A5A, dtype)
            smooth(image, windows, case.cval, out, variant=variant)
            np.testing.assert_array_equal(cupy.asnumpy(out), expected, err_msg=f"{case.name} {variant}")


@pytest.mark.parametrize("shape", [(5, 7, 3), (70, 1), (1, 300, 2), (66, 9, 4), (3, 64), (130, 26, 3)])
@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest", "wrap", "constant"])
def test_images_smaller_than_what_a_block_fetches(cupy: Any, mode: str, shape: tuple[int, ...]) -> None:
    for sigmas in ((2.0, 2.0), (4.0, 4.0), (5.5, 5.0)):
        case = Case(shape=shape, dtype="uint16", axes=(0, 1), sigmas=sigmas, modes=(mode,) * 2, cval=5)
        result = smooth(cupy.asarray(case.image()), case.windows(), case.cval, None, variant="words")
        np.testing.assert_array_equal(cupy.asnumpy(result), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_pointers_of_any_alignment(cupy: Any, channels: int, offset: int) -> None:
    image = Case(
        shape=(97, 320, channels), dtype="uint16", axes=(0, 1), sigmas=(4.0, 4.0), modes=("reflect",) * 2
    ).image()
    for source, target in ((offset, 0), (0, offset), (offset, offset)):
        moved, out = (
            cupy.zeros(image.size + 16, "uint16")[at : at + image.size].reshape(image.shape) for at in (source, target)
        )
        moved[...] = cupy.asarray(image)
        gaussian_filter(moved, 4.0, channel_axis=2, out=out)
        np.testing.assert_array_equal(cupy.asnumpy(out), gaussian_filter(image, 4.0, channel_axis=2))
