"""A region read with its halo is the region of the image extended by NumPy's own padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.smoothing import BORDER_MODES
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.workloads.common.halo import read_with_borders

PAD_MODES = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap", "constant": "constant"}


class ArrayReader(ImageReader):
    """An image in memory that insists on the contract of `read`."""

    def __init__(self, image):
        self.image = image
        self.header = ImageHeader(shape=image.shape, axes="ZYX"[-image.ndim :], dtype=image.dtype)
        self.filled = []

    def read(self, region, out):
        assert out.flags.c_contiguous
        assert (out.shape, out.dtype) == (region.shape, self.image.dtype)
        assert all(0 <= a < b <= n for a, b, n in zip(region.start, region.stop, self.image.shape, strict=True))
        out[...] = self.image[region.slices]
        self.filled.append(out)

    def close(self):
        pass


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(BORDER_MODES), st.integers(1, 3))
def test_any_region_equals_padding(data, mode, ndim):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=ndim, max_size=ndim)))
    starts = data.draw(st.lists(st.integers(-12, 12), min_size=ndim, max_size=ndim))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim))
    image = np.random.default_rng(1).integers(1, 1000, shape).astype(np.uint16)
    options = {"constant_values": 7} if mode == "constant" else {}
    width = 24
    padded = image
    for axis in range(ndim):  # one axis at a time: NumPy pads an axis of length one in mode mirror only so
        pads = [(width, width) if each == axis else (0, 0) for each in range(ndim)]
        one = mode == "mirror" and shape[axis] == 1
        padded = np.pad(padded, pads, mode="edge" if one else PAD_MODES[mode], **options)
    region = Region(tuple(starts), tuple(a + n for a, n in zip(starts, lengths, strict=True)))
    out = np.full(region.shape, 60_000, np.uint16)
    read_with_borders(ArrayReader(image), region, mode, 7, out)
    expected = padded[tuple(slice(a + width, b + width) for a, b in zip(region.start, region.stop, strict=True))]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("first", "last"), [(-2, 7), (13, 22)])
@pytest.mark.parametrize("mode", BORDER_MODES)
def test_borders_are_copied_not_read_again(mode, first, last):
    """Only "wrap" needs rows from the other end: it reads them at once. The others are read in place."""
    reader = ArrayReader(np.arange(200, dtype=np.uint16).reshape(20, 10))
    out = np.empty((9, 10), np.uint16)
    read_with_borders(reader, Region((first, 0), (last, 10)), mode, 0, out)
    assert [part.shape for part in reader.filled] == ([(7, 10), (2, 10)] if mode == "wrap" else [(7, 10)])
    assert np.shares_memory(reader.filled[0], out)
