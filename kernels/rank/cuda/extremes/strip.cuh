// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes down a band of rows of one strip, two rows at a time, and waits for no other.
//
//   rows               the next pair of rows is on its way to registers during all that follows
//        |
//   down the columns   each thread by itself. The windows of two results share (t - 1) / 2 pairs of rows: their minimum is found in
//                      runs of so many pairs (van Herk; Gil and Werman), one from the run's start, one to the end of the run
//                      before, in a ring in shared memory, which a thread goes through backwards where a run ends. The ring has a
//                      vector for two rows; the row before those of a window's pairs is loaded again if windows are large.
//        |
//   along the rows     on words of one column in both rows, so that samples never move within words: a thread's minima from
//                      each column to its last, and from its first to each; a window is the first of these, whole threads, and
//                      the second of a thread to the right. Threads exchange words in shuffles. The last threads of a warp only
//                      serve others. A thread has such minima of each of three channels; the next thread's samples begin with
//                      another channel, so their order is turned. Windows of other numbers of channels are doubled in shared memory.
//        |
//   an opening         takes these results as rows of a second strip, whose windows have maxima: no result of the first step leaves the
//                      multiprocessor. Edges are those of the first image, so windows must be symmetric, and edges mirrors.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; for 16 bytes of a row, of 16 bits and a window of 51 × 51, 12 minima down,
// 13 along and 8 permutations, of which a multiprocessor starts two a cycle for a warp, and 7 shuffles, one a cycle: 17 us of
// 8192 × 8192 on an H200, where the memory takes 64; of bytes about as many, where it takes 32; of floats 30 of 128. Half as many again
// for threads that serve others and rows before the first result; an opening takes twice as many. Measured: 0.46, 0.35 and 0.47 of a
// copy's speed. Three warps a scheduler leave it without work most of the time.
#pragma once

#include "cuda/extremes/rows.cuh"

// Blocks of a multiprocessor, which bound a thread's registers.
template <typename Sample, bool KEEPS>
constexpr int STRIP_BLOCKS = KEEPS && sizeof(Sample) > 1 ? (sizeof(Sample) == 2 ? 20 : 24) : 16;

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

// Down the columns of a thread: the windows of two results share the pairs of rows before the newest. If they have an odd number of
// rows, the row before these pairs completes the first window, and the newest pair's first row the second; if an even number, one row
// more of the newest pair each. A ring has the extremes of pairs. Where a run of them ends, they become those from each to its end.
// KEEPS: the row before the pairs, in shared memory.
template <typename Sample, bool LEAST, bool KEEPS>
struct Down {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    static constexpr int THREADS = 32, BATCH = 4;
    const int pairs;
    const bool is_even;
    V *const ring, *const kept, *const end;
    V *turn, *oldest;  // the pair's place in its run, and the row's
    Many prefix;       // of the run

    __device__ Down(V* memory, int taps)
        : pairs((taps - 1) / 2), is_even(taps % 2 == 0), ring(memory), kept(ring + pairs * THREADS),
          end(kept + (KEEPS ? pairs + 1 : 0) * THREADS), turn(ring), oldest(kept) {
        prefix = none();
    }
    static __device__ Many none() { return widened(splat<Sample>(loser<Sample, LEAST>())); }

    // A pair before the first window ends.
    __device__ void add(const V& a, const V& b) {
        *turn = narrowed(chosen<LEAST>(widened(a), widened(b))), turn += THREADS;
        if constexpr (KEEPS) *oldest = b, oldest += THREADS;
    }

    // The windows that end in rows a and b; `old` is the row before the pairs, unless it is kept.
    __device__ void add(const V& a, const V& b, V old, Column<Sample>* windows) {
        const Many first = widened(a), both = chosen<LEAST>(first, widened(b));
        Many shared = prefix;
        if (pairs > 0) {
            shared = chosen<LEAST>(shared, widened(*turn));
            *turn = narrowed(both), turn += THREADS;
            prefix = chosen<LEAST>(prefix, both);
        }
        if constexpr (KEEPS) {
            old = *oldest, *oldest = b, oldest += THREADS;
            if (oldest == end) oldest = kept;
        }
        Many upper = chosen<LEAST>(shared, widened(old)), lower;
        if (is_even) lower = chosen<LEAST>(shared, both), upper = chosen<LEAST>(upper, first);
        else lower = chosen<LEAST>(shared, first);
        to_columns<Sample>(upper, lower, windows);
    }

