// A warp has 128 points of a row, a lane four consecutive ones: neighbours along x come from the lane itself or by a
// shuffle, neighbours along z are in registers. Floor: 8 bytes per point and pass over the device's bandwidth.
#pragma once

#include "points.cuh"

constexpr int WIDTH = 128;  // points of a warp
constexpr unsigned ALL_LANES = 0xffffffffu;

// Four points of a row from x, a multiple of four; zero beyond the field. ALIGNED: rows are whole vectors of 16 bytes.
template <bool ALIGNED>
__device__ inline float4 load_four(const float* __restrict__ from, const Field& field, int x, int y, int z) {
    float4 four = make_float4(0, 0, 0, 0);
    if (x < 0 || x >= field.nx || y < 0 || y >= field.ny || z < 0 || z >= field.nz) return four;
    const float* at = from + (static_cast<long long>(z) * field.ny + y) * field.nx + x;
    if constexpr (ALIGNED) return __ldg(reinterpret_cast<const float4*>(at));
    four.x = at[0];
    if (x + 1 < field.nx) four.y = at[1];
    if (x + 2 < field.nx) four.z = at[2];
    if (x + 3 < field.nx) four.w = at[3];
    return four;
}

template <bool ALIGNED>
__device__ inline void store_four(float* __restrict__ to, const Field& field, int x, int y, int z, const float4& four) {
    if (x >= field.nx || y >= field.ny) return;
    float* at = to + (static_cast<long long>(z) * field.ny + y) * field.nx + x;
    if constexpr (ALIGNED) {
        __stcs(reinterpret_cast<float4*>(at), four);  // keeps L2 for data that is read again
    } else {
        at[0] = four.x;
        if (x + 1 < field.nx) at[1] = four.y;
        if (x + 2 < field.nx) at[2] = four.z;
        if (x + 3 < field.nx) at[3] = four.w;
    }
}

// Whether a tile of columns from x includes the field's first or last column; the same for a whole block.
__device__ inline bool touches_sides(const Field& field, int x) { return x <= 0 || x + WIDTH >= field.nx; }

// Steps four points; border points do not change. `sides`: whether the warp may have the first or last point of a row.
__device__ inline float4 stepped_four(const Field& field, bool sides, int x, int y, int z, const float4& here, float west,
                                      float east, const float4& south, const float4& north, const float4& below,
                                      const float4& above) {
    if (y <= 0 || y >= field.ny - 1 || z <= 0 || z >= field.nz - 1) return here;
    float4 result;
    result.x = stepped(field, here.x, west, here.y, south.x, north.x, below.x, above.x);
    result.y = stepped(field, here.y, here.x, here.z, south.y, north.y, below.y, above.y);
    result.z = stepped(field, here.z, here.y, here.w, south.z, north.z, below.z, above.z);
    result.w = stepped(field, here.w, here.z, east, south.w, north.w, below.w, above.w);
    if (sides) {
        const int last = field.nx - 1;
        if (x == 0 || x == last) result.x = here.x;
        if (x + 1 == last) result.y = here.y;
        if (x + 2 == last) result.z = here.z;
        if (x + 3 == last) result.w = here.w;
    }
    return result;
}

constexpr int EACH = 2;  // rows of a warp

// A lane's neighbours in a plane: the rows around its own and, in the first and last lane, the points beyond the rows' ends,
// which shuffles cannot provide.
struct Rim {
    float4 south, north;
    float beside[EACH];
};

template <bool ALIGNED>
__device__ inline Rim load_rim(const float* __restrict__ from, const Field& field, int x, int y, int z) {
    const int lane = threadIdx.x % 32, column = lane ? x + 4 : x - 1;
    const bool reads = (lane == 0 || lane == 31) && column >= 0 && column < field.nx && z < field.nz;
    Rim rim = {load_four<ALIGNED>(from, field, x, y - 1, z), load_four<ALIGNED>(from, field, x, y + EACH, z), {}};
#pragma unroll
    for (int r = 0; r < EACH; ++r)
        if (reads && y + r < field.ny)
            rim.beside[r] = __ldg(from + (static_cast<long long>(z) * field.ny + y + r) * field.nx + column);
    return rim;
}

