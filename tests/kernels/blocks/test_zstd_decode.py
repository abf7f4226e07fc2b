"""Zstandard on a GPU against libzstd: every content is decoded, every damaged frame refused or decoded as the library
does, and nothing outside a frame's output is written."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from kernels.blocks.cuda import decode_zstd
from tests.kernels.blocks.test_lz4 import NO_FAULT, SIZES, OnDevice
from tests.kernels.blocks.test_zlib import samples

pytestmark = pytest.mark.gpu


class Device(OnDevice):
    def decode_streams(self, streams, count, fault, stream):
        decode_zstd(streams, count, int(self.sizes.sum()), fault, stream)


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


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_encodes_is_decoded(seed):
    rng = np.random.default_rng(seed)
    plain = [samples(rng, size) for size in (*SIZES * 15, 300_007)]
    device = Device([encoded(rng, each) for each in plain], [each.size for each in plain])
    assert device.decode() == NO_FAULT
    for found, expected in zip(device.outputs(), plain, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_decoded_as_by_the_library(seed):
    rng = np.random.default_rng(100 + seed)
    cases = []
    for size in SIZES[:-1] * 40:
        cases.append(damaged(rng, encoded(rng, samples(rng, size)), size))
    device = Device(*zip(*cases, strict=True))
    refused = [device.decode(number, 1) != NO_FAULT for number in range(len(cases))]
    assert 0.5 < np.mean(refused) < 1
    for (stream, size), is_refused, found in zip(cases, refused, device.outputs(), strict=True):
        if not is_refused:
            np.testing.assert_array_equal(found, by_library(stream, size))


def test_the_first_fault_of_many_streams_is_given():
    rng = np.random.default_rng(7)
    plain = [samples(rng, 1031) for _ in range(300)]
    streams = [encoded(rng, each) for each in plain]
    for number in (123, 211):
        streams[number] = streams[number][:-1]
    assert Device(streams, [1031] * 300).decode() == 123
