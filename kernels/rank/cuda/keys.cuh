// Samples as unsigned keys of the same order: of floats -0.0 comes before 0.0. Part of rank.cu.
#pragma once

#include "samples.cuh"

template <typename Sample>
struct KeyType {
    using type = unsigned;
};
template <>
struct KeyType<double> {
    using type = unsigned long long;
};
template <typename Sample>
using KeyOf = typename KeyType<Sample>::type;

template <typename Sample>
__device__ inline KeyOf<Sample> key_of(Sample sample) {
    if constexpr (same<Sample, float>) {
        const unsigned bits = __float_as_uint(sample);
        return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
    } else if constexpr (same<Sample, double>) {
        const long long bits = __double_as_longlong(sample);
        return static_cast<unsigned long long>(bits ^ (bits >> 63 | static_cast<long long>(1ull << 63)));
    } else if constexpr (same<Sample, short>) {
        return static_cast<unsigned short>(sample ^ 0x8000);
    } else {
        return sample;
    }
}

template <typename Sample>
__device__ inline Sample sample_of(KeyOf<Sample> key) {
    if constexpr (same<Sample, float>) {
        return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
    } else if constexpr (same<Sample, double>) {
        return __longlong_as_double(static_cast<long long>(key >> 63 ? key ^ 1ull << 63 : ~key));
    } else if constexpr (same<Sample, short>) {
        return static_cast<short>(key ^ 0x8000);
    } else {
        return static_cast<Sample>(key);
    }
}

template <typename Sample>
__device__ inline bool is_nan(Sample sample) {
    if constexpr (same<Sample, float> || same<Sample, double>) return sample != sample;
    else return false;
}

template <typename Sample>
__device__ inline Sample not_a_number() {
    if constexpr (same<Sample, float>) return __uint_as_float(0x7FC00000u);
    else if constexpr (same<Sample, double>) return __longlong_as_double(0x7FF8000000000000ll);
    else return 0;
}
