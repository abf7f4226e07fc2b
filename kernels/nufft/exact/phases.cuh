// Shared by the exact transform's kernels: phases as fixed-point turns, their sines and cosines, scaled samples.
//
// A phase k r / N is kept modulo one turn in 32 bits, 2³² to the turn. Products with integers r then wrap exactly for any k;
// rounding k / N costs |r| 2⁻³³ turns: 1e-7 radians at r = 128.
// Axes are counted from the last: a two-dimensional image has the sizes 1, x, y, and no phase along the first.
#pragma once

struct ExactShape {
    long long samples;  // of the trajectory
    int coils;          // images, or sets of samples, that share it
    int size[3];
};

__device__ inline unsigned turns(double k, double size) {
    const double whole = k / size;
    return static_cast<unsigned>(__double2ll_rn((whole - rint(whole)) * 4294967296.0));
}

// e^{2πi phase}: to an ulp; and from the special-function unit, absolute error below 6e-7.
__device__ inline float2 accurate_unit(unsigned phase) {
    float2 unit;
    sincospif(static_cast<int>(phase) * 0x1p-31f, &unit.y, &unit.x);
    return unit;
}

__device__ inline float2 fast_unit(unsigned phase) {
    float2 unit;
    __sincosf(static_cast<int>(phase) * 1.46291808e-9f, &unit.y, &unit.x);  // 2π 2⁻³²
    return unit;
}

__device__ inline float2 times(float2 a, float2 b) {
    return make_float2(fmaf(-a.y, b.y, a.x * b.x), fmaf(a.y, b.x, a.x * b.y));
}

// The power of two that brings the largest real or imaginary part of a coil into [2¹³, 2¹⁴): sums of two, times factors
// bounded by one, then stay below fp16's 65504, and fp16 keeps its 11 bits down to 2⁻²⁷ of the largest.
__device__ inline int exponent_of(unsigned largest) {
    const float value = __uint_as_float(largest);
    return value > 0 ? 13 - ilogbf(value) : 0;
}

// Phases of one grid step along each axis and, in `w`, of half a step along the last. `steps`, if not null, receives
// e^{2πi n phase} of the axis before the last for n = 1, 2 and 4.
template <typename Real>
__global__ void exact_phases(const Real* __restrict__ trajectory, uint4* __restrict__ phases, float2* __restrict__ steps,
                             int dimensions, const __grid_constant__ ExactShape shape) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (m >= shape.samples) return;
    const Real* k = trajectory + m * dimensions;
    const double last = k[dimensions - 1];
    uint4 phase;
    phase.x = dimensions == 3 ? turns(k[0], shape.size[0]) : 0;
    phase.y = turns(k[dimensions - 2], shape.size[1]);
    phase.z = turns(last, shape.size[2]);
    phase.w = turns(last, 2.0 * shape.size[2]);
    phases[m] = phase;
    if (steps)
#pragma unroll
        for (int n = 0; n < 3; ++n) steps[n * shape.samples + m] = accurate_unit(phase.y << n);
}

// The largest real or imaginary part of each coil's values, times their weights if given; `largest` starts as zeros.
__global__ void exact_largest(const float2* __restrict__ values, const float* __restrict__ weights,
                              unsigned* __restrict__ largest, long long count, int coils) {
    for (int coil = blockIdx.y; coil < coils; coil += gridDim.y) {
        float most = 0;
        for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
             i += static_cast<long long>(gridDim.x) * blockDim.x) {
            const float2 value = values[coil * count + i];
            most = fmaxf(most, fmaxf(fabsf(value.x), fabsf(value.y)) * (weights ? fabsf(weights[i]) : 1.0f));
        }
        for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        if (threadIdx.x % 32 == 0) atomicMax(largest + coil, __float_as_uint(most));
    }
}

// Samples times weights, scaled to fp16's range, turned by half a grid step along the last axis if its size is even, which
// makes its points symmetric about their middle.
__global__ void exact_samples(const float2* __restrict__ samples, const float* __restrict__ weights,
                              const uint4* __restrict__ phases, const unsigned* __restrict__ largest,
                              float2* __restrict__ scaled, const __grid_constant__ ExactShape shape) {
    const long long m = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (m >= shape.samples) return;
    const float2 turn = shape.size[2] % 2 ? make_float2(1, 0) : accurate_unit(0u - phases[m].w);
    const float weight = weights ? weights[m] : 1.0f;
    for (int coil = blockIdx.y; coil < shape.coils; coil += gridDim.y) {
        const int exponent = exponent_of(largest[coil]);
        const float2 sample = samples[coil * shape.samples + m];
        scaled[coil * shape.samples + m] =
            times(make_float2(scalbnf(sample.x * weight, exponent), scalbnf(sample.y * weight, exponent)), turn);
    }
}
