// Samples beyond the edge of an image (kernels/smoothing/borders.py defines the modes, and numbers them in this order).
#pragma once

enum BorderMode { REFLECT, MIRROR, NEAREST, WRAP, CONSTANT, VALID };

// The index along an axis of `length` samples from which the sample at `at` comes; -1: the constant beyond the edge.
// VALID needs no samples from beyond; a tile that reads ahead there gets any sample, and does not use it.
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
