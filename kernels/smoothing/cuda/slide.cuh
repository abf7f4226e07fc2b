// Boxes of integers past 255 samples along an axis, by sums that slide, at a cost that does not grow with the window. Part of
// smoothing.cu, which defines Axis.
#pragma once

#include "block_scan.cuh"
#include "borders.cuh"
#include "samples.cuh"

//   slide_columns   a thread a column: the first window's sum, then + entering - leaving row by row
//   slide_rows      a block a piece of a line: samples -> shared memory -> prefix sums -> barrier -> differences
//
// Floors for N samples of b bytes (8192 x 8192 u16 RGB, 1023 x 1023) on an H200 (4.2 TB/s): down the columns N (2 b + 4) bytes
// and another N b for each start of a band, across N (4 + b): 16 N in all, 760 us.

constexpr int SLIDE_THREADS = 256, SLIDE_BATCH = 8;

// floor((sum + half) / samples), the mean rounded to nearest, as (sum + half) * multiplier >> 64 + shift.
struct Quotient {
    unsigned long long half, multiplier;
    int shift;
};

template <typename Out>
__device__ inline Out slid(unsigned long long sum, const Quotient& quotient) {
    if constexpr (same<Out, unsigned>) return static_cast<unsigned>(sum);
    else {
        const unsigned mean = static_cast<unsigned>(__umul64hi(sum + quotient.half, quotient.multiplier) >> quotient.shift);
        return static_cast<Out>(same<Out, short> ? mean ^ 0x8000u : mean);
    }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(SLIDE_THREADS)
slide_columns(const In* __restrict__ in, Out* __restrict__ out, Axis axis, unsigned fill, Quotient quotient,
              long long band_rows) {
    const long long tiles = (axis.inner + SLIDE_THREADS - 1) / SLIDE_THREADS;
    const long long bands = (axis.out_length + band_rows - 1) / band_rows;
    const long long column = blockIdx.x % tiles * SLIDE_THREADS + threadIdx.x, rest = blockIdx.x / tiles;
    if (column >= axis.inner) return;
    const long long begin = rest % bands * band_rows, end = min(begin + band_rows, axis.out_length);
    const In* line = in + rest / bands * axis.length * axis.inner + column;
    Out* target = out + (rest / bands * axis.out_length + begin) * axis.inner + column;
    const long long first = begin - (axis.mode == VALID ? 0 : axis.before);
    const auto tap = [&](long long at) {
        const long long from = border_index(at, axis.length, axis.mode);
        return from < 0 ? fill : to_sum<unsigned>(__ldg(line + from * axis.inner));
    };
    unsigned sum = 0;
#pragma unroll 8
    for (int k = 0; k < axis.taps - 1; ++k) sum += tap(first + k);
    for (long long y = 0; y < end - begin; y += SLIDE_BATCH) {
        unsigned entering[SLIDE_BATCH], leaving[SLIDE_BATCH];
#pragma unroll
        for (int i = 0; i < SLIDE_BATCH; ++i) {
            entering[i] = tap(first + y + i + axis.taps - 1);
            leaving[i] = tap(first + y + i);
        }
#pragma unroll
        for (int i = 0; i < SLIDE_BATCH; ++i) {
            sum += entering[i];
            if (y + i < end - begin) target[i * axis.inner] = slid<Out>(sum, quotient);
            sum -= leaving[i];
        }
        target += SLIDE_BATCH * axis.inner;
    }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(SLIDE_THREADS)
slide_rows(const In* __restrict__ in, Out* __restrict__ out, Axis axis, unsigned fill, Quotient quotient, int outputs) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned long long warps[SLIDE_THREADS / 32];
    unsigned long long* before = reinterpret_cast<unsigned long long*>(shared);  // [pixel, channel]: sum of pixels before
    const int channels = static_cast<int>(axis.inner), thread = threadIdx.x;
    const long long pieces = (axis.out_length + outputs - 1) / outputs;
    const long long line = blockIdx.x / pieces, begin = blockIdx.x % pieces * outputs;
    const int wanted = static_cast<int>(min(static_cast<long long>(outputs), axis.out_length - begin));
    const int pixels = wanted + axis.taps - 1;
    const long long first = begin - (axis.mode == VALID ? 0 : axis.before);
    const In* source = in + line * axis.length * channels;
    for (int i = thread; i < pixels * channels; i += SLIDE_THREADS) {
        const long long at = first + i / channels;
        const long long from = border_index(at, axis.length, axis.mode);
        before[i] = from < 0 ? fill : to_sum<unsigned>(__ldg(source + from * channels + i % channels));
    }
    const int run = (pixels + SLIDE_THREADS - 1) / SLIDE_THREADS | 1;  // pixels of a thread; odd, for the banks
    const int low = min(thread * run, pixels), high = min(low + run, pixels);
    for (int channel = 0; channel < channels; ++channel) {
        __syncthreads();
        unsigned long long own = 0, total;
        for (int pixel = low; pixel < high; ++pixel) own += before[pixel * channels + channel];
        unsigned long long sum = exclusive_block_sum<SLIDE_THREADS>(own, warps, total);
        for (int pixel = low; pixel < high; ++pixel) {
            const unsigned long long sample = before[pixel * channels + channel];
            before[pixel * channels + channel] = sum;
            sum += sample;
        }
        if (thread == 0) before[pixels * channels + channel] = total;
    }
    __syncthreads();
    Out* target = out + (line * axis.out_length + begin) * channels;
    for (int i = thread; i < wanted * channels; i += SLIDE_THREADS)
        target[i] = slid<Out>(before[i + axis.taps * channels] - before[i], quotient);
}
