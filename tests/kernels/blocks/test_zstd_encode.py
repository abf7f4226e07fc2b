"""Zstandard encoded on a GPU: its own library decodes every frame, and nothing outside a stream's output is written."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from kernels.blocks.cuda import ZSTD_SCRATCH_BYTES, encode_zstd
from tests.kernels.blocks.decoders import SIZES, OnDevice, contents

pytestmark = pytest.mark.gpu


def counted(rng, counts):
    """Bytes in random order, `counts` of each of as many."""
    made = np.repeat(rng.permutation(256)[: len(counts)], counts).astype(np.uint8)
    rng.shuffle(made)
    return made


def fibonacci(rng, symbols):
    """The counts whose codes are the longest."""
    counts = [1, 1]
    while len(counts) < symbols:
        counts.append(counts[-1] + counts[-2])
    return counted(rng, counts)


def streams(rng):
    yield from (contents(rng, size) for size in SIZES * 16)
    yield from (fibonacci(rng, symbols) for symbols in (3, 11, 12, 13, 17, 23))
    yield from (counted(rng, [40_000 // kinds] * kinds) for kinds in (2, 3, 127, 128, 129, 130, 255, 256))
    yield from (np.minimum(rng.geometric(p, 50_021) - 1, 255).astype(np.uint8) for p in (0.01, 0.1, 0.5, 0.97))
    yield np.full(400_009, 7, np.uint8)
    yield np.tile(rng.integers(0, 256, 70_001).astype(np.uint8), 3)  # too far apart to be found
    yield np.concatenate([rng.integers(0, 256, 80_000), np.zeros(200_000), rng.integers(0, 9, 50_000)]).astype(np.uint8)


def encode(plain, at_once):
    """Each frame, or None if it would not be shorter."""
    import cupy

    device = OnDevice(plain, [each.size for each in plain])
    scratch = cupy.empty(at_once * ZSTD_SCRATCH_BYTES, cupy.uint8)
    encode_zstd(device.streams(), device.count, scratch, device.stream)
    lengths, sizes = device.table[3].get().astype(np.int64), [each.size for each in plain]
    assert (lengths <= sizes).all()
    found = zip(device.outputs(), lengths, sizes, strict=True)
    return [out[:length].tobytes() if length < size else None for out, length, size in found]


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_the_library_decodes_what_is_encoded(seed):
    rng = np.random.default_rng(seed)
    plain = list(streams(rng))
    frames = encode(plain, at_once=len(plain))
    for frame, expected in zip(frames, plain, strict=True):
        if frame is not None:
            assert imagecodecs.zstd_decode(frame, out=expected.size) == expected.tobytes()
    assert sum(frame is not None for frame in frames) > len(plain) // 3
    assert encode(plain, at_once=5) == frames


def test_it_shrinks_as_much_as_the_library():
    """Both bytes of smooth samples with noise, and repetitions."""
    rng = np.random.default_rng(0)
    steps = (np.sin(np.arange(1 << 19) / 3e3) * 900 + 1000 + rng.normal(0, 2, 1 << 19)).astype(np.uint16)
    plain = [*steps.view(np.uint8).reshape(-1, 32 << 10, 2).transpose(0, 2, 1).reshape(-1, 32 << 10)]
    plain = [*map(np.ascontiguousarray, plain), *(np.resize(contents(rng, 300), 32 << 10) for _ in range(8))]
    ours = sum(len(frame) for frame in encode(plain, at_once=len(plain)) if frame is not None)
    theirs = sum(min(len(imagecodecs.zstd_encode(each, 1)), each.size) for each in plain)
    assert ours < 1.05 * theirs
