// Forward in production: a block loads the part of the grid that a region's points touch into shared memory, one plane per
// coil, and each warp reads it for eight or more points at a time. A lane is a coil of a point, so that weights are computed
// once for all coils. Several blocks share a region with many points.
// Also the classic form of the adjoint, on the same regions: sums in shared memory by atomic additions.
#pragma once

constexpr int REGION_THREADS = 256, BATCH = 8, REGION_BINS = 2;

// Twice as long on z for one coil, of which more fits.
template <int DIMS, bool ONE_COIL = false>
struct Region {
    static constexpr int BINS_Z = ONE_COIL ? 2 * REGION_BINS : REGION_BINS;
    static constexpr int X = DIMS == 3 ? 4 : 8, Y = DIMS == 3 ? 4 * REGION_BINS : 1, Z = 4 * BINS_Z;
    static constexpr int COLUMNS = DIMS == 3 ? REGION_BINS * BINS_Z : BINS_Z;
    int x, y, z;  // its first cell

    __device__ Region(int number, const Gridding& g) {
        const int along_x = (g.size[0] + X - 1) / X, along_z = (g.bins[1] + BINS_Z - 1) / BINS_Z;
        x = number % along_x * X;
        z = number / along_x % along_z * Z;
        y = number / along_x / along_z * Y;
    }
    // Points whose first cell is in one of its columns of bins: a run of the sorted order.
    __device__ int2 run(int column, const int* __restrict__ starts, const Gridding& g) const {
        const int bin_y = y / 4 + column / BINS_Z, bin_z = z / 4 + column % BINS_Z;
        if (bin_y >= g.bins[0] || bin_z >= g.bins[1]) return make_int2(0, 0);
        const int* of_column = starts + (static_cast<long long>(bin_y) * g.bins[1] + bin_z) * g.size[0];
        const int begin = of_column[x];
        return make_int2(begin, of_column[min(x + X, g.size[0])] - begin);
    }
};

template <int DIMS, int WIDTH>
struct Window {  // the cells that a region's points touch
    static constexpr int X = Region<DIMS>::X + WIDTH - 1, Y = DIMS == 3 ? Region<DIMS>::Y + WIDTH - 1 : 1;
    static constexpr int Z = Region<DIMS>::Z + WIDTH - 1, CELLS = X * Y * Z;
    static constexpr int WEIGHTS = (WIDTH + 3) / 4 * 4, DEGREES = WIDTH > 5 ? DEGREE : NARROW_DEGREE;
};

template <int DIMS, bool ONE_COIL>
__global__ void count_region(const int* __restrict__ starts, int* __restrict__ parts, int regions, Gridding g) {
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= regions) return;
    const Region<DIMS, ONE_COIL> region(number, g);
    int count = 0;
    for (int column = 0; column < region.COLUMNS; ++column) count += region.run(column, starts, g).y;
    parts[number] = (count + g.part - 1) / g.part;
}

// Work items: x the region, y its first point.
__global__ void fill_regions(const int* __restrict__ parts, const int* __restrict__ ends, int2* __restrict__ items, int regions,
                             Gridding g) {
    const int region = blockIdx.x * blockDim.x + threadIdx.x;
    if (region >= regions) return;
    for (int part = 0; part < parts[region]; ++part) items[ends[region] - parts[region] + part] = make_int2(region, part * g.part);
}

// Cells from a coil's plane to the next, such that the coils of 16 lanes lie in different banks.
__device__ inline int plane_pitch(int cells, int lanes) {
    const int step = lanes < 16 ? 16 / lanes : 1;
    return cells + (step - cells % 16 + 16) % 16;
}

// Each half warp loads a row of the window, coil after coil.
template <int DIMS, int WIDTH>
__device__ inline void load_window(float2* window, int pitch, const Region<DIMS>& region, int first_coil,
                                   const float2* __restrict__ grid, const Gridding& g) {
    using W = Window<DIMS, WIDTH>;
    constexpr int AHEAD = 4;  // loads in flight
    const int k = threadIdx.x % 16, z = wrapped(region.z + k, g.size[2]), coils = min(g.lanes, g.coils - first_coil);
    const long long plane = cell_index(1, 0, 0, 0, g);
    if (k >= W::Z) return;
    for (int row = threadIdx.x / 16; row < W::X * W::Y; row += REGION_THREADS / 16) {
        const int x = wrapped(region.x + row / W::Y, g.size[0]);
        const int y = DIMS == 3 ? wrapped(region.y + row % W::Y, g.size[1]) : 0;
        const float2* from = grid + cell_index(first_coil, x, y, z, g);
        float2* to = window + row * W::Z + k;
        for (int coil = 0; coil < coils; coil += AHEAD, from += AHEAD * plane, to += AHEAD * pitch) {
            float2 value[AHEAD];
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) value[ahead] = from[coil + ahead < coils ? ahead * plane : 0];
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead)
                if (coil + ahead < coils) to[ahead * pitch] = value[ahead];
        }
    }
}

