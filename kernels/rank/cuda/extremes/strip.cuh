// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes down a band of rows of one strip, two or four rows at a time, and waits for no other.
//
//   rows               the next rows are on their way to registers during all that follows
//        |
//   down the columns   each thread by itself. The windows of two (four) results share whole pairs (fours) of rows: their minimum is
//                      found in runs of so many groups (van Herk; Gil and Werman), one from the run's start, one to the end of the
//                      run before, in a ring in shared memory, which a thread goes through backwards where a run ends. The ring has a
//                      vector for each group, and one for the second row of each pair; rows before a window's fours are loaded again.
//        |
//   along the rows     on words of one column in two rows, so that samples never move within words: a thread's minima from
//                      each column to its last, and from its first to each; a window is the first of these, whole threads, and
//                      the second of a thread to the right. Threads exchange words in shuffles. The last threads of a warp only
//                      serve others. Windows of pixels with channels are doubled in shared memory instead.
//        |
//   an opening         takes these results as rows of a second strip, whose windows have maxima: no result of the first step leaves the
//                      multiprocessor. Edges are those of the first image, so windows must be symmetric, and edges mirrors.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; for 16 bytes of a row, of 16 bits and a window of 51 × 51, 12 minima down,
// 13 along and 8 permutations, of which a multiprocessor starts two a cycle for a warp, and 7 shuffles, one a cycle: 17 us of
// 8192 × 8192 on an H200, where the memory takes 64; of bytes about as many, where it takes 32; of floats 30 of 128; an opening takes
// twice as many. Half as many again for threads that serve others and rows before the first result.
#pragma once

#include "cuda/extremes/rows.cuh"

// Blocks of a multiprocessor, which bound a thread's registers.
template <typename Sample, int ROWS, bool OPENS>
constexpr int STRIP_BLOCKS = ROWS == 4 && sizeof(Sample) == 1 ? 12 : ROWS == 4 || OPENS || sizeof(Sample) == 1 ? 16 : sizeof(Sample) == 2 ? 20 : 24;

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
        for (int j = 0; j < M - 2 * BY + 1; ++j) x[j] = chosen<LEAST>(x[j], x[j + BY]);
        doubled_up_to<SPAN, 2 * BY, LEAST>(x);
    }
}

// Of windows that begin `first` columns after each column x of the warp's threads, -(N / 2 - 1) … N / 2.
template <bool LEAST, typename Sample, int N>
__device__ inline void windows_along(Column<Sample> (&x)[N], int first, int taps) {
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
    if (taps <= N) {
        with_constant<1, N>(taps, [&](auto count) {
            constexpr int TAPS = decltype(count)::value;
            Each y[N + TAPS - 1];
#pragma unroll
            for (int j = 0; j < N; ++j) y[j] = x[j];
#pragma unroll
            for (int j = 0; j < TAPS - 1; ++j) y[N + j] = from_lane(x[j], lane + 1);
            constexpr int SPAN = TAPS >= 16 ? 16 : TAPS >= 8 ? 8 : TAPS >= 4 ? 4 : TAPS >= 2 ? 2 : 1;
            doubled_up_to<SPAN, 1, LEAST>(y);
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = TAPS == SPAN ? y[j] : chosen<LEAST>(y[j], y[j + TAPS - SPAN]);
        });
        return;
    }
    Each suffix[N], prefix[N];
    suffix[N - 1] = x[N - 1], prefix[0] = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) {
        suffix[N - 1 - j] = chosen<LEAST>(suffix[N - j], x[N - 1 - j]);
        prefix[j] = chosen<LEAST>(prefix[j - 1], x[j]);
    }
    // Whole threads between: a window begins in this thread, and ends in the one `lanes` after it, or the next.
    const int lanes = (taps - 1) / N, count = lanes - 1;
    Each whole = suffix[0], between;
    const Each last = from_lane(whole, lane + lanes);
    int span = 1;
#pragma unroll 1
    for (; 2 * span <= count; span *= 2) whole = chosen<LEAST>(whole, from_lane(whole, lane + span));
