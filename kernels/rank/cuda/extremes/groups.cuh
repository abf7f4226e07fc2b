// Minima and maxima of boxes of many rows, at a cost that hardly grows with the window. Part of rank.cu.
//
//   extreme_groups   of each GROUP rows, the extremes of all, and of the first of them: an eighth of the image
//        |
//   extreme_tiles    a block has GROUP rows of results of a tile of columns, and each thread 16 bytes of them:
//
//        rows of the image      | g g g g | . . . . | . . . . | e e e e |
//        windows of the tile      [ - - - - - - - - - - - - ]             the last rows of g, whole groups, the first rows of the next
//                                       [ - - - - - - - - - - - - ]       group, which all windows have, and the first of rows e
//
//        So a thread loads two rows for each result, and a vector for GROUP rows of the window. The second time a row is loaded it
//        lies in L2, since blocks take the image's rows in order.
//
//        columns of two rows    each thread, from its first column on, into shared memory; from each to its last, in registers
//             |  barrier
//        windows along the row  three values: the thread's own, of whole threads between, and of the last thread; `span` threads at once
//             |                 for windows of many, after a barrier for each doubling
//             |  barrier        before the next two rows take their place
//
// Floors of N samples of b bytes: 3 N b bytes of memory, 0.67 of a copy, and 3 N b more from L2. Measured on an H200, 8192 × 8192: 0.24 of a
// copy for 255 × 255 of 16 bits; 0.35, 0.33 and 0.27 for 65, 101 and 255 rows and columns of floats. Bytes, and fewer rows, are faster in
// the passes of box.cuh and strip.cuh.
#pragma once

#include "cuda/extremes/columns.cuh"

constexpr int GROUP = 16, COMING = 4;  // rows of a group, and of those on their way at the end of the windows
constexpr int GROUP_THREADS = 256;     // at most

// Rows at any address: of the two vectors that hold a part of each, which may reach 15 bytes into the next row.
template <typename Sample, int ROWS>
__device__ inline void load_rows(Vector<Sample>* row, const Sample* first, long long pitch, bool aligned) {
    using V = Vector<Sample>;
    if (aligned) {
#pragma unroll
        for (int j = 0; j < ROWS; ++j) row[j] = loaded_vector(first + j * pitch);
        return;
    }
    constexpr int SOME = ROWS < 4 ? ROWS : 4, EACH = SAMPLES_A_WORD<Sample>, WORDS = V::WORDS;
#pragma unroll
    for (int begin = 0; begin < ROWS; begin += SOME) {
        V two[SOME][2];
        int by[SOME];
#pragma unroll
        for (int j = 0; j < SOME; ++j) {
            const Sample* at = first + (begin + j) * pitch;
            by[j] = static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Sample));
            two[j][0] = loaded_vector(at - by[j]);
            two[j][1] = loaded_vector(at - by[j] + (by[j] == 0 ? 0 : V::SAMPLES));
        }
#pragma unroll
        for (int j = 0; j < SOME; ++j) {
            Word<Sample> word[2 * WORDS];
#pragma unroll
            for (int k = 0; k < 2 * WORDS; ++k) word[k] = two[j][k / WORDS].word[k % WORDS];
            const int words = by[j] / EACH, bits = by[j] % EACH * 8 * static_cast<int>(sizeof(Sample));
#pragma unroll
            for (int step = WORDS / 2; step > 0; step /= 2)
#pragma unroll
                for (int k = 0; k + step < 2 * WORDS; ++k) word[k] = words & step ? word[k + step] : word[k];
#pragma unroll
            for (int k = 0; k < WORDS; ++k) {
                if constexpr (EACH == 1) row[begin + j].word[k] = word[k];
                else row[begin + j].word[k] = __funnelshift_r(word[k], word[k + 1], bits);
            }
        }
    }
}

