// Adjoint in production: the warp that owns a cell sums it in sorted order, without atomic additions.
//
// A warp owns a tile of 4 × 4 cells in registers, in 2-D along x and z, in 3-D along y and z of one x. A lane is a coil or,
// with fewer coils than lanes, a share of a coil's points. The points whose kernels reach the tile are a few runs of the
// sorted order. Lanes first test 32 of them and compute their weights, one each; then all coils add the hits. Tiles with
// too many points for one warp, like a radial trajectory's centre, are split; add_parts adds the parts in order.
#pragma once

constexpr int TILE = 4, SPREAD_WARPS = 8, PATCH_Z = 4, PATCH_X = 2;

// Cells of a warp's tile; with one coil, cells.cuh's.
template <int DIMS, bool ONE_COIL>
struct Owned {
    static constexpr int X = DIMS == 2 ? 4 : ONE_COIL ? 8 : 1, Y = DIMS == 2 ? 1 : 4, Z = ONE_COIL ? 8 : 4;
    static constexpr int AHEAD = Z / 4 - 1;  // bins of the tile along z after its first
};

struct Tile {
    int x, y, z;  // its first cell
    bool inside;
};

// The eight tiles of a block are adjacent, four along z, so that together they write whole lines.
template <int DIMS, bool ONE_COIL>
__device__ inline Tile tile_at(int number, const Gridding& g) {
    using O = Owned<DIMS, ONE_COIL>;
    const int along_x = (g.size[0] + O::X - 1) / O::X, along_z = (g.size[2] + O::Z - 1) / O::Z;
    const int patches_x = (along_x + PATCH_X - 1) / PATCH_X, patches_z = (along_z + PATCH_Z - 1) / PATCH_Z;
    const int inner = number % (PATCH_X * PATCH_Z), patch = number / (PATCH_X * PATCH_Z);
    const int x = patch % patches_x * PATCH_X + inner / PATCH_Z, z = patch / patches_x % patches_z * PATCH_Z + inner % PATCH_Z;
    return {x * O::X, patch / patches_x / patches_z * TILE, z * O::Z, x < along_x && z < along_z};
}

// Along one axis: the number of bins that can hold the start of a kernel that reaches a given bin.
__device__ inline int reaching_bins(const Gridding& g) { return (g.width + 2) / TILE + 1; }

// One of the runs of the sorted order that hold a tile's candidates.
struct Run {
    int first, count;
    int back_y, back_z;  // cells from the bin's first to the tile's
};

template <int DIMS, bool ONE_COIL>
__device__ inline int columns_of(int bins) { return (DIMS == 3 ? bins : 1) * (bins + Owned<DIMS, ONE_COIL>::AHEAD); }

// One run per column of bins; near the start of x as many again for points that wrap around from its end.
template <int DIMS, bool ONE_COIL>
__device__ inline Run run_at(int number, int bins, const Tile& tile, const int* __restrict__ starts, const Gridding& g) {
    using O = Owned<DIMS, ONE_COIL>;
    const int columns = columns_of<DIMS, ONE_COIL>(bins), column = number % columns, bins_z = bins + O::AHEAD;
    const int back_z = column % bins_z - O::AHEAD, back_y = DIMS == 3 ? column / bins_z : 0;
    int y = tile.y / TILE - back_y, z = tile.z / TILE - back_z;
    if (y < 0) y += g.bins[0];
    if (z < 0) z += g.bins[1];
    if (z >= g.bins[1]) return {0, 0, 0, 0};  // the tile's second bin lies outside
    const int low = tile.x - g.width + 1, high = min(tile.x + O::X, g.size[0]) - 1;
    const int* of_column = starts + (static_cast<long long>(y) * g.bins[1] + z) * g.size[0];
    const bool round = number >= columns;
    const int begin = round ? low + g.size[0] : max(low, 0), end = round ? g.size[0] : high + 1;
    const int first = begin < end ? of_column[begin] : 0;
    return {first, begin < end ? of_column[end] - first : 0, back_y * TILE, back_z * TILE};
}

template <int DIMS, bool ONE_COIL>
__device__ inline int runs_of(int bins, const Tile& tile, const Gridding& g) {
    return columns_of<DIMS, ONE_COIL>(bins) * (tile.x < g.width - 1 ? 2 : 1);
}

// Candidates of each tile.
template <int DIMS, bool ONE_COIL>
__global__ void count_candidates(const int* __restrict__ starts, int* __restrict__ counts, int tiles, Gridding g) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= tiles) return;
    const Tile tile = tile_at<DIMS, ONE_COIL>(number, g);
    const int bins = reaching_bins(g), runs = tile.inside ? runs_of<DIMS, ONE_COIL>(bins, tile, g) : 0;
    int count = tile.inside ? 0 : -1;
    for (int run = 0; run < runs; ++run) count += run_at<DIMS, ONE_COIL>(run, bins, tile, starts, g).count;
    counts[number] = count;
}

