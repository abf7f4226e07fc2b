"""Smoothing on a CUDA device, every variant, against the oracle of cases.py, to the last bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.smoothing import BORDER_MODES, DTYPES, MODES, gaussian_filter, uniform_filter
from kernels.smoothing.cases import Case, cases
from kernels.smoothing.cuda import VARIANTS, fused, smooth
from kernels.smoothing.cuda.boxes import tree

pytestmark = pytest.mark.gpu

WHOLE_DTYPES = ("uint8", "uint16", "int16")


def _images() -> list[Case]:
    """Images of more than one tile, with every number of channels and every length of window that `fused` compiles."""
    listed = []
    for dtype, channels in product(DTYPES, (1, 2, 3, 4)):
        for index, (taps, sigma) in enumerate(((2, 0.5), (3, 1.0), (8, 1.5), (9, 2.0), (31, 3.0))):
            shape = (83 + 16 * index, 1031, channels) if channels > 1 else (83 + 16 * index, 2053)
            modes = (MODES[(index + channels) % 6], MODES[(index + 2 * channels + 1) % 6])
            listed.append(Case(shape=shape, dtype=dtype, axes=(0, 1), sizes=(taps, taps), modes=modes, cval=6))
            if dtype != "float64":  # the oracle's exact float64 arithmetic takes a minute an image
                listed.append(Case(shape=shape, dtype=dtype, axes=(0, 1), sigmas=(sigma, sigma), modes=modes, cval=6))
    return listed


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.parametrize("case", [*cases(), *_images()], ids=lambda case: case.name)
def test_every_variant_gives_the_oracles_bits(cupy: Any, case: Case) -> None:
    image, windows = cupy.asarray(case.image()), case.windows()
    case.check(cupy.asnumpy(case.apply(image)))
    for name, variant in VARIANTS.items():
        if not windows or not variant.can_filter(image.shape, image.dtype, windows):
            continue
        shape = list(image.shape)
        for window in windows:
            shape[window.axis] = window.output_length(shape[window.axis])
        out = cupy.frombuffer(b"\xa5" * (image.itemsize * int(np.prod(shape))), image.dtype).reshape(shape).copy()
        smooth(image, windows, case.cval, out, variant=name)
        np.testing.assert_array_equal(cupy.asnumpy(out), case.bits(), err_msg=f"{case.name} {name}", strict=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [*WHOLE_DTYPES, "float32"])
def test_random_filters_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.choice([131, 257, 509])), int(rng.choice([127, 1009, 3001])), int(rng.integers(1, 5)))
    values = rng.integers(-30000, 60000, shape) if dtype != "uint8" else rng.integers(0, 256, shape)
    image = values.astype(dtype)
    modes = [str(mode) for mode in rng.choice(BORDER_MODES, 2)]
    sizes = [int(size) for size in rng.integers(1, 100 if seed % 2 else 10, 2)]
    options: dict[str, Any] = {"mode": modes, "channel_axis": 2, "cval": 3}
    np.testing.assert_array_equal(
        cupy.asnumpy(uniform_filter(cupy.asarray(image), sizes, **options)),
        uniform_filter(image, sizes, **options),
        strict=True,
    )
    sigmas = list(rng.uniform(0.3, 5 if seed % 2 else 2, 2))
    np.testing.assert_array_equal(
        cupy.asnumpy(gaussian_filter(cupy.asarray(image), sigmas, **options)),
        gaussian_filter(image, sigmas, **options),
        strict=True,
    )


def _apply(cupy: Any, case: Case, variant: str) -> Any:
    """The variant's result, written over bytes that no result contains."""
    image, windows = cupy.asarray(case.image()), case.windows()
    shape = list(image.shape)
    for window in windows:
        shape[window.axis] = window.output_length(shape[window.axis])
    out = cupy.full(int(np.prod(shape)) * image.itemsize, 0xA5, cupy.uint8).view(image.dtype).reshape(shape)
    return cupy.asnumpy(smooth(image, windows, case.cval, out, variant=variant))


