// Minima and maxima of boxes, a warp by itself for each strip of columns. Part of rank.cu.
//
// A thread has 16 bytes of each row. A warp goes down a band of rows of one strip, two rows at a time, and waits for no other.
// Words of columns and windows along rows are those of columns.cuh.
//
//   rows               the next pair of rows is on its way to registers during all that follows
//        |
//   down the columns   each thread by itself. The windows of two results share (t - 1) / 2 pairs of rows: their minimum is found in
//                      runs of so many pairs (van Herk; Gil and Werman), one from the run's start, one to the end of the run
//                      before, in a ring in shared memory, which a thread goes through backwards where a run ends. The ring has a
//                      vector for two rows; the row before those of a window's pairs is loaded again if windows are large.
//        |
//   along the rows     on words of one column in both rows, so that samples never move within words. The last threads of a warp
//                      only serve others.
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

#include "cuda/extremes/columns.cuh"

// Blocks of a multiprocessor, which bound a thread's registers.
template <typename Sample, bool KEEPS, bool OPENS>
constexpr int STRIP_BLOCKS = KEEPS && sizeof(Sample) > 1 ? (sizeof(Sample) == 4 && !OPENS ? 24 : 20) : 16;

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
__global__ void __launch_bounds__(32, STRIP_BLOCKS<Sample, KEEPS, OPENS>) extreme_strip(
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
        constexpr bool IS_ORDERED = OPENS && ROWS == 0;  // not beyond the ends of rows, which vectors may hold otherwise
        if (task.subtracts) {
            const V &more = LEAST ? found : theirs, &less = LEAST ? theirs : found;
            found = difference<IS_ORDERED>(more, less, 0, nodata);
        }
        if (aligned_out || (place >= 0 && place + SAMPLES <= task.out_columns)) store_vector(to - by, found);
        else store_part(to - column, place, found, task.out_columns);
    };
    // The vector of the image that belongs to what is stored, whose row begins at `other`.
    const long long image_step = on * task.image_pitch;
    const Sample* other = image + (out_y - (1 + later) * on) * task.image_pitch;
    const auto image_at = [&](const Sample* other, const Sample* to) {
        if (ROWS == 0 && task.aligned_image) return loaded_vector(other + column);
        const int place = column - (aligned_out ? 0 : past_of(to));
        if (!aligned_out && place >= task.out_columns) return V();
        if (!aligned_out && (place < 0 || place + SAMPLES > task.out_columns)) return some_of(other, place, task.out_columns);
        return vector_at(other + place, place + 2 * SAMPLES <= task.out_columns);
    };
#pragma unroll 1
    for (int r = -1 - later; r < rows; r += 2) {
        Column<Sample> many[SAMPLES];
        settle(next, next_by);
        if constexpr (!KEEPS) settle(old, old_by);
        down.add(next[0], next[1], old[0], many);
        V theirs[2];
        if (task.subtracts && is_used) {
            if (r >= 0) theirs[0] = image_at(other, target);
            if (r >= -1 && r + 1 < rows) theirs[1] = image_at(other + image_step, target + out_step);
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
        target += 2 * out_step, other += 2 * image_step;
    }
}
