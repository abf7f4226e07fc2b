"""zlib on a GPU against zlib's own library: every content is decoded, every damaged stream refused or decoded as the
library does, and nothing outside a stream's output is written."""

from __future__ import annotations

import zlib

import imagecodecs
import numpy as np
import pytest

from kernels.blocks.cuda import decode_zlib
from tests.kernels.blocks.decoders import SIZES, Decoder, samples

pytestmark = pytest.mark.gpu

FLUSHES = (zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH, zlib.Z_PARTIAL_FLUSH)


def encoded(rng, plain):
    """With any level, strategy, window and flushes; a fifth by libdeflate."""
    if rng.integers(5) == 0:
        return np.frombuffer(imagecodecs.deflate_encode(plain, int(rng.integers(13))), np.uint8)
    level, window, memory, strategy = (int(rng.integers(*span)) for span in ((0, 10), (9, 16), (1, 10), (0, 5)))
    encoder = zlib.compressobj(level, zlib.DEFLATED, window, memory, strategy)
    found = b""
    for part in np.array_split(plain, rng.integers(1, 4)):
        found += encoder.compress(part.tobytes())
        if rng.integers(3) == 0:
            found += encoder.flush(FLUSHES[rng.integers(3)])
    return np.frombuffer(found + encoder.flush(), np.uint8)


def by_library(stream, size):
    """The decoded bytes, or None."""
    decoder = zlib.decompressobj()
    try:
        found = decoder.decompress(stream.tobytes(), size + 1)
        if not decoder.eof:
            found += decoder.decompress(decoder.unconsumed_tail, size + 1)
    except zlib.error:
        return None
    return np.frombuffer(found, np.uint8) if decoder.eof and len(found) == size else None


def damaged(rng, stream, size):
    """A stream with one kind of damage, and the size that it is said to decode to."""
    data, kind = stream.copy(), rng.integers(8)
    first = int(rng.integers(2, len(data)))
    if kind == 0:
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == 1:
        data = data[: rng.integers(len(data))]
    elif kind == 2:
        data[2:] = rng.integers(0, 256, len(data) - 2)
    elif kind == 3:
        data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
    elif kind == 4:
        data = np.concatenate([data, data[: rng.integers(len(data) + 1)]])
    elif kind == 5:
        data[first : first + rng.integers(1, 300)] = 255
    elif kind == 6:
        size = max(size + int(rng.integers(-20, 20)), 1)
    else:  # in the lengths of codes
        data[min(first, int(rng.integers(2, 40)))] ^= 1 << rng.integers(8)
    return data, size


ZLIB = Decoder(
    launch=lambda device, first, count, fault: decode_zlib(device.streams(first), count, fault, device.stream),
    encoded=encoded, by_library=by_library, damaged=damaged, may_refuse=lambda stream: False,
)  # fmt: skip


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_encodes_is_decoded(seed):
    rng = np.random.default_rng(seed)
    ZLIB.check_encoded(rng, [samples(rng, size) for size in SIZES * 20])


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_decoded_as_by_the_library(seed):
    rng = np.random.default_rng(100 + seed)
    ZLIB.check_damaged(rng, [samples(rng, size) for size in SIZES[:-1] * 40])


def test_the_first_fault_of_many_streams_is_given():
    ZLIB.check_first_fault(np.random.default_rng(7))
