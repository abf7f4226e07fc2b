// Forward of one coil in production.
//
// In 2-D the grid lies in the L2 cache: a thread a point. In 3-D a block loads the cells that a region's points touch into
// shared memory, as in interpolate.cuh; there a warp takes one point, a lane a line of cells along x, so that its loads hit
// every bank once, and eight points' sums are exchanged at a time.
#pragma once

#include "pdl.cuh"

constexpr int GATHER_THREADS = 128, GATHERED = 8;  // points a warp computes at a time

template <int WIDTH>
__global__ void __launch_bounds__(GATHER_THREADS)
gather_points(const float4* __restrict__ points, const int* __restrict__ keys, const int* __restrict__ order,
              const float2* __restrict__ grid, float2* __restrict__ samples, Gridding g) {
    constexpr int DEGREES = WIDTH > 5 ? DEGREE : NARROW_DEGREE;
    const long long rank = blockIdx.x * static_cast<long long>(GATHER_THREADS) + threadIdx.x;
    grid_dependency_synchronize();
    if (rank >= g.points) return;
    const float4 point = points[rank];
    int first[3];
    first_cell(first, point, keys[rank], g);
    float2 value[WIDTH][WIDTH];
    int column[WIDTH];
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) column[c] = wrapped(first[2] + c, g.size[2]);
#pragma unroll
    for (int a = 0; a < WIDTH; ++a) {
        const float2* row = grid + static_cast<long long>(wrapped(first[0] + a, g.size[0])) * g.size[2];
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) value[a][c] = row[column[c]];
    }
    float by_z[WIDTH];
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) by_z[c] = spreading<DEGREES>(point.z + c, g);
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int a = 0; a < WIDTH; ++a) {
        float2 line = make_float2(0, 0);
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) {
            line.x += by_z[c] * value[a][c].x;
            line.y += by_z[c] * value[a][c].y;
        }
        const float weight = spreading<DEGREES>(point.x + a, g);
        sum.x += weight * line.x;
        sum.y += weight * line.y;
    }
    samples[order[rank]] = sum;
}

template <int WIDTH>
struct GatherWindow {  // the cells that a region's points touch
    using R = Region<3, true>;
    static constexpr int X = R::X + WIDTH - 1, Y = R::Y + WIDTH - 1, Z = R::Z + WIDTH - 1;
    static constexpr int PITCH = R::Z + WIDTH;  // of z: WIDTH modulo 16, so that neighbouring rows follow one another
    static constexpr int LINES = WIDTH * WIDTH, ROUNDS = (LINES + 31) / 32;
};

// Lane l ends with part l / 2 % 2 (real or imaginary) of point l / 4, summed over all lanes.
__device__ inline float exchanged(float2 (&sum)[GATHERED]) {
    const int lane = threadIdx.x % 32;
    float value[2 * GATHERED];
#pragma unroll
    for (int i = 0; i < GATHERED; ++i) value[2 * i] = sum[i].x, value[2 * i + 1] = sum[i].y;
#pragma unroll
    for (int half = GATHERED, other = 16; half > 0; half /= 2, other /= 2) {
        const bool upper = lane & other;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? value[i] : value[i + half], kept = upper ? value[i + half] : value[i];
            value[i] = kept + __shfl_xor_sync(~0u, sent, other);
        }
    }
    return value[0] + __shfl_xor_sync(~0u, value[0], 1);
}