// vectors: 16 bytes per read and write, and no barrier: the rows around a warp's two come from L1 or L2, where other warps
// have just read them. A plane is loaded two planes before it is used, so that loads are always in flight.
template <bool ALIGNED>
__global__ void __launch_bounds__(256, 3) vectors(const float* __restrict__ from, float* __restrict__ to, Field field) {
    const Block block(field, WIDTH, 8 * EACH);
    const int lane = threadIdx.x % 32, x = block.x + 4 * lane, y = block.y + threadIdx.x / 32 * EACH;
    if (y >= field.ny) return;
    const bool sides = touches_sides(field, block.x);
    float4 below[EACH], here[EACH], above[EACH], ahead[EACH];
#pragma unroll
    for (int r = 0; r < EACH; ++r) {
        below[r] = load_four<ALIGNED>(from, field, x, y + r, block.z_first - 1);
        here[r] = load_four<ALIGNED>(from, field, x, y + r, block.z_first);
        above[r] = load_four<ALIGNED>(from, field, x, y + r, block.z_first + 1);
    }
    Rim rim = load_rim<ALIGNED>(from, field, x, y, block.z_first);
#pragma unroll 1
    for (int z = block.z_first; z < block.z_end; ++z) {
#pragma unroll
        for (int r = 0; r < EACH; ++r) ahead[r] = load_four<ALIGNED>(from, field, x, y + r, z + 2);
        const Rim next = load_rim<ALIGNED>(from, field, x, y, z + 1);
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            float west = __shfl_up_sync(ALL_LANES, here[r].w, 1), east = __shfl_down_sync(ALL_LANES, here[r].x, 1);
            if (lane == 0) west = rim.beside[r];
            if (lane == 31) east = rim.beside[r];
            const float4 &south = r > 0 ? here[r - 1] : rim.south, &north = r + 1 < EACH ? here[r + 1] : rim.north;
            store_four<ALIGNED>(to, field, x, y + r, z, stepped_four(field, sides, x, y + r, z, here[r], west, east,
                                                                     south, north, below[r], above[r]));
        }
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            below[r] = here[r];
            here[r] = above[r];
            above[r] = ahead[r];
        }
        rim = next;
    }
}

// temporal: STEPS steps in one pass. While plane z of the field loads, plane z - s of step s is computed from three planes of
// step s - 1: the column's points in registers, rows of other warps in shared memory. Each step invalidates one more point at
// the tile's rim (along x at most the first and last lane), so tiles overlap by as many points.
template <bool ALIGNED, int STEPS>
__global__ void __launch_bounds__(512) temporal(const float* __restrict__ from, float* __restrict__ to, Field field) {
    constexpr int ROWS = 16 * EACH;
    extern __shared__ float4 planes[];  // [2][STEPS][ROWS][32]: the latest plane of each step
    const Block block(field, WIDTH - 8, ROWS - 2 * STEPS);
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * EACH;
    const int x = block.x - 4 + 4 * lane, y = block.y - STEPS + first;
    const bool sides = touches_sides(field, block.x - 4);
    float4 below[STEPS][EACH] = {}, here[STEPS][EACH] = {}, ahead[EACH];
    int z = max(block.z_first - STEPS, 0), buffer = 0;
#pragma unroll
    for (int r = 0; r < EACH; ++r) ahead[r] = load_four<ALIGNED>(from, field, x, y + r, z);
    for (; z < block.z_end + STEPS; ++z, buffer ^= 1) {
        const float4* seen = planes + buffer * STEPS * ROWS * 32 + lane;
        float4* shown = planes + (buffer ^ 1) * STEPS * ROWS * 32 + lane;
        float4 above[EACH];
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            above[r] = ahead[r];
            ahead[r] = load_four<ALIGNED>(from, field, x, y + r, z + 1);  // loads while this plane is computed
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const float4* rows = seen + s * ROWS * 32;
            const float4 south = first > 0 ? rows[(first - 1) * 32] : make_float4(0, 0, 0, 0);
            const float4 north = first + EACH < ROWS ? rows[(first + EACH) * 32] : make_float4(0, 0, 0, 0);
            float4 result[EACH];
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                const float west = __shfl_up_sync(ALL_LANES, here[s][r].w, 1);
                const float east = __shfl_down_sync(ALL_LANES, here[s][r].x, 1);
                result[r] = stepped_four(field, sides, x, y + r, z - s - 1, here[s][r], west, east,
                                         r > 0 ? here[s][r - 1] : south, r + 1 < EACH ? here[s][r + 1] : north,
                                         below[s][r], above[r]);
            }
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                below[s][r] = here[s][r];
                here[s][r] = above[r];
                shown[(s * ROWS + first + r) * 32] = above[r];
                above[r] = result[r];
            }
        }
        const int done = z - STEPS;
        if (done >= block.z_first && lane > 0 && lane < 31) {
#pragma unroll
            for (int r = 0; r < EACH; ++r)
                if (first + r >= STEPS && first + r < ROWS - STEPS)
                    store_four<ALIGNED>(to, field, x, y + r, done, above[r]);
        }
        __syncthreads();
    }
}