    __device__ void turn_back() {
        if (pairs == 0 || turn != kept) return;
        turn = ring, prefix = none();
        if (pairs < 2) return;
        V* at = ring + (pairs - 1) * THREADS;
        Many suffix = widened(*at);
        int left = pairs - 1;
#pragma unroll 1
        for (; left >= BATCH; left -= BATCH, at -= BATCH * THREADS) {
            V row[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) row[k] = at[-(k + 1) * THREADS];
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
                suffix = chosen<LEAST>(suffix, widened(row[k])), at[-(k + 1) * THREADS] = narrowed(suffix);
        }
#pragma unroll 1
        for (; left > 0; --left) at -= THREADS, suffix = chosen<LEAST>(suffix, widened(*at)), *at = narrowed(suffix);
    }
};

// The samples that lie `by` samples after those of each thread, of this one and the next.
template <typename Sample>
__device__ inline Vector<Sample> from_next(const Vector<Sample>& own, int by) {
    Vector<Sample> next;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) next.word[k] = __shfl_down_sync(~0u, own.word[k], 1);
    return by == 0 ? own : shifted(own, next, by);
}

// Those that lie `by` samples before.
template <typename Sample>
__device__ inline Vector<Sample> from_last(const Vector<Sample>& own, int by) {
    Vector<Sample> last;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) last.word[k] = __shfl_up_sync(~0u, own.word[k], 1);
    return by == 0 ? own : shifted(last, own, Vector<Sample>::SAMPLES - by);
}

// The samples of a vector at `place` of a row of `count` that lie in it: the rows' ends must not hold up the others.
template <typename Sample>
__device__ __noinline__ void store_part(Sample* row, int place, Vector<Sample> found, int count) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
    for (int i = 0; i < Vector<Sample>::SAMPLES; ++i)
        if (place + i >= 0 && place + i < count) row[place + i] = sample_in<Sample>(found.word[i / EACH], i % EACH);
}