// Of integers; and of floats whose NaN spread, without nodata. Groups begin with the windows of results 0, GROUP, 2 GROUP …; that of the first
// results is left out. Of each, two lines: the extremes of its rows, and of its first (taps_y - 1) % GROUP.
template <typename Sample, bool LEAST>
__global__ void __launch_bounds__(GROUP_THREADS) extreme_groups(
    const Sample* __restrict__ in, Sample* __restrict__ groups, const __grid_constant__ BoxTask task, Sample cval) {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    const int tiles = (task.group_pitch / V::SAMPLES + blockDim.x - 1) / blockDim.x;
    unsigned rest = blockIdx.x;
    const int x = (rest % tiles * blockDim.x + threadIdx.x) * V::SAMPLES;
    rest /= tiles;
    if (x >= task.columns) return;
    const int y = task.first_y + (rest % task.group_rows + 1) * GROUP, part = (task.taps_y - 1) % GROUP;
    in += rest / task.group_rows * task.in_plane;
    V row[GROUP];
    if (y >= 0 && y + GROUP + !task.aligned_in <= task.rows && x + V::SAMPLES <= task.columns) {
        load_rows<Sample, GROUP>(row, in + y * static_cast<long long>(task.in_pitch) + x, task.in_pitch, task.aligned_in);
    } else {
        const int last = task.first_y + task.out_rows + task.taps_y - 2;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const int at = index_beyond(min(y + j, last), task.rows, task.mode_y);
            row[j] = at < 0 ? splat<Sample>(filled(cval)) : vector_of(in + at * static_cast<long long>(task.in_pitch), x, task.columns);
        }
    }
    Many all = widened(splat<Sample>(loser<Sample, LEAST>())), some = all;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
        all = chosen<LEAST>(all, widened(row[j]));
        if (j + 1 == part) some = all;
    }
    Sample* to = groups + rest * 2ll * task.group_pitch + x;
    *reinterpret_cast<V*>(to) = narrowed(all);
    *reinterpret_cast<V*>(to + task.group_pitch) = narrowed(some);
}

// Columns in shared memory: those of a thread, and a gap, so that threads use different banks.
template <typename Sample, int N>
__device__ inline void put(Column<Sample>* to, const Column<Sample> (&column)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) to[threadIdx.x * (N + 1) + j] = column[j];
}

// Those that lie `by` after each.
template <typename Sample, int N>
__device__ inline void get(const Column<Sample>* from, int by, Column<Sample> (&column)[N]) {
    const int last = blockDim.x - 1, at = threadIdx.x + by / N, first = min(at, last) * (N + 1), second = min(at + 1, last) * (N + 1);
    with_constant<0, N>(by % N, [&](auto rest) {
        constexpr int REST = decltype(rest)::value;
#pragma unroll
        for (int j = 0; j < N; ++j) column[j] = from[(j + REST < N ? first : second) + (j + REST) % N];
    });
}

// Of windows of `taps` columns that begin at each, and end in another thread. All threads meet here. `ends` gets the extremes
// from each thread's first column on, `whole` those of whole threads, and of `span` of them.
template <bool LEAST, typename Sample, int N>
__device__ inline void extremes_along(Column<Sample> (&column)[N], Column<Sample>* ends, Column<Sample>* whole, int taps, int span) {
    using Each = Column<Sample>;
    const int threads = blockDim.x, thread = threadIdx.x;
    if (taps == 1) return;
    Each prefix[N];
#pragma unroll
    for (int j = 0; j < N; ++j) prefix[j] = j == 0 ? column[0] : chosen<LEAST>(prefix[(j + N - 1) % N], column[j]);
    put<Sample>(ends, prefix);
#pragma unroll
    for (int j = N - 2; j >= 0; --j) column[j] = chosen<LEAST>(column[j], column[j + 1]);
    whole[thread] = column[0];
    __syncthreads();
    const Each* spans = whole;
#pragma unroll 1
    for (int by = 1; by < span; by *= 2) {
        Each* doubled = spans == whole ? whole + threads : whole;
        doubled[thread] = chosen<LEAST>(spans[thread], spans[min(thread + by, threads - 1)]);
        spans = doubled;
        __syncthreads();
    }
    // Whole threads between, if a window ends in the thread `lanes` after its first, or in the next.
    const int lanes = (taps - 1) / N, at = min(thread, threads - 2 - lanes);
    Each between, to_last;
#pragma unroll
    for (int w = 0; w < Each::WORDS; ++w) between.word[w] = loser<Sample, LEAST>();
#pragma unroll 4
    for (int v = 1; v + span <= lanes; v += span) between = chosen<LEAST>(between, spans[at + v]);
    if (span > 1) between = chosen<LEAST>(between, spans[at + lanes - span]);
    to_last = chosen<LEAST>(between, spans[at + lanes - span + 1]);
    with_constant<0, N>((taps - 1) % N, [&](auto rest) {
        constexpr int REST = decltype(rest)::value;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool is_near = j + REST < N;
            const Each end = ends[(at + lanes + !is_near) * (N + 1) + (j + REST) % N];
            column[j] = chosen<LEAST>(chosen<LEAST>(column[j], is_near ? between : to_last), end);
        }
    });
}

