// Boxes over floats, one axis per pass, at the speed of memory. Part of smoothing.cu, which defines Axis.
#pragma once

#include "borders.cuh"

// The contract's doubling, W(2m)[i] = W(m)[i] + W(m)[i + m] and W(2m+1)[i] = W(2m)[i] + x[i + 2m], level by level: level l
// builds windows of taps >> (levels - l) samples; there are at most seven levels above single samples.
constexpr int MAX_LEVELS = 7;

// box_columns: each thread walks down one column, BATCH rows at a time, and every level adds the sum it has just received
// to the one received m rows before, from a ring in shared memory. Each sample is loaded once, each level takes one load
// and one store of shared memory, and no thread waits for another.
constexpr int BATCH = 8;
constexpr int COLUMN_THREADS = 32;  // threads share nothing, so small blocks fit shared memory best

// Slots of a level's ring: `delay` rows, a batch, and a copy of the first batch so that reading a batch never wraps.
__device__ inline int ring_slots(int delay) { return (delay + 2 * BATCH - 1) / BATCH * BATCH; }

template <typename Real>
__device__ inline void load_batch(Real (&rows)[BATCH], const Real* column, long long position, const Axis& axis,
                                  Real fill) {
    if (position >= 0 && position + BATCH <= axis.length) {
        const Real* from = column + position * axis.inner;
#pragma unroll
        for (int i = 0; i < BATCH; ++i, from += axis.inner) rows[i] = __ldg(from);
        return;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        const long long from = border_index(position + i, axis.length, axis.mode);
        rows[i] = from < 0 ? fill : __ldg(column + from * axis.inner);
    }
}

template <typename Real>
__global__ void __launch_bounds__(COLUMN_THREADS)
box_columns(const Real* __restrict__ in, Real* __restrict__ out, Axis axis, Real fill, Real scale,
            long long band_rows) {
    constexpr int THREADS = COLUMN_THREADS;
    extern __shared__ __align__(16) unsigned char shared[];
    const long long tiles = (axis.inner + THREADS - 1) / THREADS, bands = (axis.out_length + band_rows - 1) / band_rows;
    const long long column = blockIdx.x % tiles * THREADS + threadIdx.x, rest = blockIdx.x / tiles;
    if (column >= axis.inner) return;
    const long long outer = rest / bands, y_begin = rest % bands * band_rows;
    const int count = static_cast<int>(min(band_rows, axis.out_length - y_begin)), entering = count + axis.taps - 1;
    const Real* source = in + outer * axis.length * axis.inner + column;
    Real* target = out + (outer * axis.out_length + y_begin) * axis.inner + column;
    const long long first = y_begin + (axis.mode == VALID ? 0 : -axis.before);

    const int levels = 31 - __clz(axis.taps);
    int delay[MAX_LEVELS], slots[MAX_LEVELS], written[MAX_LEVELS] = {};
    bool odd[MAX_LEVELS];
#pragma unroll
    for (int level = 0; level < MAX_LEVELS; ++level) {
        odd[level] = axis.taps >> max(levels - level - 1, 0) & 1;
        delay[level] = (axis.taps >> max(levels - level, 0)) + odd[level];
        slots[level] = ring_slots(delay[level]);
    }
    Real last[MAX_LEVELS] = {}, before_last = 0, next[2][BATCH];
    load_batch(next[0], source, first, axis, fill);
    load_batch(next[1], source, first + BATCH, axis, fill);
#pragma unroll 1
    for (int row = 0; row < entering; row += BATCH) {
        Real sample[BATCH], sum[BATCH];  // sum[i]: of the level's window that ends at row + i
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sample[i] = next[0][i], next[0][i] = next[1][i];
        if (row + 2 * BATCH < entering) load_batch(next[1], source, first + row + 2 * BATCH, axis, fill);
        // Two or three samples: these are in registers.
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const Real one = i > 0 ? sample[max(i - 1, 0)] : last[0];
            const Real two = i > 1 ? sample[max(i - 2, 0)] : i > 0 ? last[0] : before_last;
            sum[i] = odd[0] ? two + one + sample[i] : one + sample[i];
        }
        last[0] = sample[BATCH - 1], before_last = sample[BATCH - 2];
        Real* ring = reinterpret_cast<Real*>(shared) + threadIdx.x;
#pragma unroll
        for (int level = 1; level < MAX_LEVELS; ++level) {
            if (level >= levels) break;
            const int to = written[level];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) ring[(to + i) * THREADS] = sum[i];
            if (to == 0) {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) ring[(slots[level] + i) * THREADS] = sum[i];
            }
            const Real* delayed = ring + (to - delay[level] + (to < delay[level] ? slots[level] : 0)) * THREADS;
            const Real previous = last[level];
            last[level] = sum[BATCH - 1];
            if (odd[level]) {
#pragma unroll
                for (int i = BATCH - 1; i >= 0; --i)
                    sum[i] = delayed[i * THREADS] + (i > 0 ? sum[max(i - 1, 0)] : previous) + sample[i];
            } else {
#pragma unroll
                for (int i = 0; i < BATCH; ++i) sum[i] = delayed[i * THREADS] + sum[i];
            }
            written[level] = to + BATCH == slots[level] ? 0 : to + BATCH;
            ring += (slots[level] + BATCH) * THREADS;
        }
        Real* line = target + (row - (axis.taps - 1)) * axis.inner;
#pragma unroll
        for (int i = 0; i < BATCH; ++i, line += axis.inner)
            if (row + i >= axis.taps - 1 && row + i < entering) *line = sum[i] * scale;
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
