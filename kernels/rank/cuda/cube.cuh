// Medians of 3 × 3 × 3 and 5 × 5 × 5, by networks in registers that neighbours share. Part of rank.cu.
//
// A warp goes through the planes of two rows and 32 - SIZE + 1 columns of results; the rows lie in the halves of each word.
// In every plane a lane sorts its column of SIZE samples, and merges it with those of the next lanes, to the samples of its
// window in that plane. The sorted planes of two results:
//
//      p0 [p1 p2] p3            p1 and p2 are merged for both; only samples that can still be the median are kept, and
//      p0 [p1 p2] [p3 p4] p5    ranked among those of p0 for the first result, of the last plane for the second. The
//                               next two results share [p3 p4].
//
// About 40 minima or maxima a result, and 370 for SIZE 5. Samples of the next two planes are on their way meanwhile. Lanes
// only wait for the others of their warp, as they exchange columns.
#pragma once

#include "gather.cuh"
#include "networks.cuh"
#include "opaque.cuh"

constexpr int CUBE_WARPS = 4;

struct CubeTask {
    long long planes;  // volumes
    int length[3], out_length[3], first[3], mode[3];
    int tiles, pairs, pieces, piece;  // of columns; of rows; of planes; planes of results of a piece, an even number
};

// median_cube: one warp computes `piece` planes of results, of two rows.
template <typename Sample, int SIZE>
__global__ void __launch_bounds__(32 * CUBE_WARPS) median_cube(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ CubeTask task, Sample cval) {
    constexpr int COLUMNS = 32 - SIZE + 1, PLANE = SIZE * SIZE, CORE = PLANE * (SIZE - 1), MIDDLE = PLANE * SIZE / 2;
    constexpr int FROM = MIDDLE - PLANE, KEPT = PLANE + 1;  // of the core: what can still be the median
    const int lane = threadIdx.x;
    long long rest = blockIdx.x * static_cast<long long>(CUBE_WARPS) + threadIdx.y;
    if (rest >= task.planes * task.pieces * task.pairs * task.tiles) return;
    const int x = static_cast<int>(rest % task.tiles) * COLUMNS + lane;
    rest /= task.tiles;
    const int y = static_cast<int>(rest % task.pairs) * 2;
    rest /= task.pairs;
    const int z0 = static_cast<int>(rest % task.pieces) * task.piece;
    const int z1 = min(z0 + task.piece, task.out_length[0]);
    const long long plane = static_cast<long long>(task.length[1]) * task.length[2];
    const long long out_plane = static_cast<long long>(task.out_length[1]) * task.out_length[2];
    in += rest / task.pieces * task.length[0] * plane;
    out += rest / task.pieces * task.out_length[0] * out_plane;
    const int plane_bytes = static_cast<int>(plane * sizeof(Sample));  // fewer than 2^31
    const int from_x = border_index(x + task.first[2], task.length[2], task.mode[2]);
    const char* row[SIZE + 1];  // of the first plane; null beyond the edge
    bool is_inside = true;
#pragma unroll
    for (int k = 0; k <= SIZE; ++k) {
        const int from_y = border_index(y + k + task.first[1], task.length[1], task.mode[1]);
        const bool is_beyond = from_x < 0 || from_y < 0;
        is_inside = is_inside && !is_beyond;
        row[k] = opaque(is_beyond ? nullptr : reinterpret_cast<const char*>(in + from_y * task.length[2] + from_x));
    }
    const auto fetch = [&](int z, Sample (&sample)[SIZE + 1]) {
        const int from_z = border_index(z + task.first[0], task.length[0], task.mode[0]);
        const long long from = static_cast<long long>(from_z) * plane_bytes;
        if (is_inside && from_z >= 0) {
#pragma unroll
            for (int k = 0; k <= SIZE; ++k) sample[k] = __ldg(reinterpret_cast<const Sample*>(row[k] + from));
        } else {
#pragma unroll
            for (int k = 0; k <= SIZE; ++k)
                sample[k] = from_z < 0 || row[k] == nullptr ? cval
                                                            : __ldg(reinterpret_cast<const Sample*>(row[k] + from));
        }
    };
    const auto aside = [](const auto& lines, int by, auto& found) {
#pragma unroll
        for (int k = 0; k < static_cast<int>(sizeof(lines) / sizeof(Two)); ++k)
            found[k] = {__shfl_down_sync(0xFFFFFFFFu, lines[k].bits, by)};
    };
    const auto sorted = [&](const Sample (&sample)[SIZE + 1], Two (&all)[PLANE]) {
        Two column[SIZE], last[SIZE], next[SIZE], two[2 * SIZE];
#pragma unroll
        for (int k = 0; k < SIZE; ++k) column[k] = {key_of(sample[k]) | key_of(sample[k + 1]) << 16};
        sort(column);
        aside(column, 1, next);
        aside(column, SIZE - 1, last);
        merge<0, 2 * SIZE>(column, next, two);
        if constexpr (SIZE == 3) {
            merge<0, PLANE>(two, last, all);
        } else {
            Two others[2 * SIZE], four[4 * SIZE];
            aside(two, 2, others);
            merge<0, 4 * SIZE>(two, others, four);
            merge<0, PLANE>(four, last, all);
        }
    };
    const auto store = [&](int z, Two found) {
        if (lane >= COLUMNS || x >= task.out_length[2] || z >= z1) return;
        Sample* target = out + z * out_plane + static_cast<long long>(y) * task.out_length[2] + x;
        target[0] = sample_of<Sample>(found.bits & 0xFFFFu);
        if (y + 1 < task.out_length[1]) target[task.out_length[2]] = sample_of<Sample>(found.bits >> 16);
    };
    const auto copy = [](const Two (&from)[PLANE], Two (&to)[PLANE]) {
#pragma unroll
        for (int i = 0; i < PLANE; ++i) to[i] = from[i];
    };
    // The planes z, z + 2 and, of SIZE 5, z + 3; p1 and p2 merged.
    Sample raw[2][SIZE + 1];
    const auto begin = [&](int z, Two (&all)[PLANE]) {
        fetch(z, raw[0]);
        sorted(raw[0], all);
    };
    Two first[PLANE], second[PLANE], both[CORE / 2], third[PLANE];
    begin(z0, first);
    begin(z0 + 1, second);
    if constexpr (SIZE == 5) {
        begin(z0 + 2, third);
        merge<0, CORE / 2>(second, third, both);
        copy(third, second);
        begin(z0 + 3, third);
    }
    fetch(z0 + SIZE - 1, raw[0]);
    fetch(z0 + SIZE, raw[1]);
#pragma unroll 1
    for (int z = z0; z < z1; z += 2) {
        Sample now[2][SIZE + 1];
#pragma unroll
        for (int k = 0; k <= SIZE; ++k) now[0][k] = raw[0][k], now[1][k] = raw[1][k];
        fetch(z + SIZE + 1, raw[0]);
        fetch(z + SIZE + 2, raw[1]);
        Two fourth[PLANE], kept[KEPT], last[PLANE];
        sorted(now[0], fourth);
        if constexpr (SIZE == 3) {
            merge<FROM, KEPT>(second, fourth, kept);
        } else {
            Two others[CORE / 2];
            merge<0, CORE / 2>(third, fourth, others);
            merge<FROM, KEPT>(both, others, kept);
#pragma unroll
            for (int i = 0; i < CORE / 2; ++i) both[i] = others[i];
        }
        store(z, ranked_of<MIDDLE - FROM>(kept, first));
        sorted(now[1], last);
        store(z + 1, ranked_of<MIDDLE - FROM>(kept, last));
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
