// Medians of squares of 9 to 15, by networks in registers, after Sugy's hierarchical tiling. Part of rank.cu.
//
// A thread computes a tile of 4 × 4 results, of two strips half a block apart, one in each half of a word. What all windows
// of the tile share is merged first, then what those of its upper or lower two lines share, of two columns of these, of one
// column; last comes a result's own line. With r samples to come, only the r + 1 places around the middle are kept:
//
//      15 × 15, samples      12 × 12 of all   + 2 lines   + 2 columns   + 1 column   + 1 line
//               kept                   82          58            30           16   1
//               merged once for        16           8             4            2   1 results
//
// Lists that neighbours share are sorted once, of each four columns of a line of tiles, and lie in shared memory.
//
//   threads of a block   load the block's samples, packed; ask for those of the next block
//     |  barrier
//   each four columns    sorted columns, of two, of four; their lines above and below, alone and two together
//     |  barrier         a tile reads the lists of its neighbours
//   each tile            merges -> results
//
// A result of 15 × 15 takes about 320 instructions, 170 of them minima or maxima, of which a multiprocessor starts 64 a cycle:
// 0.7 ms of 8192 × 8192 on an H200, where 1.10 ms were measured. While both warps of a scheduler merge, one of them issues in 3
// of 4 cycles. Nothing hides the loads, and one warp alone sorts the last 32 of a block's 288 lists. Of large squares a block has
// all eight warps that a multiprocessor holds, which run the same code at nearly the same time.
//
// Source: Sugy, "Hierarchical tiling" (2025).
#pragma once

#include "gather.cuh"
#include "networks.cuh"

constexpr int TILE_SIDE = 4, TILES_ACROSS = 32;
using TileKey = Pair<3>;
constexpr int TILE_SPAN = TILE_SIDE * TILES_ACROSS;  // results of a line, of one strip

template <int SIZE>
struct Tile {
    // A side of what all windows share: its lists of four columns, and whether it has two columns more.
    static constexpr int CORE = SIZE - 3, QUADS = CORE / 4, HALF = CORE % 4 / 2;
    static constexpr int DOWN = SIZE < 13 ? 4 : 8;  // lines of tiles of a block, each of one warp
    static constexpr int LISTS = TILES_ACROSS + QUADS + 1 + HALF;  // of a line of tiles
    static constexpr int COUNT = LISTS * DOWN, PITCH = 4 * LISTS, LINES = TILE_SIDE * DOWN + SIZE - 1;
    // Places of lists, of which each has COUNT: of four columns, twice two, four times one; of two lines, above and below; of
    // one line.
    static constexpr int FOUR = 0, TWO = 4 * CORE, ONE_ = 8 * CORE, PAIRS = 12 * CORE, LINE = 12 * CORE + 16;
    static constexpr int WORDS = LINES * PITCH + (LINE + 16) * COUNT;
    static_assert(CORE % 2 == 0 && (QUADS == 1 ? HALF == 1 : QUADS == 2 || (QUADS == 3 && HALF == 0)), "");
};

template <int N, typename Key>
__device__ inline void load_list(const unsigned* list, int count, Key (&found)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) found[i] = {list[i * count]};
}

template <int N, typename Key>
__device__ inline void store_list(unsigned* list, int count, const Key (&sorted)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) list[i * count] = sorted[i].bits;
}

