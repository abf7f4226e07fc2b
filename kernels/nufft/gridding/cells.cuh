// Adjoint of one coil in production: a lane owns cells, and all lanes of a warp visit the same points.
//
// A warp owns a tile of 4 × 8 cells, in 2-D along x and z, in 3-D along y and z with eight cells of x in each lane. As in
// spread.cuh, lanes first test 32 candidates and compute their weights on all axes, one each; then every lane adds each
// hit to its own cells, so that nothing is summed over lanes and the order is fixed. With points spread evenly over a 3-D
// grid and kernels of 5 cells, a point is visited by 4.5 tiles, at 22 instructions of the warp and 8 for its weights.
#pragma once

#include "pdl.cuh"

constexpr int CELL_WARPS = 4;

template <int DIMS>
struct alignas(16) CellHit {
    static constexpr int ALONG = DIMS == 3 ? Owned<3, true>::X : 0;  // cells along x of a lane
    float2 rows[4];                                     // value × weights along x, in 3-D along y
    float columns[8];                                   // weights along z
    float along[ALONG % 8 == 0 ? ALONG + 4 : ALONG];    // weights along x in 3-D; and a gap against bank conflicts
};

template <int DIMS, int DEGREES>
__device__ inline void prepare_hit(CellHit<DIMS>& hit, float4 point, float2 value, int back_y, int back_z, const Tile& tile,
                                   const Gridding& g) {
    constexpr int X = Owned<DIMS, true>::X;
    int x = tile.x - place_x(point);
    if (x < -X) x += g.size[0];  // the point lies at the other end of the grid
#pragma unroll
    for (int j = 0; j < CellHit<DIMS>::ALONG; j += 4)
        *reinterpret_cast<float4*>(hit.along + j) = four_weights<DEGREES>(point.x, x + j, g);
    const float4 rows = DIMS == 3 ? four_weights<DEGREES>(point.y, back_y - place_y(point), g)
                                  : four_weights<DEGREES>(point.x, x, g);
    auto* to = reinterpret_cast<float4*>(hit.rows);
    to[0] = make_float4(value.x * rows.x, value.y * rows.x, value.x * rows.y, value.y * rows.y);
    to[1] = make_float4(value.x * rows.z, value.y * rows.z, value.x * rows.w, value.y * rows.w);
    const int z = back_z - place_z(point);
    reinterpret_cast<float4*>(hit.columns)[0] = four_weights<DEGREES>(point.z, z, g);
    reinterpret_cast<float4*>(hit.columns)[1] = four_weights<DEGREES>(point.z, z + 4, g);
}

__device__ inline void add_to(float2& sum, float2 value, float weight) {
    sum.x += value.x * weight;
    sum.y += value.y * weight;
}

// WIDE: for kernels of more than 5 cells.
template <int DIMS, bool WIDE, bool WEIGHTED>
__global__ void __launch_bounds__(32 * CELL_WARPS)
spread_cells(const float4* __restrict__ points, const int* __restrict__ starts, const int4* __restrict__ items,
             const int* __restrict__ order, const float2* __restrict__ samples, const float* __restrict__ weights,
             float2* __restrict__ grid, float2* __restrict__ partial, Gridding g) {
    constexpr int BINS = WIDE ? 3 : 2, DEGREES = WIDE ? DEGREE : NARROW_DEGREE;
    constexpr int ALONG = DIMS == 3 ? CellHit<DIMS>::ALONG : 1;
    __shared__ CellHit<DIMS> all_hits[CELL_WARPS][32];
    grid_dependency_synchronize();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, number = blockIdx.x * CELL_WARPS + warp;
    if (number >= g.items) return;
    CellHit<DIMS>* hits = all_hits[warp];
    const int4 item = items[number];
    const Tile tile = tile_of(item);
    const int runs = runs_of<DIMS, true>(BINS, tile, g);
    Run mine = {0, 0, 0, 0};
    if (lane < runs) mine = run_at<DIMS, true>(lane, BINS, tile, starts, g);
    const int before = counted_before(mine.count), end = min(candidates_of(before, mine.count), item.z + g.part);

    float2 sum[ALONG] = {};
    for (int base = item.z; base < end; base += 32) {
        int rank, back_y, back_z;
        const bool valid = base + lane < end;
        find_candidate(rank, back_y, back_z, base + lane, mine, before, runs);
        float4 point = make_float4(0, 0, 0, 0);
        if (valid) point = points[rank];
        const bool hit = valid && back_z - place_z(point) < g.width && (DIMS == 2 || back_y - place_y(point) < g.width);
        const unsigned found = __ballot_sync(~0u, hit);
        if (hit) {
            const int m = order[rank];
            float2 value = samples[m];
            if (WEIGHTED) value = make_float2(value.x * weights[m], value.y * weights[m]);
            prepare_hit<DIMS, DEGREES>(hits[__popc(found & ((1u << lane) - 1))], point, value, back_y, back_z, tile, g);
        }
        __syncwarp();
        const int count = __popc(found);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const float by_z = hits[i].columns[lane % 8];
            float2 value = hits[i].rows[lane / 8];
            if constexpr (DIMS == 2) {
                add_to(sum[0], value, by_z);
            } else {
                value = make_float2(value.x * by_z, value.y * by_z);
#pragma unroll
                for (int j = 0; j < ALONG; j += 4) {
                    const float4 by = *reinterpret_cast<const float4*>(hits[i].along + j);
                    add_to(sum[j], value, by.x);
                    add_to(sum[j + 1], value, by.y);
                    add_to(sum[j + 2], value, by.z);
                    add_to(sum[j + 3], value, by.w);
                }
            }
        }
        __syncwarp();
    }
    if (item.w >= 0) {
#pragma unroll
        for (int j = 0; j < ALONG; ++j) partial[(static_cast<long long>(item.w) * ALONG + j) * 32 + lane] = sum[j];
        return;
    }
    const int row = lane / 8, z = tile.z + lane % 8;
    if (z >= g.size[2]) return;
#pragma unroll
    for (int j = 0; j < ALONG; ++j) {
        const int x = tile.x + (DIMS == 3 ? j : row);
        if (x < g.size[0]) grid[cell_index(0, x, DIMS == 3 ? tile.y + row : 0, z, g)] = sum[j];
    }
}

// A block per split tile, a thread per cell.
template <int DIMS>
__global__ void add_cells(const int4* __restrict__ heavy, const float2* __restrict__ partial, float2* __restrict__ grid,
                          Gridding g) {
    constexpr int CELLS = DIMS == 3 ? 32 * Owned<3, true>::X : 32;
    grid_dependency_synchronize();
    const int4 of = heavy[blockIdx.x];
    const Tile tile = tile_of(of);
    const int i = threadIdx.x;
    float2 sum = make_float2(0, 0);
#pragma unroll 8
    for (int part = 0; part < of.w; ++part) {
        const float2 value = partial[(of.z + part) * static_cast<long long>(CELLS) + i];
        sum.x += value.x;
        sum.y += value.y;
    }
    const int row = i / 8 % 4, z = tile.z + i % 8, x = tile.x + (DIMS == 3 ? i / 32 : row);
    if (x < g.size[0] && z < g.size[2]) grid[cell_index(0, x, DIMS == 3 ? tile.y + row : 0, z, g)] = sum;
}
