// Medians of 3 × 3 × 3 and 5 × 5 × 5, by networks in registers that neighbours share. Part of rank.cu.
//
// A lane goes through the planes of two rows of one column of results; the rows lie in the halves of each word. In every plane
// it sorts its column of SIZE samples, and merges it with those of the next lanes, to the samples of its window in that plane.
// Of SIZE 3 it merges all three columns. Of SIZE 5 two neighbours share four columns:
//
//      c0 [c1 c2 c3 c4]         the even lane merges these four in the first of two planes, the odd lane in the second;
//         [c1 c2 c3 c4] c5      each merges both with the column that is left
//
// The sorted planes of two results:
//
//      p0 [p1 p2] p3            p1 and p2 are merged for both; only samples that can still be the median are kept, and
//      p0 [p1 p2] [p3 p4] p5    ranked among those of p0 for the first result, of the last plane for the second. The
//                               next two results share [p3 p4].
//
// For two results of two rows, a lane starts about 104 minima or maxima, and 690 of SIZE 5.
//
//   samples of the next two planes .......... registers      on their way during all that follows
//   each lane      sorts its columns of two planes
//     |  barrier     of SIZE 5, all threads of the block: columns are in shared memory; of SIZE 3, shuffles within the warp
//   each lane      of SIZE 5, merges four columns -> shared memory
//     |  barrier     of SIZE 5, all threads of the block
//   each lane      windows of both planes -> results of two planes
#pragma once

#include "gather.cuh"
#include "networks.cuh"
#include "opaque.cuh"

constexpr int CUBE_THREADS = 128;

// Samples as unsigned numbers, and the bits that make two of them keys.
template <typename Sample>
struct Unsigned {
    using type = Sample;
    static constexpr unsigned FLIPPED = 0;
};
template <>
struct Unsigned<short> {
    using type = unsigned short;
    static constexpr unsigned FLIPPED = 0x80008000u;
};

struct CubeTask {
    int length[3], out_length[3], first[3], mode[3];
    int windows, piece;  // of a plane; planes of results of a block, an even number
};