@pytest.mark.parametrize("sigmas", [(2.25, 2.25), (4.0, 4.0), (4.0, 0.3), (0.8, 4.3), (7.5, 5.8), (7.3, 5.0)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_gaussians_of_medium_reach_match_the_cpu_bit_by_bit(
    cupy: Any, dtype: str, channels: int, sigmas: tuple[float, float]
) -> None:
    """The radii that `wide` and `words` are compiled for, reaches at and below them, aligned and unaligned lines."""
    for index, (first, second) in enumerate(product(MODES, MODES)):
        rows, columns = (97, 331) if index % 3 else (128, 320)
        shape = (rows, columns) if channels == 1 else (rows, columns, channels)
        case = Case(shape=shape, dtype=dtype, axes=(0, 1), sigmas=sigmas, modes=(first, second), cval=6)
        variant = "words" if case.windows()[0].words else "wide"
        np.testing.assert_array_equal(_apply(cupy, case, variant), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_gaussians_of_the_farthest_reach_of_wide_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, channels: int) -> None:
    for columns, mode in product((320, 331), MODES):
        image = Case(
            shape=(97, columns, channels), dtype=dtype, axes=(0, 1), sigmas=(8.0, 8.0), modes=(mode,) * 2
        ).image()
        options: dict[str, Any] = {"radius": 32, "mode": mode, "cval": 6, "channel_axis": 2}
        found = cupy.asnumpy(gaussian_filter(cupy.asarray(image), 8, **options))
        np.testing.assert_array_equal(found, gaussian_filter(image, 8, **options), strict=True)


@pytest.mark.parametrize("sizes", [(3, 3), (5, 5), (7, 7), (9, 9), (4, 9), (9, 2), (1, 6)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [*WHOLE_DTYPES, "float32"])
def test_short_boxes_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, channels: int, sizes: tuple[int, int]) -> None:
    """Every kind of box that `fused` compiles, in aligned and unaligned rows, over several tiles and bands."""
    for index, (first, second) in enumerate(product(MODES, MODES)):
        rows, columns = (97, 643) if index % 3 else (128, 1280 // channels)
        shape = (rows, columns) if channels == 1 else (rows, columns, channels)
        content = ("random", "extreme", "checkerboard")[index % 3]
        case = Case(shape=shape, dtype=dtype, axes=(0, 1), sizes=sizes, modes=(first, second), cval=6, content=content)
        np.testing.assert_array_equal(_apply(cupy, case, "fused"), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_short_gaussians_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, channels: int, sigma: float) -> None:
    """Every reach from 1 to 8, in aligned and unaligned rows, over several tiles and bands. If both reaches of integers
    exceed 4, they have other kernels."""
    down = sigma if dtype == "float32" or sigma <= 1 else 0.5
    for index, (first, second) in enumerate(product(MODES, MODES)):
        rows, columns = (97, 643) if index % 3 else (128, 1280 // channels)
        shape = (rows, columns) if channels == 1 else (rows, columns, channels)
        content = ("random", "extreme", "impulse")[index % 3]
        case = Case(
            shape=shape, dtype=dtype, axes=(0, 1), sigmas=(down, sigma), modes=(first, second), cval=6, content=content
        )
        np.testing.assert_array_equal(_apply(cupy, case, "fused"), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_rows_that_end_anywhere_are_written_and_nothing_else(cupy: Any, dtype: str) -> None:
    """Tiles of `fused` share words of memory where their rows meet: lengths of a few samples, and of about one tile."""
    kind = "BOX" if dtype == "float32" else "SQUARE"
    tile = fused._tile(np.dtype(dtype), 1, kind, 1, aligned=False).outputs
    for index, columns in enumerate((*range(1, 10), *range(tile - 4, tile + 6))):
        case = Case(shape=(7, columns), dtype=dtype, axes=(0, 1), sizes=(3, 3), modes=("reflect", "reflect"))
        whole = cupy.full(7 * columns + 64, 77, dtype)
        out = whole[32 + index % 5 :][: 7 * columns].reshape(7, columns)
        smooth(cupy.asarray(case.image()), case.windows(), case.cval, out, variant="fused")
        np.testing.assert_array_equal(cupy.asnumpy(out), case.apply(case.image()), err_msg=case.name)
        out[...] = 77
        assert (whole == 77).all()


@pytest.mark.parametrize("sigmas", [(1.0, 1.0), (2.0, 1.75), (4.0, 4.0), (7.6, 7.6), (0.3, 4.3), (7.6, 0.5)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_gaussians_of_bytes_match_the_cpu_bit_by_bit(cupy: Any, channels: int, sigmas: tuple[float, float]) -> None:
    """Every reach that `tensor` is compiled for, and shorter ones, in aligned and unaligned rows."""
    variant = "tensor" if channels < 5 else "bytes_apart"
    for index, (first, second) in enumerate(product(MODES, MODES)):
        rows, columns = ((97, 331), (260, 320), (129, 1280))[index % 3]
        shape = (rows, columns) if channels == 1 else (rows, columns, channels)
        content = ("random", "extreme", "checkerboard", "impulse")[index % 4]
        case = Case(
            shape=shape, dtype="uint8", axes=(0, 1), sigmas=sigmas, modes=(first, second), cval=6, content=content
        )
        np.testing.assert_array_equal(_apply(cupy, case, variant), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("variant", ["byte_sums", "tensor"])
@pytest.mark.parametrize(("axes", "sigmas"), [((1,), (2.0,)), ((2,), (0.5,)), ((2,), (7.6,)), ((1, 2), (0.1, 3.0))])
def test_gaussians_of_bytes_along_one_axis_match_the_cpu_bit_by_bit(
    cupy: Any, axes: tuple[int, ...], sigmas: tuple[float, ...], variant: str
) -> None:
    for mode, content in product(MODES, ("random", "extreme")):
        case = Case(
            shape=(2, 97, 131, 3), dtype="uint8", axes=axes, sigmas=sigmas, modes=(mode,) * len(axes), cval=6,
            content=content,
        )  # fmt: skip
        np.testing.assert_array_equal(_apply(cupy, case, variant), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("sizes", [(2, 3), (10, 255), (127, 31), (255, 16), (64, 60), (129, 113)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_streamed_boxes_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, channels: int, sizes: tuple[int, int]) -> None:
    for index, (first, second) in enumerate(product(MODES, MODES)):
        shape = (257 + index, 1501, channels) if channels > 1 else (257 + index, 3001)
        if dtype == "float64" and (channels - 1) * sizes[1] > 500:
            continue  # the halo of such a line does not fit
        case = Case(shape=shape, dtype=dtype, axes=(0, 1), sizes=sizes, modes=(first, second), cval=6)
        np.testing.assert_array_equal(_apply(cupy, case, "streamed"), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("sizes", [(31, 31), (2, 127), (127, 64), (255, 255), (1, 12), (33, 1)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", WHOLE_DTYPES)
def test_running_boxes_match_the_cpu_bit_by_bit(cupy: Any, dtype: str, channels: int, sizes: tuple[int, int]) -> None:
    """Strips cut at every place, rows with the same alignment and others, more rows than all warps of a block hold."""
    for index, (first, second) in enumerate(product(MODES, MODES)):
        rows, columns = 257 + index, 1200 if index % 3 == 0 else 1500 + index
        shape = (rows, columns, channels) if channels > 1 else (rows, columns)
        content = "extreme" if index % 4 == 3 else "random"
        case = Case(shape=shape, dtype=dtype, axes=(0, 1), sizes=sizes, modes=(first, second), cval=6, content=content)
        np.testing.assert_array_equal(_apply(cupy, case, "running"), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("columns", [1023, 1022, 1024, 7])
@pytest.mark.parametrize("dtype", WHOLE_DTYPES)
def test_running_boxes_of_rows_of_any_alignment(cupy: Any, dtype: str, columns: int, offset: int) -> None:
    values = np.random.default_rng(offset).integers(0, 128, (61, columns, 3)).astype(dtype)
    image, target = (cupy.empty(values.size + at, dtype)[at:].reshape(values.shape) for at in (offset, 8 - offset))
    image[...] = cupy.asarray(values)
    for size, mode in ((12, "wrap"), (31, "mirror"), (64, "constant"), (127, "reflect")):
        case = Case(shape=values.shape, dtype=dtype, axes=(0, 1), sizes=(size, size), modes=(mode,) * 2, cval=3)
        smooth(image, case.windows(), 3, target, variant="running")
        np.testing.assert_array_equal(cupy.asnumpy(target), case.apply(values), err_msg=case.name, strict=True)


@pytest.mark.parametrize("size", tree.SIZES)
def test_trees_match_the_cpu_bit_by_bit(cupy: Any, size: int) -> None:
    """Every pair of borders; aligned and unaligned lines; several tiles and bands; images smaller than a window."""
    shapes = ((257, 1501), (320, 1536), (701, 905), (1, 1), (300, 8), (2, 1300), (150, 704), (3, 140, 451))
    for index, (first, second) in enumerate(product(MODES, MODES)):
        shape = shapes[index % len(shapes)]
        if "valid" in (first, second) and min(shape[-2:]) < size:
            shape = shapes[index % 2]
        axes = (len(shape) - 2, len(shape) - 1)
        content = ("random", "extreme", "impulse")[index % 3]
        case = Case(
            shape=shape, dtype="float32", axes=axes, sizes=(size, size), modes=(first, second), cval=6, content=content
        )
        np.testing.assert_array_equal(_apply(cupy, case, "tree"), case.apply(case.image()), err_msg=case.name)


@pytest.mark.parametrize("sizes", [(127, 127), (113, 113), (113, 128), (101, 101), (65, 80), (96, 81)])
def test_run_planes_match_the_cpu_bit_by_bit(cupy: Any, sizes: tuple[int, int]) -> None:
    """Every pair of borders; runs that begin anywhere; several strips and bands; images smaller than a window."""
    shapes = ((257, 1501), (1320, 384), (301, 451, 3), (701, 905), (1, 1), (300, 8), (2, 1300), (150, 410, 2))
    for index, (first, second) in enumerate(product(MODES, MODES)):
        shape = shapes[index % len(shapes)]
        if "valid" in (first, second) and min(shape[:2]) < max(sizes):
            shape = shapes[index % 4]
        image = np.random.default_rng(index).standard_normal(shape).astype(np.float32)
        options: dict[str, Any] = {"axes": (0, 1), "mode": (first, second), "cval": 6, "offset": (3 * index, 7 * index)}
        got = cupy.asnumpy(uniform_filter(cupy.asarray(image), sizes, **options))
        np.testing.assert_array_equal(
            got, uniform_filter(image, sizes, **options), err_msg=f"{shape} {options}", strict=True
        )


@pytest.mark.parametrize("size", [31, 63, 119, 127])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_boxes_of_floats_at_pointers_of_any_alignment(cupy: Any, size: int, offset: int) -> None:
    values = np.random.default_rng(offset).standard_normal((333, 1504)).astype(np.float32)
    image = cupy.empty(values.size + offset, np.float32)[offset:].reshape(values.shape)
    target = cupy.empty(values.size + 4, np.float32)[4 - offset : values.size + 4 - offset].reshape(values.shape)
    image[...] = cupy.asarray(values)
    uniform_filter(image, size, mode="wrap", out=target)
    np.testing.assert_array_equal(cupy.asnumpy(target), uniform_filter(values, size, mode="wrap"), strict=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [*tree.SIZES, 65, 127])
def test_squares_keep_a_nan_or_infinity_in_the_windows_that_hold_it(cupy: Any, bad: float, size: int) -> None:
    image = np.random.default_rng(1).standard_normal((301, 1009)).astype(np.float32)
    rows, columns = (150, 0, 300), (703, 446, 1008)
    for row, column in zip(rows, columns, strict=True):
        image[row, column] = bad
    np.testing.assert_array_equal(
        cupy.asnumpy(uniform_filter(cupy.asarray(image), size, mode="constant")),
        uniform_filter(image, size, mode="constant"),
        strict=True,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 9, 21, 33, 65])
def test_a_nan_or_infinity_stays_in_the_windows_that_hold_it(cupy: Any, bad: float, size: int) -> None:
    image = np.random.default_rng(1).standard_normal((67, 101)).astype(np.float32)
    image[33, 41] = bad
    for result in (
        uniform_filter(cupy.asarray(image), size, mode="wrap"),
        gaussian_filter(cupy.asarray(image), 1.0, radius=size // 2, mode="wrap"),
    ):
        reached = np.zeros(image.shape, bool)
        reached[33 - size // 2 : 34 + size // 2, 41 - size // 2 : 42 + size // 2] = True
        np.testing.assert_array_equal(~np.isfinite(cupy.asnumpy(result)), reached)


@pytest.mark.parametrize("mode", ["reflect", "valid", "constant"])
@pytest.mark.parametrize("shape", [(61, 1024, 3), (67, 1031, 3), (65, 2063)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_rows_and_pointers_of_any_alignment(cupy: Any, dtype: str, shape: tuple[int, ...], mode: str) -> None:
    """Nothing is written beside the output."""
    values = np.random.default_rng(7).integers(0, 256, shape).astype(dtype)
    channel_axis = 2 if len(shape) == 3 else None
    filters: list[Any] = [(uniform_filter, size) for size in (3, 9, 31)] + [
        (gaussian_filter, sigma) for sigma in (1.0, 4.0, 5.8)
    ]
    for filtered, parameter in filters:
        expected = filtered(values, parameter, mode=mode, channel_axis=channel_axis)
        for offset, out_offset in ((1, 0), (0, 1), (2, 7), (3, 3), (5, 16), (8, 13)):
            image = cupy.empty(values.size + offset, dtype)[offset:].reshape(shape)
            image[...] = cupy.asarray(values)
            around = cupy.full(expected.size + out_offset + 64, 77, dtype)
            target = around[out_offset : out_offset + expected.size].reshape(expected.shape)
            filtered(image, parameter, mode=mode, channel_axis=channel_axis, out=target)
            np.testing.assert_array_equal(cupy.asnumpy(target), expected, strict=True)
            target[...] = 77
            assert bool((around == 77).all()), (parameter, offset, out_offset)


def test_a_view_that_is_not_contiguous(cupy: Any) -> None:
    image = np.random.default_rng(2).integers(0, 65536, (90, 70, 3)).astype(np.uint16)
    view = cupy.asarray(image).transpose(1, 0, 2)[::2, 5:, ::-1]
    expected = uniform_filter(np.ascontiguousarray(image.transpose(1, 0, 2)[::2, 5:, ::-1]), 5, channel_axis=2)
    np.testing.assert_array_equal(cupy.asnumpy(uniform_filter(view, 5, channel_axis=2)), expected, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_work_is_ordered_on_the_stream_given(cupy: Any, variant: str) -> None:
    """The stream writes the input just before and overwrites it just after: only the right order gives the result."""
    floats = dict.fromkeys(("streamed", "tree", "run_plane", "wide"), "float32")
    in_bytes = dict.fromkeys(("byte_sums", "bytes_apart", "tensor"), "uint8")
    dtype = {**floats, **in_bytes}.get(variant, "uint16")
    gaussians = ("wide", "word_sums", "words_apart", "words", *in_bytes)
    what: dict[str, Any] = {"sigmas": (4.0, 4.0)} if variant in gaussians else {"sizes": (5, 5)}
    if variant in ("tree", "run_plane"):
        what = {"sizes": (31, 31) if variant == "tree" else (127, 127)}
    if variant == "decimated":
        what = {"sigmas": (10.0, 10.0)}
    values = np.random.default_rng(3).integers(0, 256 if dtype == "uint8" else 65536, (2000, 2000)).astype(dtype)
    case = Case(shape=values.shape, dtype=dtype, axes=(0, 1), modes=("reflect",) * 2, **what)
    stream = cupy.cuda.Stream(non_blocking=True)
    pinned = cupy.cuda.alloc_pinned_memory(values.nbytes)
    host = np.frombuffer(pinned, values.dtype, values.size).reshape(values.shape)
    host[...] = values
    image, out = cupy.zeros(values.shape, values.dtype), cupy.zeros(values.shape, values.dtype)
    smooth(image, case.windows(), 0, out, stream=stream, variant=variant)  # compiled before it is timed against copies
    stream.synchronize()
    for _ in range(5):
        image.set(host, stream=stream)
        smooth(image, case.windows(), 0, out, stream=stream, variant=variant)
        with stream:
            image.fill(0)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), case.apply(values), strict=True)


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        *((dtype, {"size": size}) for dtype in ("uint8", "uint16", "float32") for size in (3, 31)),
        *((dtype, {"sigma": sigma}) for dtype in ("uint8", "uint16", "float32") for sigma in (1.0, 4.0)),
    ],
)
def test_kernels_in_a_row_see_what_those_before_them_wrote(cupy: Any, dtype: str, what: dict[str, float]) -> None:
    """Blocks of one launch may start while those of the last run: with small images all fit the device at once."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (48, 131, 512)).astype(dtype)
    between = cupy.zeros((2, 131, 512), dtype)  # overwritten while the kernel before last may still read it
    sources, results = cupy.asarray(images), cupy.zeros_like(images)

    def smoothed(image: Any, out: Any = None) -> Any:
        options: dict[str, Any] = {"mode": "mirror", "axes": (0, 1), "out": out}
        return (
            uniform_filter(image, what["size"], **options)
            if "size" in what
            else gaussian_filter(image, what["sigma"], **options)
        )

    for place, source in enumerate(sources):
        smoothed(smoothed(source, between[place % 2]), results[place])
    for place, image in enumerate(images):
        np.testing.assert_array_equal(cupy.asnumpy(results[place]), smoothed(smoothed(image)), strict=True)


def test_fused_allocates_nothing(cupy: Any) -> None:
    image = cupy.zeros((512, 512, 3), cupy.uint16)
    out = cupy.empty_like(image)
    uniform_filter(image, 3, channel_axis=2, out=out)
    pool = cupy.get_default_memory_pool()
    gaussian_filter(image, 4.0, channel_axis=2, out=out)
    before = pool.total_bytes(), pool.used_bytes()
    with cupy.cuda.using_allocator(_refuse):
        uniform_filter(image, 3, channel_axis=2, out=out)
        gaussian_filter(image, 1.0, channel_axis=2, out=out)
        gaussian_filter(image, 4.0, channel_axis=2, out=out)
    assert (pool.total_bytes(), pool.used_bytes()) == before


def _refuse(size: int) -> Any:
    raise AssertionError(f"{size} bytes of device memory were asked for")


def test_a_call_repeated_takes_the_arrays_and_the_stream_it_is_given(cupy: Any) -> None:
    """Launches are cached, so the key must include everything else that they depend on."""
    rng = np.random.default_rng(6)
    images = [rng.integers(0, 65536, (97, 211, 3)).astype(np.uint16) for _ in range(3)]
    calls: list[tuple[Any, dict[str, Any]]] = [
        (uniform_filter, {"size": 3}),
        (uniform_filter, {"size": 31}),
        (gaussian_filter, {"sigma": 1.0}),
    ]
    for function, what in calls:
        for image, cval, mode in product(images, (0, 1, 65535), ("constant", "wrap")):
            options = {"mode": mode, "cval": cval, "channel_axis": 2, **what}
            stream, on_device = cupy.cuda.Stream(non_blocking=True), cupy.asarray(image)
            holder = cupy.empty(image.size + 1, image.dtype)
            expected = function(image, **options)
            cupy.cuda.Device().synchronize()
            for out in (cupy.empty_like(on_device), holder[1:].reshape(image.shape), holder[:-1].reshape(image.shape)):
                assert function(on_device, out=out, stream=stream, **options) is out
                stream.synchronize()
                np.testing.assert_array_equal(cupy.asnumpy(out), expected, strict=True)


def test_many_threads_repeat_one_call(cupy: Any) -> None:
    rng = np.random.default_rng(7)
    images = [rng.integers(0, 256, (64, 300, 3)).astype(np.uint8) for _ in range(8)]
    uniform_filter(cupy.asarray(images[0]), 31, channel_axis=2, out=cupy.empty((64, 300, 3), cupy.uint8))

    def worker(image: Any) -> None:
        on_device, out = cupy.asarray(image), cupy.empty((64, 300, 3), cupy.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        for _ in range(50):
            uniform_filter(on_device, 31, channel_axis=2, out=out, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(cupy.asnumpy(out), uniform_filter(image, 31, channel_axis=2), strict=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, images))


def test_many_threads_at_once(cupy: Any) -> None:
    rng = np.random.default_rng(4)
    images = [rng.integers(0, 256, (101 + n, 203, 3)).astype(np.uint8) for n in range(8)]
    ready = threading.Barrier(8)

    def worker(image: Any) -> Any:
        ready.wait(60)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            return [cupy.asnumpy(uniform_filter(cupy.asarray(image), size, channel_axis=2)) for size in (3, 5, 11) * 5]

    with ThreadPoolExecutor(8) as pool:
        for image, results in zip(images, pool.map(worker, images), strict=True):
            for size, result in zip((3, 5, 11) * 5, results, strict=True):
                np.testing.assert_array_equal(result, uniform_filter(image, size, channel_axis=2), strict=True)


def test_a_variant_that_does_not_apply_is_refused(cupy: Any) -> None:
    image = cupy.zeros((9, 9), cupy.float64)
    case = Case(shape=(9, 9), dtype="float64", axes=(0, 1), sizes=(3, 3), modes=("reflect",) * 2)
    with pytest.raises(ValueError, match="'fused' cannot smooth float64"):
        smooth(image, case.windows(), 0, None, variant="fused")


@pytest.mark.large
def test_offsets_past_two_to_the_31(cupy: Any) -> None:
    """More samples than a 32-bit offset reaches: the last rows must not wrap around to the top."""
    rows, columns = (1 << 31) // 65536 + 9, 65536
    free, _total = cupy.cuda.runtime.memGetInfo()
    image = cupy.zeros((rows, columns), cupy.uint8)
    assert free > 3 * image.nbytes, "this test needs 7 GB of device memory"
    image[-12:] = cupy.random.default_rng(5).integers(0, 256, (12, columns), dtype=cupy.uint8)
    tail = cupy.asnumpy(image[-20:])
    for variant in ("fused", "separable"):
        case = Case(shape=image.shape, dtype="uint8", axes=(0, 1), sizes=(3, 3), modes=("nearest",) * 2)
        result = smooth(image, case.windows(), 0, None, variant=variant)
        np.testing.assert_array_equal(
            cupy.asnumpy(result[-18:]), uniform_filter(tail, 3, mode="nearest")[-18:], strict=True
        )
        assert not cupy.asnumpy(result[:-14].any())
        del result
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.large
@pytest.mark.parametrize(
    ("variant", "dtype", "sigmas"),
    [
        ("wide", "uint16", (0.8, 2.5)),
        ("words", "uint16", (2.5, 2.5)),
        ("word_sums", "uint16", (2.5, 2.5)),
        ("tensor", "uint8", (2.5, 2.5)),
    ],
)
def test_gaussians_past_two_to_the_31(cupy: Any, variant: str, dtype: str, sigmas: tuple[float, float]) -> None:
    rows, columns = (1 << 31) // 65536 + 9, 65536
    image = cupy.zeros((rows, columns), dtype)
    image[-12:] = cupy.random.default_rng(5).integers(0, np.iinfo(dtype).max, (12, columns), dtype=dtype, endpoint=True)
    case = Case(shape=image.shape, dtype=dtype, axes=(0, 1), sigmas=sigmas, modes=("nearest",) * 2)
    result = smooth(image, case.windows(), 0, None, variant=variant)
    expected = gaussian_filter(cupy.asnumpy(image[-40:]), sigmas, mode="nearest")
    np.testing.assert_array_equal(cupy.asnumpy(result[-20:]), expected[-20:], strict=True)
    assert not cupy.asnumpy(result[:-23].any())


def test_running_boxes_past_two_to_the_31(cupy: Any) -> None:
    rows, columns = (1 << 31) // 65536 + 9, 65536
    image = cupy.zeros((rows, columns), cupy.uint8)
    image[-64:] = cupy.random.default_rng(5).integers(0, 256, (64, columns), dtype=cupy.uint8)
    tail = cupy.asnumpy(image[-100:])
    case = Case(shape=image.shape, dtype="uint8", axes=(0, 1), sizes=(31, 31), modes=("nearest",) * 2)
    result = smooth(image, case.windows(), 0, None, variant="running")
    np.testing.assert_array_equal(
        cupy.asnumpy(result[-80:]), uniform_filter(tail, 31, mode="nearest")[-80:], strict=True
    )
    assert not cupy.asnumpy(result[:-80].any())
