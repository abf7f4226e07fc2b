// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes through a band of rows of one strip, ROWS at a time (rows.cuh):
//
//   down the columns   each thread by itself, windows of t rows in runs of t rows (van Herk; Gil and Werman): a minimum
//                      from its run's start, and one to the end of the run before from a ring of t vectors in shared memory,
//                      which holds those, and the rows of this run where they have been used. Where a run ends, the ring is gone
//                      through backwards. The next rows are on their way from here on.
//   along the rows     by doubling: M(2m)[i] = min(M(m)[i], M(m)[i + m]); the last step overlaps. What lies in the vectors
//                      of other threads comes by shuffles. The last vectors of a warp only serve the others.
//
// Nobody waits for anybody, but for the shuffles of a warp.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; for each 16 bytes, of 16 bits and a window of 51 × 51, 16 minima down
// and 28 along, 12 permutations and 20 shuffles, at 2, 2 and 1 a cycle of a multiprocessor: 50 us of 8192 × 8192 on an H200 with
// a quarter of the warps' vectors lost, where the memory takes 64.
#pragma once

#include "rows.cuh"

// Of each row, x[i] = the extreme of x[i] and what is BY samples after it, less than a vector.
template <int BY, bool LEAST, typename Sample, int ROWS>
__device__ inline void doubled_along(Lanes<Sample> (&x)[ROWS]) {
    constexpr int WORDS = Vector<Sample>::WORDS, STREAMS = Lanes<Sample>::STREAMS;
    constexpr int EACH = SAMPLES_A_WORD<Sample> / STREAMS, STEP = BY / STREAMS;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        if constexpr (STEP == 0) {  // of bytes: from even places to odd ones, and on
            auto &odd = x[j].word[0], &even = x[j].word[STREAMS - 1];
            const unsigned beyond = __shfl_down_sync(~0u, even[0], 1);
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                const unsigned next = __byte_perm(even[k], k + 1 < WORDS ? even[k + 1] : beyond, 0x5432);
                even[k] = extreme_halves<LEAST>(even[k], odd[k]);
                odd[k] = extreme_halves<LEAST>(odd[k], next);
            }
        } else {
#pragma unroll
            for (int s = 0; s < STREAMS; ++s) {
                constexpr int AFTER = STEP < EACH ? 1 : STEP / EACH;
                Word<Sample>(&word)[WORDS] = x[j].word[s];
                Word<Sample> beyond[AFTER];
#pragma unroll
                for (int k = 0; k < AFTER; ++k) beyond[k] = __shfl_down_sync(~0u, word[k], 1);
#pragma unroll
                for (int k = 0; k < WORDS; ++k) {
                    Word<Sample> next = k + AFTER < WORDS ? word[k + AFTER] : beyond[k + AFTER - WORDS];
                    if constexpr (STEP < EACH) next = __byte_perm(word[k], next, 0x5432);
                    word[k] = extreme_in<LEAST, Sample>(word[k], next);
                }
            }
        }
    }
}

// Of each row the extremes of `span` samples, the largest power of two up to `taps`. Returns span.
template <bool LEAST, typename Sample, int ROWS>
__device__ inline int spans_along(Lanes<Sample> (&x)[ROWS], int taps) {
    constexpr int SAMPLES = Vector<Sample>::SAMPLES;
    int span = 1;
    if (taps >= 2) doubled_along<1, LEAST>(x), span = 2;
    if constexpr (SAMPLES > 2)
        if (taps >= 4) doubled_along<2, LEAST>(x), span = 4;
    if constexpr (SAMPLES > 4)
        if (taps >= 8) doubled_along<4, LEAST>(x), span = 8;
    if constexpr (SAMPLES > 8)
        if (taps >= 16) doubled_along<8, LEAST>(x), span = 16;
#pragma unroll 1
    for (; 2 * span <= taps; span *= 2) {
#pragma unroll
        for (int j = 0; j < ROWS; ++j)
#pragma unroll
            for (int s = 0; s < Lanes<Sample>::STREAMS; ++s)
#pragma unroll
                for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
                    const Word<Sample> next = __shfl_down_sync(~0u, x[j].word[s][k], span / SAMPLES);
                    x[j].word[s][k] = extreme_in<LEAST, Sample>(x[j].word[s][k], next);
                }
    }
    return span;
}

