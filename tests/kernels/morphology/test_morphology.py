"""Grey morphology against scipy.ndimage and OpenCV, and its laws."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import scipy.ndimage

import kernels.morphology as ours
from kernels.rank import cross, disk, maximum_filter
from kernels.rank.task import Difference
from kernels.runtime.launch import observe
from kernels.smoothing.borders import BORDER_MODES
from tests.kernels.rank.cases import same_bits, samples_of

NAMES = ("grey_erosion", "grey_dilation", "grey_opening", "grey_closing", "white_tophat", "black_tophat")


def by_scipy(name: str, image: Any, **options: Any) -> Any:
    """In exact arithmetic; top-hats saturate at the ends of the dtype."""
    if image.dtype.kind == "f":
        return getattr(scipy.ndimage, name)(image, **options)
    ends = np.iinfo(image.dtype)
    return getattr(scipy.ndimage, name)(image.astype(np.int32), **options).clip(ends.min, ends.max).astype(image.dtype)


@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize(
    ("dtype", "size"), [("uint8", (3, 5)), ("uint16", (4, 1)), ("int16", (6, 41)), ("float64", (7, 7))]
)
@pytest.mark.parametrize("name", NAMES)
def test_scipy_gives_the_same(name: str, dtype: str, size: tuple[int, int], mode: str) -> None:
    image = samples_of((13, 17), dtype)
    image[~np.isfinite(image)] = 2
    for origin in (0, (-1, 0)):
        options = {"mode": mode, "cval": 5, "origin": origin}
        found = getattr(ours, name)(image, size, **options)
        np.testing.assert_array_equal(found, by_scipy(name, image, size=size, **options), strict=True)


@pytest.mark.parametrize("mask", [disk(3), cross(2, 2), np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)])
@pytest.mark.parametrize("name", NAMES)
def test_scipy_gives_the_same_for_footprints(name: str, mask: Any) -> None:
    image = samples_of((19, 23), "uint16")
    found = getattr(ours, name)(image, footprint=mask)
    np.testing.assert_array_equal(found, by_scipy(name, image, footprint=mask), strict=True)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_opencv_gives_the_same(dtype: str) -> None:
    image = samples_of((61, 47), dtype)
    for name, operation in zip(NAMES, ("ERODE", "DILATE", "OPEN", "CLOSE", "TOPHAT", "BLACKHAT"), strict=True):
        # OpenCV's openings extend the image once, ours each step: away from the edges they agree.
        expected = cv2.morphologyEx(image, getattr(cv2, f"MORPH_{operation}"), np.ones((7, 5), np.uint8))
        found = getattr(ours, name)(image, (7, 5))
        np.testing.assert_array_equal(found[6:-6, 4:-4], expected[6:-6, 4:-4])


@pytest.mark.parametrize("size", [1, 2, 5, (3, 8, 1)])
def test_laws_in_volumes(size: Any) -> None:
    image = samples_of((7, 11, 9, 2), "uint8")
    opened = ours.grey_opening(image, size, channel_axis=3)
    assert (opened <= image).all()
    np.testing.assert_array_equal(ours.grey_opening(opened, size, channel_axis=3), opened)
    # Negation swaps the two, with the windows mirrored.
    dual = 255 - ours.grey_closing(255 - image, size, channel_axis=3)
    mirrored = ours.grey_opening(image[::-1, ::-1, ::-1], size, channel_axis=3)[::-1, ::-1, ::-1]
    np.testing.assert_array_equal(dual, mirrored)


def test_missing_samples() -> None:
    image = np.array([3, np.nan, 0.0, -0.0, np.inf, -np.inf, 1], np.float32)
    same_bits(ours.grey_erosion(image, 2), np.array([3, np.nan, np.nan, -0.0, -0.0, -np.inf, -np.inf], np.float32))
    same_bits(ours.grey_dilation(image, 2), np.array([np.nan, np.nan, 0, np.inf, np.inf, 1, 1], np.float32))
    image = np.array([[9, 1, 9, 9, 4, 6]], np.int16)
    np.testing.assert_array_equal(ours.grey_dilation(image, (1, 3), nodata=9, mode="nearest"), [[1, 1, 1, 4, 6, 6]])
    np.testing.assert_array_equal(ours.white_tophat(image, (1, 3), nodata=9, mode="nearest"), [[9, 0, 9, 9, 0, 2]])
    image = np.array([-30_000, 30_000, -30_000], np.int16)
    np.testing.assert_array_equal(ours.white_tophat(image, 3), [0, 32_767, 0])


def test_results_go_into_an_array_of_the_caller() -> None:
    image = samples_of((13, 17), "uint8")
    for name in NAMES:
        out = np.empty_like(image)
        getattr(ours, name)(image, 3, out=out)
        np.testing.assert_array_equal(out, getattr(ours, name)(image, 3))
        with pytest.raises(ValueError, match="out shares memory with image"):
            getattr(ours, name)(image, 3, out=image)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 0}, "size must be 1 or more"),
        ({"size": 2.5}, "size must be a whole number"),
        ({"size": 3, "mode": "valid"}, 'mode "valid" would shrink the image twice'),
        ({}, "give either size or footprint"),
        ({"footprint": np.ones((2, 3))}, "even side"),
        ({"size": 3, "cval": 300, "mode": "constant"}, "cval must be a whole number"),
    ],
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        ours.grey_opening(samples_of((5, 7), "uint8"), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_bits_of_the_cpu(name: str, dtype: str) -> None:
    import cupy

    for shape in ((161, 147, 3), (61, 1024, 3), (61, 147, 2)):
        image = samples_of(shape, dtype)
        for options in ({"size": (4, 33)}, {"size": 131}, {"size": (300, 1)}, {"footprint": disk(3)}, {"size": (5, 3)}):
            for mode in ("nearest", "constant", "reflect"):
                found = getattr(ours, name)(cupy.asarray(image), mode=mode, cval=7, channel_axis=2, **options)
                expected = getattr(ours, name)(image, mode=mode, cval=7, channel_axis=2, **options)
                same_bits(found.get(), expected, f"{shape} {options}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("name", [each for each in NAMES if each not in ("grey_erosion", "grey_dilation")])
def test_a_gpu_opens_in_one_pass(name: str, dtype: str) -> None:
    """Windows of both steps beyond every edge, and larger than the image; those of many rows an axis a pass, or in two
    steps."""
    import cupy

    for index, shape in enumerate([(97, 512), (61, 331), (2, 35, 1040), (9, 67)]):
        image = samples_of(shape, dtype, index)
        axes = (len(shape) - 2, len(shape) - 1)
        for size in (3, (1, 5), (9, 1), 15, (21, 7), (57, 51), (131, 33), (141, 1)):
            for mode in ("reflect", "mirror", "wrap"):
                found = getattr(ours, name)(cupy.asarray(image), size, axes=axes, mode=mode)
                expected = getattr(ours, name)(image, size, axes=axes, mode=mode)
                same_bits(found.get(), expected, f"{shape} {size} {mode}")


@pytest.mark.sanitize("morphology", "rank")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize(
    ("shape", "size"), [((97, 604), 31), ((61, 601), (17, 31)), ((2, 141, 332), (51, 31)), ((75, 110, 3), 15)]
)
def test_a_gpu_erodes_by_slabs(shape: tuple[int, ...], size: Any, dtype: str) -> None:
    """Rows that begin at whole words and elsewhere, windows at even and odd samples, planes, and channels; edges of
    every kind."""
    import cupy

    image = samples_of(shape, dtype)
    options = {"channel_axis": 2} if shape[-1] == 3 else {"axes": (-2, -1)}
    given, out = cupy.asarray(image), cupy.empty(shape, image.dtype)
    for name, modes in (("grey_erosion", BORDER_MODES), ("grey_dilation", ("constant",))):
        for mode in modes:
            for origin in (0, (2, -3)) if mode in ("reflect", "constant") else (0,):
                chosen = {"mode": mode, "cval": 7, "origin": origin, **options}
                launches = observe(lambda name=name, chosen=chosen: getattr(ours, name)(given, size, out=out, **chosen))
                names = [launch.kernel.expression.partition("<")[0] for launch in launches]
                assert names == ["extreme_slabs"] or dtype == "uint8", (mode, names)
                same_bits(out.get(), getattr(ours, name)(image, size, **chosen), f"{name} {mode} {origin}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((1009, 1028), "uint16"), ((203, 310, 3), "uint16"), ((97, 411), "float32")]
)
def test_a_gpu_opens_by_slabs(shape: tuple[int, ...], dtype: str) -> None:
    """With one kernel; each band of rows has whole batches: the last begins earlier than its turn."""
    import cupy

    image = samples_of(shape, dtype)
    options = {"channel_axis": 2} if shape[-1] == 3 else {}
    given, out = cupy.asarray(image), cupy.empty(shape, image.dtype)
    for size in (15, 31, (51, 31), 51):
        launches = observe(lambda size=size: ours.white_tophat(given, size, out=out, **options))
        assert [launch.kernel.expression.partition("<")[0] for launch in launches] == ["extreme_slabs"], size
        same_bits(out.get(), ours.white_tophat(image, size, **options), str(size))


@pytest.mark.sanitize("morphology", "rank")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize("name", ["white_tophat", "black_tophat"])
def test_a_gpu_subtracts_rows_of_any_alignment(name: str, dtype: str) -> None:
    import cupy

    for columns, offset, nodata in ((1024, 0, None), (1023, 0, None), (512, 1, None), (517, 3, 7)):
        image = samples_of((83, columns), dtype)
        given = cupy.empty(image.size + offset, dtype)[offset:].reshape(image.shape)
        given[...] = cupy.asarray(image)
        for size in (1, 3, 20, 67, 131):
            out = cupy.empty(image.size + 5, dtype)[5 - offset :][: image.size].reshape(image.shape)
            getattr(ours, name)(given, size, nodata=nodata, out=out)
            same_bits(out.get(), getattr(ours, name)(image, size, nodata=nodata), f"{columns} {size}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_gpu_subtracts_from_an_image_whose_rows_begin_anywhere(dtype: str) -> None:
    """As blocks with halos do: the rows that are filtered begin at whole vectors, those of the image elsewhere."""
    import cupy

    image = samples_of((83, 512), dtype)
    given, wide = cupy.asarray(image), cupy.zeros((83, 520), dtype)
    view = wide[:, 3:515]
    view[...] = given
    for size in (3, 21, 61):
        taken = Difference(image=view, reverse=False, opens=True)
        found = maximum_filter(given, size, difference=taken)
        same_bits(found.get(), ours.white_tophat(image, size), str(size))
