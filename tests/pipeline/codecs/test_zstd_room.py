"""What Zstandard frames need while they are decoded, as the host counts it; on a GPU the kernels count the same
(tests/kernels/blocks/test_zstd_decode.py)."""

from __future__ import annotations

import imagecodecs
import numpy as np
import pytest

from pipeline.codecs.loops.streams import zstd_room

SINGLE = (0x20, b"\x07"), (0x60, bytes(2)), (0xA0, bytes(4)), (0xE0, bytes(8))  # flags, and the content's size
WINDOWED = (0x00, b"\x58"), (0x40, b"\x58" + bytes(2))


def block(kind, body, size=None, *, is_last=False):
    head = (len(body) if size is None else size) << 3 | kind << 1 | is_last
    return head.to_bytes(3, "little") + body


def literals(kind, count, stored):
    """With each form of header in turn."""
    for form, bits in ((1, 12), (3, 20)) if kind < 2 else ((1, 10), (2, 14), (3, 18)):
        size = {12: 2, 20: 3, 10: 3, 14: 4, 18: 5}[bits]
        head = kind | form << 2 | count << 4 | (0 if kind < 2 else len(stored) << (4 + bits))
        yield head.to_bytes(size, "little") + stored


def room(frames):
    lengths = np.array([len(each) for each in frames])
    memory = np.frombuffer(b"".join(frames), np.uint8)
    return zstd_room(memory, np.stack([np.cumsum(lengths) - lengths, lengths])).tolist()


@pytest.mark.parametrize("head", SINGLE + WINDOWED, ids=str)
def test_blocks_literals_and_sequences_are_counted(head):
    flags, fields = head
    start = b"\x28\xb5\x2f\xfd" + bytes([flags]) + fields
    frame = start + block(0, b"stored") + block(1, b"a", 1000) + block(0, b"", is_last=True)
    assert room([frame]) == [3, 0, 0]
    for kind, stored, counted in ((0, bytes(300), 0), (1, b"a", 300), (2, bytes(77), 300), (3, bytes(77), 300)):
        for section in literals(kind, 300, stored):
            for count, head_of_sequences in (
                (0, b"\0"),
                (5, b"\x05\0"),
                (1000, b"\x83\xe8\0"),
                (40000, b"\xff\x40\x1d\0"),
            ):
                frame = start + block(2, section + head_of_sequences, is_last=True)
                assert room([frame, frame]) == [2, 2 * counted, 2 * (count + 1)]


def test_any_bytes_are_counted_without_reading_beyond_them():
    rng = np.random.default_rng(0)
    plain = np.minimum(rng.geometric(0.3, 30_000), 255).astype(np.uint8)
    frame = np.frombuffer(imagecodecs.zstd_encode(plain, 3), np.uint8)
    for _ in range(2000):
        data = frame[: rng.integers(len(frame))].copy() if rng.integers(2) else frame.copy()
        if len(data):
            data[rng.integers(0, min(len(data), 40), 3)] = rng.integers(0, 256, 3)
        assert min(room([data.tobytes()])) >= 0
