"""Blosc chunks in the layout of a GPU's encoder: other decoders read them."""

from __future__ import annotations

import imagecodecs
import numcodecs
import numpy as np
import pytest

from pipeline.codecs.blosc import BloscLayout, check_blosc
from tests.pipeline.unpacking import packed_chunk

DECODERS = {
    "imagecodecs": imagecodecs.blosc_decode,
    "blosc2": imagecodecs.blosc2_decode,
    "numcodecs": numcodecs.blosc.decompress,
}


@pytest.mark.parametrize("count", [1, 7, 127, 128, 1024, 4099, 32 << 10, 100_003, 160 << 10])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_every_size_is_read_by_every_decoder(count, dtype, codec):
    rng = np.random.default_rng(count)
    for values in (np.arange(count) // 3 + rng.integers(0, 2, count), rng.integers(0, 256, count * 8)):
        samples = values.astype(dtype) if len(values) == count else values.astype(np.uint8).view(dtype)[:count].copy()
        chunk = packed_chunk(samples, codec)
        assert check_blosc(chunk) == samples.nbytes
        for name, decode in DECODERS.items():
            assert bytes(decode(chunk.tobytes())) == samples.tobytes(), name


@pytest.mark.parametrize("typesize", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 999, 32 << 10, 77_777, 1 << 20])
def test_streams_tile_the_chunk(typesize, count):
    layout = BloscLayout(nbytes=count * typesize, typesize=typesize)
    ends = np.cumsum([size for _, size in layout.streams()])
    assert [first for first, _ in layout.streams()] == [0, *ends[:-1].tolist()]
    assert ends[-1] == layout.nbytes
