// Medians of 3 × 3 × 3, by networks in registers that neighbours share. Part of rank.cu.
//
// A warp goes through the planes of two rows and 30 columns of results; the rows lie in the halves of each word. In every
// plane a lane sorts its column of three samples, and merges it with those of the next two lanes, to the nine of its window
// in that plane. The sorted planes of two results:
//
//      p0 [p1 p2] p3        p1 and p2 are merged for both; of their 18 samples the ten that can still be the median of 27
//                           are kept, and ranked among those of p0 for the first result, of p3 for the second
//
// About 40 minima or maxima a result. Lanes wait for the others of their warp as they exchange columns, and for nobody else.
#pragma once

#include "gather.cuh"
#include "networks.cuh"

constexpr int CUBE_WARPS = 4, CUBE_COLUMNS = 30;

struct CubeTask {
    long long planes;  // volumes
    int length[3], out_length[3], first[3], mode[3];
    int tiles, pairs, pieces, piece;  // of columns; of rows; of planes; planes of results of a piece, an even number
};

// median_cube: one warp computes `piece` planes of results, of two rows and CUBE_COLUMNS columns.
template <typename Sample>
__global__ void __launch_bounds__(32 * CUBE_WARPS) median_cube(
    const Sample* __restrict__ in, Sample* __restrict__ out, const __grid_constant__ CubeTask task, Sample cval) {
    const int lane = threadIdx.x;
    long long rest = blockIdx.x * static_cast<long long>(CUBE_WARPS) + threadIdx.y;
    if (rest >= task.planes * task.pieces * task.pairs * task.tiles) return;
    const int x = static_cast<int>(rest % task.tiles) * CUBE_COLUMNS + lane;
    rest /= task.tiles;
    const int y = static_cast<int>(rest % task.pairs) * 2;
    rest /= task.pairs;
    const int z0 = static_cast<int>(rest % task.pieces) * task.piece;
    const int z1 = min(z0 + task.piece, task.out_length[0]);
    const long long plane = static_cast<long long>(task.length[1]) * task.length[2];
    const long long out_plane = static_cast<long long>(task.out_length[1]) * task.out_length[2];
    in += rest / task.pieces * task.length[0] * plane;
    out += rest / task.pieces * task.out_length[0] * out_plane;
    const int from_x = border_index(x + task.first[2], task.length[2], task.mode[2]);
    long long from[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int from_y = border_index(y + k + task.first[1], task.length[1], task.mode[1]);
        from[k] = from_x < 0 || from_y < 0 ? -1 : static_cast<long long>(from_y) * task.length[2] + from_x;
    }
    const auto sorted = [&](int z, Two (&nine)[9]) {
        const int from_z = border_index(z + task.first[0], task.length[0], task.mode[0]);
        unsigned key[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) key[k] = key_of(from_z < 0 || from[k] < 0 ? cval : in[from_z * plane + from[k]]);
        Two column[3], next[3], after[3], six[6];
#pragma unroll
        for (int k = 0; k < 3; ++k) column[k] = {key[k] | key[k + 1] << 16};
        sort(column);
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            next[k] = {__shfl_down_sync(0xFFFFFFFFu, column[k].bits, 1)};
            after[k] = {__shfl_down_sync(0xFFFFFFFFu, column[k].bits, 2)};
        }
        merge<0, 6>(column, next, six);
        merge<0, 9>(six, after, nine);
    };
    const auto store = [&](int z, Two found) {
        if (lane >= CUBE_COLUMNS || x >= task.out_length[2] || z >= z1) return;
        Sample* target = out + z * out_plane + static_cast<long long>(y) * task.out_length[2] + x;
        target[0] = sample_of<Sample>(found.bits & 0xFFFFu);
        if (y + 1 < task.out_length[1]) target[task.out_length[2]] = sample_of<Sample>(found.bits >> 16);
    };
    Two first[9], second[9], third[9], fourth[9];
    sorted(z0, first);
    sorted(z0 + 1, second);
    for (int z = z0; z < z1; z += 2) {
        sorted(z + 2, third);
        sorted(z + 3, fourth);
        Two both[10];
        merge<4, 10>(second, third, both);
        store(z, ranked_of<9>(both, first));
        store(z + 1, ranked_of<9>(both, fourth));
#pragma unroll
        for (int i = 0; i < 9; ++i) first[i] = third[i], second[i] = fourth[i];
    }
}
