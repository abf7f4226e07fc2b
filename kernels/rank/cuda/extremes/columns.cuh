// Samples of one column in two rows as words, and the minima and maxima of windows along rows of them, by the threads of a warp. Part of
// rank.cu.
//
//   move            the columns that lie some to the left or right of each thread's
//   windows_along   a thread's minima from each column to its last, and from its first to each; a window is the first of these, whole
//                   threads, and the second of a thread to the right. Threads exchange words in shuffles. A thread has such minima of
//                   each of three channels; the next thread's samples begin with another channel, so their order is turned.
//   windows_apart   of other numbers of channels, by doubling in shared memory; the threads of a warp wait for each other before and after
//                   each doubling, and for no other warp
#pragma once

#include "cuda/extremes/rows.cuh"

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

// The samples of one column in two rows, compared at once: halves of a word, of bytes the upper ones; or two words.
template <typename Sample>
struct Column {
    static constexpr int WORDS = sizeof(Sample) == 4 ? 2 : 1;
    Word<Sample> word[WORDS];
};

template <bool LEAST, typename Sample>
__device__ inline Column<Sample> chosen(Column<Sample> a, Column<Sample> b) {
#pragma unroll
    for (int w = 0; w < Column<Sample>::WORDS; ++w) a.word[w] = chosen<LEAST, Sample>(a.word[w], b.word[w]);
    return a;
}

template <typename Sample>
__device__ inline Column<Sample> from_lane(Column<Sample> column, int lane) {
#pragma unroll
    for (int w = 0; w < Column<Sample>::WORDS; ++w) column.word[w] = __shfl_sync(~0u, column.word[w], lane);
    return column;
}

// The sample in both rows of a column.
template <typename Sample>
__device__ inline Column<Sample> column_of(Sample sample) {
    Column<Sample> column;
#pragma unroll
    for (int w = 0; w < Column<Sample>::WORDS; ++w) column.word[w] = filled(sample);
    return column;
}

// The word that loses every comparison, of floats as such.
template <typename Sample, bool LEAST>
__device__ inline Word<Sample> loser() {
    if constexpr (same<Sample, float>) return LEAST ? 0x7F800000u : 0xFF800000u;
    else return neutral<Sample, LEAST>();
}

template <typename Sample>
__device__ inline void to_columns(const Lanes<Sample>& a, const Lanes<Sample>& b, Column<Sample>* x) {
    constexpr int WORDS = Vector<Sample>::WORDS;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[4 * k + i].word[0] = __byte_perm(a.word[(i + 1) % 2][k], b.word[(i + 1) % 2][k], i < 2 ? 0x5410 : 0x7632);
        } else if constexpr (sizeof(Sample) == 2) {
            x[2 * k].word[0] = __byte_perm(a.word[0][k], b.word[0][k], 0x5410);
            x[2 * k + 1].word[0] = __byte_perm(a.word[0][k], b.word[0][k], 0x7632);
        } else {
            x[k].word[0] = a.word[0][k], x[k].word[1] = b.word[0][k];
        }
    }
}

template <typename Sample>
__device__ inline void to_rows(const Column<Sample>* x, Vector<Sample>& a, Vector<Sample>& b) {
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) {
            const unsigned left = __byte_perm(x[4 * k].word[0], x[4 * k + 1].word[0], 0x7531);
            const unsigned right = __byte_perm(x[4 * k + 2].word[0], x[4 * k + 3].word[0], 0x7531);
            a.word[k] = __byte_perm(left, right, 0x6420), b.word[k] = __byte_perm(left, right, 0x7531);
        } else if constexpr (sizeof(Sample) == 2) {
            a.word[k] = __byte_perm(x[2 * k].word[0], x[2 * k + 1].word[0], 0x5410);
            b.word[k] = __byte_perm(x[2 * k].word[0], x[2 * k + 1].word[0], 0x7632);
        } else {
            a.word[k] = x[k].word[0], b.word[k] = x[k].word[1];
        }
    }
}

// Calls `body` with `value`, of FIRST … FIRST + COUNT - 1, as a constant.
template <int FIRST, int COUNT, typename Body>
__device__ inline void with_constant(int value, const Body& body) {
    if constexpr (COUNT == 1) {
        body(Number<FIRST>());
    } else if (value < FIRST + COUNT / 2) {
        with_constant<FIRST, COUNT / 2>(value, body);
    } else {
        with_constant<FIRST + COUNT / 2, COUNT - COUNT / 2>(value, body);
    }
}

// x[j] = the extreme of x[j] and the SPAN - 1 columns after it.
template <int SPAN, int BY, bool LEAST, typename Sample, int M>
__device__ inline void doubled_up_to(Column<Sample> (&x)[M]) {
    if constexpr (BY < SPAN) {
#pragma unroll
        for (int j = 0; j < M - BY; ++j) x[j] = chosen<LEAST>(x[j], x[j + BY]);
        doubled_up_to<SPAN, 2 * BY, LEAST>(x);
    }
}