// A point's weights on all axes.
template <int DIMS, int WIDTH>
struct Weighed {
    float weight[DIMS][Window<DIMS, WIDTH>::WEIGHTS];
};

// The rank of one of the region's candidates, and its column.
template <int DIMS, bool ONE_COIL = false>
__device__ inline int2 rank_in(const int2* runs, int candidate) {
    int column = 0;
#pragma unroll
    for (int c = 0; c < Region<DIMS, ONE_COIL>::COLUMNS - 1; ++c)
        if (column == c && candidate >= runs[c].y) candidate -= runs[c].y, ++column;
    return make_int2(runs[column].x + candidate, column);
}

template <int DIMS, int WIDTH>
__device__ inline float2 sum_window(const float2* cell, const Weighed<DIMS, WIDTH>& of) {
    using W = Window<DIMS, WIDTH>;
    float by_z[WIDTH];
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) by_z[c] = of.weight[DIMS - 1][c];
    float2 sum = make_float2(0, 0);
    constexpr int AT_ONCE = DIMS == 3 && WIDTH > 5 ? 1 : WIDTH;  // more would unroll to too much code
#pragma unroll AT_ONCE
    for (int a = 0; a < WIDTH; ++a)
#pragma unroll
        for (int b = 0; b < (DIMS == 3 ? WIDTH : 1); ++b) {
            float2 line = make_float2(0, 0);
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) {
                const float2 value = cell[(a * W::Y + b) * W::Z + c];
                line.x += by_z[c] * value.x;
                line.y += by_z[c] * value.y;
            }
            const float weight = DIMS == 3 ? of.weight[0][a] * of.weight[1][b] : of.weight[0][a];
            sum.x += weight * line.x;
            sum.y += weight * line.y;
        }
    return sum;
}

// ranks: x the point's rank, y the index of its first cell in the window.
template <int DIMS, int WIDTH>
__device__ inline void weigh(Weighed<DIMS, WIDTH>* weighed, int2* ranks, const int2* runs, const Region<DIMS>& region, int base,
                             int count, const float4* __restrict__ points, const Gridding& g) {
    using W = Window<DIMS, WIDTH>;
    for (int i = threadIdx.x % 32; i < count * DIMS; i += 32) {
        const int which = i % count, axis = i / count;
        const int2 at = rank_in<DIMS>(runs, base + which);
        const float4 point = points[at.x];
        const float to_cell = axis == 0 ? point.x : DIMS == 3 && axis == 1 ? point.y : point.z;
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) weighed[which].weight[axis][c] = spreading<W::DEGREES>(to_cell + c, g);
        if (axis == 0) {
            const int y = at.y / REGION_BINS * 4 + place_y(point), z = at.y % REGION_BINS * 4 + place_z(point);
            ranks[which] = make_int2(at.x, ((place_x(point) - region.x) * W::Y + (DIMS == 3 ? y : 0)) * W::Z + z);
        }
    }
}