// Work items: x the tile's x, y its y and z in tiles, z its first candidate, w the slot of its partial sums, or -1 if the
// tile is not split. For each split tile, `heavy` has its position, first slot and number of slots.
template <int DIMS, bool ONE_COIL>
__global__ void fill_items(const int* __restrict__ parts, const int* __restrict__ ends, const int* __restrict__ slot_ends,
                           int4* __restrict__ items, int4* __restrict__ heavy, const int* __restrict__ heavy_ends, int tiles,
                           Gridding g) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= tiles || parts[number] == 0) return;
    const Tile tile = tile_at<DIMS, ONE_COIL>(number, g);
    const int count = parts[number], first = ends[number] - count, slot = count > 1 ? slot_ends[number] - count : -1;
    const int place = tile.y / TILE << 16 | tile.z / TILE;
    for (int part = 0; part < count; ++part)
        items[first + part] = make_int4(tile.x, place, part * g.part, slot < 0 ? -1 : slot + part);
    if (slot >= 0) heavy[heavy_ends[number] - 1] = make_int4(tile.x, place, slot, count);
}

__device__ inline Tile tile_of(int4 item) {
    return {item.x, (item.y >> 16) * TILE, (item.y & 0xffff) * TILE, true};
}

// The weights of a tile's four cells on one axis; `place`: of the first cell in the kernel.
template <int DEGREES>
__device__ inline float4 four_weights(float to_cell, int place, const Gridding& g) {
    float weight[TILE];
#pragma unroll
    for (int j = 0; j < TILE; ++j) {
        const float value = spreading<DEGREES>(to_cell + (place + j), g);
        weight[j] = static_cast<unsigned>(place + j) < static_cast<unsigned>(g.width) ? value : 0;
    }
    return make_float4(weight[0], weight[1], weight[2], weight[3]);
}

template <int DIMS, int DEGREES>
__device__ inline float4 row_weights(float4 point, int back_y, const Tile& tile, const Gridding& g) {
    int x = tile.x - place_x(point);
    if (DIMS == 2) {  // the tile's first cell may lie before the point's; the other end of the grid lies further
        if (x < -TILE) x += g.size[0];
        return four_weights<DEGREES>(point.x, x, g);
    }
    if (x < 0) x += g.size[0];
    const float by_x = spreading<DEGREES>(point.x + x, g);
    const float4 by_y = four_weights<DEGREES>(point.y, back_y - place_y(point), g);
    return make_float4(by_x * by_y.x, by_x * by_y.y, by_x * by_y.z, by_x * by_y.w);
}

__device__ inline void add_row(float2 (&row)[TILE], float2 value, float weight, float4 by_z) {
    const float2 v = make_float2(value.x * weight, value.y * weight);
    row[0].x += v.x * by_z.x; row[0].y += v.y * by_z.x;
    row[1].x += v.x * by_z.y; row[1].y += v.y * by_z.y;
    row[2].x += v.x * by_z.z; row[2].y += v.y * by_z.z;
    row[3].x += v.x * by_z.w; row[3].y += v.y * by_z.w;
}

// Candidates of the lanes before this one.
__device__ inline int counted_before(int count) {
    int before = count;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, before, step);
        if (static_cast<int>(threadIdx.x % 32) >= step) before += other;
    }
    return before - count;
}

__device__ inline int candidates_of(int before, int count) { return __shfl_sync(~0u, before + count, 31); }

// The rank of a candidate, and the cells from its bin to the tile. Lane i has the tile's run i.
__device__ inline void find_candidate(int& rank, int& back_y, int& back_z, int candidate, const Run& mine, int before, int runs) {
    int from = 0;
    for (int run = 1; run < runs; ++run) from += __shfl_sync(~0u, before, run) <= candidate;
    rank = candidate - __shfl_sync(~0u, before, from) + __shfl_sync(~0u, mine.first, from);
    back_y = __shfl_sync(~0u, mine.back_y, from);
    back_z = __shfl_sync(~0u, mine.back_z, from);
}

// Hits among up to 32 tested candidates, shared by all coils.
struct Hits {
    float4 rows[32], columns[32];
    int rank[32];
};

template <int DIMS, int DEGREES>
__device__ inline int find_hits(Hits& hits, int candidate, bool valid, const Run& mine, int before, int runs,
                                const Tile& tile, const float4* __restrict__ points, const Gridding& g) {
    int rank, back_y, back_z;
    find_candidate(rank, back_y, back_z, candidate, mine, before, runs);
    float4 point = make_float4(0, 0, 0, 0);
    if (valid) point = points[rank];
    const bool hit = valid && back_z - place_z(point) < g.width && (DIMS == 2 || back_y - place_y(point) < g.width);
    const unsigned found = __ballot_sync(~0u, hit);
    if (hit) {
        const int place = __popc(found & ((1u << (threadIdx.x % 32)) - 1));
        hits.rows[place] = row_weights<DIMS, DEGREES>(point, back_y, tile, g);
        hits.columns[place] = four_weights<DEGREES>(point.z, back_z - place_z(point), g);
        hits.rank[place] = rank;
    }
    __syncwarp();
    return __popc(found);
}

