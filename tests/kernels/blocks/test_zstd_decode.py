"""Zstandard on a GPU against libzstd: every content is decoded, every damaged frame refused or decoded as the library
does, and nothing outside a frame's output is written."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from kernels.blocks import ZstdRoom
from kernels.blocks.cuda import decode_zstd
from pipeline.codecs.loops.streams import zstd_room
from tests.kernels.blocks.decoders import NO_FAULT, SIZES, Decoder, samples

pytestmark = pytest.mark.gpu


def launch(device, first, count, fault):
    """In memory for exactly what the host counts."""
    import cupy

    chosen = slice(first, first + count)
    counts = zstd_room(device.bytes, np.stack([device.starts[chosen], device.lengths[chosen]]))
    most = int(device.sizes[chosen].sum()) + 8 * count
    room = ZstdRoom(count, *np.minimum(counts, most).tolist())
    scratch = cupy.full(room.nbytes + 64, 0x5A, cupy.uint8)
    decode_zstd(device.streams(first), room, scratch[: room.nbytes], fault, device.stream)
    assert (scratch[room.nbytes :] == 0x5A).all()
    if int(fault) == NO_FAULT:
        assert scratch[:24].view(cupy.uint64).tolist() == [*room[1:]]


def encoded(rng, plain):
    return np.frombuffer(imagecodecs.zstd_encode(plain, int(rng.integers(-5, 23)) or 1), np.uint8)


def by_library(stream, size):
    """The decoded bytes, or None."""
    out = np.zeros(size, np.uint8)
    try:
        found = imagecodecs.zstd_decode(stream.tobytes(), out=out)
    except imagecodecs.ZstdError:
        return None
    return out if len(found) == size else None


def damaged(rng, stream, size):
    """A frame with one kind of damage, and the size that it is said to decode to."""
    data, kind = stream.copy(), rng.integers(8)
    at = int(rng.integers(len(data)))
    if kind == 0:
        data[at] ^= 1 << rng.integers(8)
    elif kind == 1:
        data = data[:at]
    elif kind == 2:
        data[9:] = rng.integers(0, 256, len(data[9:]))
    elif kind == 3:
        data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
    elif kind == 4:
        data = np.concatenate([data, data[: at + 1]])
    elif kind == 5:
        size = max(size + int(rng.integers(-20, 20)), 1)
    elif kind == 6:  # in the headers and tables
        data[min(at, int(rng.integers(4, 40)))] ^= 1 << rng.integers(8)
    else:  # in the bits that are read first
        data[max(len(data) - 1 - int(rng.integers(12)), 0)] ^= 1 << rng.integers(8)
    return data, size


ZSTD = Decoder(
    launch=launch,
    encoded=encoded, by_library=by_library, damaged=damaged, may_refuse=lambda stream: True,
)  # fmt: skip


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_encodes_is_decoded(seed):
    rng = np.random.default_rng(seed)
    ZSTD.check_encoded(rng, [samples(rng, size) for size in (*SIZES * 15, 300_007)])


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_decoded_as_by_the_library(seed):
    rng = np.random.default_rng(100 + seed)
    ZSTD.check_damaged(rng, [samples(rng, size) for size in SIZES[:-1] * 40])


def test_the_first_fault_of_many_streams_is_given():
    ZSTD.check_first_fault(np.random.default_rng(7))
