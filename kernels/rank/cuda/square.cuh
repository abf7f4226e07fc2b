// Medians of 3 × 3, 5 × 5 and 7 × 7, by networks in registers that neighbours share. Part of rank.cu.
//
// A thread computes tiles of 2 × 2 results along a strip; samples of 16 bits two strips at once, half a block apart, one in
// each half of a word. Of the windows of a tile
//
//      t . . t t . . t        c  core: in all four windows; its columns are sorted, merged in pairs that the next tile
//      . l c c c c r .           shares, and all merged
//      . l c c c c r .        l, r  in the windows of one side: a sorted column, merged with the core for two results
//      . l c c c c r .        t, b  in those of one line: sorted, with the corner of each result
//      . l c c c c r .
//      b . . b b . . b
//
// only samples that can still be the median are kept: with r samples to come, r + 1 places around the middle. For a result
// this takes about 9 (3 × 3), 21 (5 × 5, and as many sums) and 60 (7 × 7) minima or maxima.
//
//   threads of a block     load the block's samples, packed, to shared memory
//        |  barrier           each waits for all others: a strip reads what its neighbours loaded
//   each thread by itself  columns of its strip from shared memory, two at a time -> results -> global memory
//
// Sources: Adams, "Fast median filters using separable sorting networks" (2021); Sugy, "Hierarchical tiling" (2025).
#pragma once

#include "gather.cuh"
#include "networks.cuh"

struct SquareTask : PlanesTask {
    int aligned_in, aligned_out;  // whether vectors can be loaded and stored
};

// How samples lie in words.
template <typename Sample>
struct Words {
    template <int SIZE>
    using Key = Pair<SIZE == 5 ? 4 : 0>;  // larger networks wait for instructions
    static constexpr int STRIPS = 2;
};
template <>
struct Words<float> {
    template <int SIZE>
    using Key = One;
    static constexpr int STRIPS = 1;
};

constexpr int STRIP = 8;                       // results of a strip along a line
constexpr int ACROSS = 16, DOWN = 8;           // threads of a block
constexpr int SPAN = STRIP * ACROSS;           // results along a line, of all strips in one half of the words
constexpr int LEAD = 4;                        // samples before the first result that a block loads, for aligned vectors
constexpr int LOADED = LEAD + SPAN + 4;        // words of a line
constexpr int skewed(int x) { return x + x / 8 * 2; }  // pairs of words that 16 threads read at once lie in different banks
constexpr int PITCH = skewed(LOADED);

template <typename Sample>
__device__ inline unsigned word_of(Sample first, Sample second) {
    if constexpr (Words<Sample>::STRIPS == 1) return key_of(first);
    else return key_of(first) | key_of(second) << 16;
}

template <typename Sample>
__device__ inline Sample unpacked(unsigned word, int strip) {
    if constexpr (Words<Sample>::STRIPS == 1) return sample_of<Sample>(word);
    else return sample_of<Sample>(word >> 16 * strip & 0xFFFFu);
}

