"""The rank filter of any window, any dtype, one tile at a time: a moving window over the tile's sorted samples.

The samples of a tile with its halo are sorted once, so that each has a place in one order. The window's samples are
a set of bits over these places. Along a line the window moves by one sample: what enters sets bits, what leaves clears
them, and the result is followed from bit to bit, a few steps each time. The cost grows with the surface of the window,
not with its volume, and hardly depends on the dtype.

Source: Huang, Yang and Tang, "A fast two-dimensional median filtering algorithm" (1979), with a set of places
instead of a histogram of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled, ir, types
from kernels.smoothing.cpu.rows import generated

DIGIT = 11  # bits that a pass of the sort looks at
MISSING, NAN = -1, -2  # instead of a place


@generated
def _trailing_zeros(_typing: Any, word: Any) -> Any:
    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(word), code


@generated
def _leading_zeros(_typing: Any, word: Any) -> Any:
    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(word), code


@compiled
def ordered_tile(
    source: Any,
    sources: Any,
    lengths: Any,
    inner: int,
    target: Any,
    out_lengths: Any,
    window: Any,
    ranks: Any,
    is_float: bool,
    span: Any,
    constants: Any,
    tile: Any,
) -> None:
    """Fill a tile of the result.

    source, target : integers, the bits of the samples of [planes, three axes, inner]
    sources        : of each axis, the index that each position of result and halo comes from; -1: beyond the edge
    window         : boolean array over the axes, True for the samples that count
    ranks          : the rank to take, by the number of samples present
    span           : lowest and highest key of numbers, first and last that mark missing samples, and whether NaN do
    constants      : bits beyond the edge, of NaN, and of a window of missing samples
    tile           : int64 (2, 5), begin and end along planes, axes and inner
    """
    sources0, sources1, sources2 = sources
    taps0, taps1, taps2 = window.shape
    outs0, outs1, outs2 = tile[1, 1] - tile[0, 1], tile[1, 2] - tile[0, 2], tile[1, 3] - tile[0, 3]
    side0, side1, side2 = outs0 + taps0 - 1, outs1 + taps1 - 1, outs2 + taps2 - 1
    bits = np.empty(side0 * side1 * side2, source.dtype)
    cval, nan, empty = constants
    plane, within = tile[0, 0], tile[0, 4]
    at = 0
    for z in range(side0):
        from0 = sources0[tile[0, 1] + z]
        for y in range(side1):
            from1 = sources1[tile[0, 2] + y]
            line = ((plane * lengths[0] + from0) * lengths[1] + from1) * lengths[2]
            for x in range(side2):
                from2 = sources2[tile[0, 3] + x]
                beyond = from0 < 0 or from1 < 0 or from2 < 0
                bits[at] = cval if beyond else source[(line + from2) * inner + within]
                at += 1
    order, places = _sorted(bits, is_float, span)
    inside, enter, leave = _moves(window, side1, side2)
    present = np.zeros((len(order) >> 6) + 1, np.uint64)
    counts = np.zeros(3, np.int64)  # of samples present, of NaN, and of those below `follower`
    for z in range(outs0):
        for y in range(outs1):
            first = (z * side1 + y) * side2
            follower = len(order) >> 1
            counts[:] = 0
            for offset in inside:
                _enter(present, counts, places[first + offset], follower)
            written = ((plane * out_lengths[0] + tile[0, 1] + z) * out_lengths[1] + tile[0, 2] + y) * out_lengths[2]
            written = (written + tile[0, 3]) * inner + within
            for x in range(outs2):
                if x > 0:
                    for i in range(len(enter)):
                        _leave(present, counts, places[first + x - 1 + leave[i]], follower)
                        _enter(present, counts, places[first + x + enter[i]], follower)
                if counts[1] > 0:
                    target[written + x * inner] = nan
                elif counts[0] == 0:
                    target[written + x * inner] = empty
                else:
                    follower = _follow(present, counts, follower, ranks[counts[0]])
                    target[written + x * inner] = bits[order[follower]]
            present[:] = 0


@compiled
def _sorted(bits: Any, is_float: bool, span: Any) -> Any:
    """The samples in ascending order, and the place of each in it, MISSING or NAN."""
    lowest, highest, first, last, omit_nan = span
    count = len(bits)
    keys, more_keys = np.empty(count, np.uint64), np.empty(count, np.uint64)
    order, more_order = np.empty(count, np.int32), np.empty(count, np.int32)
    places = np.empty(count, np.int32)
    most = np.iinfo(np.int64).max if bits.itemsize == 8 else np.iinfo(np.int32).max
    present = 0
    widest = np.uint64(0)
    for i in range(count):
        key = np.int64(bits[i])
        if is_float and key < 0:
            key ^= most
        if key < lowest or key > highest:
            places[i] = MISSING if omit_nan else NAN
        elif first <= key <= last:
            places[i] = MISSING
        else:
            keys[present] = np.uint64(key) - np.uint64(lowest)
            widest |= keys[present]
            order[present] = i
            present += 1
    for shift in range(0, 64, DIGIT):
        if widest >> np.uint64(shift) == 0:
            break
        starts = np.zeros(1 << DIGIT, np.int32)
        for i in range(present):
            starts[(keys[i] >> np.uint64(shift)) & np.uint64((1 << DIGIT) - 1)] += 1
        total = 0
        for digit in range(1 << DIGIT):
            starts[digit], total = total, total + starts[digit]
        for i in range(present):
            digit = (keys[i] >> np.uint64(shift)) & np.uint64((1 << DIGIT) - 1)
            more_keys[starts[digit]], more_order[starts[digit]] = keys[i], order[i]
            starts[digit] += 1
        keys, more_keys = more_keys, keys
        order, more_order = more_order, order
    for i in range(present):
        places[order[i]] = i
    return order[:present], places


@compiled
def _moves(window: Any, side1: int, side2: int) -> Any:
    """Offsets in the tile of the window's samples, of those that enter when it moves by one, and of those that leave,
    before the move."""
    taps0, taps1, taps2 = window.shape
    inside = np.empty(window.size, np.int64)
    enter, leave = np.empty_like(inside), np.empty_like(inside)
    samples = moving = leaving = 0
    for z in range(taps0):
        for y in range(taps1):
            for x in range(taps2):
                if not window[z, y, x]:
                    continue
                offset = (z * side1 + y) * side2 + x
                inside[samples] = offset
                samples += 1
                if x + 1 == taps2 or not window[z, y, x + 1]:
                    enter[moving] = offset
                    moving += 1
                if x == 0 or not window[z, y, x - 1]:
                    leave[leaving] = offset
                    leaving += 1
    return inside[:samples], enter[:moving], leave[:leaving]


@compiled
def _enter(present: Any, counts: Any, place: int, follower: int) -> None:
    if place >= 0:
        present[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
        counts[0] += 1
        counts[2] += place < follower
    elif place == NAN:
        counts[1] += 1


@compiled
def _leave(present: Any, counts: Any, place: int, follower: int) -> None:
    if place >= 0:
        present[place >> 6] &= ~(np.uint64(1) << np.uint64(place & 63))
        counts[0] -= 1
        counts[2] -= place < follower
    elif place == NAN:
        counts[1] -= 1


@compiled
def _follow(present: Any, counts: Any, follower: int, rank: int) -> int:
    """The place of the sample with `rank` present ones below; `counts[2]` is kept for it."""
    below = counts[2]
    while below > rank:  # back to the bit before
        word = follower >> 6
        found = present[word] & ((np.uint64(1) << np.uint64(follower & 63)) - np.uint64(1))
        while found == 0:
            word -= 1
            found = present[word]
        follower = (word << 6) + 63 - int(_leading_zeros(found))
        below -= 1
    while True:
        word = follower >> 6
        found = present[word] & (~np.uint64(0) << np.uint64(follower & 63))
        while found == 0:
            word += 1
            found = present[word]
        follower = (word << 6) + int(_trailing_zeros(found))
        if below == rank:
            break
        follower += 1
        below += 1
    counts[2] = below
    return follower