// The vector that begins `by` samples after the thread's own. `by` is the same for all threads.
template <typename Sample>
__device__ inline Vector<Sample> later(const Vector<Sample>& own, unsigned by) {
    constexpr int WORDS = Vector<Sample>::WORDS, EACH = SAMPLES_A_WORD<Sample>, SAMPLES = Vector<Sample>::SAMPLES;
    if (by == 0) return own;
    const unsigned lanes = by / SAMPLES, bits = by % EACH * 8 * sizeof(Sample);
    Vector<Sample> found;
    const auto take = [&](auto words) {
        constexpr int FIRST = decltype(words)::value;
        Word<Sample> x[WORDS + 1];
#pragma unroll
        for (int k = 0; k < WORDS + (EACH > 1); ++k)
            x[k] = __shfl_down_sync(~0u, own.word[(FIRST + k) % WORDS], lanes + (FIRST + k) / WORDS);
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            if constexpr (EACH > 1) found.word[k] = __funnelshift_r(x[k], x[k + 1], bits);
            else found.word[k] = x[k];
        }
    };
    switch (by % SAMPLES / EACH) {
        case 0: take(Number<0>()); break;
        case 1: take(Number<1>()); break;
        case 2: take(Number<WORDS == 2 ? 1 : 2>()); break;
        default: take(Number<WORDS == 2 ? 1 : 3>());
    }
    return found;
}

template <typename Sample, bool LEAST, int ROWS>
__global__ void __launch_bounds__(32, 16) extreme_strip(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample empty) {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    constexpr int SAMPLES = V::SAMPLES, WORDS = V::WORDS, THREADS = 32;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, taps = task.taps_y;
    V* const line = reinterpret_cast<V*>(vectors);
    V* const ring = line + THREADS + lane;
    int* const from = reinterpret_cast<int*>(line + THREADS * (1 + taps)) + lane;
    const Coding<Sample, LEAST> coding = {nodata, empty, task.omit_nan, task.has_nodata};
    const Word<Sample> key = coding.encode(filled(cval));
    const Word<Sample> beyond = SAMPLES_A_WORD<Sample> == 1 ? key : bits_of(cval);  // the constant as the first pass leaves it
    if (!task.is_first) cval = sample_in<Sample>(key, 0);
    Band<Sample> band(in, out, image, task, blockIdx.x, lane, THREADS, from);
    if (band.total == 0) return;
    band.settle(__any_sync(~0u, band.is_far));
    const bool is_used = lane * SAMPLES < task.tile;

    V row[ROWS];
    Many prefix = {};
    int p = 0;  // place in the run
#pragma unroll 1
    for (int group = -ROWS; group < band.total; group += ROWS) {  // the first time, rows are only fetched
        Many x[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (group < 0) break;
            if (task.is_first) {
#pragma unroll
                for (int k = 0; k < WORDS; ++k) row[j].word[k] = coding.encode(row[j].word[k]);
            }
            x[j] = widened(row[j]);
            if (taps == 1) continue;
            prefix = p == 0 ? x[j] : extreme<LEAST>(prefix, x[j]);
            x[j] = prefix;
            if (p + 1 < taps && group + j >= taps) x[j] = extreme<LEAST>(prefix, widened(ring[(p + 1) * THREADS]));
            ring[p * THREADS] = row[j];
            if (++p < taps) continue;
            Many suffix = widened(row[j]);
#pragma unroll 4
            for (int q = taps - 2; q > 0; --q) {
                suffix = extreme<LEAST>(suffix, widened(ring[q * THREADS]));
                ring[q * THREADS] = narrowed(suffix);
            }
            p = 0;
        }
        if (group + ROWS < band.total) band.template fetch<LEAST>(row, group + ROWS, from, cval);
        if (group < 0 || group + ROWS < taps) continue;  // no window ends here
        if (band.fills) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                const V own = narrowed(x[j]);
                __syncwarp();
                line[lane] = own;
                __syncwarp();
                if (band.is_edge)
                    x[j] = widened(completed(own, line, from, band.x, band.columns, band.base, beyond));
            }
        }
        const int span = spans_along<LEAST>(x, task.taps_x), apart = task.taps_x - span;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (group + j < taps - 1 || group + j >= band.total) continue;
            const auto to = band.results(group + j, lane);
            const bool is_stored = is_used && to.place < band.out_columns;
            V theirs = {};
            if (task.subtracts && is_stored) theirs = band.image_at(to);
            const V own = narrowed(x[j]);
            V found = later(own, band.ahead - to.before);
            if (apart > 0) found = extreme<LEAST>(found, later(own, band.ahead - to.before + apart));
            if (is_stored) band.store(to, found, theirs, coding);
        }
    }
}
