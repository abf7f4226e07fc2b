"""Frames of XTC trajectories, checked before MDAnalysis reads them: a damaged one would end the process.

Source: xdrfile.c, `xdrfile_decompress_coord_float`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled

# A mark and the atoms; step, time and cell, which may be anything; the atoms again; and, of more than nine, the
# precision, the least and the largest integers, the size of small differences, and the packed bytes.
HEAD = struct.Struct(">2i44xif8i")
_MARK, _NOT_PACKED, _NOT_PACKED_HEAD = 1995, 9, 56
_FIRST_SMALL, _END_SMALL = 9, 73  # indices of the format's table of sizes
_WIDEST = 0xFFFFFF  # if a range is larger, the three integers of an atom are packed one by one


def frame_bytes(head: tuple[Any, ...]) -> tuple[int, int | None]:
    """The atoms and the length of a frame, or None if its header is damaged."""
    mark, atoms, packed_atoms, precision, *bounds, small, packed = head
    if mark != _MARK or atoms < 1 or packed_atoms != atoms:
        return atoms, None
    if atoms <= _NOT_PACKED:
        return atoms, _NOT_PACKED_HEAD + 12 * atoms
    fits = all(0 < size < 1 << 31 for size in _sizes(bounds)) and _FIRST_SMALL <= small < _END_SMALL
    fits &= 0 < precision < math.inf and 0 < packed <= int(3.6 * atoms) * 4  # bytes: MDAnalysis's memory for them
    return atoms, HEAD.size + -(-packed // 4) * 4 if fits else None


def is_whole(frame: bytes) -> bool:
    """Whether the packed bytes of a frame, whose header is not damaged, hold its atoms and no more."""
    _, atoms, _, _, *bounds, small, packed = HEAD.unpack_from(frame)
    if atoms <= _NOT_PACKED:
        return True
    sizes = _sizes(bounds)
    one_by_one = max(sizes) > _WIDEST
    bits = sum(size.bit_length() for size in sizes) if one_by_one else math.prod(sizes).bit_length()
    return bool(_unpacks(np.frombuffer(frame, np.uint8, packed, HEAD.size), atoms, bits, small))


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [high - low + 1 for low, high in zip(bounds[:3], bounds[3:], strict=True)]


@compiled
def _unpacks(packed: Any, atoms: Any, bits: Any, small: Any) -> Any:
    """Walk over atoms of `bits` each, which runs of up to ten atoms of `small` bits may follow."""
    at, atom, run, end = 0, 0, 0, 8 * len(packed)
    while atom < atoms:
        at, step = at + bits + 1, 0
        if _bits(packed, at - 1, 1):
            run = _bits(packed, at, 5)
            at, step, run = at + 5, run % 3 - 1, run // 3
        atom, at, small = atom + 1 + run, at + run * small, small + step
        if not _FIRST_SMALL <= small < _END_SMALL:
            return False
    return atom == atoms and end - 8 < at <= end


@compiled
def _bits(packed: Any, at: Any, count: Any) -> Any:
    """A number of `count` bits, the most significant first; zeros beyond the end."""
    found = 0
    for place in range(at, at + count):
        found <<= 1
        if place >> 3 < len(packed):
            found |= packed[place >> 3] >> (7 - (place & 7)) & 1
    return found
