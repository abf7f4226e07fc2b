// Boxes over floats, one axis per pass, at the speed of memory. Part of smoothing.cu, which defines Axis.
#pragma once

#include "borders.cuh"

// The contract's doubling, W(2m)[i] = W(m)[i] + W(m)[i + m] and W(2m+1)[i] = W(2m)[i] + x[i + 2m], level by level: level l
// builds windows of taps >> (levels - l) samples; 64 samples take six levels above single samples.
constexpr int MAX_LEVELS = 6;

// box_columns: a block goes down 32 columns, BATCH rows a warp in each step. A level stores the sums it has received in its
// ring in shared memory, and adds to them those of m rows before:
//   load the next rows -> each level: store -> barrier -> read -> add -> ... -> results
// Each sample is loaded once, and each level takes one store and one load of shared memory.
constexpr int BATCH = 8;

// Slots of a level's ring: `delay` rows, a step's, and a copy of the first batch so that reading a batch never wraps.
template <int GROUP>
__device__ inline int ring_slots(int delay) { return (delay + BATCH - 1) / BATCH * BATCH + GROUP; }

template <typename Real, int COUNT>
__device__ inline void load_batch(Real (&rows)[COUNT], const Real* column, long long position, const Axis& axis,
                                  Real fill) {
    if (position >= 0 && position + COUNT <= axis.length) {
        const Real* from = column + position * axis.inner;
#pragma unroll
        for (int i = 0; i < COUNT; ++i, from += axis.inner) rows[i] = __ldg(from);
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const long long from = border_index(position + i, axis.length, axis.mode);
        rows[i] = from < 0 ? fill : __ldg(column + from * axis.inner);
    }
}

template <typename Real, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, (sizeof(Real) == 8 ? 16 : 24) / WARPS)
box_columns(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Real fill, Real scale,
            long long band_rows) {
    constexpr int GROUP = WARPS * BATCH;
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long tiles = (axis.inner + 31) / 32, bands = (axis.out_length + band_rows - 1) / band_rows;
    const long long wanted = blockIdx.x % tiles * 32 + lane, rest = blockIdx.x / tiles;
    const long long column = min(wanted, axis.inner - 1);
    const long long outer = rest / bands, y_begin = rest % bands * band_rows;
    const int count = static_cast<int>(min(band_rows, axis.out_length - y_begin)), entering = count + axis.taps - 1;
    const Real* source = in + outer * axis.length * axis.inner + column;
    const long long first = y_begin + (axis.mode == VALID ? 0 : -axis.before) + warp * BATCH;
    Real* target = out + (outer * axis.out_length + y_begin) * axis.inner + column;

    const int levels = 31 - __clz(axis.taps);
    int written[MAX_LEVELS];  // the slot of the warp's rows
#pragma unroll
    for (int level = 0; level < MAX_LEVELS; ++level) written[level] = warp * BATCH;
    Real next[BATCH];
    load_batch(next, source, first, axis, fill);
#pragma unroll 1
    for (int row = 0; row < entering; row += GROUP) {
        Real sample[BATCH], sum[BATCH];  // sum[i]: of the level's window that ends at row + i
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum[i] = sample[i] = next[i];
        if (row + GROUP + warp * BATCH < entering) load_batch(next, source, first + row + GROUP, axis, fill);
        Real* ring = reinterpret_cast<Real*>(shared) + lane;
#pragma unroll
        for (int level = 0; level < MAX_LEVELS; ++level) {
            if (level >= levels) break;
            const bool odd = axis.taps >> (levels - level - 1) & 1;
            const int delay = (axis.taps >> (levels - level)) + odd, slots = ring_slots<GROUP>(delay), to = written[level];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) ring[(to + i) * 32] = sum[i];
            if (to == 0) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) ring[(slots + i) * 32] = sum[i];
            }
            __syncthreads();
            const Real* delayed = ring + (to - delay + (to < delay ? slots : 0)) * 32;
            if (odd) {
                const Real previous = ring[(to == 0 ? slots - 1 : to - 1) * 32];
#pragma unroll
                for (int i = BATCH - 1; i >= 0; --i)
                    sum[i] = delayed[i * 32] + (i > 0 ? sum[max(i - 1, 0)] : previous) + sample[i];
            } else {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) sum[i] = delayed[i * 32] + sum[i];
            }
            written[level] = to + GROUP >= slots ? to + GROUP - slots : to + GROUP;
            ring += (slots + BATCH) * 32;
        }
        if (levels == 1) __syncthreads();  // otherwise the next level's barrier
        const int end = row + warp * BATCH;
        Real* line = target + (end - (axis.taps - 1)) * axis.inner;
        if (wanted < axis.inner)
