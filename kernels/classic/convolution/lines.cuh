// Convolution of a line with a mask. Floor: 8 bytes per result over the device's bandwidth, up to 54 taps on an H200.
#pragma once

#include "async_copy.cuh"

constexpr int MAX_WEIGHTS = 961;  // fits the 4 KB of launch parameters

struct Mask {
    int rows, columns;  // both odd; rows = 1 for lines
    float weight[MAX_WEIGHTS];
};

__device__ inline float sample_or_zero(const float* line, long long length, long long at) {
    return at >= 0 && at < length ? line[at] : 0.0f;
}

// line_direct: one thread per result; mask and samples are read through the caches.
__global__ void __launch_bounds__(256)
line_direct(const float* __restrict__ from, const float* __restrict__ mask, float* to, long long length, int taps) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= length) return;
    float sum = 0;
    for (int k = 0; k < taps; ++k) sum = fmaf(mask[k], sample_or_zero(from, length, i + k - taps / 2), sum);
    to[i] = sum;
}

// line_constant: all threads need the same weight at the same time, which constant memory serves with one read.
__global__ void __launch_bounds__(256)
line_constant(const float* __restrict__ from, float* to, long long length, const __grid_constant__ Mask mask) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= length) return;
    float sum = 0;
    for (int k = 0; k < mask.columns; ++k)
        sum = fmaf(mask.weight[k], sample_or_zero(from, length, i + k - mask.columns / 2), sum);
    to[i] = sum;
}

// line_steps: strategy 1. A sample is read from global memory once per block; the halo takes at least one more step.
__global__ void __launch_bounds__(256)
line_steps(const float* __restrict__ from, float* to, long long length, const __grid_constant__ Mask mask) {
    extern __shared__ float tile[];
    const long long first = blockIdx.x * 256ll;
    for (int j = threadIdx.x; j < 256 + mask.columns - 1; j += 256)
        tile[j] = sample_or_zero(from, length, first + j - mask.columns / 2);
    __syncthreads();
    if (first + threadIdx.x >= length) return;
    float sum = 0;
    for (int k = 0; k < mask.columns; ++k) sum = fmaf(mask.weight[k], tile[threadIdx.x + k], sum);
    to[first + threadIdx.x] = sum;
}

// line_inputs: strategy 2. One step loads everything, but the threads of the halo compute nothing.
__global__ void __launch_bounds__(1024)
line_inputs(const float* __restrict__ from, float* to, long long length, const __grid_constant__ Mask mask) {
    __shared__ float tile[1024];
    const int results = 1024 - (mask.columns - 1);
    const long long first = static_cast<long long>(blockIdx.x) * results;
    tile[threadIdx.x] = sample_or_zero(from, length, first + threadIdx.x - mask.columns / 2);
    __syncthreads();
    if (threadIdx.x >= results || first + threadIdx.x >= length) return;
    float sum = 0;
    for (int k = 0; k < mask.columns; ++k) sum = fmaf(mask.weight[k], tile[threadIdx.x + k], sum);
    to[first + threadIdx.x] = sum;
}

// line_inner: strategy 3. No step for the halo: a neighbouring block has just read it, so it is in L2. A branch per tap.
__global__ void __launch_bounds__(256)
line_inner(const float* __restrict__ from, float* to, long long length, const __grid_constant__ Mask mask) {
    __shared__ float tile[256];
    const long long first = blockIdx.x * 256ll;
    tile[threadIdx.x] = sample_or_zero(from, length, first + threadIdx.x);
    __syncthreads();
    if (first + threadIdx.x >= length) return;
    float sum = 0;
    for (int k = 0; k < mask.columns; ++k) {
        const int j = static_cast<int>(threadIdx.x) + k - mask.columns / 2;
        sum = fmaf(mask.weight[k], j >= 0 && j < 256 ? tile[j] : sample_or_zero(from, length, first + j), sum);
    }
    to[first + threadIdx.x] = sum;
}

__device__ inline bool is_aligned(const void* at) { return reinterpret_cast<unsigned long long>(at) % 16 == 0; }

// Copies four samples of a line to shared memory, at once if all exist and are aligned to 16 bytes.
__device__ inline void stage_four(float* to, const float* line, long long length, long long at, bool aligned) {
    if (aligned && at >= 0 && at + 4 <= length) {
        copy_16_bytes(to, line + at);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) to[c] = sample_or_zero(line, length, at + c);
    }
}

template <int TAPS, int SHIFT>
__device__ inline void add_taps(float (&sum)[4], const float* weight, const float (&window)[12]) {
#pragma unroll
    for (int t = 0; t < TAPS; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] = fmaf(weight[t], window[SHIFT + t + c], sum[c]);
}

// line_registers: two runs of four results per thread. A read of 16 bytes brings the next four samples of a run, for sixteen
// multiply-adds; both runs share the weights. The tile begins SHIFT samples before the first one needed, on a multiple of
// 16 bytes, so that it is copied in whole vectors.
template <int SHIFT>
__global__ void __launch_bounds__(256)
line_registers(const float* __restrict__ from, float* to, long long length, const __grid_constant__ Mask mask) {
    constexpr int RUNS = 2, STRIDE = 1024, RESULTS = RUNS * STRIDE;
    extern __shared__ __align__(16) float tile[];
    const long long first = static_cast<long long>(blockIdx.x) * RESULTS, begin = first - mask.columns / 2 - SHIFT;
    const int vectors = (RESULTS + mask.columns - 1 + 3) / 4 + 2;  // up to two are unused
    const bool in_vectors = is_aligned(from);
    for (int j = threadIdx.x; j < vectors; j += 256) stage_four(tile + 4 * j, from, length, begin + 4 * j, in_vectors);
    wait_for_copies();
    __syncthreads();
    float sum[RUNS][4] = {}, window[RUNS][12];
    const float4* mine = reinterpret_cast<const float4*>(tile) + threadIdx.x;
#pragma unroll
    for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int v = 0; v < 2; ++v)
            *reinterpret_cast<float4*>(window[run] + 4 * v) = mine[run * STRIDE / 4 + v];
    for (int k = 0; k < mask.columns; k += 4) {
        const int left = mask.columns - k;
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            *reinterpret_cast<float4*>(window[run] + 8) = mine[run * STRIDE / 4 + k / 4 + 2];
            if (left >= 4) add_taps<4, SHIFT>(sum[run], mask.weight + k, window[run]);
            else if (left == 3) add_taps<3, SHIFT>(sum[run], mask.weight + k, window[run]);
            else add_taps<1, SHIFT>(sum[run], mask.weight + k, window[run]);
#pragma unroll
            for (int c = 0; c < 8; ++c) window[run][c] = window[run][c + 4];
        }
    }
    const bool aligned = is_aligned(to);
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
        const long long at = first + run * STRIDE + 4 * threadIdx.x;
        if (aligned && at + 4 <= length) {
            *reinterpret_cast<float4*>(to + at) = *reinterpret_cast<const float4*>(sum[run]);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (at + c < length) to[at + c] = sum[run][c];
        }
    }
}