// Of integers; and of floats whose NaN spread, without nodata. If rows do not begin at whole vectors, threads load and store those that
// hold their samples, and exchange the rest.
// KEEPS: the row before those that two results share, in shared memory; it is loaded again otherwise.
// OPENS: after the opposite extremes of the same windows, which are symmetric, or both lie in the image.
// ROWS: 0: they begin at whole vectors, in the input and the output; 1: anywhere; 2: pixels have channels; 3: three channels.
template <typename Sample, bool LEAST, bool KEEPS, bool OPENS, int ROWS>
__global__ void __launch_bounds__(32, STRIP_BLOCKS<Sample, KEEPS && !OPENS>) extreme_strip(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample) {
    using V = Vector<Sample>;
    constexpr int SAMPLES = V::SAMPLES, THREADS = 32, BATCH = 4;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, taps = task.taps_y, inner = ROWS == 2 ? task.inner : ROWS == 3 ? 3 : 1;
    const bool aligned_in = ROWS >= 2 ? task.aligned_in : ROWS == 0, aligned_out = ROWS >= 2 ? task.aligned_out : ROWS == 0;
    // Rows of the windows of both steps, columns from a window's first to its last, and rows from a first step's result to the second's.
    const int taps_y = OPENS ? 2 * taps - 1 : taps, reach = (OPENS ? 2 : 1) * (task.taps_x - 1) * inner, later = OPENS ? (taps - 1) / 2 * 2 + 1 : 0;
    Down<Sample, LEAST != OPENS, KEEPS> down(reinterpret_cast<V*>(vectors) + lane, taps);
    Down<Sample, LEAST, true> then(down.end, taps);
    const int pairs = down.pairs;
    Column<Sample>* const line = reinterpret_cast<Column<Sample>*>((OPENS ? then.end : down.end) - lane);
    int* const from = reinterpret_cast<int*>(line + SAMPLES * THREADS) + lane;

    unsigned block = blockIdx.x;
    const int c0 = block % task.tiles * task.tile;
    block /= task.tiles;
    const int number = block % task.bands, y0 = number * task.band;
    const long long plane = block / task.bands;
    const int rows = min(task.band, task.out_rows - y0), last = rows + taps_y - 2;  // rows of results; the last row to read
    if (rows <= 0) return;
    const bool upwards = number % 2 == 1;  // every other band: neighbours read the rows that both need at the same time
    const int on = upwards ? -1 : 1;
    const int in_y = task.first_y + y0 + (upwards ? last : 0), out_y = y0 + (upwards ? rows - 1 : 0);
    in += plane * task.in_plane, out += plane * task.out_plane, image += plane * task.image_plane;

    // The thread's vector of the input begins at x, and its windows `first` columns after that; its results, at `column`.
    const int past = task.first_x & (SAMPLES - 1), first = past > SAMPLES / 2 ? past - SAMPLES : past;
    const int slack = aligned_out ? 0 : SAMPLES, held = SAMPLES * (aligned_in ? THREADS : THREADS - 1);
    const int base = c0 + task.first_x - past - slack, x = base + lane * SAMPLES, column = x - task.first_x + first;
    const int tile_end = min(c0 + task.tile, task.out_columns), end = tile_end + task.first_x + reach;
    const bool is_used = column >= c0 && column < (aligned_out ? tile_end : c0 + task.tile);
    const bool is_edge = x < end && (x < 0 || x + SAMPLES > task.columns);
    // Columns beyond an edge are those of others, as their results down the columns; if the border mode names columns that the
    // warp does not have, each sample is loaded from where it lies.
    bool is_far = false;
    if (is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int at = x + i, pixel = at / inner - (at % inner < 0), channel = at - pixel * inner;
            const int beside = border_index(pixel, task.columns / inner, task.mode_x);
            const int source = beside < 0 ? beside : beside * inner + channel;
            from[i * THREADS] = source;
            const bool is_needed = at >= c0 + task.first_x - slack && at < end && source >= 0;
            if (is_needed && (source < base || source >= min(base + held, end))) is_far = true;
        }
    }
    const bool gathers = __any_sync(~0u, is_far), fills = !gathers && __any_sync(~0u, is_edge);
    if (fills && is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int source = from[i * THREADS], place = source - base;
            const bool is_here = place >= 0 && place < held;
            if (source >= 0) from[i * THREADS] = is_here ? place % SAMPLES * THREADS + place / SAMPLES : 0;
        }
    }

    // Rows of the band from safe_first to safe_last lie in the image, and what follows them too if vectors hold some of that.
    const int whole = task.rows - (aligned_in ? 1 : 2);
    const int safe_first = upwards ? in_y - whole : -in_y, safe_last = min(upwards ? in_y : whole - in_y, last);
    const long long in_step = on * static_cast<long long>(task.in_pitch);
    // Threads that need nothing load what others do.
    const int loaded_x = max(0, min(x, aligned_in ? task.columns - SAMPLES : (task.columns + SAMPLES - 1) & ~(SAMPLES - 1)));
    const auto row_at = [&](int n) { return in + (in_y + n * on) * static_cast<long long>(task.in_pitch) + loaded_x; };
    const auto is_safe = [&](int n, int end) { return n >= safe_first && end - 1 <= safe_last && !gathers; };
    const auto past_of = [](const Sample* at) { return static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Sample)); };
    // Safe rows, of which the first is at `source`, and others: n … of the band; each begins `by` samples before what is wanted.
    const auto load = [&](auto& row, auto& by, const Sample* source) {
        if (aligned_in) {
#pragma unroll
            for (int k = 0; k < sizeof(row) / sizeof(V); ++k) row[k] = loaded_vector<Sample>(source + k * in_step);
        } else {
#pragma unroll
            for (int k = 0; k < sizeof(row) / sizeof(V); ++k) {
                by[k] = past_of(source + k * in_step);
                row[k] = loaded_vector<Sample>(source + k * in_step - by[k]);
            }
        }
    };
    const auto settle = [&](auto& row, const auto& by) {
        if (aligned_in) return;
#pragma unroll
        for (int k = 0; k < sizeof(row) / sizeof(V); ++k) row[k] = from_next(row[k], by[k]);
    };
    const auto load_any = [&](auto& row, auto& by, int n) {
#pragma unroll
        for (int k = 0; k < sizeof(row) / sizeof(V); ++k) {
            by[k] = 0;
            int y = in_y + min(n + k, last) * on;
            if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
            const Sample* line = in + y * static_cast<long long>(task.in_pitch);
            if (y < 0) row[k] = splat<Sample>(filled(cval));
            else if (gathers && is_edge) row[k] = gathered(line, from, cval);
            else if (aligned_in) row[k] = loaded_vector<Sample>(line + loaded_x);
            else row[k] = vector_of(line, x, task.columns);
        }
    };

    int pair = 0;
