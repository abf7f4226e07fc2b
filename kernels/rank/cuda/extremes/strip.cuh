// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes down a band of rows of one strip (rows.cuh), ROWS at a time: the instructions of
// one or two stay in the caches, those of four or eight do not. Two wait less for each other's results.
//
//   copies             the rows that come next are on their way to the ring
//        |  each thread waits for its own copies
//   down the columns   each thread by itself, windows of t rows in runs of t rows (van Herk; Gil and Werman): a minimum from
//                      its run's start, and one to the end of the run before, from the ring of t rows and those to come. Where a
//                      run ends, the thread goes through it backwards, and its minima take the rows' places.
//        |  the threads of a warp wait for each other in shuffles
//   along the rows     by doubling: M(2m)[i] = min(M(m)[i], M(m)[i + m]); the last step overlaps. The last vectors of a warp
//                      only serve the others.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; for each 16 bytes, of 16 bits and a window of 51 × 51, 12 minima down
// and 24 along, 8 permutations and 22 shuffles, at 2, 2 and 1 a cycle of a multiprocessor: 45 us of 8192 × 8192 on an H200 with
// a quarter of the warps' vectors lost, where the memory takes 64.
#pragma once

#include "async_copy.cuh"
#include "cuda/extremes/rows.cuh"

constexpr int STRIP_BLOCKS = 24;  // of a multiprocessor
constexpr int AHEAD = 4;          // rows on their way

// The extreme of words of a stream. Floats are compared as such: a NaN spreads, and -0.0 comes before 0.0.
template <bool LEAST, typename Sample>
__device__ inline Word<Sample> chosen(Word<Sample> a, Word<Sample> b) {
    if constexpr (same<Sample, float>) {
        const float x = __uint_as_float(a), y = __uint_as_float(b);
#if __CUDA_ARCH__ >= 800
        float found;
        if constexpr (LEAST) asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
        else asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
        return __float_as_uint(found);
#else
        if (is_nan(x) || is_nan(y)) return bits_of(not_a_number<float>());
        return (key_of(x) < key_of(y)) == LEAST ? a : b;
#endif
    } else {
        return extreme_in<LEAST, Sample>(a, b);
    }
}

template <bool LEAST, typename Sample>
__device__ inline Lanes<Sample> chosen(const Lanes<Sample>& a, const Lanes<Sample>& b) {
    Lanes<Sample> found;
#pragma unroll
    for (int s = 0; s < Lanes<Sample>::STREAMS; ++s)
#pragma unroll
        for (int k = 0; k < Vector<Sample>::WORDS; ++k) found.word[s][k] = chosen<LEAST, Sample>(a.word[s][k], b.word[s][k]);
    return found;
}

