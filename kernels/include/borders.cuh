// What lies beyond the edge of an image (kernels/smoothing/borders.py defines it, and numbers the modes in this order).
#pragma once

enum BorderMode { REFLECT, MIRROR, NEAREST, WRAP, CONSTANT, VALID };

// Where along an axis of `length` samples the sample at `at` comes from; -1: the constant beyond the edge.
// VALID needs nothing from beyond; what a tile reads there ahead of itself is any sample, and is not used.
template <typename Position>
__device__ inline Position border_index(Position at, Position length, int mode) {
    if (at >= 0 && at < length) return at;
    if (mode == CONSTANT) return -1;
    if (mode == NEAREST || mode == VALID || length == 1) return at < 0 ? 0 : length - 1;
    const Position period = mode == WRAP ? length : mode == REFLECT ? 2 * length : 2 * length - 2;
    Position folded = at % period;
    if (folded < 0) folded += period;
    if (mode == WRAP || folded < length) return folded;
    return period - folded - (mode == REFLECT ? 1 : 0);
}