#pragma unroll 1
    for (; pair + BATCH <= pairs; pair += BATCH) {
        V row[2 * BATCH];
        int by[2 * BATCH];
        if (is_safe(2 * pair, 2 * (pair + BATCH))) load(row, by, row_at(2 * pair));
        else load_any(row, by, 2 * pair);
        settle(row, by);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) down.add(row[2 * k], row[2 * k + 1]);
    }
    V next[2] = {}, old[1] = {};
    int next_by[2] = {}, old_by[1] = {};
#pragma unroll 1
    for (; pair <= pairs; ++pair) {
        load_any(next, next_by, 2 * pair);
        if (pair == pairs) break;
        down.add(next[0], next[1]);
    }
    down.turn_back();

    const Sample *coming = row_at(2 * pairs + 2), *going = row_at(1);
    const long long out_step = on * static_cast<long long>(task.out_pitch);
    Sample* target = out + (out_y - (1 + later) * on) * static_cast<long long>(task.out_pitch) + column;
    const auto store = [&](Sample* to, V found, const V& theirs) {
        const int by = aligned_out ? 0 : past_of(to), place = column - by;
        if (!aligned_out) found = from_last(found, by);
        if (!is_used || (!aligned_out && place >= task.out_columns)) return;
        if constexpr (same<Sample, float>) {
#pragma unroll
            for (int k = 0; k < V::WORDS; ++k)
                if (is_nan(__uint_as_float(found.word[k]))) found.word[k] = bits_of(not_a_number<float>());
        }
        if (task.subtracts == 1) found = difference(theirs, found, task.has_nodata, nodata);
        if (task.subtracts == 2) found = difference(found, theirs, task.has_nodata, nodata);
        if (aligned_out || (place >= 0 && place + SAMPLES <= task.out_columns)) store_vector(to - by, found);
        else store_part(to - column, place, found, task.out_columns);
    };
    // The vector of the image that belongs to what is stored.
    const auto image_at = [&](const Sample* to, int y) {
        const int place = column - (aligned_out ? 0 : past_of(to));
        const Sample* line = image + y * task.image_pitch;
        if (!aligned_out && place >= task.out_columns) return V();
        if (!aligned_out && (place < 0 || place + SAMPLES > task.out_columns)) return some_of(line, place, task.out_columns);
        return vector_at(line + place, place + 2 * SAMPLES <= task.out_columns);
    };
#pragma unroll 1
    for (int r = -1 - later; r < rows; r += 2) {
        Column<Sample> many[SAMPLES];
        settle(next, next_by);
        if constexpr (!KEEPS) settle(old, old_by);
        down.add(next[0], next[1], old[0], many);
        V theirs[2];
        if (task.subtracts && is_used) {
            if (r >= 0) theirs[0] = image_at(target, out_y + r * on);
            if (r >= -1 && r + 1 < rows) theirs[1] = image_at(target + out_step, out_y + (r + 1) * on);
        }
        if (r + 2 < rows) {
            const int n = r + later + 2 * pairs + 3;
            if (is_safe(KEEPS ? n : n - 2 * pairs - 1, n + 2)) {
                load(next, next_by, coming);
                if constexpr (!KEEPS) load(old, old_by, going);
            } else {
                load_any(next, next_by, n);
                if constexpr (!KEEPS) load_any(old, old_by, n - 2 * pairs - 1);
            }
            coming += 2 * in_step, going += 2 * in_step;
        }
        down.turn_back();
        if (fills) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j) line[j * THREADS + lane] = many[j];
            __syncwarp();
            if (is_edge) {
#pragma unroll
                for (int j = 0; j < SAMPLES; ++j) {
                    const int source = from[j * THREADS];
                    many[j] = source < 0 ? column_of(cval) : line[source];
                }
            }
        }
        if constexpr (ROWS == 2) {
            windows_apart<LEAST>(many, first, task.taps_x, inner, line);
        } else {
            if constexpr (!OPENS) move(many, first);
            windows_along<LEAST != OPENS, ROWS == 3 ? 3 : 1>(many, task.taps_x);
        }
        V found[2];
        to_rows<Sample>(many, found[0], found[1]);
        if constexpr (OPENS) {
            then.add(found[0], found[1], V(), many);
            then.turn_back();
            if (r >= -1) {
                move(many, first);
                windows_along<LEAST, 1>(many, task.taps_x);
            }
            to_rows<Sample>(many, found[0], found[1]);
        }
        if (r >= 0) store(target, found[0], theirs[0]);
        if (r >= -1 && r + 1 < rows) store(target + out_step, found[1], theirs[1]);
        target += 2 * out_step;
    }
}