// median_cube: `piece` planes of results. The pairs of rows of a plane lie behind each other, each with SIZE - 1 columns more
// than results, and LANES at a time take all of these. grid: blocks of a plane, pieces, volumes.
template <typename Sample, int SIZE>
__global__ void __launch_bounds__(CUBE_THREADS) median_cube(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ CubeTask task, Sample cval) {
    using Key = Pair<SIZE == 3 ? 4 : 3>;
    constexpr int PLANE = SIZE * SIZE, CORE = PLANE * (SIZE - 1), MIDDLE = PLANE * SIZE / 2;
    constexpr int FROM = MIDDLE - PLANE, KEPT = PLANE + 1;  // of the core: what can still be the median
    constexpr int LANES = SIZE == 3 ? 32 : CUBE_THREADS;  // that exchange columns
    constexpr int COLUMNS = LANES - SIZE + 1;  // of results
    using Bits = typename Unsigned<Sample>::type;
    constexpr unsigned FLIPPED = Unsigned<Sample>::FLIPPED;
    const int lane = threadIdx.x % LANES;
    const int first_window = (blockIdx.x * (CUBE_THREADS / LANES) + threadIdx.x / LANES) * COLUMNS;
    if (first_window >= task.windows) return;
    const int window = first_window + lane, span = task.out_length[2] + SIZE - 1;
    const int y = window / span * 2, x = window % span;
    const int z0 = blockIdx.y * task.piece, z1 = min(z0 + task.piece, task.out_length[0]);
    const int plane_bytes = task.length[1] * task.length[2] * static_cast<int>(sizeof(Sample));  // fewer than 2^31
    const int out_bytes = task.out_length[1] * task.out_length[2] * static_cast<int>(sizeof(Sample));
    in += blockIdx.z * static_cast<long long>(task.length[0]) * task.length[1] * task.length[2];
    out += blockIdx.z * static_cast<long long>(task.out_length[0]) * task.out_length[1] * task.out_length[2];
    const int from_x = border_index(x + task.first[2], task.length[2], task.mode[2]);
    const char* row[SIZE + 1];  // of the first plane; null beyond the edge
    bool is_inside = true;
#pragma unroll
    for (int k = 0; k <= SIZE; ++k) {
        const int from_y = border_index(y + k + task.first[1], task.length[1], task.mode[1]);
        const bool is_beyond = from_x < 0 || from_y < 0;
        is_inside = is_inside && !is_beyond;
        row[k] = is_beyond ? nullptr : reinterpret_cast<const char*>(in + from_y * task.length[2] + from_x);
    }
    const auto fetch = [&](int z, unsigned (&sample)[SIZE + 1]) {
        // Opaque: one multiplication and addition for each place, and samples of 32 bits.
        const auto load = [&](int from_z, int k) {
            const char* from = row[k] + static_cast<long long>(opaque(from_z)) * plane_bytes;
            return opaque(static_cast<unsigned>(__ldg(reinterpret_cast<const Bits*>(from))));
        };
        const int at = z + task.first[0];
        if (is_inside && static_cast<unsigned>(at) < task.length[0]) {
#pragma unroll
            for (int k = 0; k <= SIZE; ++k) sample[k] = load(at, k);
        } else {
            const int from_z = border_index(at, task.length[0], task.mode[0]);
#pragma unroll
            for (int k = 0; k <= SIZE; ++k)
                sample[k] = from_z < 0 || row[k] == nullptr ? static_cast<Bits>(cval) : load(from_z, k);
        }
    };
    const auto aside = [](const auto& lines, int by, auto& found) {
#pragma unroll
        for (int k = 0; k < static_cast<int>(sizeof(lines) / sizeof(Key)); ++k)
            found[k] = {__shfl_down_sync(0xFFFFFFFFu, lines[k].bits, by)};
    };
    // Of SIZE 5: lanes without a result do what the last pair with one does.
    __shared__ unsigned columns[SIZE == 5 ? 2 : 1][SIZE][LANES];
    __shared__ unsigned fours[SIZE == 5 ? 4 * SIZE : 1][LANES];
    const int odd = lane % 2, even = min(lane - odd, COLUMNS - 2);
    Key last_column[2][SIZE];
    const auto column_of = [&](const unsigned (&sample)[SIZE + 1], Key (&column)[SIZE]) {
#pragma unroll
        for (int k = 0; k < SIZE; ++k) column[k] = {(sample[k + 1] * FACTOR[2] + sample[k]) ^ FLIPPED};
        sort(column);
    };
    const auto prepare = [&](const unsigned (&sample)[2][SIZE + 1]) {
        if constexpr (SIZE == 5) {
            Key column[2][SIZE], four[4][SIZE], two[2][2 * SIZE], all[4 * SIZE];
            column_of(sample[0], column[0]);
            column_of(sample[1], column[1]);
#pragma unroll
            for (int i = 0; i < SIZE; ++i)
                columns[0][i][lane] = column[0][i].bits, columns[1][i][lane] = column[1][i].bits;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < SIZE; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j][i] = {columns[odd][i][even + 1 + j]};
#pragma unroll
                for (int which = 0; which < 2; ++which) last_column[which][i] = {columns[which][i][even + 5 * odd]};
            }
            merge<0, 2 * SIZE>(four[0], four[1], two[0]);
            merge<0, 2 * SIZE>(four[2], four[3], two[1]);
            merge<0, 4 * SIZE>(two[0], two[1], all);
#pragma unroll
            for (int i = 0; i < 4 * SIZE; ++i) fours[i][lane] = all[i].bits;
            __syncthreads();
        }
    };
    // The samples of the lane's window in the first or second plane that was prepared.
    const auto sorted = [&](const unsigned (&sample)[2][SIZE + 1], int which, Key (&all)[PLANE]) {
        if constexpr (SIZE == 5) {
            Key four[4 * SIZE];
#pragma unroll
            for (int i = 0; i < 4 * SIZE; ++i) four[i] = {fours[i][even + which]};
            merge<0, PLANE>(four, last_column[which], all);
        } else {
            Key column[SIZE], last[SIZE], next[SIZE];
            column_of(sample[which], column);
            aside(column, 1, next);
            aside(column, SIZE - 1, last);
            merge(column, next, last, all);
        }
    };
    const bool is_result = lane < COLUMNS && x < task.out_length[2] && window < task.windows;
    const int results = is_result ? min(task.out_length[1] - y, 2) : 0;
    char* const above = reinterpret_cast<char*>(out + static_cast<long long>(y) * task.out_length[2] + x);
    char* const below = above + task.out_length[2] * sizeof(Sample);
    const auto store = [&](int z, Key found) {
        const auto target = [&](char* first) {
            return reinterpret_cast<Bits*>(first + static_cast<long long>(opaque(z)) * out_bytes);
        };
        found.bits ^= FLIPPED;
        if (results > 0) *target(above) = static_cast<Bits>(found.bits);
        if (results > 1) *target(below) = static_cast<Bits>(found.bits >> 16);
    };
    const auto copy = [](const Key (&from)[PLANE], Key (&to)[PLANE]) {
#pragma unroll
        for (int i = 0; i < PLANE; ++i) to[i] = from[i];
    };
    // The planes z, z + 2 and, of SIZE 5, z + 3; p1 and p2 merged.
    unsigned raw[2][SIZE + 1];
    const auto begin = [&](int z, Key (&one)[PLANE], Key (&other)[PLANE]) {
        fetch(z, raw[0]);
        fetch(z + 1, raw[1]);
        prepare(raw);
        sorted(raw, 0, one);
        sorted(raw, 1, other);
    };
    Key first[PLANE], second[PLANE], both[CORE / 2], third[PLANE];
    begin(z0, first, second);
    if constexpr (SIZE == 5) {
        Key next[PLANE];
        begin(z0 + 2, next, third);
        merge<0, CORE / 2>(second, next, both);
        copy(next, second);
    }
    fetch(z0 + SIZE - 1, raw[0]);
    fetch(z0 + SIZE, raw[1]);
#pragma unroll 1
    for (int z = z0; z < z1; z += 2) {
        unsigned now[2][SIZE + 1];
#pragma unroll
        for (int k = 0; k <= SIZE; ++k) now[0][k] = raw[0][k], now[1][k] = raw[1][k];
        fetch(z + SIZE + 1, raw[0]);
        fetch(z + SIZE + 2, raw[1]);
        Key fourth[PLANE], kept[KEPT], last[PLANE];
        prepare(now);
        sorted(now, 0, fourth);
        if constexpr (SIZE == 3) {
            merge<FROM, KEPT>(second, fourth, kept);
        } else {
            Key others[CORE / 2];
            merge<0, CORE / 2>(third, fourth, others);
            merge<FROM, KEPT>(both, others, kept);
#pragma unroll
            for (int i = 0; i < CORE / 2; ++i) both[i] = others[i];
        }
        store(z, ranked_of<MIDDLE - FROM>(kept, first));
        sorted(now, 1, last);
        if (z + 1 < z1) store(z + 1, ranked_of<MIDDLE - FROM>(kept, last));
        if constexpr (SIZE == 3) {
            copy(fourth, first);
            copy(last, second);
        } else {
            copy(second, first);
            copy(fourth, second);
            copy(last, third);
        }
    }
}
