// One window's sum, from an array of registers, and its conversion to a sample. Part of smoothing.cu.
#pragma once

#include "samples.cuh"

// Kinds of short windows. SQUARE: boxes over integers that reach equally far in all four directions.
enum FilterKind { GAUSS, BOX, SQUARE };

// Unsigned integers are summed as the bits of floats: their unit is then the smallest float, 2^-149, and no conversion is
// needed. Weights 2^126 times as large bring the sums to units of 2^-23, normal floats that round as at any other scale.
// (32768 is added to signed samples of boxes.)
template <int KIND, typename Sample>
constexpr bool TINY = !same<Sample, float> && (KIND != GAUSS || !same<Sample, short>);

// W(TAPS) at x[at] by the contract's doubling; the compiler shares the parts among neighbours.
template <int TAPS, int STRIDE, int SIZE>
__device__ inline float doubled(const float (&x)[SIZE], int at) {
    if constexpr (TAPS == 1) {
        return x[at];
    } else {
        constexpr int HALF = TAPS / 2;
        float sum = doubled<HALF, STRIDE>(x, at) + doubled<HALF, STRIDE>(x, at + HALF * STRIDE);
        if constexpr (TAPS % 2 == 1) sum = sum + x[at + 2 * HALF * STRIDE];
        return sum;
    }
}

// One filtered sample from x[centre - RADIUS * STRIDE] … x[centre + RADIUS * STRIDE].
template <int KIND, int RADIUS, int STRIDE, int SIZE>
__device__ inline float filtered(const float (&x)[SIZE], int centre, const float* weights, float bias) {
    if constexpr (KIND == GAUSS) {
        float sum = weights[0] * x[centre];
#pragma unroll
        for (int k = 1; k <= RADIUS; ++k)
            sum = fma_rn(weights[k], x[centre - k * STRIDE] + x[centre + k * STRIDE], sum);
        return sum;
    } else {
        float sum = bias;
#pragma unroll
        for (int k = -RADIUS; k <= RADIUS; ++k) sum = fma_rn(weights[k + RADIUS], x[centre + k * STRIDE], sum);
        return sum;
    }
}

// Calls body(Taps<taps>()) for the taps of a float box.
template <int TAPS>
struct Taps {
    static constexpr int value = TAPS;
};

template <int MOST, typename Body>
__device__ inline void for_taps(int taps, Body body) {
    if constexpr (MOST > 1) {
        if (taps != MOST) return for_taps<MOST - 1>(taps, body);
    }
    body(Taps<MOST>());
}

// The bits of the finished sample in the low end of a word. Adding 2^23 units (for signed numbers 1.5 * 2^23) rounds to an
// integer, ties to even. A box's mean must round ties up: sums of an even number of samples include a bias of 1/2, which
// moves ties up and nothing else across; for up to 81 samples of 16 bits the error of `scale`, at most 65535 * 2^-24 of a
// unit, is less than 1/162, the smallest distance of any other quotient from a half.
template <int KIND, typename Sample>
__device__ inline unsigned finished(float sum, float scale) {
    if constexpr (same<Sample, float>) return __float_as_uint(KIND == BOX ? sum * scale : sum);
    else if constexpr (KIND != GAUSS) return __float_as_uint(fma_rn(sum, scale, 1.0f));
    else return __float_as_uint(sum + (TINY<KIND, Sample> ? 1.0f : 12582912.0f));
}
