"""Zarr chunks that a device decodes: the same samples as the processor reads, for every codec, shuffle and region."""

from __future__ import annotations

import itertools

import numcodecs
import numpy as np
import pytest
import zarr

from pipeline.formats.image import Region, open_image
from tests.pipeline.unpacking import unpack

SHAPE, CHUNK = (211, 307), (53, 101)
COMPRESSORS = [
    *(
        {"id": "blosc", "cname": name, "clevel": 5, "shuffle": shuffle, "blocksize": size}
        for name, shuffle, size in itertools.product(("lz4", "zstd"), (0, 1, 2), (0, 1000))
    ),
    {"id": "zstd", "level": 1},
    {"id": "lz4", "acceleration": 1},
]


def samples(dtype, shape=SHAPE):
    rng = np.random.default_rng(3)
    steps = np.add.outer(np.arange(shape[0]), np.arange(shape[-1])) * 7
    values = np.broadcast_to(steps.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1]), shape)
    return (values + rng.integers(0, 4, shape)).astype(dtype)


def regions(shape):
    yield Region.whole(shape)
    yield Region(tuple(n // 3 for n in shape), tuple(n // 3 + 1 for n in shape))
    yield Region(tuple(n // 4 for n in shape), tuple(n - n // 5 for n in shape))


def check(path, image, region):
    """Whether the region is packed; then its samples are compared."""
    memory = np.full(2 * image.nbytes + (1 << 16), 0x5A, np.uint8)
    with open_image(path) as reader:
        packed = reader.read_packed(region, memory)
        if packed is None:
            return False
        expected = np.empty(region.shape, image.dtype)
        reader.read(region, expected)
    out = np.full(region.shape, 77, image.dtype)
    assert unpack(packed, memory, out)
    np.testing.assert_array_equal(expected, image[region.slices])
    np.testing.assert_array_equal(out, image[region.slices])
    return True


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_codec_and_shuffle(tmp_path, compressor, dtype):
    image = samples(dtype)
    array = zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=SHAPE, chunks=CHUNK, dtype=dtype, zarr_format=2,
        compressor=numcodecs.get_codec(compressor), fill_value=5,
    )  # fmt: skip
    array[...] = image
    for region in regions(SHAPE):
        assert check(tmp_path / "a.zarr", image, region)