#pragma unroll
            for (int i = 0; i < BATCH; ++i, line += axis.inner)
                if (end + i >= axis.taps - 1 && end + i < entering) *line = sum[i] * scale;
    }
}

// box_rows: a block loads part of a line, `outputs` samples and their halo, into shared memory, and builds all its windows
// level by level: log2(taps) steps instead of `taps` loads. A thread holds every 256th of PER * 256 samples, so that
// neighbouring threads read and write neighbouring words.
constexpr int ROW_THREADS = 256, ROW_HALO_BYTES = 4096;

// Sample `at` of a line, beyond its edge.
template <typename Real>
__device__ inline Real beyond(const Real* line, int at, const Axis& axis, Real fill) {
    const int inner = static_cast<int>(axis.inner), shifted = at + 1024 * inner;  // never negative
    const int from = border_index(shifted / inner - 1024, static_cast<int>(axis.length), axis.mode);
    return from < 0 ? fill : __ldg(line + from * inner + shifted % inner);
}

template <typename Real, int PER>
__global__ void __launch_bounds__(ROW_THREADS)
box_rows(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Real fill, Real scale, int outputs) {
    constexpr int SIZE = PER * ROW_THREADS, HALO = ROW_HALO_BYTES / sizeof(Real);
    // Nothing is written beyond SIZE: values read there only affect sums that are not used.
    __shared__ Real samples[SIZE + HALO], windows[SIZE + HALO];
    const int inner = static_cast<int>(axis.inner);
    const long long out_samples = axis.out_length * inner, tiles = (out_samples + outputs - 1) / outputs;
    const long long line = blockIdx.x / tiles, begin = blockIdx.x % tiles * outputs;
    const int wanted = static_cast<int>(min(static_cast<long long>(outputs), out_samples - begin));
    const int used = wanted + (axis.taps - 1) * inner, length = static_cast<int>(axis.length) * inner;  // below 2^30
    const int first = static_cast<int>(begin) + (axis.mode == VALID ? 0 : -axis.before * inner);
    const Real* source = in + line * length;
    const int thread = threadIdx.x;
    Real window[PER];
#pragma unroll
    for (int k = 0; k < PER; ++k) window[k] = __ldg(source + max(min(first + thread + k * ROW_THREADS, length - 1), 0));
#pragma unroll
    for (int k = 0; k < PER; ++k) samples[thread + k * ROW_THREADS] = window[k];
    if (first < 0 || first + used > length) {
        // Samples beyond the edges, each thread at its own places.
        for (int at = thread; at < min(-first, used); at += ROW_THREADS)
            samples[at] = beyond(source, first + at, axis, fill);
        const int after = max(length - first - thread + ROW_THREADS - 1, 0) / ROW_THREADS * ROW_THREADS + thread;
        for (int at = after; at < used; at += ROW_THREADS) samples[at] = beyond(source, first + at, axis, fill);
#pragma unroll
        for (int k = 0; k < PER; ++k) window[k] = samples[thread + k * ROW_THREADS];
    }
    const Real* before = samples;  // of the level before
#pragma unroll 1
    for (int bit = 30 - __clz(axis.taps); bit >= 0; --bit) {
        const int reach = (axis.taps >> (bit + 1)) * inner;
        const Real *other = before + thread + reach, *lone = samples + thread + 2 * reach;
        __syncthreads();
        if (axis.taps >> bit & 1) {
#pragma unroll
            for (int k = 0; k < PER; ++k) window[k] = window[k] + other[k * ROW_THREADS] + lone[k * ROW_THREADS];
        } else {
#pragma unroll
            for (int k = 0; k < PER; ++k) window[k] = window[k] + other[k * ROW_THREADS];
        }
        if (bit == 0) break;
        if (before == windows) __syncthreads();
        before = windows;
#pragma unroll
        for (int k = 0; k < PER; ++k) windows[thread + k * ROW_THREADS] = window[k];
    }
    Real* target = out + line * out_samples + begin + thread;
#pragma unroll
    for (int k = 0; k < PER; ++k)
        if (thread + k * ROW_THREADS < wanted) target[k * ROW_THREADS] = window[k] * scale;
}