// The median of SIZE × SIZE for one strip; `emit(y, x, key)` gets the results of two lines.
template <int SIZE, typename Key, typename Emit>
__device__ inline void medians(const unsigned* strip, Emit emit) {
    constexpr int CORE = SIZE - 1, ALL = SIZE * SIZE, MIDDLE = ALL / 2, PAIRS = CORE / 2;
    // What is kept of the core, and of the core with a side.
    constexpr int LEFT = ALL - CORE * CORE, FROM = MIDDLE > LEFT ? MIDDLE - LEFT : 0;
    constexpr int KEPT = MIDDLE - FROM + 1 < CORE * CORE - FROM ? MIDDLE - FROM + 1 : CORE * CORE - FROM;
    constexpr int SIDE_FROM = MIDDLE - SIZE - FROM > 0 ? MIDDLE - SIZE - FROM : 0;
    constexpr int SIDE_KEPT = MIDDLE - FROM - SIDE_FROM + 1 < KEPT + CORE - SIDE_FROM ? MIDDLE - FROM - SIDE_FROM + 1
                                                                                     : KEPT + CORE - SIDE_FROM;
    constexpr int SHIFT = LEAD - SIZE / 2, ODD = SHIFT % 2;  // words before the strip's first column
    Key above[STRIP + SIZE], below[STRIP + SIZE];            // the lines of one result each
    Key column[STRIP + SIZE][CORE], pair[STRIP / 2 + PAIRS][2 * CORE], inner[4 * CORE];
    const auto put = [&](int y, int x, unsigned word) {
        if (y == 0) above[x] = {word};
        else if (y == SIZE) below[x] = {word};
        else column[x][y - 1] = {word};
    };
    if constexpr (ODD == 1) {
#pragma unroll
        for (int y = 0; y <= SIZE; ++y) put(y, 0, strip[y * PITCH + skewed(SHIFT)]);
    }
#pragma unroll
    for (int x = 0; x < STRIP + CORE; x += 2) {
        // Columns x and x + 1 of the strip; vectors begin at even words, so that of an odd strip holds x + 1 and x + 2.
#pragma unroll
        for (int y = 0; y <= SIZE; ++y) {
            const uint2 both = *reinterpret_cast<const uint2*>(strip + y * PITCH + skewed(x + ODD + SHIFT));
            put(y, x + ODD, both.x);
            put(y, x + ODD + 1, both.y);
        }
        sort(column[x]);
        sort(column[x + 1]);
        if (x > 0) merge<0, 2 * CORE>(column[x - 1], column[x], pair[x / 2 - 1]);
        if (x < CORE) continue;
        // The tile whose windows' columns are x - CORE … x + 1.
        const int left = x - CORE;
        Key core[KEPT], top[CORE], bottom[CORE];
        if constexpr (PAIRS == 1) {
            static_assert(PAIRS > 1 || (FROM == 0 && KEPT == CORE * CORE), "");
#pragma unroll
            for (int i = 0; i < KEPT; ++i) core[i] = pair[left / 2][i];
        } else if constexpr (PAIRS == 2) {
            merge<FROM, KEPT>(pair[left / 2], pair[left / 2 + 1], core);
        } else {
            // Two tiles share the pairs that are inside of both.
            static_assert(PAIRS == 3, "");
            const bool is_first = left / 2 % 2 == 0;
            if (is_first) merge<0, 4 * CORE>(pair[left / 2 + 1], pair[left / 2 + 2], inner);
            merge<FROM, KEPT>(inner, pair[is_first ? left / 2 : left / 2 + 2], core);
        }
#pragma unroll
        for (int i = 0; i < CORE; ++i) top[i] = above[left + 1 + i], bottom[i] = below[left + 1 + i];
        sort(top);
        sort(bottom);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int at = side == 0 ? left : x + 1;
            Key half[SIDE_KEPT], line[SIZE];
            merge<SIDE_FROM, SIDE_KEPT>(core, column[at], half);
            const Key corners[2][1] = {{above[at]}, {below[at]}};
            merge<0, SIZE>(top, corners[0], line);
            emit(0, left + side, ranked_of<MIDDLE - FROM - SIDE_FROM>(half, line));
            merge<0, SIZE>(bottom, corners[1], line);
            emit(1, left + side, ranked_of<MIDDLE - FROM - SIDE_FROM>(half, line));
        }
    }
}