#pragma unroll
    for (int w = 0; w < Each::WORDS; ++w) between.word[w] = loser<Sample, LEAST>();
    if (count > 0) between = chosen<LEAST>(from_lane(whole, lane + 1), from_lane(whole, lane + 1 + count - span));
    const Each to_last = chosen<LEAST>(between, last);
    with_constant<0, N>((taps - 1) % N, [&](auto rest) {
        constexpr int REST = decltype(rest)::value;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool is_near = j + REST < N;
            const Each end = from_lane(prefix[(j + REST) % N], lane + lanes + !is_near);
            x[j] = chosen<LEAST>(chosen<LEAST>(suffix[j], is_near ? between : to_last), end);
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

// Down the columns of a thread: the windows of two or four results, ROWS, share the groups of as many rows before the newest. Rows
// before these complete the first windows, and rows of the newest group the last. A ring has the extremes of groups. Where a run of
// them ends, they become those from each to its end. The row before pairs is kept in shared memory; those before fours are loaded again.
template <typename Sample, bool LEAST, int ROWS>
struct Down {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    static constexpr int THREADS = 32, BATCH = 4, OLD = ROWS == 2 ? 1 : 4;
    static constexpr bool KEEPS = ROWS == 2;
    const int groups, rest;  // rest: rows that windows share, but are no whole group
    V *const ring, *const kept, *const end;
    V *turn, *oldest;  // the group's place in its run, and the row's
    V before;          // the row before `old`
    Many prefix;       // of the run

    __device__ Down(V* memory, int taps)
        : groups((taps + 1) / ROWS - 1), rest((taps + 1) % ROWS), ring(memory), kept(ring + groups * THREADS),
          end(kept + (KEEPS ? groups + 1 : 0) * THREADS), turn(ring), oldest(kept) {
        prefix = none();
    }
    static __device__ Many none() { return widened(splat<Sample>(loser<Sample, LEAST>())); }

    // Rows from the first window's beginning to the first group.
    __device__ int lead() const { return KEEPS ? 1 : 3 + max(rest - 1, 0); }

    // A group before the first window ends.
    __device__ void add(const V* row) {
        Many whole = widened(row[0]);
#pragma unroll
        for (int k = 1; k < ROWS; ++k) whole = chosen<LEAST>(whole, widened(row[k]));
        *turn = narrowed(whole), turn += THREADS;
        if constexpr (KEEPS) *oldest = row[1], oldest += THREADS;
    }

    // The windows that end in the rows of a group; `old` are the rows before the groups, unless they are kept.
    __device__ void add(const V (&row)[ROWS], V (&old)[OLD], Column<Sample> (*windows)[V::SAMPLES]) {
        Many first[ROWS], found[ROWS];  // of the first rows of the group
#pragma unroll
        for (int k = 0; k < ROWS; ++k) first[k] = k == 0 ? widened(row[k]) : chosen<LEAST>(first[k - 1], widened(row[k]));
        Many shared = prefix;
        if (groups > 0) {
            shared = chosen<LEAST>(shared, widened(*turn));
            *turn = narrowed(first[ROWS - 1]), turn += THREADS;
            prefix = chosen<LEAST>(prefix, first[ROWS - 1]);
        }
        if constexpr (KEEPS) {
            old[0] = *oldest, *oldest = row[1], oldest += THREADS;
            if (oldest == end) oldest = kept;
        }
        Many last[OLD + 1];  // of the last rows of old
#pragma unroll
        for (int k = 0; k < OLD; ++k) last[k] = k == 0 ? widened(old[OLD - 1]) : chosen<LEAST>(last[k - 1], widened(old[OLD - 1 - k]));
        if constexpr (!KEEPS) {
            last[OLD] = chosen<LEAST>(last[OLD - 1], widened(before));
            before = old[OLD - 1];
        }
        with_constant<0, ROWS>(rest, [&](auto more) {
            constexpr int REST = decltype(more)::value, LATER = REST > 0, EARLIER = REST > 1 ? REST - 1 : 0;
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                found[k] = shared;
                if (ROWS - 1 + EARLIER > k) found[k] = chosen<LEAST>(found[k], last[ROWS - 1 + EARLIER > k ? ROWS - 2 + EARLIER - k : 0]);
                if (k + LATER > 0) found[k] = chosen<LEAST>(found[k], first[k + LATER > 0 ? k + LATER - 1 : 0]);
            }
        });
#pragma unroll
        for (int k = 0; k < ROWS; k += 2) to_columns<Sample>(found[k], found[k + 1], windows[k / 2]);
    }

    __device__ void turn_back() {
        if (groups == 0 || turn != kept) return;
        turn = ring, prefix = none();
        if (groups < 2) return;
        V* at = ring + (groups - 1) * THREADS;
        Many suffix = widened(*at);
        int left = groups - 1;
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

// Of integers; and of floats whose NaN spread, without nodata. If rows do not begin at whole vectors, threads load and store those that
// hold their samples, and exchange the rest.
// ROWS: of results at a time.
// OPENS: after the opposite extremes of the same windows, of an odd number of samples in the middle of which the result lies.
template <typename Sample, bool LEAST, int ROWS, bool OPENS>
__global__ void __launch_bounds__(32, STRIP_BLOCKS<Sample, ROWS, OPENS>) extreme_strip(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample) {
    using V = Vector<Sample>;
    constexpr int SAMPLES = V::SAMPLES, THREADS = 32, BATCH = 8;
    constexpr bool KEEPS = ROWS == 2;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, taps = task.taps_y;
    // Rows of the windows of both steps, columns from a window's first to its last, and rows from a first step's result to the second's.
    const int taps_y = OPENS ? 2 * taps - 1 : taps, reach = (OPENS ? 2 : 1) * (task.taps_x - 1) * task.inner, later = OPENS ? taps : 0;
    Down<Sample, LEAST != OPENS, ROWS> down(reinterpret_cast<V*>(vectors) + lane, taps);
    Down<Sample, LEAST, 2> then(down.end, taps);
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
    const int slack = task.aligned_out ? 0 : SAMPLES, held = SAMPLES * (task.aligned_in ? THREADS : THREADS - 1);
    const int base = c0 + task.first_x - past - slack, x = base + lane * SAMPLES, column = x - task.first_x + first;
    const int tile_end = min(c0 + task.tile, task.out_columns), end = tile_end + task.first_x + reach;
    const bool is_used = column >= c0 && column < (task.aligned_out ? tile_end : c0 + task.tile);
    const bool is_edge = x < end && (x < 0 || x + SAMPLES > task.columns);
    // Columns beyond an edge are those of others, as their results down the columns; if the border mode names columns that the
    // warp does not have, each sample is loaded from where it lies.
    bool is_far = false;
    if (is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int at = x + i, pixel = at / task.inner - (at % task.inner < 0), channel = at - pixel * task.inner;
            const int beside = border_index(pixel, task.columns / task.inner, task.mode_x);
            const int source = beside < 0 ? beside : beside * task.inner + channel;
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
    const int whole = task.rows - (task.aligned_in ? 1 : 2);
    const int safe_first = upwards ? in_y - whole : -in_y, safe_last = min(upwards ? in_y : whole - in_y, last);
    const long long in_step = on * static_cast<long long>(task.in_pitch);
    // Threads that need nothing load what others do.
    const int loaded_x = max(0, min(x, task.aligned_in ? task.columns - SAMPLES : (task.columns + SAMPLES - 1) & ~(SAMPLES - 1)));
    const auto row_at = [&](int n) { return in + (in_y + n * on) * static_cast<long long>(task.in_pitch) + loaded_x; };
    const auto is_safe = [&](int n, int end) { return n >= safe_first && end - 1 <= safe_last && !gathers; };
    const auto past_of = [](const Sample* at) { return static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Sample)); };
    // Safe rows, of which the first is at `source`, and others: n … of the band; each begins `by` samples before what is wanted.
    const auto load = [&](auto& row, auto& by, const Sample* source) {
        if (task.aligned_in) {
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
        if (task.aligned_in) return;
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
            else if (task.aligned_in) row[k] = loaded_vector<Sample>(line + loaded_x);
            else row[k] = vector_of(line, x, task.columns);
        }
    };

    // Results r … r + ROWS - 1 share the groups before row n, of which r + lead is the first row.
    const int lead = down.lead() + later, behind = ROWS * down.groups, first_r = KEEPS ? -1 - later : 0;
    int n = first_r + lead;
#pragma unroll 1
    for (; n + BATCH <= first_r + lead + behind; n += BATCH) {
        V row[BATCH];
        int by[BATCH];
        if (is_safe(n, n + BATCH)) load(row, by, row_at(n));
        else load_any(row, by, n);
        settle(row, by);
#pragma unroll
        for (int k = 0; k < BATCH; k += ROWS) down.add(row + k);
    }
    V next[ROWS] = {}, old[down.OLD] = {};
    int next_by[ROWS] = {}, old_by[down.OLD] = {};
#pragma unroll 1
    for (;; n += ROWS) {
        load_any(next, next_by, n);
        if (n == first_r + lead + behind) break;
        down.add(next);
    }
    down.turn_back();
    if constexpr (!KEEPS) {
        load_any(old, old_by, n - behind - 5);
        down.before = old[0];
        load_any(old, old_by, n - behind - 4);
    }

    n += ROWS;
    const Sample *coming = row_at(n), *going = row_at(n - behind - ROWS);
    const long long out_step = on * static_cast<long long>(task.out_pitch);
    Sample* target = out + (out_y + first_r * on) * static_cast<long long>(task.out_pitch) + column;
    const auto store = [&](Sample* to, V found, const V& theirs) {
        const int by = task.aligned_out ? 0 : past_of(to), place = column - by;
        if (!task.aligned_out) found = from_last(found, by);
        if (!is_used) return;
        if constexpr (same<Sample, float>) {
#pragma unroll
            for (int k = 0; k < V::WORDS; ++k)
                if (is_nan(__uint_as_float(found.word[k]))) found.word[k] = bits_of(not_a_number<float>());
        }
        if (task.subtracts == 1) found = difference(theirs, found, task.has_nodata, nodata);
        if (task.subtracts == 2) found = difference(found, theirs, task.has_nodata, nodata);
        if (task.aligned_out || (place >= 0 && place + SAMPLES <= task.out_columns)) {
            store_vector(to - by, found);
        } else {
            for (int k = 0; k < V::WORDS; ++k)
                store_some<Sample>(to - column, place + k * SAMPLES_A_WORD<Sample>, found.word[k], 0, task.out_columns);
        }
    };
    // The vectors of the image that belong to results r and r + 1, long before these are stored.
    const auto image_at = [&](const Sample* to, int y) {
        const int place = column - (task.aligned_out ? 0 : past_of(to));
        const Sample* line = image + y * task.image_pitch;
        if (!task.aligned_out && (place < 0 || place + SAMPLES > task.out_columns)) return some_of(line, place, task.out_columns);
        return vector_at(line + place, place + 2 * SAMPLES <= task.out_columns);
    };
    V theirs[ROWS];
    const auto fetch = [&](int r) {
        if (!task.subtracts || !is_used) return;
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            if (r + k >= 0 && r + k < rows) theirs[k] = image_at(target + k * out_step, out_y + (r + k) * on);
    };
    fetch(first_r);
#pragma unroll 1
    for (int r = first_r; r < rows; r += ROWS, n += ROWS) {
        Column<Sample> windows[ROWS / 2][SAMPLES];
        settle(next, next_by);
        if constexpr (!KEEPS) settle(old, old_by);
        down.add(next, old, windows);
        if (r + ROWS < rows) {
            if (is_safe(KEEPS ? n : n - behind - ROWS, n + ROWS)) {
                load(next, next_by, coming);
                if constexpr (!KEEPS) load(old, old_by, going);
            } else {
                load_any(next, next_by, n);
                if constexpr (!KEEPS) load_any(old, old_by, n - behind - ROWS);
            }
            coming += ROWS * in_step, going += ROWS * in_step;
        }
        down.turn_back();
#pragma unroll
        for (int k = 0; k < ROWS; k += 2) {
            auto& many = windows[k / 2];
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
            if (task.inner > 1) windows_apart<LEAST != OPENS>(many, OPENS ? 0 : first, task.taps_x, task.inner, line);
            else windows_along<LEAST != OPENS>(many, OPENS ? 0 : first, task.taps_x);
            V found[2];
            to_rows<Sample>(many, found[0], found[1]);
            if constexpr (OPENS) {
                V none[1];
                then.add(found, none, windows);
                then.turn_back();
                if (task.inner > 1) windows_apart<LEAST>(many, first, task.taps_x, task.inner, line);
                else if (r >= -1) windows_along<LEAST>(many, first, task.taps_x);
                to_rows<Sample>(many, found[0], found[1]);
            }
            if (r + k >= 0 && r + k < rows) store(target, found[0], theirs[k]);
            if (r + k >= -1 && r + k + 1 < rows) store(target + out_step, found[1], theirs[k + 1]);
            target += 2 * out_step;
        }
        fetch(r + ROWS);
    }
}
