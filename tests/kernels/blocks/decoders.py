"""Streams on a GPU, and what every decoder must do with them: decode what the codec's own library encodes, and decode
damaged streams as the library does or refuse them, without writing outside a stream's output."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.blocks.cuda import Streams

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


def samples(rng, size):
    """As `contents`; or differences of noise, or bytes of which some are so rare that their codes are long."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.normal(0, 17, size // 2 + 1).round().astype(np.int16).view(np.uint8)[:size]
    if kind == 1:
        return np.minimum(rng.geometric(0.5, size) * 8 + rng.integers(0, 3, size), 255).astype(np.uint8)
    return contents(rng, size)


class OnDevice:
    """Streams one behind another, at any alignment, and outputs of some sizes with guards between them."""

    def __init__(self, streams, sizes):
        import cupy

        self.count, self.sizes = len(streams), np.array(sizes)
        self.lengths = np.array([len(each) for each in streams])
        padding = bytes(-int(self.lengths.sum()) % 4)  # the last word is read as one
        self.bytes = np.frombuffer(b"".join(map(bytes, streams)) + padding, np.uint8)
        self.data = cupy.asarray(self.bytes)
        rooms = self.sizes + 2 * GUARD
        self.firsts = np.cumsum(rooms) - self.sizes - GUARD
        self.out = cupy.full(int(rooms.sum()), GUARD_BYTE, cupy.uint8)
        self.starts = np.cumsum(self.lengths) - self.lengths
        rows = self.starts + self.data.data.ptr, self.lengths, self.firsts + self.out.data.ptr, self.sizes
        self.table = cupy.asarray(np.stack(rows).astype(np.uint64))
        self.stream = cupy.cuda.get_current_stream()

    def streams(self, first=0):
        return Streams(*(ctypes.c_void_p(row.data.ptr + 8 * first) for row in self.table))

    def outputs(self):
        found, inside = self.out.get(), np.zeros(self.out.size, bool)
        for first, size in zip(self.firsts, self.sizes, strict=True):
            inside[first : first + size] = True
        assert (found[~inside] == GUARD_BYTE).all()
        return [found[first : first + size] for first, size in zip(self.firsts, self.sizes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A codec's kernels and its library.

    launch     : with an `OnDevice`, the first stream and how many, and the fault
    encoded    : by the library, with any of its options
    by_library : the decoded bytes of a stream and a size, or None
    damaged    : a stream and its size with one kind of damage
    may_refuse : whether a stream that the library decodes may be refused
    """

    launch: Callable[[OnDevice, int, int, Any], None]
    encoded: Callable[[np.random.Generator, Any], Any]
    by_library: Callable[[Any, int], Any]
    damaged: Callable[[np.random.Generator, Any, int], tuple[Any, int]]
    may_refuse: Callable[[Any], bool]

    def decode(self, device, first=0, count=None):
        """The index of the first fault, or NO_FAULT."""
        import cupy

        fault = cupy.full((), NO_FAULT, cupy.int32)
        self.launch(device, first, device.count if count is None else count, fault)
        return int(fault)

    def check_encoded(self, rng, plain):
        device = OnDevice([self.encoded(rng, each) for each in plain], [each.size for each in plain])
        assert self.decode(device) == NO_FAULT
        for found, expected in zip(device.outputs(), plain, strict=True):
            np.testing.assert_array_equal(found, expected)

    def check_damaged(self, rng, plain):
        """One by one, and all in one launch."""
        cases = [self.damaged(rng, self.encoded(rng, each), each.size) for each in plain]
        device = OnDevice(*zip(*cases, strict=True))
        first = self.decode(device)
        at_once = [each.copy() for each in device.outputs()]
        refused = [self.decode(device, number, 1) != NO_FAULT for number in range(device.count)]
        assert first == refused.index(True)
        assert 0.25 < np.mean(refused) < 1
        for (stream, size), is_refused, *found in zip(cases, refused, at_once, device.outputs(), strict=True):
            expected = self.by_library(stream, size)
            if is_refused:
                assert expected is None or self.may_refuse(stream)
            else:
                for each in found:
                    np.testing.assert_array_equal(each, expected)

    def check_first_fault(self, rng):
        plain = [samples(rng, 1031) for _ in range(300)]
        streams = [self.encoded(rng, each) for each in plain]
        for number in (123, 211):
            streams[number] = streams[number][:-1]
        assert self.decode(OnDevice(streams, [1031] * 300)) == 123