// Sums over the lanes that share a coil; each of them then stores some of the tile's rows.
template <int DIMS>
__device__ inline void store_tile(float2 (&sum)[TILE][TILE], const Tile& tile, int slot, int coil, int share, int shares,
                                  float2* __restrict__ grid, float2* __restrict__ partial, const Gridding& g) {
    for (int other = g.lanes; other < 32; other *= 2)
#pragma unroll
        for (int j = 0; j < TILE; ++j)
#pragma unroll
            for (int k = 0; k < TILE; ++k) {
                sum[j][k].x += __shfl_xor_sync(~0u, sum[j][k].x, other);
                sum[j][k].y += __shfl_xor_sync(~0u, sum[j][k].y, other);
            }
    if (coil >= g.coils) return;
#pragma unroll
    for (int j = 0; j < TILE; ++j) {
        if ((j & (shares - 1)) != share) continue;
        const int x = DIMS == 3 ? tile.x : tile.x + j, y = DIMS == 3 ? tile.y + j : 0;
        float2* to = slot >= 0 ? partial + ((static_cast<long long>(slot) * g.coils + coil) * TILE + j) * TILE
                               : grid + cell_index(coil, x, y, tile.z, g);
        reinterpret_cast<float4*>(to)[0] = make_float4(sum[j][0].x, sum[j][0].y, sum[j][1].x, sum[j][1].y);
        reinterpret_cast<float4*>(to)[1] = make_float4(sum[j][2].x, sum[j][2].y, sum[j][3].x, sum[j][3].y);
    }
}

// WIDE: for kernels of more than 5 cells.
template <int DIMS, bool WIDE>
__global__ void __launch_bounds__(32 * SPREAD_WARPS, 3)
spread_tiles(const float4* __restrict__ points, const int* __restrict__ starts, const int4* __restrict__ items,
             const float2* __restrict__ ordered, float2* __restrict__ grid, float2* __restrict__ partial, Gridding g) {
    constexpr int BINS = WIDE ? 3 : 2, DEGREES = WIDE ? DEGREE : NARROW_DEGREE;
    __shared__ Hits all_hits[SPREAD_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, number = blockIdx.x * SPREAD_WARPS + warp;
    if (number >= g.items) return;
    Hits& hits = all_hits[warp];
    const int4 item = items[number];
    const Tile tile = tile_of(item);
    const int runs = runs_of<DIMS, false>(BINS, tile, g);
    Run mine = {0, 0, 0, 0};
    if (lane < runs) mine = run_at<DIMS, false>(lane, BINS, tile, starts, g);
    const int before = counted_before(mine.count), end = min(candidates_of(before, mine.count), item.z + g.part);

    const int coil = lane & (g.lanes - 1), shares = 32 / g.lanes, share = lane / g.lanes;
    const float2* values = ordered + blockIdx.y * g.points * g.lanes + coil;
    float2 sum[TILE][TILE] = {};
    for (int base = item.z; base < end; base += 32) {
        const int found =
            find_hits<DIMS, DEGREES>(hits, base + lane, base + lane < end, mine, before, runs, tile, points, g);
#pragma unroll 4
        for (int i = share; i < found; i += shares) {
            const float2 value = values[static_cast<long long>(hits.rank[i]) * g.lanes];
            const float4 by_row = hits.rows[i], by_z = hits.columns[i];
            add_row(sum[0], value, by_row.x, by_z);
            add_row(sum[1], value, by_row.y, by_z);
            add_row(sum[2], value, by_row.z, by_z);
            add_row(sum[3], value, by_row.w, by_z);
        }
        __syncwarp();
    }
    store_tile<DIMS>(sum, tile, item.w, blockIdx.y * g.lanes + coil, share, shares, grid, partial, g);
}

// A block per split tile, a thread per coil and cell.
template <int DIMS>
__global__ void add_parts(const int4* __restrict__ heavy, const float2* __restrict__ partial, float2* __restrict__ grid,
                          Gridding g) {
    const int4 of = heavy[blockIdx.x];
    const Tile tile = tile_of(of);
    for (int i = threadIdx.x; i < g.coils * TILE * TILE; i += blockDim.x) {
        const int coil = i / (TILE * TILE), j = i / TILE % TILE, k = i % TILE;
        float2 sum = make_float2(0, 0);
#pragma unroll 8
        for (int part = 0; part < of.w; ++part) {
            const float2 value = partial[(of.z + part) * static_cast<long long>(g.coils) * TILE * TILE + i];
            sum.x += value.x;
            sum.y += value.y;
        }
        const int x = DIMS == 3 ? tile.x : tile.x + j, y = DIMS == 3 ? tile.y + j : 0;
        grid[cell_index(coil, x, y, tile.z + k, g)] = sum;
    }
}