template <int WIDTH>
__global__ void __launch_bounds__(GATHER_THREADS)
gather_cells(const float4* __restrict__ points, const int* __restrict__ starts, const int2* __restrict__ items,
             const int* __restrict__ order, const float2* __restrict__ grid, float* __restrict__ samples, Gridding g) {
    using W = GatherWindow<WIDTH>;
    constexpr int WARPS = GATHER_THREADS / 32, DEGREES = WIDTH > 5 ? DEGREE : NARROW_DEGREE;
    __shared__ float2 window[W::X * W::Y * W::PITCH];
    __shared__ alignas(16) float weights[WARPS][GATHERED][3][8];
    __shared__ int2 places[WARPS][GATHERED];  // of the points: in the samples, and of their first cell in the window
    __shared__ int2 runs[W::R::COLUMNS];
    grid_dependency_synchronize();
    const typename W::R region(items[blockIdx.x].x, g);
    if (threadIdx.x < W::R::COLUMNS) runs[threadIdx.x] = region.run(threadIdx.x, starts, g);
#pragma unroll 4
    for (int i = threadIdx.x; i < W::X * W::Y * W::Z; i += GATHER_THREADS) {
        const int k = i % W::Z, row = i / W::Z;
        const int x = wrapped(region.x + row / W::Y, g.size[0]), y = wrapped(region.y + row % W::Y, g.size[1]);
        int z = region.z + k;
        if (z >= g.size[2]) z -= g.size[2];
        window[row * W::PITCH + k] = grid[cell_index(0, x, y, z, g)];
    }
    __syncthreads();
    int total = 0;
    for (int column = 0; column < W::R::COLUMNS; ++column) total += runs[column].y;
    const int begin = items[blockIdx.x].y, end = min(total, begin + g.part);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int of_y[W::ROUNDS], of_z[W::ROUNDS];
#pragma unroll
    for (int round = 0; round < W::ROUNDS; ++round) {
        const int line = min(lane + 32 * round, W::LINES - 1);
        of_y[round] = line / WIDTH;
        of_z[round] = line % WIDTH;
    }
    for (int base = begin + warp * GATHERED; base < end; base += WARPS * GATHERED) {
        const int count = min(GATHERED, end - base);
        if (lane < 3 * GATHERED) {
            const int which = lane % GATHERED, axis = lane / GATHERED;
            const int2 at = rank_in<3, true>(runs, base + min(which, count - 1));
            const float4 point = points[at.x];
            const float to_cell = axis == 0 ? point.x : axis == 1 ? point.y : point.z;
            float weight[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) weight[c] = c < WIDTH ? spreading<DEGREES>(to_cell + c, g) : 0;
            auto* to = reinterpret_cast<float4*>(weights[warp][which][axis]);
            to[0] = make_float4(weight[0], weight[1], weight[2], weight[3]);
            to[1] = make_float4(weight[4], weight[5], weight[6], weight[7]);
            if (axis == 0) {
                const int y = at.y / W::R::BINS_Z * 4 + place_y(point), z = at.y % W::R::BINS_Z * 4 + place_z(point);
                places[warp][which] = make_int2(order[at.x], ((place_x(point) - region.x) * W::Y + y) * W::PITCH + z);
            }
        }
        __syncwarp();
        float2 sum[GATHERED];
#pragma unroll
        for (int i = 0; i < GATHERED; ++i) {
            const auto& of = weights[warp][i];
            const float2* cell = window + places[warp][i].y;
            sum[i] = make_float2(0, 0);
#pragma unroll
            for (int round = 0; round < W::ROUNDS; ++round) {
                const float2* from = cell + of_y[round] * W::PITCH + of_z[round];
                float2 line = make_float2(0, 0);
#pragma unroll
                for (int a = 0; a < WIDTH; ++a) {
                    const float2 value = from[a * W::Y * W::PITCH];
                    line.x += of[0][a] * value.x;
                    line.y += of[0][a] * value.y;
                }
                const float by = lane + 32 * round < W::LINES ? of[1][of_y[round]] * of[2][of_z[round]] : 0;
                sum[i].x += by * line.x;
                sum[i].y += by * line.y;
            }
        }
        const float value = exchanged(sum);
        const int which = lane / 4;
        if (lane % 2 == 0 && which < count) samples[2 * static_cast<long long>(places[warp][which].x) + lane / 2 % 2] = value;
        __syncwarp();
    }
}
