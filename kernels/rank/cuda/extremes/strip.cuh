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
//                      serve others.
//
// Floors of N samples of b bytes: 2 N b bytes of memory; for 16 bytes of a row, of 16 bits and a window of 51 × 51, 12 minima down,
// 13 along and 8 permutations, of which a multiprocessor starts two a cycle for a warp, and 7 shuffles, one a cycle: 17 us of
// 8192 × 8192 on an H200, where the memory takes 64; of bytes about as many, where it takes 32; of floats 30 of 128. Half as many again
// for threads that serve others and rows before the first result. Measured: 0.46, 0.35 and 0.47 of a copy's speed. Three
// warps a scheduler leave it without work most of the time.
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

// Of integers; and of floats whose NaN spread, without nodata. Rows begin at whole vectors in the input and in the output.
// KEEPS: the row before those that two results share, in shared memory; it is loaded again otherwise.
template <typename Sample, bool LEAST, bool KEEPS>
__global__ void __launch_bounds__(32, STRIP_BLOCKS<Sample, KEEPS>) extreme_strip(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image,
    const __grid_constant__ BoxTask task, Sample cval, Sample nodata, Sample) {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    constexpr int SAMPLES = V::SAMPLES, THREADS = 32, BATCH = 4;
    extern __shared__ ulonglong2 vectors[];
    const int lane = threadIdx.x, taps = task.taps_y, pairs = (taps - 1) / 2;
    const bool is_even = taps % 2 == 0;
    V* const ring = reinterpret_cast<V*>(vectors) + lane;
    V* const kept = ring + pairs * THREADS;
    V* const kept_end = kept + (KEEPS ? pairs + 1 : 0) * THREADS;
    Column<Sample>* const line = reinterpret_cast<Column<Sample>*>(kept_end - lane);
    int* const from = reinterpret_cast<int*>(line + SAMPLES * THREADS) + lane;

    unsigned block = blockIdx.x;
    const int c0 = block % task.tiles * task.tile;
    block /= task.tiles;
    const int number = block % task.bands, y0 = number * task.band;
    const long long plane = block / task.bands;
    const int rows = min(task.band, task.out_rows - y0), last = rows + taps - 2;  // rows of results; the last row to read
    if (rows <= 0) return;
    const bool upwards = number % 2 == 1;  // every other band: neighbours read the rows that both need at the same time
    const int on = upwards ? -1 : 1;
    const int in_y = task.first_y + y0 + (upwards ? last : 0), out_y = y0 + (upwards ? rows - 1 : 0);
    in += plane * task.in_plane, out += plane * task.out_plane, image += plane * task.image_plane;

    // The thread's vector of the input begins at x, and its windows `first` columns after that; its results, at `column`.
    const int past = task.first_x & (SAMPLES - 1), first = past > SAMPLES / 2 ? past - SAMPLES : past;
    const int base = c0 + task.first_x - past, x = base + lane * SAMPLES, column = x - task.first_x + first;
    const int tile_end = min(c0 + task.tile, task.out_columns), end = tile_end + task.first_x + task.taps_x - 1;
    const bool is_used = column >= c0 && column < tile_end;
    const bool is_edge = x < end && (x < 0 || x >= task.columns);
    // Columns beyond an edge are those of others, as their results down the columns; if the border mode names columns that the
    // warp does not have, each sample is loaded from where it lies.
    bool is_far = false;
    if (is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int at = x + i, source = border_index(at, task.columns, task.mode_x);
            from[i * THREADS] = source;
            const bool is_needed = at >= c0 + task.first_x && at < end && source >= 0;
            if (is_needed && (source < base || source >= min(base + SAMPLES * THREADS, end))) is_far = true;
        }
    }
    const bool gathers = __any_sync(~0u, is_far), fills = !gathers && __any_sync(~0u, is_edge);
    if (fills && is_edge) {
        for (int i = 0; i < SAMPLES; ++i) {
            const int source = from[i * THREADS], place = source - base;
            const bool is_here = place >= 0 && place < SAMPLES * THREADS;
            if (source >= 0) from[i * THREADS] = is_here ? place % SAMPLES * THREADS + place / SAMPLES : 0;
        }
    }

    // Rows of the band from safe_first to safe_last lie in the image.
    const int safe_first = upwards ? in_y - task.rows + 1 : -in_y, safe_last = min(upwards ? in_y : task.rows - 1 - in_y, last);
    const long long in_step = on * static_cast<long long>(task.in_pitch);
    const int loaded_x = max(0, min(x, task.columns - SAMPLES));  // threads that need nothing load what others do
    const auto row_at = [&](int n) { return in + (in_y + n * on) * static_cast<long long>(task.in_pitch) + loaded_x; };
    const auto is_safe = [&](int n, int end) { return n >= safe_first && end - 1 <= safe_last && !gathers; };
    // Safe rows, of which the first is at `source`, and others: n … of the band.
    const auto load = [&](auto& row, const Sample* source) {
#pragma unroll
        for (int k = 0; k < sizeof(row) / sizeof(V); ++k) row[k] = loaded_vector<Sample>(source + k * in_step);
    };
    const auto load_any = [&](auto& row, int n) {
#pragma unroll
        for (int k = 0; k < sizeof(row) / sizeof(V); ++k) {
            int y = in_y + min(n + k, last) * on;
            if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
            const Sample* line = in + y * static_cast<long long>(task.in_pitch);
            if (y < 0) row[k] = splat<Sample>(filled(cval));
            else if (gathers && is_edge) row[k] = gathered(line, from, cval);
            else row[k] = loaded_vector<Sample>(line + loaded_x);
        }
    };

    // A ring of the extremes of pairs of rows. Where a run of them ends, they become those from each to the run's end.
    Many prefix;
    const auto turn_back = [&] {
        prefix = widened(splat<Sample>(loser<Sample, LEAST>()));
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
    };
    const auto pair_of = [](const V& a, const V& b) { return narrowed(chosen<LEAST>(widened(a), widened(b))); };
    int pair = 0;
