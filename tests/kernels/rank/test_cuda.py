"""Rank filters on a CUDA device, every variant, against the CPU to the last bit (test_rank.py checks the CPU)."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.morphology import white_tophat
from kernels.rank import (
    DTYPES,
    MODES,
    ball,
    cross,
    cuda,
    disk,
    maximum_filter,
    median_filter,
    minimum_filter,
    percentile_filter,
    rank_filter,
)
from kernels.rank.cuda import VARIANTS
from tests.kernels.rank.cases import same_bits, samples_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def _check(cupy: Any, monkeypatch: pytest.MonkeyPatch, image: Any, percentile: float, **options: Any) -> None:
    """Compares every variant that applies; results are written over bytes that no result contains."""
    expected = percentile_filter(image, percentile, **options)
    on_device, compute = cupy.asarray(image), cuda.filtered
    for name, variant in VARIANTS.items():

        def chosen(source: Any, task: Any, out: Any, *, stream: Any, name=name, variant=variant) -> Any:
            return compute(source, task, out, stream=stream, variant=name if variant.applies(task) else "gather")

        out = cupy.full(expected.size * image.itemsize, 0xA5, cupy.uint8).view(image.dtype).reshape(expected.shape)
        with monkeypatch.context() as patched:
            patched.setattr(cuda, "filtered", chosen)
            percentile_filter(on_device, percentile, out=out, **options)
        same_bits(cupy.asnumpy(out), expected, f"{name} {options}")


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [*((side, side) for side in (3, 5, 7, 9, 11, 13, 15, 31, 33)), (2, 6), (1, 40), (67, 3), (12, 62), (5, 4)],
    ids=str,
)
def test_every_variant_gives_the_bits_of_the_cpu(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, size: tuple[int, int]
) -> None:
    """Tiles cut at every place, aligned rows and others."""
    for index, (first, second) in enumerate(zip(MODES, MODES[1:] + MODES[:1], strict=True)):
        for shape in ((131, 277), (96, 512), (70, 83, 3))[index % 2 :: 2]:
            image, percentile = samples_of(shape, dtype, index), (50.0, 0.0, 100.0, 20.0)[index % 4 if index > 2 else 0]
            _check(cupy, monkeypatch, image, percentile, size=size, axes=(0, 1), mode=(first, second), cval=7)


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(3, 3, 3), (5, 5, 5), (2, 3, 7), (9, 1, 4)], ids=str)
def test_volumes(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, size: tuple[int, ...]) -> None:
    for index, mode in enumerate(MODES):
        image = samples_of(((11, 23, 37), (35, 5, 130))[index % 2], dtype, index)
        _check(cupy, monkeypatch, image, 50.0 if index < 4 else 70.0, size=size, mode=mode, cval=7)


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("footprint", "shape"),
    [(disk(1), (19, 81)), (disk(15), (57, 91)), (ball(3), (9, 13, 9)), (cross(15, 3), (8, 9, 7)), (cross(4, 1), (71,))],
    ids=["disk1", "disk15", "ball3", "cross15", "line4"],
)  # fmt: skip
def test_footprints(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, footprint: Any, shape: Any) -> None:
    for mode, percentile in product(("reflect", "constant"), (50.0, 85.0)):
        _check(cupy, monkeypatch, samples_of(shape, dtype), percentile, footprint=footprint, mode=mode, cval=3)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
@pytest.mark.parametrize("size", [9, 15, (31, 31), (31, 63)], ids=str)
def test_few_values(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, size: Any) -> None:
    """Whole windows in one bin of a histogram; a narrow range of values, with outliers or without, and a wide one."""
    rng = np.random.default_rng(7)
    for highest, outliers in ((3, 0), (900, 0), (900, 40), (1 << 16, 0)):
        image = rng.integers(-5 if dtype == "int16" else 0, min(highest, np.iinfo(dtype).max), (97, 211)).astype(dtype)
        image[30:70, 60:140] = 2
        image.reshape(-1)[rng.choice(image.size, outliers)] = np.iinfo(dtype).max
        for percentile in (50.0, 7.0):
            _check(cupy, monkeypatch, image, percentile, size=size)


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_large_squares_inside_of_the_image(cupy: Any, dtype: str) -> None:
    """Blocks that read no sample from beyond the edges, and others beside them."""
    image = samples_of((75, 531), dtype)
    for size in (9, 11, 13, 15):
        same_bits(cupy.asnumpy(median_filter(cupy.asarray(image), size)), median_filter(image, size))


def test_large_squares_on_devices_with_little_shared_memory(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.tile, "shared_bytes_a_block", lambda: 160 << 10)
    image = samples_of((97, 211), "uint16")
    for size in (11, 13, 15):
        same_bits(cupy.asnumpy(median_filter(cupy.asarray(image), size)), median_filter(image, size))


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("size", [(4, 4), (15, 17), (33, 33), (33, 65)], ids=str)
def test_ranks_near_the_ends(cupy: Any, size: tuple[int, int]) -> None:
    """Places of results reach from the first of a tile, or to its last."""
    image = samples_of((77, 131), "uint16")
    for rank in (1, size[0] * size[1] - 2):
        same_bits(cupy.asnumpy(rank_filter(cupy.asarray(image), rank, size)), rank_filter(image, rank, size), f"{rank}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [3, 5, 7, 12, 15])
def test_nan(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int) -> None:
    image = samples_of((150, 300), dtype)
    image[10:40, 20:70] = np.nan
    image[100:, 200:][np.random.default_rng(1).random((50, 100)) < 0.1] = np.nan
    image[60, 30] = -np.float64(np.nan)
    for policy, percentile in product(("propagate", "omit"), (50.0, 30.0, 0.0, 100.0)):
        _check(cupy, monkeypatch, image, percentile, size=size, nan_policy=policy)


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", 255), ("uint16", 0), ("int16", -32768), ("float32", 0.0)])
def test_nodata(cupy: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, nodata: float) -> None:
    image = samples_of((90, 170), dtype)
    image[20:40, 40:100] = nodata
    for size, percentile in product((3, 7, 15), (50.0, 90.0)):
        _check(cupy, monkeypatch, image, percentile, size=size, nodata=nodata)


def test_ranks_views_and_streams(cupy: Any) -> None:
    image = samples_of((90, 70, 3), "uint16")
    view = cupy.asarray(image).transpose(1, 0, 2)[::2, 5:, ::-1]
    expected = rank_filter(np.ascontiguousarray(image.transpose(1, 0, 2)[::2, 5:, ::-1]), -3, 5, channel_axis=2)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        found = rank_filter(view, -3, 5, channel_axis=2, stream=stream)
        same_bits(cupy.asnumpy(found, stream=stream), expected)


def test_calls_with_other_arrays_of_the_same_layout(cupy: Any) -> None:
    """Launches are repeated: on any stream, with the arrays of each call."""
    filters = (lambda image, **out: median_filter(image, 3, **out), lambda image, **out: white_tophat(image, 9, **out))
    for stream in (None, cupy.cuda.Stream(non_blocking=True), None):
        for seed, filtered in product(range(3), filters):
            image = samples_of((64, 128), "uint16", seed)
            source, out = cupy.asarray(image), cupy.empty((64, 128), cupy.uint16)
            cupy.cuda.Device().synchronize()
            filtered(source, out=out, stream=stream)
            cupy.cuda.Device().synchronize()
            same_bits(cupy.asnumpy(out), filtered(image), f"{seed}")


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("columns", [1023, 1022, 1024, 1032, 7])
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_rows_and_pointers_of_any_alignment(cupy: Any, dtype: str, columns: int, offset: int) -> None:
    """Nothing is written beside the output."""
    values = samples_of((61, columns), dtype)
    image = cupy.empty(values.size + offset, dtype)[offset:].reshape(values.shape)
    image[...] = cupy.asarray(values)
    for size in (3, 5, 7, 9, 11):
        around = cupy.full(values.size + 80, 77, dtype)
        target = around[8 - offset : 8 - offset + values.size].reshape(values.shape)
        median_filter(image, size, mode="mirror", out=target)
        same_bits(cupy.asnumpy(target), median_filter(values, size, mode="mirror"), f"{size}")
        target[...] = 77
        assert bool((around == 77).all()), size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [4099, 2048, 61])
def test_boxes_of_every_size(cupy: Any, dtype: str, columns: int) -> None:
    """Several tiles and bands, in one pass and in several, windows larger than the image, inputs and outputs at any
    address; nothing is written beside the output."""
    sizes = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 51, 64, 65, 130, 521, 1023]
    rng = np.random.default_rng(columns)
    for index, across in enumerate(sizes):
        down, shape = int(rng.choice(sizes)), (int(rng.integers(1, 211)), columns)
        values = samples_of(shape, dtype, index)
        before, after = (int(each) for each in rng.integers(0, 17, 2))
        if index % 2 == 0:
            before = after = 0
        source = cupy.empty(values.size + before, dtype)[before:].reshape(shape)
        source[...] = cupy.asarray(values)
        around = cupy.full(values.size + after + 80, 77, dtype)
        target = around[16 + after : 16 + after + values.size].reshape(shape)
        mode = [mode for mode in MODES if mode != "valid"][index % 5]
        for filtered in (minimum_filter, maximum_filter):
            filtered(source, (down, across), mode=mode, cval=7, out=target)
            expected = filtered(values, (down, across), mode=mode, cval=7)
            same_bits(cupy.asnumpy(target), expected, f"{shape} {down} × {across} {mode} {before} {after}")
        target[...] = 77
        assert bool((around == 77).all()), (down, across)


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [
        (51, 51),
        (54, 9),
        (52, 30),
        (2, 2),
        (3, 1),
        (1, 101),
        (101, 1),
        (64, 128),
        (301, 7),
        (16, 1999),
        (66, 40),
        (131, 100),
    ],
    ids=str,
)
def test_minima_and_maxima_equal_scipy(cupy: Any, dtype: str, size: tuple[int, int]) -> None:
    """Aligned rows and others, windows of even sides, of one axis, and larger than the image."""
    from scipy import ndimage

    modes = [mode for mode in MODES if mode != "valid"]
    for index, shape in enumerate([(97, 208), (401, 1024), (61, 331), (2, 67, 512)]):
        values = samples_of(shape, dtype, index)
        sides = (1,) * (len(shape) - 2) + size
        for mode in (modes[index], modes[(index + 2) % 5]):
            for ours, theirs in (
                (minimum_filter, ndimage.minimum_filter),
                (maximum_filter, ndimage.maximum_filter),
            ):
                found = cupy.asnumpy(ours(cupy.asarray(values), sides, mode=mode, cval=3))
                np.testing.assert_array_equal(found, theirs(values, sides, mode=mode, cval=3), f"{shape} {mode}")


@pytest.mark.sanitize("rank")
@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
def test_volumes_with_windows_of_many_rows(cupy: Any, dtype: str) -> None:
    """Several passes, of which floats take the later ones as keys."""
    values = samples_of((5, 83, 96), dtype)
    for size in ((3, 140, 33), (1, 140, 1), (3, 131, 1)):
        found = minimum_filter(cupy.asarray(values), size, mode="mirror")
        same_bits(cupy.asnumpy(found), minimum_filter(values, size, mode="mirror"), f"{size}")


@pytest.mark.large
def test_offsets_past_two_to_the_31(cupy: Any) -> None:
    rows, columns = (1 << 31) // 65536 + 9, 65536
    image = cupy.zeros((rows, columns), cupy.uint8)
    image[-12:] = cupy.random.default_rng(5).integers(0, 256, (12, columns), dtype=cupy.uint8)
    result = median_filter(image, 3, mode="nearest")
    expected = median_filter(cupy.asnumpy(image[-20:]), 3, mode="nearest")
    same_bits(cupy.asnumpy(result[-18:]), expected[-18:])
    assert not cupy.asnumpy(result[:-14].any())