// The columns that lie `first` after each column x of the warp's threads, -(N / 2 - 1) … N / 2.
template <typename Sample, int N>
__device__ inline void move(Column<Sample> (&x)[N], int first) {
    using Each = Column<Sample>;
    const int lane = threadIdx.x;
    with_constant<1 - N / 2, N>(first, [&](auto by) {
        constexpr int BY = decltype(by)::value, COUNT = BY < 0 ? -BY : BY;
        Each other[COUNT + 1], own[N];
#pragma unroll
        for (int j = 0; j < N; ++j) own[j] = x[j];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) other[j] = BY > 0 ? from_lane(own[j], lane + 1) : from_lane(own[N - COUNT + j], lane - 1);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int at = j + BY;
            x[j] = at < 0 ? other[(at + COUNT) % (COUNT + 1)] : at < N ? own[at % N] : other[(at - N) % (COUNT + 1)];
        }
    });
}

// What a thread has of each channel, as another has it, whose first sample is of the channel `by` before its own.
template <int INNER, typename Each>
__device__ inline void turned(const Each (&x)[INNER], int by, Each (&found)[INNER]) {
#pragma unroll
    for (int c = 0; c < INNER; ++c) {
        found[c] = x[c];
#pragma unroll
        for (int b = 1; b < INNER; ++b)
            if (by == b) found[c] = x[(c + INNER - b) % INNER];
    }
}

// Of windows that begin at each column x of the warp's threads, and have every INNER-th column, of pixels with so many channels.
template <bool LEAST, int INNER, typename Sample, int N>
__device__ inline void windows_along(Column<Sample> (&x)[N], int taps) {
    using Each = Column<Sample>;
    const int lane = threadIdx.x;
    constexpr int SHORT = (N - 1) / INNER + 1;  // ends in the next thread
    if (taps <= SHORT) {
        with_constant<1, SHORT>(taps, [&](auto count) {
            constexpr int TAPS = decltype(count)::value, REACH = (TAPS - 1) * INNER;
            Each y[N + REACH];
#pragma unroll
            for (int j = 0; j < N; ++j) y[j] = x[j];
#pragma unroll
            for (int j = 0; j < REACH; ++j) y[N + j] = from_lane(x[j], lane + 1);
            constexpr int SPAN = TAPS >= 16 ? 16 : TAPS >= 8 ? 8 : TAPS >= 4 ? 4 : TAPS >= 2 ? 2 : 1;
            doubled_up_to<SPAN * INNER, INNER, LEAST>(y);
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = TAPS == SPAN ? y[j] : chosen<LEAST>(y[j], y[j + (TAPS - SPAN) * INNER]);
        });
        return;
    }
    Each suffix[N], prefix[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int k = N - 1 - j;
        prefix[j] = j < INNER ? x[j] : chosen<LEAST>(prefix[(j + N - INNER) % N], x[j]);
        suffix[k] = j < INNER ? x[k] : chosen<LEAST>(suffix[(k + INNER) % N], x[k]);
    }
    // Whole threads between: a window begins in this thread, and ends in the one `lanes` after it, or the next.
    const int lanes = (taps - 1) * INNER / N, count = lanes - 1;
    Each whole[INNER], between[INNER], to_last[INNER];
    // Of each channel of this thread, from the thread `after` it.
    const auto fetch = [&](int after, Each (&found)[INNER]) {
        Each theirs[INNER];
#pragma unroll
        for (int c = 0; c < INNER; ++c) theirs[c] = from_lane(whole[c], lane + after);
        turned(theirs, after * N % INNER, found);
    };
#pragma unroll
    for (int c = 0; c < INNER; ++c) {
        whole[c] = suffix[c];
#pragma unroll
        for (int w = 0; w < Each::WORDS; ++w) between[c].word[w] = loser<Sample, LEAST>();
    }
    fetch(lanes, to_last);
    int span = 1;
#pragma unroll 1
    for (; 2 * span <= count; span *= 2) {
        Each other[INNER];
        fetch(span, other);
#pragma unroll
        for (int c = 0; c < INNER; ++c) whole[c] = chosen<LEAST>(whole[c], other[c]);
    }
    if (count > 0) {
        Each other[INNER];
        fetch(1, between), fetch(1 + count - span, other);
#pragma unroll
        for (int c = 0; c < INNER; ++c) between[c] = chosen<LEAST>(between[c], other[c]);
    }
#pragma unroll
    for (int c = 0; c < INNER; ++c) to_last[c] = chosen<LEAST>(between[c], to_last[c]);
    with_constant<0, N>((taps - 1) * INNER % N, [&](auto rest) {
        constexpr int REST = decltype(rest)::value;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool is_near = j + REST < N;
            const Each end = from_lane(prefix[(j + REST) % N], lane + lanes + !is_near);
            x[j] = chosen<LEAST>(chosen<LEAST>(suffix[j], is_near ? between[j % INNER] : to_last[j % INNER]), end);
        }
    });
}

// The same for windows of every `inner`-th column, of pixels with channels: by doubling, in shared memory.
template <bool LEAST, typename Sample, int N>
__device__ inline void windows_apart(Column<Sample> (&x)[N], int first, int taps, int inner, Column<Sample>* line) {
    const int lane = threadIdx.x;
    const auto share = [&] {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < N; ++j) line[j * 32 + lane] = x[j];
        __syncwarp();
    };
    const auto at = [&](int column) { return line[(column & (N - 1)) * 32 + ((lane + (column >= 0 ? column / N : -1)) & 31)]; };
    int span = 1;
#pragma unroll 1
    for (; 2 * span <= taps; span *= 2) {
        share();
#pragma unroll
        for (int j = 0; j < N; ++j) x[j] = chosen<LEAST>(x[j], at(j + span * inner));
    }
    share();
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = chosen<LEAST>(at(j + first), at(j + first + (taps - span) * inner));
}