template <int DIMS, int WIDTH>
__global__ void __launch_bounds__(REGION_THREADS)
interpolate_tiles(const float4* __restrict__ points, const int* __restrict__ starts, const int2* __restrict__ items,
                  const float2* __restrict__ grid, float2* __restrict__ ordered, Gridding g) {
    using W = Window<DIMS, WIDTH>;
    extern __shared__ float4 shared[];
    __shared__ int2 runs[Region<DIMS>::COLUMNS];
    const int shares = 32 / g.lanes, batch = max(BATCH, shares), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto* weighed = reinterpret_cast<Weighed<DIMS, WIDTH>*>(shared) + warp * batch;
    auto* ranks = reinterpret_cast<int2*>(reinterpret_cast<Weighed<DIMS, WIDTH>*>(shared) + REGION_THREADS / 32 * batch);
    float2* window = reinterpret_cast<float2*>(ranks + REGION_THREADS / 32 * batch);
    ranks += warp * batch;
    const int pitch = plane_pitch(W::CELLS, g.lanes);

    const Region<DIMS> region(items[blockIdx.x].x, g);
    if (threadIdx.x < Region<DIMS>::COLUMNS) runs[threadIdx.x] = region.run(threadIdx.x, starts, g);
    load_window<DIMS, WIDTH>(window, pitch, region, blockIdx.y * g.lanes, grid, g);
    __syncthreads();
    int total = 0;
    for (int column = 0; column < Region<DIMS>::COLUMNS; ++column) total += runs[column].y;
    const int begin = items[blockIdx.x].y, end = min(total, begin + g.part);
    const int of = lane & (g.lanes - 1), share = lane / g.lanes;
    float2* to = ordered + blockIdx.y * g.points * g.lanes + of;
    for (int base = begin + warp * batch; base < end; base += REGION_THREADS / 32 * batch) {
        const int count = min(batch, end - base);
        weigh<DIMS, WIDTH>(weighed, ranks, runs, region, base, count, points, g);
        __syncwarp();
        for (int i = share; i < count; i += shares)
            to[static_cast<long long>(ranks[i].x) * g.lanes] = sum_window<DIMS, WIDTH>(window + of * pitch + ranks[i].y, weighed[i]);
        __syncwarp();
    }
}

// A block a region's points and one coil: sums in shared memory, then one addition per cell to the grid. The many additions
// at the centre of radial trajectories stay on the multiprocessor.
template <int DIMS, int WIDTH>
__global__ void __launch_bounds__(REGION_THREADS)
spread_shared(const float4* __restrict__ points, const int* __restrict__ starts, const int2* __restrict__ items,
              const int* __restrict__ order, const float2* __restrict__ samples, float2* __restrict__ grid, Gridding g) {
    using W = Window<DIMS, WIDTH>;
    extern __shared__ float4 shared[];
    __shared__ int2 runs[Region<DIMS>::COLUMNS];
    float2* window = reinterpret_cast<float2*>(shared);
    const Region<DIMS> region(items[blockIdx.x].x, g);
    if (threadIdx.x < Region<DIMS>::COLUMNS) runs[threadIdx.x] = region.run(threadIdx.x, starts, g);
    for (int i = threadIdx.x; i < W::CELLS; i += REGION_THREADS) window[i] = make_float2(0, 0);
    __syncthreads();
    int total = 0;
    for (int column = 0; column < Region<DIMS>::COLUMNS; ++column) total += runs[column].y;
    const int begin = items[blockIdx.x].y, end = min(total, begin + g.part);
    for (int i = begin + threadIdx.x; i < end; i += REGION_THREADS) {
        const int2 at = rank_in<DIMS>(runs, i);
        const float4 point = points[at.x];
        const float2 value = samples[blockIdx.y * g.points + order[at.x]];
        const int y = DIMS == 3 ? at.y / REGION_BINS * 4 + place_y(point) : 0, z = at.y % REGION_BINS * 4 + place_z(point);
        float2* cell = window + ((place_x(point) - region.x) * W::Y + y) * W::Z + z;
        for (int a = 0; a < WIDTH; ++a)
            for (int b = 0; b < (DIMS == 3 ? WIDTH : 1); ++b) {
                const float by_row = spreading(point.x + a, g) * (DIMS == 3 ? spreading(point.y + b, g) : 1);
                for (int c = 0; c < WIDTH; ++c) {
                    const float weight = by_row * spreading(point.z + c, g);
                    atomicAdd(&cell[(a * W::Y + b) * W::Z + c].x, weight * value.x);
                    atomicAdd(&cell[(a * W::Y + b) * W::Z + c].y, weight * value.y);
                }
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < W::X * W::Y * W::Z; i += REGION_THREADS) {
        const int x = wrapped(region.x + i / W::Z / W::Y, g.size[0]), z = wrapped(region.z + i % W::Z, g.size[2]);
        const int y = DIMS == 3 ? wrapped(region.y + i / W::Z % W::Y, g.size[1]) : 0;
        float2* cell = grid + cell_index(blockIdx.y, x, y, z, g);
        if (window[i].x != 0) atomicAdd(&cell->x, window[i].x);
        if (window[i].y != 0) atomicAdd(&cell->y, window[i].y);
    }
}