// median_square: one block computes 2 DOWN lines of SPAN results, twice that for samples of 16 bits and fewer.
template <typename Sample, int SIZE>
__global__ void __launch_bounds__(ACROSS * DOWN) median_square(
    const Sample* __restrict__ in, Sample* __restrict__ out, SquareTask task, RankTask rank, Sample cval) {
    using Key = typename Words<Sample>::template Key<SIZE>;
    constexpr int STRIPS = Words<Sample>::STRIPS, LINES = 2 * DOWN + SIZE - 1;
    __shared__ __align__(16) unsigned lines[LINES * PITCH];
    const int x0 = blockIdx.x * (STRIPS * SPAN), y0 = blockIdx.y * (2 * DOWN);
    const long long plane = blockIdx.z;
    in += plane * task.rows * task.columns;
    out += plane * task.out_rows * task.out_columns;
    // The input's place of the first word: LEAD before that of result x0's centre.
    const int from_x = x0 + task.first_x + SIZE / 2 - LEAD, from_y = y0 + task.first_y;
    const int thread = threadIdx.y * ACROSS + threadIdx.x;
    bool nan = false;
    const bool inside = task.aligned_in && from_x >= 0 && from_x + (STRIPS - 1) * SPAN + LOADED <= task.columns;
    struct __align__(4 * sizeof(Sample)) Four {
        Sample sample[4];
    };
    const auto store = [&](int y, int x, const Four (&loaded)[STRIPS]) {
        unsigned word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            nan |= is_nan(loaded[0].sample[j]);
            word[j] = word_of(loaded[0].sample[j], loaded[STRIPS - 1].sample[j]);
        }
        uint2* target = reinterpret_cast<uint2*>(lines + y * PITCH + skewed(x));
        target[0] = {word[0], word[1]};
        target[1] = {word[2], word[3]};
    };
    if (inside && from_y >= 0 && from_y + LINES <= task.rows) {
        // All loads of a thread are under way before it stores the first. A warp takes every WARPS-th line, 32 groups of
        // four of it; the two groups that are left of each line are shared out after that.
        constexpr int WARPS = ACROSS * DOWN / 32, MOST = (LINES + WARPS - 1) / WARPS;
        const Sample* corner = in + static_cast<long long>(from_y) * task.columns + from_x;
        const int warp = thread / 32, lane = thread % 32;
        const int edge_y = thread / 2, edge_x = 4 * (32 + thread % 2);
        Four loaded[MOST][STRIPS], edge[STRIPS];
#pragma unroll
        for (int i = 0; i < MOST; ++i)
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip)
                if (warp + i * WARPS < LINES)
                    loaded[i][strip] = *reinterpret_cast<const Four*>(
                        corner + (warp + i * WARPS) * task.columns + 4 * lane + strip * SPAN);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
            if (edge_y < LINES)
                edge[strip] = *reinterpret_cast<const Four*>(corner + edge_y * task.columns + edge_x + strip * SPAN);
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (warp + i * WARPS < LINES) store(warp + i * WARPS, 4 * lane, loaded[i]);
        if (edge_y < LINES) store(edge_y, edge_x, edge);
    } else {
        constexpr int GROUPS = LOADED / 4;
        for (int i = thread; i < LINES * GROUPS; i += ACROSS * DOWN) {
            const int y = i / GROUPS, x = i % GROUPS * 4;
            const int from = border_index(from_y + y, task.rows, task.mode_y);
            Four loaded[STRIPS];
#pragma unroll
            for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = border_index(from_x + x + j + strip * SPAN, task.columns, task.mode_x);
                    loaded[strip].sample[j] = from < 0 || at < 0 ? cval : in[static_cast<long long>(from) * task.columns + at];
                }
            store(y, x, loaded);
        }
    }
    if constexpr (same<Sample, float>) nan = __syncthreads_or(nan);
    else __syncthreads();
    const int y = y0 + 2 * threadIdx.y, x = x0 + STRIP * threadIdx.x;
    if constexpr (same<Sample, float>) {
        if (nan) {
            for (int i = 0; i < 2 * STRIP; ++i) {
                const int line = y + i / STRIP, at = x + i % STRIP;
                if (line >= task.out_rows || at >= task.out_columns) continue;
                const long long result = (plane * task.out_rows + line) * task.out_columns + at;
                out[static_cast<long long>(line) * task.out_columns + at] =
                    ranked<false>(in - plane * task.rows * task.columns, rank, Footprint(), result, cval, cval,
                                  not_a_number<Sample>());
            }
            return;
        }
    }
    unsigned result[2][STRIP];
    // Strip threadIdx.x begins at word STRIP * threadIdx.x; skewed() is linear over multiples of 8.
    medians<SIZE, Key>(lines + 2 * threadIdx.y * PITCH + skewed(STRIP * threadIdx.x),
                       [&](int line, int at, Key key) { result[line][at] = key.bits; });
#pragma unroll
    for (int line = 0; line < 2; ++line) {
        if (y + line >= task.out_rows) break;
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
            const int at = x + strip * SPAN;
            Sample* target = out + static_cast<long long>(y + line) * task.out_columns + at;
            struct __align__(8 * sizeof(Sample) < 16 ? 8 * sizeof(Sample) : 16) Vector {
                Sample sample[sizeof(Sample) == 4 ? 4 : 8];
            };
            constexpr int EACH = sizeof(Vector) / sizeof(Sample);
            if (task.aligned_out && at + STRIP <= task.out_columns) {
#pragma unroll
                for (int part = 0; part < STRIP / EACH; ++part) {
                    Vector vector;
#pragma unroll
                    for (int j = 0; j < EACH; ++j)
                        vector.sample[j] = unpacked<Sample>(result[line][part * EACH + j], strip);
                    reinterpret_cast<Vector*>(target)[part] = vector;
                }
            } else {
#pragma unroll
                for (int j = 0; j < STRIP; ++j)
                    if (at + j < task.out_columns) target[j] = unpacked<Sample>(result[line][j], strip);
            }
        }
    }
}
