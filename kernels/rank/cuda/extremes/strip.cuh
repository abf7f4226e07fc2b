// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes down a band of rows of one strip (rows.cuh), a row at a time: its instructions
// are few enough to stay in a multiprocessor's instruction caches, which larger steps do not (they take a third longer).
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

constexpr int AHEAD = 8;  // rows on their way

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

// x[i] = the extreme of x[i] and what is BY samples after it, less than a vector.
template <int BY, bool LEAST, typename Sample>
__device__ inline void doubled_along(Lanes<Sample>& x) {
    constexpr int WORDS = Vector<Sample>::WORDS, STREAMS = Lanes<Sample>::STREAMS;
    constexpr int EACH = SAMPLES_A_WORD<Sample> / STREAMS, STEP = BY / STREAMS;
    if constexpr (STEP == 0) {  // of bytes: from even places to odd ones, and on
        unsigned(&odd)[WORDS] = x.word[0], (&even)[WORDS] = x.word[STREAMS - 1];
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
            Word<Sample>(&word)[WORDS] = x.word[s];
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

// The extremes of `span` samples, the largest power of two up to `taps`. Returns span.
template <bool LEAST, typename Sample>
__device__ inline int spans_along(Lanes<Sample>& x, int taps) {
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
        Lanes<Sample> next;
#pragma unroll
        for (int s = 0; s < Lanes<Sample>::STREAMS; ++s)
#pragma unroll
            for (int k = 0; k < Vector<Sample>::WORDS; ++k)
                next.word[s][k] = __shfl_down_sync(~0u, x.word[s][k], static_cast<unsigned>(span) / SAMPLES);
        x = chosen<LEAST>(x, next);
    }
    return span;
}

// The vector that begins `by` samples after the thread's own. `by` is the same for all threads.
template <typename Sample>
__device__ inline Vector<Sample> later(const Vector<Sample>& own, unsigned by) {
    constexpr int WORDS = Vector<Sample>::WORDS, EACH = SAMPLES_A_WORD<Sample>, SAMPLES = Vector<Sample>::SAMPLES;
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
        case 2: take(Number<2>()); break;
        default: take(Number<3>());
    }
    return found;
}

// Of integers; and of floats whose NaN spread, without nodata. Rows begin at whole vectors in the input.
template <typename Sample, bool LEAST>
__global__ void __launch_bounds__(32, 24) extreme_strip(
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
    const bool is_used = lane * SAMPLES < task.tile, is_loaded = !band.is_idle && (band.is_inside || band.gathers);
    const V outside = splat<Sample>(filled(cval));
    if (!is_loaded)
        for (int at = 0; at < end; at += THREADS) ring[at] = outside;

    const auto fetch = [&](int n, int slot) {
        int y = band.in_y + n * band.on;
        if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
        if (!is_loaded) return;
        const Sample* row = band.in + y * static_cast<long long>(task.in_pitch);
        if (y < 0) ring[slot] = outside;
        else if (band.is_inside) copy_16_bytes(ring + slot, row + band.x);
        else ring[slot] = gathered(row, from, cval);
    };
    const auto after = [&](int slot) { return slot + THREADS == end ? 0 : slot + THREADS; };
#pragma unroll 1
    for (int n = 0; n < AHEAD; ++n) {
        if (n < band.total) fetch(n, n * THREADS);
        end_copy_group();
    }
    // Slots of this row, of the one that is fetched, and of the first of the window that ends here.
    int slot = 0, fetched = AHEAD * THREADS, begin = after(fetched), p = 0;  // p: the row's place in its run
    Many prefix = {};
    V theirs = {};
    if (task.subtracts && taps == 1) theirs = band.image_at(band.results(0, lane));
#pragma unroll 1
    for (int n = 0; n < band.total; ++n) {
        if (n + AHEAD < band.total) fetch(n + AHEAD, fetched);
        end_copy_group();
        wait_for_copies_but<AHEAD>();
        Many x = widened(ring[slot]);
        prefix = p == 0 ? x : chosen<LEAST>(prefix, x);
        if (++p < taps) {
            x = n < taps ? prefix : chosen<LEAST>(prefix, widened(ring[begin]));
        } else {
            int back = slot;
#pragma unroll 1
            for (p = taps - 2; p > 0; --p) {
                back = back == 0 ? end - THREADS : back - THREADS;
                x = chosen<LEAST>(x, widened(ring[back]));
                ring[back] = narrowed(x);
            }
            x = prefix, p = 0;
        }
        slot = after(slot), fetched = begin, begin = after(begin);
        if (n + 1 < taps) {  // no window ends here
            if (task.subtracts && n + 2 == taps) theirs = band.image_at(band.results(n + 1, lane));
            continue;
        }
        V own = narrowed(x);
        if (band.fills) {
            __syncwarp();
            line[lane] = own;
            __syncwarp();
            if (band.is_edge) own = completed(own, line, from, band.x, task.columns, band.base, bits_of(cval));
            x = widened(own);
        }
        const auto to = band.results(n, lane);
        const int span = spans_along<LEAST>(x, task.taps_x), apart = task.taps_x - span, by = band.ahead - to.before;
        own = narrowed(x);
        V found = later(own, by);
        if (apart > 0) found = narrowed(chosen<LEAST>(widened(found), widened(later(own, by + apart))));
        if constexpr (same<Sample, float>) {
#pragma unroll
            for (int k = 0; k < V::WORDS; ++k)
                if (is_nan(__uint_as_float(found.word[k]))) found.word[k] = bits_of(not_a_number<float>());
        }
        if (is_used && to.place < task.out_columns) band.store(to, found, theirs, nodata);
        if (task.subtracts && n + 1 < band.total) theirs = band.image_at(band.results(n + 1, lane));
    }
}
