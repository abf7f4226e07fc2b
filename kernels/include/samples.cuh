// Conversions between an image's samples and the type of their sums.
#pragma once

template <typename A, typename B>
constexpr bool same = false;
template <typename A>
constexpr bool same<A, A> = true;

__device__ inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }

// 32768 is added to each signed sample, so that sums are unsigned and division always rounds the same way.
template <typename Sum, typename Sample>
__device__ inline Sum to_sum(Sample sample) {
    if constexpr (same<Sample, short>) return static_cast<unsigned short>(sample ^ 0x8000);
    else return static_cast<Sum>(sample);
}

// The mean of `divisor` samples, rounded to nearest: floor(sum / divisor + 1/2). For floats `divisor` is its reciprocal.
template <typename Sample, typename Sum>
__device__ inline Sample to_mean(Sum sum, Sum divisor) {
    if constexpr (same<Sum, float> || same<Sum, double>) {
        return sum * divisor;
    } else {
        const Sum mean = (sum + divisor / 2) / divisor;
        if constexpr (same<Sample, short>) return static_cast<short>(static_cast<int>(mean) - 32768);
        else return static_cast<Sample>(mean);
    }
}

// A weighted sum as a sample: integers are rounded to nearest, ties to even.
template <typename Sample, typename Work>
__device__ inline Sample to_sample(Work value) {
    if constexpr (same<Sample, Work>) return value;
    else return static_cast<Sample>(__float2int_rn(value));
}