// The lists of four columns, whose first sample of the tile's first line is raw[0].
template <int SIZE>
__device__ inline void sort_quad(const unsigned* raw, unsigned* lists) {
    using T = Tile<SIZE>;
    constexpr int CORE = T::CORE, COUNT = T::COUNT;
    TileKey column[4][CORE], two[2][2 * CORE], four[4 * CORE];
#pragma unroll
    for (int y = 0; y < CORE; ++y) {
        const uint4 line = *reinterpret_cast<const uint4*>(raw + (y + 3) * T::PITCH);
        column[0][y] = {line.x}, column[1][y] = {line.y}, column[2][y] = {line.z}, column[3][y] = {line.w};
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sort(column[j]);
        store_list(lists + (T::ONE_ + j * CORE) * COUNT, COUNT, column[j]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        merge<0, 2 * CORE>(column[2 * j], column[2 * j + 1], two[j]);
        store_list(lists + (T::TWO + 2 * j * CORE) * COUNT, COUNT, two[j]);
    }
    merge<0, 4 * CORE>(two[0], two[1], four);
    store_list(lists + T::FOUR * COUNT, COUNT, four);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Above or below: the line of the outer result, two lines of both, of which one is the inner result's elsewhere.
        const unsigned* outer = raw + (half == 0 ? 0 : CORE + 3) * T::PITCH;
        TileKey line[3][4], both[8];
#pragma unroll
        for (int y = 0; y < 3; ++y) {
            const uint4 four = *reinterpret_cast<const uint4*>(outer + y * T::PITCH);
            line[y][0] = {four.x}, line[y][1] = {four.y}, line[y][2] = {four.z}, line[y][3] = {four.w};
            sort(line[y]);
        }
        // Lines 0 and 2 are those of single results; of both: 1 and 2 above, 0 and 1 below.
        merge<0, 8>(line[1 - half], line[2 - half], both);
        store_list(lists + (T::PAIRS + 8 * half) * COUNT, COUNT, both);
        store_list(lists + (T::LINE + 8 * half) * COUNT, COUNT, line[0]);
        store_list(lists + (T::LINE + 8 * half + 4) * COUNT, COUNT, line[2]);
    }
}

// Merges the lists of the lines of a tile's quads, of N samples each, and of the two columns that are left, from `rest` on.
template <int SIZE, int N>
__device__ inline void merge_lines(const unsigned* lists, const unsigned* rest, TileKey (&all)[N / 4 * Tile<SIZE>::CORE]) {
    using T = Tile<SIZE>;
    TileKey first[N], two[2 * N], half[N / 2];
    load_list(lists + 1, T::COUNT, first);
    if constexpr (T::HALF) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) half[i] = {rest[i / 2 * T::PITCH + i % 2]};
        sort(half);
    }
    if constexpr (T::QUADS == 1) {
        merge<0, N + N / 2>(first, half, all);
    } else {
        TileKey second[N];
        load_list(lists + 2, T::COUNT, second);
        merge<0, 2 * N>(first, second, two);
        if constexpr (T::QUADS == 3) {
            TileKey third[N];
            load_list(lists + 3, T::COUNT, third);
            merge<0, 3 * N>(two, third, all);
        } else if constexpr (T::HALF) {
            merge<0, 2 * N + N / 2>(two, half, all);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * N; ++i) all[i] = two[i];
        }
    }
}

