"""Partials on the CPU: one pass, one thread, without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from kernels.statistics.totals import (
    FLOAT_HEAD,
    INFINITE,
    INTEGER_HEAD,
    LAYOUTS,
    LEAST,
    MINUS_INFINITE,
    MOST,
    NANS,
    NEGATIVE,
    PARTS,
    POSITIVE,
    SQUARES,
    SUM,
)

_LOW_24 = np.int64((1 << 24) - 1)
_LOW_27 = np.int64((1 << 27) - 1)


def summarise(blocks: NDArray[Any], out: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The partial of an image given as [outer, channels, inner]; see kernels.statistics."""
    layout = LAYOUTS[blocks.dtype.name]
    if out is None:
        out = np.empty((blocks.shape[1], layout.words), np.int64)
    out[...] = 0
    if not layout.is_float:
        unsigned = blocks.view(f"u{layout.bits // 8}")
        counts = np.zeros((blocks.shape[1], 1 << layout.bits), np.uint32)
        _count(unsigned, layout.least, counts)
        _integers(counts, layout.shift, out)
    elif layout.bits == 32:
        _floats(blocks.view(np.uint32), out)
    else:
        _doubles(blocks.view(np.uint64), out)
    return out


@compiled
def _count(blocks: Any, least: int, counts: Any) -> None:
    """Counts each u, from which all else follows. A signed sample's bits give u with the sign bit flipped."""
    outer, channels, inner = blocks.shape
    flip = np.int64(-least)
    for o in range(outer):
        if inner == 1:
            for c in range(channels):
                counts[c, np.int64(blocks[o, c, 0]) ^ flip] += np.uint32(1)
        else:
            for c in range(channels):
                for i in range(inner):
                    counts[c, np.int64(blocks[o, c, i]) ^ flip] += np.uint32(1)


@compiled
def _integers(counts: Any, shift: int, out: Any) -> None:
    channels, values = counts.shape
    for c in range(channels):
        row = out[c]
        for u in range(values):
            count = np.int64(counts[c, u])
            if count:
                row[LEAST] = max(row[LEAST], values - u)
                row[MOST] = u + 1
                row[SUM] += count * u
                row[SQUARES] += count * u * u
                row[INTEGER_HEAD + (u >> shift)] += count


@compiled
def _floats(blocks: Any, out: Any) -> None:
    outer, channels, inner = blocks.shape
    for o in range(outer):
        for c in range(channels):
            row = out[c]
            for i in range(inner):
                bits = np.int64(blocks[o, c, i])
                exponent, fraction, negative = (bits >> 23) & 255, bits & 0x7FFFFF, bits >> 31
                if exponent == 255:
                    row[NANS if fraction else MINUS_INFINITE if negative else INFINITE] += 1
                    continue
                key = bits ^ (0xFFFFFFFF if negative else 0x80000000)
                row[LEAST] = max(row[LEAST], 0xFFFFFFFF - key + 1)
                row[MOST] = max(row[MOST], key + 1)
                m = fraction | (0x800000 if exponent else 0)
                at = FLOAT_HEAD + exponent * 5
                row[at + (NEGATIVE if negative else POSITIVE)] += 1
                row[at + PARTS] += -m if negative else m
                row[at + PARTS + 1] += (m * m) & _LOW_24
                row[at + PARTS + 2] += (m * m) >> 24


@compiled
def _doubles(blocks: Any, out: Any) -> None:
    outer, channels, inner = blocks.shape
    for o in range(outer):
        for c in range(channels):
            row = out[c]
            for i in range(inner):
                bits = np.uint64(blocks[o, c, i])
                exponent = np.int64((bits >> np.uint64(52)) & np.uint64(2047))
                fraction = np.int64(bits & np.uint64((1 << 52) - 1))
                negative = np.int64(bits >> np.uint64(63))
                if exponent == 2047:
                    row[NANS if fraction else MINUS_INFINITE if negative else INFINITE] += 1
                    continue
                _extremes(row, bits, negative)
                m = fraction | ((1 << 52) if exponent else 0)
                a, b = m >> 27, m & _LOW_27
                sign = -1 if negative else 1
                at = FLOAT_HEAD + exponent * 8
                row[at + (NEGATIVE if negative else POSITIVE)] += 1
                row[at + PARTS] += sign * b
                row[at + PARTS + 1] += sign * a
                aa, ab, bb = a * a, 2 * a * b, b * b
                row[at + PARTS + 2] += bb & _LOW_27
                row[at + PARTS + 3] += (bb >> 27) + (ab & _LOW_27)
                row[at + PARTS + 4] += (ab >> 27) + (aa & _LOW_27)
                row[at + PARTS + 5] += aa >> 27


@compiled
def _extremes(row: Any, bits: Any, negative: Any) -> None:
    """Updates the extremes by 64-bit keys, which need unsigned words."""
    top = np.uint64(0xFFFFFFFFFFFFFFFF)
    key = bits ^ (top if negative else np.uint64(1 << 63))
    row[LEAST] = np.int64(max(np.uint64(row[LEAST]), top - key + np.uint64(1)))
    row[MOST] = np.int64(max(np.uint64(row[MOST]), key + np.uint64(1)))