#pragma unroll 1
    for (; pair + BATCH <= pairs; pair += BATCH) {
        V row[2 * BATCH];
        if (is_safe(2 * pair, 2 * (pair + BATCH))) load(row, row_at(2 * pair));
        else load_any(row, 2 * pair);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            ring[(pair + k) * THREADS] = pair_of(row[2 * k], row[2 * k + 1]);
            if constexpr (KEEPS) kept[(pair + k) * THREADS] = row[2 * k + 1];
        }
    }
    V next[2] = {}, old[1] = {};
#pragma unroll 1
    for (; pair <= pairs; ++pair) {
        load_any(next, 2 * pair);
        if (pair == pairs) break;
        ring[pair * THREADS] = pair_of(next[0], next[1]);
        if constexpr (KEEPS) kept[pair * THREADS] = next[1];
    }
    turn_back();

    const Sample *coming = row_at(2 * pairs + 2), *going = row_at(1);
    const long long out_step = on * static_cast<long long>(task.out_pitch);
    Sample* target = out + (out_y - on) * static_cast<long long>(task.out_pitch) + column;
    const auto store = [&](Sample* to, V found, const V& theirs) {
        if (!is_used) return;
        if constexpr (same<Sample, float>) {
#pragma unroll
            for (int k = 0; k < V::WORDS; ++k)
                if (is_nan(__uint_as_float(found.word[k]))) found.word[k] = bits_of(not_a_number<float>());
        }
        if (task.subtracts == 1) found = difference(theirs, found, task.has_nodata, nodata);
        if (task.subtracts == 2) found = difference(found, theirs, task.has_nodata, nodata);
        store_vector(to, found);
    };
    V* turn = ring;  // the pair's place in its run
    V* oldest = kept + pairs * THREADS;
    // The windows of results r and r + 1 share the pairs before this one. If they have an odd number of rows, the row before these
    // pairs completes the first window, and this pair's first row the second; if an even number, one row more of this pair each.
#pragma unroll 1
    for (int r = -1; r < rows; r += 2) {
        const Many a = widened(next[0]), both = chosen<LEAST>(a, widened(next[1]));
        Many shared = prefix;
        if (pairs > 0) {
            shared = chosen<LEAST>(shared, widened(*turn));
            *turn = narrowed(both), turn += THREADS;
            prefix = chosen<LEAST>(prefix, both);
        }
        if constexpr (KEEPS) {
            old[0] = *oldest, *oldest = next[1], oldest += THREADS;
            if (oldest == kept_end) oldest = kept;
        }
        Many upper = chosen<LEAST>(shared, widened(old[0])), lower;
        if (is_even) lower = chosen<LEAST>(shared, both), upper = chosen<LEAST>(upper, a);
        else lower = chosen<LEAST>(shared, a);
        Column<Sample> many[SAMPLES];
        to_columns<Sample>(upper, lower, many);
        V theirs[2];
        if (task.subtracts && is_used) {
            const Sample* other = image + (out_y + r * on) * task.image_pitch + column;
            const bool more_follow = column + 2 * SAMPLES <= task.out_columns;
            if (r >= 0) theirs[0] = vector_at(other, more_follow);
            if (r + 1 < rows) theirs[1] = vector_at(other + on * task.image_pitch, more_follow);
        }
        if (r + 2 < rows) {
            const int n = r + 2 * pairs + 3;
            if (is_safe(KEEPS ? n : r + 2, n + 2)) {
                load(next, coming);
                if constexpr (!KEEPS) load(old, going);
            } else {
                load_any(next, n);
                if constexpr (!KEEPS) load_any(old, r + 2);
            }
            coming += 2 * in_step, going += 2 * in_step;
        }
        if (pairs > 0 && turn == kept) turn_back(), turn = ring;
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
        windows_along<LEAST>(many, first, task.taps_x);
        V found[2];
        to_rows<Sample>(many, found[0], found[1]);
        if (r >= 0) store(target, found[0], theirs[0]);
        if (r + 1 < rows) store(target + out_step, found[1], theirs[1]);
        target += 2 * out_step;
    }
}
