"""Raw chunks in pieces of moderate size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.codecs import chunk_codec
from pipeline.codecs.chunk_codec import ChunkCodec


@pytest.mark.parametrize("shape", [(1, 1, 7, 11), (3, 5, 7), (1,), (13,), (2, 3)])
@pytest.mark.parametrize("band_bytes", [1, 9, 50, 1 << 20])
def test_bands_are_the_bytes_of_a_chunk_in_order(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], band_bytes: int
) -> None:
    monkeypatch.setattr(chunk_codec, "_BAND_BYTES", band_bytes)
    samples = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    codec = ChunkCodec(shape=shape, dtype=samples.dtype, order=tuple(range(len(shape))))
    row_bytes, found = 2 * shape[-1], b""
    for piece, first, nbytes in codec.bands():
        band = samples[piece].tobytes()
        assert first == len(found)
        assert len(band) == nbytes <= max(band_bytes, row_bytes)
        found += band
    assert found == samples.tobytes()