// The medians of a tile; `emit(y, x, key)` gets each.
template <int SIZE, typename Emit>
__device__ inline void tile_medians(const unsigned* raw, const unsigned* lists, Emit emit) {
    using T = Tile<SIZE>;
    constexpr int CORE = T::CORE, COUNT = T::COUNT, QUADS = T::QUADS, MIDDLE = SIZE * SIZE / 2;
    // Of the samples so far: how many are still to come, and the place from which on they are kept.
    constexpr int LEFT4 = SIZE * SIZE - CORE * CORE, LEFT42 = LEFT4 - 2 * CORE, LEFT2 = LEFT42 - 2 * (CORE + 2);
    constexpr int LEFT1 = LEFT2 - (CORE + 2);
    static_assert(LEFT1 == SIZE, "");
    constexpr int FROM4 = MIDDLE > LEFT4 ? MIDDLE - LEFT4 : 0, MIDDLE4 = MIDDLE - FROM4;
    constexpr int KEPT4 = MIDDLE4 + 1 < CORE * CORE - FROM4 ? MIDDLE4 + 1 : CORE * CORE - FROM4;
    constexpr int FROM42 = MIDDLE4 > LEFT42 ? MIDDLE4 - LEFT42 : 0, KEPT42 = MIDDLE4 - FROM42 + 1, MIDDLE42 = MIDDLE4 - FROM42;
    constexpr int FROM2 = MIDDLE42 - LEFT2, KEPT2 = LEFT2 + 1, FROM1 = LEFT2 - LEFT1, KEPT1 = LEFT1 + 1;
    static_assert(FROM42 + KEPT42 <= KEPT4 + 2 * CORE, "");
    constexpr int REST = 4 * (QUADS + 1);  // the columns that are left of all quads
    TileKey core[KEPT4];
    {
        TileKey first[4 * CORE], second[4 * CORE], two[8 * CORE], half[2 * CORE];
        load_list(lists + T::FOUR * COUNT + 1, COUNT, first);
        if constexpr (T::HALF) load_list(lists + T::TWO * COUNT + QUADS + 1, COUNT, half);
        if constexpr (QUADS == 1) {
            merge<FROM4, KEPT4>(first, half, core);
        } else {
            load_list(lists + T::FOUR * COUNT + 2, COUNT, second);
            if constexpr (QUADS == 2 && !T::HALF) {
                merge<FROM4, KEPT4>(first, second, core);
            } else {
                merge<0, 8 * CORE>(first, second, two);
                if constexpr (T::HALF) {
                    merge<FROM4, KEPT4>(two, half, core);
                } else {
                    TileKey third[4 * CORE];
                    load_list(lists + T::FOUR * COUNT + 3, COUNT, third);
                    merge<FROM4, KEPT4>(two, third, core);
                }
            }
        }
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const unsigned* pair_lines = raw + (half == 0 ? 1 : CORE + 3) * T::PITCH;
        TileKey pair[KEPT42];
        {
            TileKey lines[2 * CORE];
            merge_lines<SIZE, 8>(lists + (T::PAIRS + 8 * half) * COUNT, pair_lines + REST, lines);
            merge<FROM42, KEPT42>(core, lines, pair);
        }
#pragma unroll 1
        for (int side = 0; side < 2; ++side) {
            // The two columns that join for both results, and those of one.
            const int column_at = side == 0 ? 2 : 4 + CORE;
            TileKey kept[KEPT2];
            {
                TileKey two[2 * CORE], corner[4], all[2 * CORE + 4];
                load_list(side == 0 ? lists + (T::TWO + 2 * CORE) * COUNT
                                    : lists + (T::TWO + 2 * CORE * T::HALF) * COUNT + QUADS + 1,
                          COUNT, two);
#pragma unroll
                for (int i = 0; i < 4; ++i) corner[i] = {pair_lines[i / 2 * T::PITCH + column_at + i % 2]};
                sort(corner);
                merge<0, 2 * CORE + 4>(two, corner, all);
                merge<FROM2, KEPT2>(pair, all, kept);
            }
            TileKey found[2][2];
            TileKey line[2][CORE + 2];
#pragma unroll
            for (int y = 0; y < 2; ++y) {
                const unsigned* own = raw + (y == 0 ? 2 * half : CORE + 3 + 2 * half) * T::PITCH;
                TileKey middle[CORE], two[2];
                merge_lines<SIZE, 4>(lists + (T::LINE + 8 * y + 4 * half) * COUNT, own + REST, middle);
                two[0] = {own[column_at]}, two[1] = {own[column_at + 1]};
                exchange(two[0], two[1]);
                merge<0, CORE + 2>(middle, two, line[y]);
            }
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int at = (x == 0 ? 1 : 4 + CORE) + 2 * side;
                const unsigned* list = lists + (T::ONE_ + at % 4 * CORE) * COUNT + at / 4;
                const unsigned* ends = pair_lines + at;
                TileKey column[CORE], two[2] = {{ends[0]}, {ends[T::PITCH]}}, all[CORE + 2], nearly[KEPT1];
                load_list(list, COUNT, column);
                exchange(two[0], two[1]);
                merge<0, CORE + 2>(column, two, all);
                merge<FROM1, KEPT1>(kept, all, nearly);
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    // The last sample to join lies between the two middle ones of the others, or one of these is the median.
                    const TileKey corner = {raw[(y == 0 ? 2 * half : CORE + 3 + 2 * half) * T::PITCH + at]};
                    const TileKey upper_of_two = high(ranked_of<LEFT1 - 1>(nearly, line[y]), corner);
                    emit(2 * half + y, 2 * side + x, low(ranked_of<LEFT1>(nearly, line[y]), upper_of_two));
                }
            }
        }
    }
}

