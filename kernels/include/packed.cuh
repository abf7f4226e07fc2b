// Four neighbouring samples in registers, as in memory and as floats. Converting integers with I2F runs at an eighth of the
// rate of a byte permutation (sm_90), so their bytes are put under the exponent of 2^23 instead.
#pragma once

#include "samples.cuh"

template <typename Sample>
struct Packed {
    unsigned word[sizeof(Sample)];
};

// BIASED: 32768 is added to signed samples, so that all are at least 0.
template <bool BIASED, typename Sample>
__device__ inline void unpack(const Packed<Sample>& packed, float (&value)[4]) {
    constexpr float EXPONENT = 8388608.0f;
    constexpr unsigned EXPONENT_BITS = 0x4B000000u;
    if constexpr (same<Sample, float>) {
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = __uint_as_float(packed.word[j]);
    } else if constexpr (sizeof(Sample) == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            value[j] = __uint_as_float(__byte_perm(packed.word[0], EXPONENT_BITS, 0x7440 | j)) - EXPONENT;
    } else {
        constexpr bool IS_SIGNED = same<Sample, short>;
        constexpr float ZERO = EXPONENT + (IS_SIGNED && !BIASED ? 32768.0f : 0.0f);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned word = packed.word[j] ^ (IS_SIGNED ? 0x80008000u : 0u);
            value[2 * j] = __uint_as_float(__byte_perm(word, EXPONENT_BITS, 0x7410)) - ZERO;
            value[2 * j + 1] = __uint_as_float(__byte_perm(word, EXPONENT_BITS, 0x7432)) - ZERO;
        }
    }
}

// The lowest bits of four words, side by side.
template <typename Sample>
__device__ inline Packed<Sample> pack(const unsigned (&bits)[4]) {
    if constexpr (sizeof(Sample) == 4) return {{bits[0], bits[1], bits[2], bits[3]}};
    else if constexpr (sizeof(Sample) == 2)
        return {{__byte_perm(bits[0], bits[1], 0x5410), __byte_perm(bits[2], bits[3], 0x5410)}};
    else return {{__byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410)}};
}
