"""LZ4 on a GPU against LZ4's own library: every content is decoded and encoded, every damaged stream refused or decoded
as the library does, and nothing outside a stream's output is written."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from kernels.blocks.cuda import decode_lz4, encode_lz4
from tests.kernels.blocks.decoders import SIZES, Decoder, OnDevice, contents

pytestmark = pytest.mark.gpu


def encoded(rng, plain):
    level, high = int(rng.choice([1, 2, 3, 9, 12])), bool(rng.integers(2))
    return np.frombuffer(imagecodecs.lz4_encode(plain, level=level, hc=high, header=False), np.uint8)


def by_library(stream, size):
    """The decoded bytes, or None."""
    out = np.zeros(size, np.uint8)
    try:
        found = imagecodecs.lz4_decode(stream.tobytes(), out=out, header=False)
    except imagecodecs.Lz4Error:
        return None
    return out if len(found) == size else None


def has_offset_zero(stream):
    """Whether the sequences come to one: the library then repeats bytes that it has not decoded."""
    data, at = bytes(stream) + bytes(3), 0

    def length(nibble):
        nonlocal at
        total = nibble
        while nibble == 15 and at < len(stream):
            at += 1
            total += data[at - 1]
            if data[at - 1] != 255:
                break
        return total

    while at < len(stream):
        token, at = data[at], at + 1
        literals = length(token >> 4)
        at += literals
        if at >= len(stream):
            return False
        if data[at : at + 2] == b"\0\0":
            return True
        at += 2
        length(token & 15)
    return False


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_the_library_decodes_what_is_encoded(seed):
    rng = np.random.default_rng(seed)
    plain = [contents(rng, size) for size in SIZES * 20]
    device = OnDevice(plain, [each.size for each in plain])
    encode_lz4(device.streams(), device.count, device.stream)
    lengths, shrunk = device.table[3].get().astype(np.int64), 0
    for found, length, expected in zip(device.outputs(), lengths, plain, strict=True):
        assert length <= expected.size
        if length < expected.size:
            shrunk += 1
            np.testing.assert_array_equal(by_library(found[:length], expected.size), expected)
    assert shrunk > len(plain) // 3
    again = OnDevice(plain, [each.size for each in plain])
    encode_lz4(again.streams(), again.count, again.stream)
    np.testing.assert_array_equal(again.table[3].get(), lengths)
    for first, second, length in zip(device.outputs(), again.outputs(), lengths, strict=True):
        if length < first.size:
            np.testing.assert_array_equal(first[:length], second[:length])


def test_it_shrinks_as_much_as_the_library():
    """Both bytes of smooth samples with noise, and repetitions."""
    rng = np.random.default_rng(0)
    steps = (np.sin(np.arange(1 << 19) / 3e3) * 900 + 1000 + rng.normal(0, 2, 1 << 19)).astype(np.uint16)
    plain = [*steps.view(np.uint8).reshape(-1, 32 << 10, 2).transpose(0, 2, 1).reshape(-1, 32 << 10)]
    plain = [*map(np.ascontiguousarray, plain), *(np.resize(contents(rng, 300), 32 << 10) for _ in range(8))]
    device = OnDevice(plain, [each.size for each in plain])
    encode_lz4(device.streams(), device.count, device.stream)
    ours = int(device.table[3].get().sum())
    theirs = sum(min(len(imagecodecs.lz4_encode(each, header=False)), each.size) for each in plain)
    assert ours < 1.05 * theirs


def damaged(rng, stream, size):
    stream, kind = stream.copy(), rng.integers(9)
    at = int(rng.integers(stream.size))
    if kind == 0:
        stream[at] ^= 1 << rng.integers(8)
    elif kind == 1:
        stream = stream[:at]
    elif kind == 2:
        stream[:] = rng.integers(0, 256, stream.size)
    elif kind == 3:
        stream[rng.integers(0, stream.size, 3)] = rng.integers(0, 256, 3)
    elif kind == 4:
        stream = np.concatenate([stream, stream[: at + 1]])
    elif kind == 5:
        stream[at : at + int(rng.integers(1, 300))] = 255
    elif kind == 6:
        size = max(size + int(rng.integers(-20, 20)), 1)
    elif kind == 7:
        stream[at : at + 2] = 0
    else:
        stream = np.concatenate([stream[:at], np.full(rng.integers(1, 70_000), 255, np.uint8), stream[at:]])
    return stream, size


LZ4 = Decoder(
    launch=lambda device, first, count, fault: decode_lz4(device.streams(first), count, fault, device.stream),
    encoded=encoded, by_library=by_library, damaged=damaged, may_refuse=has_offset_zero,
)  # fmt: skip


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_encodes_is_decoded(seed):
    rng = np.random.default_rng(seed)
    LZ4.check_encoded(rng, [contents(rng, size) for size in SIZES * 20])


CRAFTED = [
    (b"", 1),
    (b"\x00", 1),
    (b"\x10", 1),
    (b"\x10A\x00\x00", 20),  # offset 0
    (b"\x10A\x02\x00\x50BCDEF", 10),  # before the first byte
    (b"\x10A\xff\xff\x50BCDEF", 10),
    (b"\xf0" + b"\xff" * 9_000_000 + b"\x00", 100),  # 2^31 literals
    (b"\x1fA\x01\x00" + b"\xff" * 9_000_000 + b"\x00\x50BCDEF", 100),  # a match of 2^31
    (b"\xff" * 1000, 1000),
    (b"\x1fA\x01\x00" + b"\xff" * 1000, 200_000),  # a length without end
    (b"\x10A\x01\x00", 5),  # no last literals
    (b"\x13A\x01\x00\x40BCDE", 12),  # four last literals
    (b"\x50ABCDE", 4),
    (b"\x50ABCDE", 6),
]


@pytest.mark.sanitize("blocks")
def test_crafted_streams_are_refused():
    for stream, size in CRAFTED:
        device = OnDevice([np.frombuffer(stream, np.uint8)], [size])
        assert LZ4.decode(device) == 0, stream[:20]
        device.outputs()
    device = OnDevice([b"\x50ABCDE", b"\x10A\x00\x00", b"\x50ABCDE", b""], [5, 20, 5, 1])
    assert LZ4.decode(device) == 1, "the first of several"


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_decode_as_by_the_library_or_are_refused(seed):
    rng = np.random.default_rng(100 + seed)
    LZ4.check_damaged(rng, [contents(rng, size) for size in SIZES * 40])