// median_tile: one block computes TILE_SIDE DOWN lines of twice TILE_SPAN results. `signs`: of two samples, the sign bits, which
// are flipped meanwhile; 0 if samples have none.
template <typename Sample, int SIZE>
__global__ void __launch_bounds__(32 * Tile<SIZE>::DOWN, 8 / Tile<SIZE>::DOWN) median_tile(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ PlanesTask task, Sample cval,
    unsigned signs) {
    using T = Tile<SIZE>;
    extern __shared__ __align__(16) unsigned words[];
    unsigned* raw = words;
    unsigned* lists = words + T::LINES * T::PITCH;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int x0 = blockIdx.x * (2 * TILE_SPAN), y0 = blockIdx.y * (TILE_SIDE * T::DOWN);
    in += blockIdx.z * static_cast<long long>(task.rows) * task.columns;
    out += blockIdx.z * static_cast<long long>(task.out_rows) * task.out_columns;
    // The first list begins one sample before the first result's window.
    constexpr int EACH = (T::PITCH + 31) / 32;
    const int top = y0 + task.first_y, left = x0 + task.first_x - 1;
    if (top >= 0 && left >= 0 && top + T::LINES <= task.rows && left + TILE_SPAN + T::PITCH <= task.columns) {
        const Sample* row = in + static_cast<long long>(top + warp) * task.columns + left + lane;
#pragma unroll
        for (int k = 0; k < T::LINES; k += T::DOWN) {
            if (warp + k < T::LINES) {
#pragma unroll
                for (int j = 0; j < EACH; ++j)
                    if (lane + 32 * j < T::PITCH)
                        raw[(warp + k) * T::PITCH + lane + 32 * j] = (row[32 * j] | row[32 * j + TILE_SPAN] << 16) ^ signs;
            }
            row += static_cast<long long>(T::DOWN) * task.columns;
        }
    } else {
        int from_x[2][EACH];
#pragma unroll
        for (int strip = 0; strip < 2; ++strip)
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                from_x[strip][j] = border_index(left + strip * TILE_SPAN + lane + 32 * j, task.columns, task.mode_x);
#pragma unroll 3
        for (int y = warp; y < T::LINES; y += T::DOWN) {
            const int from_y = border_index(top + y, task.rows, task.mode_y);
            const Sample* row = in + static_cast<long long>(from_y) * task.columns;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                unsigned key[2];
#pragma unroll
                for (int strip = 0; strip < 2; ++strip)
                    key[strip] = from_y < 0 || from_x[strip][j] < 0 ? cval : row[from_x[strip][j]];
                if (lane + 32 * j < T::PITCH) raw[y * T::PITCH + lane + 32 * j] = (key[0] | key[1] << 16) ^ signs;
            }
        }
    }
    {
        // Into L2: the lines of the block that this multiprocessor computes next, four times 128 bytes of each.
        unsigned multiprocessors;
        asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
        const unsigned next = blockIdx.x + gridDim.x * blockIdx.y + multiprocessors * (8 / T::DOWN);
        const int line = thread / 4, y = static_cast<int>(next / gridDim.x) * (TILE_SIDE * T::DOWN) + task.first_y + line;
        constexpr int APART = 128 / sizeof(Sample);
        const int x = static_cast<int>(next % gridDim.x) * (2 * TILE_SPAN) + task.first_x + thread % 4 * APART;
        if (line < T::LINES && y >= 0 && y < task.rows && x >= 0 && x < task.columns)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(in + static_cast<long long>(y) * task.columns + x));
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < T::COUNT; i += 32 * T::DOWN) {
        const int line = i / T::LISTS, quad = i % T::LISTS;
        sort_quad<SIZE>(raw + line * TILE_SIDE * T::PITCH + 4 * quad, lists + i);
    }
    __syncthreads();
    const int y = y0 + warp * TILE_SIDE, x = x0 + lane * TILE_SIDE;
    if (y >= task.out_rows || x >= task.out_columns) return;
    raw += warp * TILE_SIDE * T::PITCH + 4 * lane;
    tile_medians<SIZE>(raw, lists + warp * T::LISTS + lane, [&](int dy, int dx, TileKey found) {
        if (y + dy >= task.out_rows) return;
        Sample* target = out + static_cast<long long>(y + dy) * task.out_columns + x + dx;
        if (x + dx < task.out_columns) target[0] = static_cast<Sample>(found.bits ^ signs);
        if (x + dx + TILE_SPAN < task.out_columns) target[TILE_SPAN] = static_cast<Sample>((found.bits ^ signs) >> 16);
    });
}