// Of each row x[i] = the extreme of x[i] and what is BY samples after it, less than a vector.
template <int BY, bool LEAST, typename Sample, int ROWS>
__device__ inline void doubled_along(Lanes<Sample> (&x)[ROWS]) {
    constexpr int WORDS = Vector<Sample>::WORDS, STREAMS = Lanes<Sample>::STREAMS;
    constexpr int EACH = SAMPLES_A_WORD<Sample> / STREAMS, STEP = BY / STREAMS;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        if constexpr (STEP == 0) {  // of bytes: from even places to odd ones, and on
            unsigned(&odd)[WORDS] = x[j].word[0], (&even)[WORDS] = x[j].word[STREAMS - 1];
            const unsigned beyond = __shfl_down_sync(~0u, even[0], 1);
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                const unsigned next = __byte_perm(even[k], k + 1 < WORDS ? even[k + 1] : beyond, 0x5432);
                even[k] = extreme_halves<LEAST>(even[k], odd[k]);
                odd[k] = extreme_halves<LEAST>(odd[k], next);
            }
        } else {
            constexpr int AFTER = STEP < EACH ? 1 : STEP / EACH;
#pragma unroll
            for (int s = 0; s < STREAMS; ++s) {
                Word<Sample>(&word)[WORDS] = x[j].word[s];
                Word<Sample> beyond[AFTER];
#pragma unroll
                for (int k = 0; k < AFTER; ++k) beyond[k] = __shfl_down_sync(~0u, word[k], 1);
#pragma unroll
                for (int k = 0; k < WORDS; ++k) {
                    Word<Sample> next = k + AFTER < WORDS ? word[k + AFTER] : beyond[k + AFTER - WORDS];
                    if constexpr (STEP < EACH) next = __byte_perm(word[k], next, 0x5432);
                    word[k] = chosen<LEAST, Sample>(word[k], next);
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
    if (taps >= 4) doubled_along<2, LEAST>(x), span = 4;
    if constexpr (SAMPLES > 4)
        if (taps >= 8) doubled_along<4, LEAST>(x), span = 8;
    if constexpr (SAMPLES > 8)
        if (taps >= 16) doubled_along<8, LEAST>(x), span = 16;
#pragma unroll 1
    for (; 2 * span <= taps; span *= 2) {
        Lanes<Sample> next[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j)
#pragma unroll
            for (int s = 0; s < Lanes<Sample>::STREAMS; ++s)
#pragma unroll
                for (int k = 0; k < Vector<Sample>::WORDS; ++k)
                    next[j].word[s][k] = __shfl_down_sync(~0u, x[j].word[s][k], static_cast<unsigned>(span) / SAMPLES);
#pragma unroll
        for (int j = 0; j < ROWS; ++j) x[j] = chosen<LEAST>(x[j], next[j]);
    }
    return span;
}

// Of each row the vectors that begin `by` samples after the threads' own, or before them. `by` is the same for all threads.
template <typename Sample, int ROWS>
__device__ inline void shift_along(const Vector<Sample> (&own)[ROWS], int by, Vector<Sample> (&found)[ROWS]) {
    constexpr int WORDS = Vector<Sample>::WORDS, EACH = SAMPLES_A_WORD<Sample>, SAMPLES = Vector<Sample>::SAMPLES;
    // Word k of the result begins in word FIRST + k of the thread that is `lanes` after this one.
    const int rest = by & (SAMPLES - 1), bits = rest % EACH * 8 * static_cast<int>(sizeof(Sample));
    const int lane = threadIdx.x, source = lane + (by - rest) / SAMPLES;
    const auto take = [&](auto words, auto is_near) {
        constexpr int FIRST = decltype(words)::value;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            Word<Sample> x[WORDS + 1];
#pragma unroll
            for (int k = 0; k < WORDS + (EACH > 1); ++k) {
                const Word<Sample> word = own[j].word[(FIRST + k) % WORDS];
                if (decltype(is_near)::value && FIRST + k >= WORDS) x[k] = word;  // by > -SAMPLES: of the thread's own
                else x[k] = __shfl_sync(~0u, word, source + (FIRST + k) / WORDS);
            }
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                if constexpr (EACH > 1) found[j].word[k] = __funnelshift_r(x[k], x[k + 1], bits);
                else found[j].word[k] = x[k];
            }
        }
    };
    const auto choose = [&](auto is_near) {
        switch (rest / EACH) {
            case 0: take(Number<0>(), is_near); break;
            case 1: take(Number<1>(), is_near); break;
            case 2: take(Number<2>(), is_near); break;
            default: take(Number<3>(), is_near);
        }
    };
    if (by == 0) {
#pragma unroll
        for (int j = 0; j < ROWS; ++j) found[j] = own[j];
    } else if (by < 0 && by > -SAMPLES) {
        choose(Number<1>());
    } else {
        choose(Number<0>());
    }
}

