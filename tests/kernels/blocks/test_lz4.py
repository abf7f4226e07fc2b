"""LZ4 on a GPU against LZ4's own library: every content is decoded and encoded, every damaged stream refused or decoded
as the library does, and nothing outside a stream's output is written."""

from __future__ import annotations

import ctypes

import imagecodecs
import numpy as np
import pytest

from kernels.blocks.cuda import Streams, decode_lz4, encode_lz4

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 5, 12, 13, 17, 31, 33, 64, 100, 257, 1031, 4099, 20_011, 150_001)
GUARD, GUARD_BYTE = 64, 0xA5
NO_FAULT = 0x7F7F7F7F


def contents(rng, size):
    kind = rng.integers(7)
    if kind == 0:
        return np.full(size, rng.integers(256), np.uint8)
    if kind == 1:
        return rng.integers(0, 256, size).astype(np.uint8)
    if kind == 2:
        return rng.integers(0, 2, size).astype(np.uint8)
    if kind == 3:
        return np.resize(rng.integers(0, 256, rng.integers(1, 70)).astype(np.uint8), size)
    if kind == 4:
        return np.repeat(rng.integers(0, 256, size), rng.integers(1, 400, size))[:size].astype(np.uint8)
    noise = (rng.normal(0, 3, size).round() + 100).astype(np.uint8)
    for _ in range(size // 100 if kind == 5 else 0):  # repetitions from anywhere before
        length = int(rng.integers(4, min(400, size // 2)))
        first, second = rng.integers(0, size - length + 1, 2)
        noise[second : second + length] = noise[first : first + length].copy()
    return noise


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


class OnDevice:
    """Streams one behind another, at any alignment, and outputs of some sizes with guards between them."""

    decode_streams = staticmethod(decode_lz4)

    def __init__(self, streams, sizes):
        import cupy

        self.count, self.sizes = len(streams), np.array(sizes)
        lengths = np.array([len(each) for each in streams])
        padding = bytes(-int(lengths.sum()) % 4)  # the last word is read as one
        self.data = cupy.asarray(np.frombuffer(b"".join(map(bytes, streams)) + padding, np.uint8))
        rooms = self.sizes + 2 * GUARD
        self.firsts = np.cumsum(rooms) - self.sizes - GUARD
        self.out = cupy.full(int(rooms.sum()), GUARD_BYTE, cupy.uint8)
        starts = np.cumsum(lengths) - lengths + self.data.data.ptr
        rows = starts, lengths, self.firsts + self.out.data.ptr, self.sizes
        self.table = cupy.asarray(np.stack(rows).astype(np.uint64))
        self.stream = cupy.cuda.get_current_stream()

    def streams(self, first=0):
        return Streams(*(ctypes.c_void_p(row.data.ptr + 8 * first) for row in self.table))

    def decode(self, first=0, count=None):
        """The index of the first fault, or NO_FAULT."""
        import cupy

        fault = cupy.full((), NO_FAULT, cupy.int32)
        self.decode_streams(self.streams(first), self.count if count is None else count, fault, self.stream)
        return int(fault)

    def outputs(self):
        found, inside = self.out.get(), np.zeros(self.out.size, bool)
        for first, size in zip(self.firsts, self.sizes, strict=True):
            inside[first : first + size] = True
        assert (found[~inside] == GUARD_BYTE).all()
        return [found[first : first + size] for first, size in zip(self.firsts, self.sizes, strict=True)]


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_encodes_is_decoded(seed):
    rng = np.random.default_rng(seed)
    plain = [contents(rng, size) for size in SIZES * 20]
    device = OnDevice([encoded(rng, each) for each in plain], [each.size for each in plain])
    assert device.decode() == NO_FAULT
    for found, expected in zip(device.outputs(), plain, strict=True):
        np.testing.assert_array_equal(found, expected)


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
        assert device.decode() == 0, stream[:20]
        device.outputs()
    device = OnDevice([b"\x50ABCDE", b"\x10A\x00\x00", b"\x50ABCDE", b""], [5, 20, 5, 1])
    assert device.decode() == 1, "the first of several"


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_decode_as_by_the_library_or_are_refused(seed):
    rng = np.random.default_rng(100 + seed)
    plain = [contents(rng, size) for size in SIZES * 40]
    cases = [damaged(rng, encoded(rng, each), each.size) for each in plain]
    streams, sizes = zip(*cases, strict=True)
    device = OnDevice(streams, sizes)
    first = device.decode()
    at_once = [each.copy() for each in device.outputs()]
    refused = [device.decode(number, 1) != NO_FAULT for number in range(device.count)]
    assert first == refused.index(True)
    for stream, size, is_refused, *found in zip(streams, sizes, refused, at_once, device.outputs(), strict=True):
        expected = by_library(stream, size)
        if is_refused:
            assert expected is None or has_offset_zero(stream)
        else:
            for each in found:
                np.testing.assert_array_equal(each, expected)
    assert len(refused) // 4 < sum(refused) < len(refused)