template <typename Sample, bool LEAST>
__global__ void __launch_bounds__(GROUP_THREADS, 2) extreme_tiles(
    const Sample* __restrict__ in, Sample* __restrict__ out, const Sample* __restrict__ image, const Sample* __restrict__ groups,
    const __grid_constant__ BoxTask task, Sample cval) {
    using V = Vector<Sample>;
    using Many = Lanes<Sample>;
    using Each = Column<Sample>;
    constexpr int N = V::SAMPLES, WORDS = V::WORDS;
    extern __shared__ ulonglong2 vectors[];
    const int threads = blockDim.x, thread = threadIdx.x, taps = task.taps_x;
    Each* const raw = reinterpret_cast<Each*>(vectors);
    Each* const ends = raw + (N + 1) * threads;
    Each* const whole = ends + (N + 1) * threads;
    int* const from = reinterpret_cast<int*>(whole + 2 * threads) + thread;

    const unsigned block = gridDim.x - 1 - blockIdx.x;  // the last rows first: L2 has what extreme_groups read last
    Band<Sample> band(in, out, image, task, block, thread, threads, from, false);
    band.settle(__syncthreads_or(band.is_far));
    const int rows = band.total - (task.taps_y - 1), x = band.x, columns = task.columns;
    const int number = block / task.tiles % task.bands;
    const long long plane = block / task.tiles / task.bands;
    const bool is_gathered = band.is_edge && band.gathers, is_part = x < columns && x + N > columns;
    const int loaded_x = max(0, min(x, columns - N));  // threads that need nothing load what others do

    // Rows n … of the windows.
    const auto fetch = [&](V* row, int n, auto count) {
        constexpr int ROWS = decltype(count)::value;
        const int y = band.in_y + n;
        if (y >= 0 && y + ROWS + !task.aligned_in <= task.rows && !is_gathered && !is_part) {
            load_rows<Sample, ROWS>(row, band.in + y * static_cast<long long>(task.in_pitch) + loaded_x, task.in_pitch, task.aligned_in);
            return;
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            int at = band.in_y + min(n + j, band.total - 1);
            if (at < 0 || at >= task.rows) at = index_beyond(at, task.rows, task.mode_y);
            const Sample* line = band.in + at * static_cast<long long>(task.in_pitch);
            if (at < 0) row[j] = splat<Sample>(filled(cval));
            else if (is_gathered) row[j] = gathered(line, from, cval);
            else if (is_part) row[j] = vector_of(line, x, columns);
            else row[j] = vector_at(line + loaded_x, at + 1 < task.rows);
        }
    };
    V row[GROUP], next[COMING];
    fetch(row, 0, Number<GROUP>());
    fetch(next, task.taps_y - 1, Number<COMING>());
    Many suffix = widened(splat<Sample>(loser<Sample, LEAST>()));
    const Sample* line = groups + (plane * task.group_rows + number) * 2 * task.group_pitch;
#pragma unroll 4
    for (int k = 1; k <= task.slots; ++k, line += 2 * task.group_pitch) {
        const Sample* here = line + (k == task.slots ? task.group_pitch : 0);
        if (is_gathered) suffix = chosen<LEAST>(suffix, widened(gathered(here, from, cval)));
        else suffix = chosen<LEAST>(suffix, widened(loaded_vector(here + max(0, min(x, task.group_pitch - N)))));
    }
#pragma unroll
    for (int j = GROUP - 1; j >= 0; --j) suffix = chosen<LEAST>(suffix, widened(row[j])), row[j] = narrowed(suffix);
    if (band.fills && band.is_edge) {  // columns from beyond the edges are others of the tile
        for (int i = 0; i < N; ++i) {
            const int source = from[i * threads], place = source - band.base;
            const bool is_here = place >= 0 && place < threads * N;
            if (source >= 0) from[i * threads] = is_here ? place / N * (N + 1) + place % N : 0;
        }
    }

    const int place = band.c0 + thread * N, by = band.ahead - (task.aligned_out ? 0 : N - 1);
    const bool is_used = thread < task.tile / N;
    Many prefix = widened(splat<Sample>(loser<Sample, LEAST>()));
#pragma unroll 1
    for (int n = 0; n < rows; n += 2) {
        Each column[N];
        const Many upper = chosen<LEAST>(prefix, widened(next[0]));
        prefix = chosen<LEAST>(upper, widened(next[1]));
        to_columns<Sample>(chosen<LEAST>(upper, widened(row[0])), chosen<LEAST>(prefix, widened(row[1])), column);
#pragma unroll
        for (int j = 0; j < GROUP - 2; ++j) row[j] = row[j + 2];
#pragma unroll
        for (int j = 0; j < COMING - 2; ++j) next[j] = next[j + 2];
        if (n + COMING < rows) fetch(next + COMING - 2, task.taps_y - 1 + n + COMING, Number<2>());
        if (band.fills) {
            __syncthreads();
            put<Sample>(raw, column);
            __syncthreads();
            if (band.is_edge) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    const int source = from[j * threads];
                    column[j] = source < 0 ? column_of(cval) : raw[source];
                }
            }
            __syncthreads();
        }
        if (by > 0) put<Sample>(raw, column);
        if (by > 0 || taps > 1) __syncthreads();
        if (by > 0) get<Sample>(raw, by, column);
        extremes_along<LEAST, Sample>(column, ends, whole, taps, task.span);
        V found[2];
        to_rows<Sample>(column, found[0], found[1]);
        if constexpr (same<Sample, float>) {
#pragma unroll
            for (int k = 0; k < 2 * WORDS; ++k) {
                Word<Sample>& word = found[k / WORDS].word[k % WORDS];
                if (is_nan(__uint_as_float(word))) word = bits_of(not_a_number<float>());
            }
        }
        if (task.aligned_out) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (!is_used || n + j >= rows || place >= task.out_columns) break;
                const int y = number * GROUP + n + j;
                Sample* to = band.out + y * static_cast<long long>(task.out_pitch) + place;
                if (task.subtracts) {
                    const V theirs = vector_at(band.image + y * task.image_pitch + place, place + 2 * N <= task.out_columns);
                    found[j] = task.subtracts == 1 ? difference(theirs, found[j], 0, cval) : difference(found[j], theirs, 0, cval);
                }
                store_vector(to, found[j]);
            }
            continue;
        }
        // Rows that begin anywhere: vectors of the output hold results of two threads.
        V* const lines = reinterpret_cast<V*>(raw);
        if (taps == 1) __syncthreads();  // until all have read `raw`
        lines[thread] = found[0], lines[threads + thread] = found[1];
        __syncthreads();
        for (int j = 0; j < 2 && n + j < rows && is_used; ++j) {
            const auto to = band.results(n + j + task.taps_y - 1, thread);
            if (to.place >= task.out_columns) continue;
            V theirs = {};
            if (task.subtracts) theirs = band.image_at(to);
            const V* mine = lines + j * threads + thread;
            band.store(to, shifted(mine[0], mine[1], N - 1 - to.before), theirs, cval);
        }
        __syncthreads();
    }
}