// Of integers; and of floats whose NaN spread, without nodata. Rows begin at whole vectors in the input and in the output.
template <typename Sample, bool LEAST, int ROWS>
__global__ void __launch_bounds__(32, STRIP_BLOCKS) extreme_strip(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample) {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    constexpr int SAMPLES = V::SAMPLES, THREADS = 32;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, taps = task.taps_y, end = (taps + AHEAD) * THREADS;
    V* const line = reinterpret_cast<V*>(vectors);
    V* const ring = line + THREADS + lane;
    int* const from = reinterpret_cast<int*>(line + THREADS + end) + lane;
    Band<Sample> band(in, out, image, task, blockIdx.x, lane, THREADS, from);
    if (band.total == 0) return;
    band.settle(__any_sync(~0u, band.is_far));
    // The thread's results have the columns of its vector of the input; or, of windows after them, of one before it.
    const int apart_by = task.first_x > 0 ? task.first_x & ~(SAMPLES - 1) : 0;
    const int column = band.x - apart_by, first = task.first_x - apart_by;
    const bool is_used = column >= band.c0 && column < min(band.c0 + task.tile, task.out_columns);
    const bool is_loaded = !band.is_idle && (band.is_inside || band.gathers), is_copied = is_loaded && band.is_inside;
    const V outside = splat<Sample>(filled(cval));
    if (!is_loaded)
        for (int at = 0; at < end; at += THREADS) ring[at] = outside;

    // The next row to fetch, and the one of the next results.
    int y = band.in_y;
    const long long in_step = band.on * static_cast<long long>(task.in_pitch);
    const Sample* source = band.in + y * static_cast<long long>(task.in_pitch) + band.x;
    const auto fetch = [&](int slot) {
        if (static_cast<unsigned>(y) < static_cast<unsigned>(task.rows)) {
            if (is_copied) copy_16_bytes(ring + slot, source);
            else if (is_loaded) ring[slot] = gathered(source - band.x, from, cval);
        } else if (is_loaded) {
            const int inner = index_beyond(y, task.rows, task.mode_y);
            const Sample* row = band.in + inner * static_cast<long long>(task.in_pitch);
            if (inner < 0) ring[slot] = outside;
            else if (is_copied) copy_16_bytes(ring + slot, row + band.x);
            else ring[slot] = gathered(row, from, cval);
        }
        y += band.on, source += in_step;
    };
    const auto after = [&](int slot) { return slot + THREADS == end ? 0 : slot + THREADS; };
#pragma unroll 1
    for (int n = 0; n < AHEAD; ++n) {
        if (n < band.total) fetch(n * THREADS);
        end_copy_group();
    }
    // Through a run backwards, from the row in a slot.
    const auto go_back = [&](int from_slot, Many suffix) {
        int back = from_slot, left = taps - 2;
#pragma unroll 1
        for (; left >= 4; left -= 4) {
            int at[4];
            V row[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) back = (back == 0 ? end : back) - THREADS, at[k] = back, row[k] = ring[back];
#pragma unroll
            for (int k = 0; k < 4; ++k) suffix = chosen<LEAST>(suffix, widened(row[k])), ring[at[k]] = narrowed(suffix);
        }
#pragma unroll 1
        for (; left > 0; --left) {
            back = (back == 0 ? end : back) - THREADS;
            suffix = chosen<LEAST>(suffix, widened(ring[back]));
            ring[back] = narrowed(suffix);
        }
    };
    // The results whose windows end in the next row, and what is subtracted from them or they from.
    const long long out_step = band.on * static_cast<long long>(task.out_pitch), image_step = band.on * task.image_pitch;
    Sample* target = band.out + band.out_y * static_cast<long long>(task.out_pitch) + column;
    const Sample* other = band.image + band.out_y * task.image_pitch;
    const bool is_whole = is_used && column + SAMPLES <= task.out_columns;
    V theirs[ROWS];
    const auto fetch_image = [&](int n) {
#pragma unroll
        for (int j = 0; j < ROWS; ++j, other += image_step) {
            if (n + j + 1 < taps || n + j >= band.total || !is_used) continue;
            if (is_whole) theirs[j] = vector_at(other + column, column + 2 * SAMPLES <= task.out_columns);
            else theirs[j] = some_of(other, column, task.out_columns);
        }
    };
    if (task.subtracts) fetch_image(0);
    // Slots of this row, of the one that is fetched, and of the first of the window that ends here.
    int slot = 0, fetched = AHEAD * THREADS, begin = after(fetched), p = 0;  // p: the row's place in its run
    Many prefix = {};
#pragma unroll 1
    for (int n = 0; n < band.total; n += ROWS) {
        Many x[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (n + j + AHEAD < band.total) fetch(fetched);
            end_copy_group();
            wait_for_copies_but<AHEAD>();
            x[j] = widened(ring[slot]);
            prefix = p == 0 ? x[j] : chosen<LEAST>(prefix, x[j]);
            if (++p < taps) {
                x[j] = n + j < taps ? prefix : chosen<LEAST>(prefix, widened(ring[begin]));
            } else {
                go_back(slot, x[j]);
                x[j] = prefix, p = 0;
            }
            slot = after(slot), fetched = begin, begin = after(begin);
        }
        V now[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) now[j] = theirs[j];
        if (task.subtracts) fetch_image(n + ROWS);
        if (n + ROWS < taps) {  // no window ends here
            target += ROWS * out_step;
            continue;
        }
        if (band.fills) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                const V mine = narrowed(x[j]);
                __syncwarp();
                line[lane] = mine;
                __syncwarp();
                if (band.is_edge)
                    x[j] = widened(completed(mine, line, from, band.x, task.columns, band.base, bits_of(cval)));
            }
        }
        const int span = spans_along<LEAST>(x, task.taps_x), apart = task.taps_x - span;
        V own[ROWS], found[ROWS], last[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) own[j] = narrowed(x[j]);
        shift_along(own, first, found);
        if (apart > 0) {
            shift_along(own, first + apart, last);
#pragma unroll
            for (int j = 0; j < ROWS; ++j) found[j] = narrowed(chosen<LEAST>(widened(found[j]), widened(last[j])));
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j, target += out_step) {
            if (n + j + 1 < taps || n + j >= band.total) continue;
            if constexpr (same<Sample, float>) {
#pragma unroll
                for (int k = 0; k < V::WORDS; ++k)
                    if (is_nan(__uint_as_float(found[j].word[k]))) found[j].word[k] = bits_of(not_a_number<float>());
            }
            if (task.subtracts == 1) found[j] = difference(now[j], found[j], task.has_nodata, nodata);
            if (task.subtracts == 2) found[j] = difference(found[j], now[j], task.has_nodata, nodata);
            if (is_whole) {
                store_vector(target, found[j]);
            } else if (is_used) {
#pragma unroll
                for (int k = 0; k < V::WORDS; ++k)
                    store_some<Sample>(target - column, column + k * SAMPLES_A_WORD<Sample>, found[j].word[k], 0, task.out_columns);
            }
        }
    }
}
